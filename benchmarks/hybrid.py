"""Time a model of experts that is larger than the device: decode steps and prompts, with random weights.

    python benchmarks/hybrid.py MODEL [--cap 16GB] [--forms bf16,q4_k_m] [--ways host,resident] [--cases 1x128,16x512]

MODEL is a name of ``model_configs.py``, or a folder with a ``config.json``. The device's memory is capped: the memory
plan sees no more, and torch may not allocate more. Ways:

- ``host``: the host computes the experts of some layers (``infer.cpu_layer_num=auto``, or ``--layers N``);
- ``resident``: the device computes all, and experts are copied to it when they are needed (``infer.resident_experts=
  auto``, or ``--residents N``);
- ``all``: everything is on the device; only if the cap holds it.

Each row also has ``moved_ms``: how long it takes to copy all experts that the ``host`` way leaves in host memory to the
device, once a step, from page-locked memory, without any compute. An engine that moves weights every step takes at
least as long. ``host_share``: bytes of experts that the host read a second while it computed them, as a share of the
speed at which all its threads read memory, which is measured first. ``step_ms``: from the first tokens to the last
ones, divided by the steps between them, as llama.cpp's own program measures it. With ``--calls own,driver`` cases are
timed as the device itself calls the host in captured steps, and again by ``Device.host_call``, which a thread of the
driver serves. With ``--pass 0,25,auto`` cases are timed from one start with each of these percents of experts that
pass through the device in captured steps; ``--set offload.pass_experts=33`` gives the slots for as many. The way
``resident`` also needs ``--set offload.host_when_sooner=auto`` for it.
Forms are those of ``packed_steps.py``, or bf16, or own: the one that config.json says.
With ``--file`` weights are those of a GGUF file, as ``llamacpp_hybrid.py`` writes it for both engines.
Every combination runs in a process of its own. Rows go to standard output, and to hybrid.jsonl in ``--out`` or $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import torch
from gpu_check import generate, say, start
from machine import record
from model_configs import CONFIGS, write

from evener.backend.torch_device import TorchDevice
from evener.contracts.device import Device, MemoryInfo
from evener.errors import ConfigError
from evener.key_spec import KeySpec, parse

#: More than any cache.
APART = 4 << 30
#: Prompts of each case before it is timed, each with other tokens: the engine times its first steps of a size in two
#: ways, and copies experts that the last step needed.
WARM = 8
#: Of each case, each with other tokens; the fastest counts, as of llama.cpp in ``llamacpp_hybrid.py``.
REPEATS = 3
WAYS: Mapping[str, str] = {"host": "infer.cpu_layer_num", "resident": "infer.resident_experts", "all": ""}


def main(argv: Sequence[str]) -> int:
    """Run every combination; 0 if all of them succeeded."""
    args = parser().parse_args(argv)
    if args.here:
        return here(args)
    codes = []
    for form in args.forms.split(","):
        for way in args.ways.split(","):
            command = [sys.executable, __file__, *argv, "--here", f"{form}:{way}"]
            codes.append(subprocess.run(command, timeout=args.limit).returncode)
    return int(any(codes))


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model")
    made.add_argument("--cap", type=size, help="memory of the device, as 16GB; default: all")
    made.add_argument("--file", type=Path, help="a GGUF file of the model in the form that --forms names")
    made.add_argument("--forms", default="bf16,q4_k_m", help="with commas between them")
    made.add_argument("--ways", default="host,resident", help="host, resident and all, with commas between them")
    made.add_argument("--layers", default="auto", help="infer.cpu_layer_num")
    made.add_argument("--residents", default="auto", help="infer.resident_experts")
    made.add_argument("--cases", default="1x128,16x128,1x2048", help="requests x tokens of each prompt")
    made.add_argument("--calls", default="own", help="how captured steps call the host, with commas: own, driver")
    made.add_argument("--pass", dest="parts", default="", help="offload.pass_experts of captured steps, with commas")
    made.add_argument("--steps", type=int, default=48, help="decode steps that are timed")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    made.add_argument("--apart", type=size, default=APART, help="bytes with which the speed of memory is measured")
    made.add_argument("--limit", type=float, help="seconds that a process may take")
    made.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    made.add_argument("--here", help=argparse.SUPPRESS)
    return made


def size(text: str) -> int:
    """Bytes, as in the engine's keys: 16GB, 16GiB."""
    try:
        return int(parse("--cap", KeySpec(help="", kind="size"), text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def here(args: argparse.Namespace) -> int:
    """One form, one way, all cases."""
    form, _, way = args.here.partition(":")
    cap_memory(args.cap)
    config = config_of(args.model)
    if form not in ("bf16", "own") and args.file is None:
        make_packed(form, config["num_hidden_layers"])
    pairs = ["infer.step_tokens=2048", "infer.max_reqs=64", "executor=inline", *args.set]
    value = {"host": args.layers, "resident": args.residents}.get(way)
    pairs += [f"{WAYS[way]}={value}"] if value is not None else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.model) if args.model not in CONFIGS else write(args.model, Path(folder) / args.model)
        if args.file is not None:
            path, pairs = args.file, ["load=auto", *pairs]
        began = time.perf_counter()
        llm = start(path, True, ["infer.use_cuda_graph=auto", *pairs])
        run = Run(llm, args, form, way, round(time.perf_counter() - began, 1))
        failed = 0
        parts = args.parts.split(",") if way != "all" else [""]
        for calls, part, case in product(args.calls.split(","), parts, args.cases.split(",")):
            try:
                if args.calls != "own":
                    run.call_by(calls)
                if part:
                    run.let_pass(None if part == "auto" else int(part))
                run.case(*(int(n) for n in case.split("x")))
            except Exception as error:  # the other rows are still useful
                failed = 1
                say(f"{form} {way} {case}: FAILED: {type(error).__name__}: {str(error)[:400]}")
        llm.close()
    return failed


def config_of(model: str) -> Mapping[str, Any]:
    """The ``config.json`` of a name or a folder."""
    if model in CONFIGS:
        return CONFIGS[model]
    file = Path(model) / "config.json"
    if not file.is_file():
        raise SystemExit(f"there is no {file}, and no model {model!r}; names are {', '.join(CONFIGS)}")
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def cap_memory(cap: int | None) -> None:
    """From here on every device of a torch namespace has ``cap`` bytes: what it says, and what torch allocates."""
    if cap is None:
        return
    memory, select = TorchDevice.memory, TorchDevice.select

    def capped(self: TorchDevice) -> MemoryInfo:
        info = memory(self)
        return MemoryInfo(max(0, info.free - max(0, info.total - cap)), min(cap, info.total))

    def selected(self: TorchDevice) -> None:
        select(self)
        limit = getattr(self.module, "set_per_process_memory_fraction", None)
        if limit is not None:
            limit(min(1.0, cap / memory(self).total), self.index)

    TorchDevice.memory, TorchDevice.select = capped, selected  # type: ignore[method-assign]


def make_packed(form: str, layers: int) -> None:
    """Random weights have random bits in ``form``. A few matrices of each size are drawn, and used again: packing them
    takes long enough."""
    import packed_products
    import packed_steps

    drawn = cache(packed_products.part_of)

    def few(form: str, rows: int, columns: int, seed: int, where: torch.device) -> Any:
        return drawn(form, rows, columns, seed % 4, where)

    packed_steps.part_of = few  # type: ignore[attr-defined, assignment]  # it imports that
    packed_steps.quantize(form, layers)


@dataclass
class Spent:
    """Seconds of a run, and of its decode steps; and what the engine counted meanwhile."""

    seconds: float
    decode: float
    counted: Mapping[str, int]

    def counted_beyond(self, other: Spent) -> Mapping[str, int]:
        """What it counted more than another run."""
        return {name: value - other.counted.get(name, 0) for name, value in self.counted.items()}


class Run:
    """One engine that is measured."""

    def __init__(self, llm: Any, args: argparse.Namespace, form: str, way: str, ready: float) -> None:
        self._llm, self._args = llm, args
        self._calls = "own"
        executor = llm._client.controller.executor
        self._worker, self._read_at = executor.worker, list[float]()
        read = executor.read

        def timed() -> Any:
            result = read()
            self._read_at.append(time.perf_counter())
            return result

        executor.read = timed
        memory, device = llm.info.memory, self._worker.assembly.device
        captured = getattr(self._worker.assembly.placement, "_captured", None)
        self._exchanges = getattr(captured, "_exchanges", None)
        assembly, residents, slots = self._worker.assembly, 0, 0
        if way == "resident":
            residents = assembly.config.config.infer.resident_experts
            slots = sum(residents * layer.nbytes for layer in assembly.placement.layer.values())
        place: Any = assembly.placement
        second = getattr(place, "streamed", place).second_bytes if place is not None else 0
        # Experts in slots are in host memory, too, and some in two layouts.
        self._left = int(memory.host) - slots - second
        self._read_gb_s = read_gb_s(args.apart)
        copy_gb_s = copied_gb_s(device, args.apart // 8)
        self._facts = {
            "engine": "evener", "model": Path(args.model).name, "form": form, "way": way, "device": llm.info.device,
            "host_threads": torch.get_num_threads(), "cap_gb": args.cap and round(args.cap / 1e9, 2), "ready_s": ready,
            "host_layers": memory.host_layers, "residents": residents,
            "weights_gb": gb(memory.weights), "host_gb": gb(self._left), "second_layout_gb": gb(second),
            "host_reads_gb_s": round(self._read_gb_s, 1), "copies_gb_s": round(copy_gb_s, 1),
            "moved_ms": round(self._left / copy_gb_s / 1e6, 2),
        }  # fmt: skip

    def call_by(self, calls: str) -> None:
        """Capture steps again that call the host so: ``own`` or ``driver``."""
        self._calls, captured = calls, self._worker.assembly.placement._captured
        captured._exchanges = self._exchanges if calls == "own" else None
        self._worker.graphs._captured.clear()

    def let_pass(self, percent: int | None) -> None:
        """Capture steps again in which so many experts of a layer in a hundred pass through the device; None: auto."""
        passing = self._worker.assembly.placement._passing
        if passing is None:
            raise ConfigError(
                "no experts pass: set offload.pass_experts, and offload.host_when_sooner of experts in slots"
            )
        passing.part.percent, passing.part.known = percent, {}
        self._facts["passing"] = "auto" if percent is None else percent
        self._worker.graphs._captured.clear()

    def case(self, batch: int, prompt: int) -> None:
        """Time prompts alone, and decode steps after the same prompts."""
        steps = self._args.steps
        for seed in range(WARM):
            generate(self._llm, batch, prompt, 2, seed)
        seeds = range(WARM, WARM + REPEATS)
        short = min((self._spent(batch, prompt, 1, seed) for seed in seeds), key=lambda spent: spent.seconds)
        long = min((self._spent(batch, prompt, 1 + steps, seed) for seed in seeds), key=lambda spent: spent.decode)
        decode = Spent(long.decode, 0.0, long.counted_beyond(short))
        step_ms = decode.seconds / steps * 1e3
        row = {
            **self._facts, "calls": self._calls, "bs": batch, "inp": prompt, "steps": steps,
            "prompt_ms": round(short.seconds * 1e3, 2),
            "prompt_tok_s": round(batch * prompt / short.seconds, 1), "step_ms": round(step_ms, 3),
            "out_tok_s": round(batch / step_ms * 1e3, 2), "times_moved": round(self._facts["moved_ms"] / step_ms, 2),
            "counted_a_step": {name: round(value / steps) for name, value in decode.counted.items()},
            "counted_a_prompt": dict(short.counted),
        }  # fmt: skip
        for name, spent in (("prompt", short), ("step", decode)):
            row |= self._host(name, spent)
        record(row, self._args.out / "hybrid.jsonl")

    def _host(self, name: str, spent: Spent) -> dict[str, float]:
        """How fast the host read experts while it computed them; nothing where it computed none."""
        us = spent.counted.get("host_expert_microseconds", 0)
        if not us:
            return {}
        speed = spent.counted["host_expert_read_bytes"] / us / 1e3
        return {
            f"{name}_host_gb_s": round(speed, 1), f"{name}_host_share": round(speed / self._read_gb_s, 3),
            f"{name}_host_busy": round(us / 1e6 / spent.seconds, 3),
        }  # fmt: skip

    def _spent(self, batch: int, prompt: int, new: int, seed: int) -> Spent:
        """One run. Each decode step's result is read once, and the last ones of a run are theirs."""
        before, self._read_at[:] = self._counters(), []
        seconds = generate(self._llm, batch, prompt, new, seed)
        decode = self._read_at[-1] - self._read_at[-new]
        return Spent(seconds, decode, Spent(0, 0, self._counters()).counted_beyond(Spent(0, 0, before)))

    def _counters(self) -> dict[str, int]:
        placement = self._worker.assembly.placement
        return {} if placement is None else dict(placement.counters())


def gb(nbytes: int) -> float:
    return round(nbytes / 1e9, 3)


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def read_gb_s(nbytes: int) -> float:
    """How fast all threads of the host read so many bytes of memory."""
    block = torch.ones(nbytes // 4, dtype=torch.int32)
    return nbytes / min(best(block.max), best(block.view(torch.float32).sum)) / 1e9


def copied_gb_s(device: Device, nbytes: int) -> float:
    """How fast so many bytes of page-locked memory are copied to the device."""
    pinned = device.pinned_buffers(1, nbytes)
    source = pinned[0] if pinned else torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        device.synchronize()

    return nbytes / best(copy) / 1e9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
