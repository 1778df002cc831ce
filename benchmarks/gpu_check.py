"""All checks that need an accelerator, in one command, by parts.

    python benchmarks/gpu_check.py [PART ...] [--out FOLDER]

Parts, in this order: ``doctor``; ``kit:AREA[:DTYPE]`` (an area of the conformance kit, in one compute dtype or in all;
``kit:collectives`` needs two devices; ``kit:each`` is all of them, each op, kind of state and dtype in its own
process, so that a crash does not end the others); ``models`` (captured against eager, greedy tokens against
transformers); ``speed:MODEL`` and ``eager:MODEL`` (decode steps and start, random weights); ``profile:MODEL`` (kernels
of a decode step, and the host's calls); ``prompts:MODEL`` (kernels of prompts, and the time between them);
``first:MODEL`` (time to the first token of one request, the median of 30);
``experts:MODEL`` (how many experts of each layer a step reads). MODEL is a name of ``model_configs.py``; ``--weights
uniform`` draws its weights as vLLM does (``vllm_dummy_weights.py``). A part that fails or takes too long is reported,
and the next one runs. Parts of the kit run in parallel on the devices in CUDA_VISIBLE_DEVICES. Full logs go to FOLDER
(or $OUT), a summary to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import msgspec
import vllm_dummy_weights
from model_configs import CONFIGS, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

PARTS = (
    "doctor", "kit:device", "kit:primitives:bfloat16", "kit:attention:bfloat16", "kit:composites:bfloat16",
    "kit:graphs:bfloat16", "kit:memory:bfloat16", "kit:model:bfloat16", "models", "speed:qwen3-0.6b", "speed:qwen3-8b",
    "eager:qwen3-8b", "profile:qwen3-8b", "profile:qwen3-0.6b",
)  # fmt: skip
#: (requests, tokens of each prompt): the cases of the table in docs/performance.md.
CASES = ((1, 128), (16, 128), (64, 512), (256, 512))
SHORT, LONG = 16, 272
LIMIT_S = 240
#: What a profile calls the work that it records.
_WORK = "the work"


def cases_of(text: str) -> list[tuple[int, int]]:
    """(requests, tokens of each prompt) of text such as "1x128,16x512"; none of empty text."""
    return [(int(batch), int(prompt)) for batch, prompt in (case.split("x") for case in text.split(",") if case)]


def main(argv: Sequence[str]) -> int:
    """Run the parts, each in its own process; 0 if all of them succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_check")))
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds a part may take")
    parser.add_argument("--backend", default="cuda", help="whose kit is run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    parser.add_argument("--cases", default="", help="such as 1x128,16x128 (default: all)")
    parser.add_argument("--weights", choices=("normal", "uniform"), default="normal", help="how they are drawn")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        return here(args)
    args.out.mkdir(parents=True, exist_ok=True)
    parts = list(args.parts or PARTS)
    # These mostly compile, so they share the machine; timed parts run alone.
    tests = [part for part in parts if part.startswith("kit:") and part != "kit:each"]
    tests += each(args) if "kit:each" in parts else []
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    with ThreadPoolExecutor(max_workers=max(4, (os.cpu_count() or 4) // 2)) as pool:
        running = {
            part: pool.submit(
                run, part, args, None if part.startswith("kit:collectives") else devices[i % len(devices)]
            )
            for i, part in enumerate(tests)
        }
        results = [report(part, *future.result()) for part, future in running.items()]
    results += [report(part, *run(part, args)) for part in parts if not part.startswith("kit:")]
    return 1 if any(results) else 0


def each(args: argparse.Namespace) -> list[str]:
    """``kit:NAME:DTYPE`` for everything that the kit checks, the longest first."""
    code, lines = run("names", args)
    if code:
        raise SystemExit("\n".join(lines))
    return [f"kit:{line}" for line in lines]


def report(part: str, code: int, lines: Sequence[str]) -> int:
    """Add a part to the summary; returns its exit status."""
    print(f"== {part}: {'ok' if code == 0 else f'FAILED ({code})'}")
    print("\n".join(lines), flush=True)
    return code


def command_of(part: str, args: argparse.Namespace) -> list[str]:
    """The command of one part."""
    kind, _, name = part.partition(":")
    if part == "doctor":
        return [sys.executable, "-m", "evener", "doctor", "--fresh"]
    if kind == "kit":
        area, _, dtype = name.partition(":")
        words = ["--op", area, *(("--dtype", dtype) if dtype else ())]
        return [sys.executable, "-m", "evener", "conformance", "--backend", args.backend, "--seed", "5", *words]
    if kind == "models":
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "-k", "tokens", "-s", "--tb=short",
                "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-o", "addopts=--import-mode=importlib",
                "tests/test_accelerator.py"]  # fmt: skip
    extra = [word for pair in args.set for word in ("--set", pair)]
    return [sys.executable, __file__, "--here", part, "--out", str(args.out), "--cases", args.cases,
            "--backend", args.backend, "--weights", args.weights, *extra]  # fmt: skip


def run(part: str, args: argparse.Namespace, device: str | None = None) -> tuple[int, list[str]]:
    """Run one part, on one device or all; returns its exit status, and the part of its log for the summary."""
    log, command = args.out / f"{part.replace(':', '-')}.log", command_of(part, args)
    began = time.perf_counter()
    with log.open("w") as file:
        # If a process crashes, its log ends with the Python line where it did.
        environ = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        if device is not None:  # other parts run at the same time and share the CPU
            environ |= {"CUDA_VISIBLE_DEVICES": device, "OMP_NUM_THREADS": "2"}
        child = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environ)
        try:
            code = child.wait(args.limit)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        print(f"{time.perf_counter() - began:.1f} s", file=file)
    text = log.read_text(errors="replace").splitlines()
    marked = [line.removeprefix("> ") for line in text if line.startswith("> ")]
    tail = text[-25:] if code or not marked else []
    return code, marked + [line[:300] for line in tail]


def say(line: str) -> None:
    """Write to the log and the summary."""
    print("> " + line, flush=True)


def here(args: argparse.Namespace) -> int:
    """One timing part, in this process."""
    kind, _, model = args.here.partition(":")
    if kind == "names":
        return names(args.backend)
    if args.weights == "uniform":
        vllm_dummy_weights.use()
    if model not in CONFIGS:
        raise SystemExit(f"no model {model!r}; there are {', '.join(CONFIGS)}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = start(write(model, Path(folder) / model), kind not in ("eager", "experts"), args.set)
        ready = time.perf_counter() - began
        info = llm.info
        mode = "eager" if kind in ("eager", "experts") else "captured"
        say(f"{model} {mode}: ready after {ready:.1f} s ({info.start_seconds} s of it in the worker), "
            f"{info.device}, memory {json.dumps(info.memory.to_json())}")  # fmt: skip
        print(msgspec.json.encode(info.manifest).decode()[:20000])
        for batch, prompt in cases_of(args.cases) or CASES:
            try:
                does = {"profile": profile, "prompts": prompts, "experts": experts, "first": first}.get(kind, measure)
                does(llm, model, f"{kind} {args.weights}", batch, prompt, args.out)
            except Exception as error:  # only this row is lost; the other rows are still useful
                import traceback

                traceback.print_exc()
                say(f"{model} {batch}x{prompt}: FAILED: {type(error).__name__}: {str(error)[:500]}")
        llm.close()
    return 0


def names(backend: str) -> int:
    """Print the names of the kit's checks, and the dtypes in which they can run."""
    from evener_conformance.kit.checklist import Checklist, CheckRequest
    from evener_conformance.kit.outcome import AREAS
    from evener_conformance.kit.subject import open_subject

    checklist = Checklist(open_subject(backend), CheckRequest(0))
    whole, order = (
        ("model", "graphs", "device", "collectives"),
        ("model", "composites", "graphs", "attention", "formats"),
    )
    found: dict[str, str] = {}
    for check in sorted(checklist.checks, key=lambda c: (order + AREAS).index(c.area)):
        found.setdefault(check.area if check.area in whole else check.subject, check.area)
    for name, area in found.items():
        for dtype in checklist.dtypes if area in order else ("",):
            say(f"{name}:{dtype}".rstrip(":"))
    return 0


def start(folder: Path, captured: bool, pairs: Sequence[str]) -> Any:
    """The engine in this process."""
    from evener import LLM

    overrides: dict[str, Any] = {
        "load": "dummy", "dtype": "bfloat16", "infer.max_seq_len": 4096, "infer.max_reqs": 256,
        "infer.prefix_cache": False, "infer.step_tokens": 8192, "infer.use_cuda_graph": captured,
    }  # fmt: skip
    return LLM(folder, **{**overrides, **dict(pair.split("=", 1) for pair in pairs)})


def generate(llm: Any, batch: int, prompt: int, new: int, seed: int) -> float:
    """Seconds for ``batch`` random prompts with ``new`` tokens each."""
    return answers(llm, batch, prompt, new, seed)[0]


def answers(llm: Any, batch: int, prompt: int, new: int, seed: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens."""
    from evener import SamplingParams

    rng = random.Random(seed)
    prompts = [[rng.randrange(100, min(90000, llm.info.vocab_size)) for _ in range(prompt)] for _ in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    assert sum(map(len, tokens)) == batch * new
    return seconds, tokens


def measure(llm: Any, model: str, kind: str, batch: int, prompt: int, out: Path) -> None:
    """One row of the table."""
    warm = generate(llm, batch, prompt, 8, 0)
    short = min(generate(llm, batch, prompt, SHORT, seed) for seed in (1, 2))
    long = min(generate(llm, batch, prompt, LONG, seed) for seed in (3, 4))
    row = {
        "engine": "evener", "model": model, "mode": kind, "bs": batch, "inp": prompt, "out": LONG,
        "wall_s": round(long, 3), "out_tok_s": round(batch * LONG / long, 1),
        "step_ms": round((long - short) / (LONG - SHORT) * 1000, 3), "short_s": round(short, 3),
        "first_use_s": round(warm, 2),
    }  # fmt: skip
    say(json.dumps(row))
    with (out / "speed.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def experts(llm: Any, model: str, kind: str, batch: int, prompt: int, out: Path) -> None:
    """Number of distinct experts per layer that the tokens of a decode step are routed to, by step."""
    import torch

    import evener_kernels_triton.experts as module

    counts: list[torch.Tensor] = []
    plain = module.route

    def route(*args: Any, **kwargs: Any) -> Any:
        slots, weights = plain(*args, **kwargs)
        if slots.shape[0] == batch:
            hit = torch.zeros(1024, dtype=torch.int32, device=slots.device)
            hit[slots.flatten().long()] = 1
            counts.append(hit.sum())
        return slots, weights

    steps = 8 + LONG * 16 // max(16, batch)
    module.route = route
    try:
        _, tokens = answers(llm, batch, prompt, steps, 0)
    finally:
        module.route = plain
    config = CONFIGS[model]
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    if not counts:
        raise RuntimeError("no layer routed tokens in steps of this size; one token takes another path")
    seen = torch.stack(counts[-(len(counts) // layers) * layers :]).float().cpu().view(-1, layers).mean(1)
    row = {
        "engine": "evener", "model": model, "mode": kind, "bs": batch, "inp": prompt, "steps": len(seen),
        "experts_a_layer": round(seen.mean().item(), 2),
        "by_step": {i: round(seen[i].item(), 1) for i in (0, 4, 16, 32, 64, 128, 256) if i < len(seen)},
        "distinct_tokens": {i: len({t[i] for t in tokens}) for i in (0, 4, 16, 64, 128, 256) if i < steps},
    }  # fmt: skip
    say(json.dumps(row))
    with (out / "speed.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def first(llm: Any, model: str, kind: str, batch: int, prompt: int, out: Path) -> None:
    """Milliseconds to the first token of requests that are alone: the median, and the slowest tenth."""
    generate(llm, batch, prompt, 2, 0)
    times = sorted(generate(llm, batch, prompt, 1, seed) * 1e3 for seed in range(1, 31))
    captured = any("single prompts" in note for note in llm.info.manifest.notes)
    row = {
        "engine": "evener", "model": model, "mode": kind, "bs": batch, "inp": prompt, "captured": captured,
        "ttft_ms": round(times[15], 3), "p90_ms": round(times[27], 3),
    }  # fmt: skip
    say(json.dumps(row))
    with (out / "first.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def prompts(llm: Any, model: str, kind: str, batch: int, prompt: int, out: Path) -> None:
    """Kernels of prompts with one new token each, by time, and the time without kernels."""
    generate(llm, batch, prompt, 1, 0)
    wall = min(generate(llm, batch, prompt, 1, seed) for seed in (1, 2))
    prof = recorded(lambda: generate(llm, batch, prompt, 1, 3))
    say(f"{model} {kind} {batch}x{prompt}: {wall * 1e3:.1f} ms for all prompts; {busy(prof):.1f} ms of kernels")
    say(f"  without a kernel, ms: {idle(prof)}")
    report_kernels(prof, out / f"prompts-{model}-{batch}x{prompt}.txt")


def profile(llm: Any, model: str, kind: str, batch: int, prompt: int, out: Path) -> None:
    """Kernels of decode steps, by time; the host's calls meanwhile, and whether device memory was allocated."""
    import cProfile
    import pstats

    import torch

    steps, host = 24, cProfile.Profile()
    generate(llm, batch, prompt, 8, 0)
    base = generate(llm, batch, prompt, 8, 1)
    before = torch.cuda.memory_stats()
    wall = generate(llm, batch, prompt, 8 + steps, 3) - base
    after = torch.cuda.memory_stats()
    asked = {key: after[key] - before[key] for key in ("num_alloc_retries", "num_device_alloc", "num_device_free")}
    prof = recorded(lambda: generate(llm, batch, prompt, 8 + steps, 2))
    say(f"{model} {kind} {batch}x{prompt}: {wall / steps * 1e3:.3f} ms a step; {busy(prof):.1f} ms of kernels of "
        f"prompts and {8 + steps} steps; {json.dumps(asked)}")  # fmt: skip
    report_kernels(prof, out / f"profile-{model}-{batch}x{prompt}.txt".replace(" ", "-"))
    host.runcall(generate, llm, batch, prompt, 8 + 4 * steps, 2)
    with (out / f"host-{model}-{batch}x{prompt}.txt".replace(" ", "-")).open("w") as file:
        pstats.Stats(host, stream=file).sort_stats("tottime").print_stats(60)


def recorded(work: Callable[[], object]) -> Any:
    """torch's profile of some work."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        with torch.profiler.record_function(_WORK):
            work()
        torch.cuda.synchronize()
    return prof


def idle(prof: Any) -> str:
    """Milliseconds without a kernel: before the first one, after the last one, and the longest ones in between."""
    work = next(e.time_range for e in prof.events() if e.name == _WORK and e.device_type.name == "CPU")
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in prof.events()
                   if e.device_type.name == "CUDA" and e.name != _WORK)  # fmt: skip
    gaps, until, last = [], spans[0][0], ""
    for start, end, name in spans:
        gaps.append((start - until, start - work.start, last, name))
        until, last = max(until, end), name
    longest = [f"{gap / 1e3:.2f} at {at / 1e3:.1f} ({a[:24]}, {b[:24]})" for gap, at, a, b in sorted(gaps)[:-9:-1]]
    before, after = (spans[0][0] - work.start) / 1e3, (work.end - until) / 1e3
    total = sum(max(0.0, gap) for gap, *_ in gaps) / 1e3
    return f"{before:.2f} before, {after:.2f} after, {total:.2f} between: {'; '.join(longest)}"


def busy(prof: Any) -> float:
    """Milliseconds in which some kernel or copy ran."""
    kernels = (e.time_range for e in prof.events() if e.device_type.name == "CUDA" and e.name != _WORK)
    spans = sorted((span.start, span.end) for span in kernels)
    total = until = 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def report_kernels(prof: Any, path: Path) -> None:
    """The longest kernels, and the host's longest calls into the library and the driver."""
    averages = prof.key_averages()
    kernels = sorted(averages, key=lambda e: -e.self_device_time_total)
    calls = sorted(averages, key=lambda e: -e.self_cpu_time_total)
    path.write_text("\n".join(
        averages.table(sort_by=order, row_limit=40, max_name_column_width=60)
        for order in ("self_cuda_time_total", "self_cpu_time_total")
    ))  # fmt: skip
    for event in kernels[:22]:
        say(f"  {event.self_device_time_total / 1e3:9.3f} ms {event.count:6d} x "
            f"{event.self_device_time_total / event.count:8.2f} us  {event.key[:70]}")  # fmt: skip
    for event in calls[:8]:
        say(f"  host {event.self_cpu_time_total / 1e3:9.3f} ms {event.count:6d} x  {event.key[:70]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
