"""Ranks on several accelerators of one machine: all-reduces, timed inside captures, and tokens compared with one rank.

    python benchmarks/rank_check.py [sums] [pipe] [tokens] [--ranks 2] [--stages 1]
    python benchmarks/rank_check.py tokens --layouts 2x1 --pretend hygon hygon.arch=gfx936

``sums``: the backend's communicator and the library alone, for sizes from a decode step to a prefill: correct values,
equal bits on all ranks, microseconds per all-reduce in a captured sequence of them. ``pipe``: what pipeline stages rely
on, between two devices: isend does not wait, a pending irecv does not block a device, and the time of a round.
``tokens``: random small models of several families, one rank against all ranks, which share every layer and, with
``--stages``, are pipeline stages too: prompts in chunks, prefix hits, preempted and aborted requests; with graph
capture if the device can (with --eager: both). ``--pretend`` runs them with a backend whose vendor's devices these are
not, and with its options. A part that takes longer than ``--limit`` seconds is ended, after each
of its processes has printed its stack.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from pretend import pretend

KIB = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
SUMS_PER_CAPTURE = 40
#: Blocks of a pool that is too small for all requests; the models have enough layers for a pool of a megabyte.
SMALL_POOL_BLOCKS = 20
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 512,
         "intermediate_size": 1024, "vocab_size": 4099, "num_hidden_layers": 8}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": HEADS,
    "Qwen2": {
        **HEADS,
        "use_sliding_window": False,
    },  # as published; with windows a request takes more of SMALL_POOL_BLOCKS
    "Qwen3Moe": {**HEADS, "moe_intermediate_size": 256},
    "DeepseekV3": {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 512, "num_hidden_layers": 8},
}


def main(argv: Sequence[str]) -> int:
    """Run the parts; 0 if all of them were correct."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["sums", "tokens"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--layouts", nargs="*", type=_layout, metavar="RANKSxSTAGES", help="such as 2x1 1x2 2x2")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each model and for each other part")
    parser.add_argument("--pretend", nargs="+", default=(), metavar=("BACKEND", "KEY=VALUE"), help="for tokens alone")
    args = parser.parse_args(argv)
    if args.pretend and args.parts != ["tokens"]:
        parser.error(f"--pretend is for tokens alone, not for {' '.join(args.parts)}; type: tokens --pretend BACKEND")
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a process that gets SIGABRT prints its stacks
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        if args.pretend:
            pretend(args.pretend[0], Path(folder))
        for part in args.parts:
            wrong += {"sums": sums, "pipe": pipe, "tokens": tokens}[part](args)
    return 1 if wrong else 0


def _layout(text: str) -> tuple[int, int]:
    ranks, _, stages = text.partition("x")
    return int(ranks), int(stages)


def sums(args: argparse.Namespace) -> int:
    """One process for each rank."""
    return _on_ranks(_rank, args.ranks, args)


def pipe(args: argparse.Namespace) -> int:
    """Two stages without a model."""
    return _on_ranks(_stage, 2, args)


def _on_ranks(work: Callable[..., None], ranks: int, args: argparse.Namespace) -> int:
    """Run ``work`` in a process for each rank; returns how many failed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/meet"
        started = [context.Process(target=work, args=(r, ranks, meet)) for r in range(ranks)]
        until = time.monotonic() + args.limit
        for process in started:
            process.start()
        for process in started:
            process.join(max(0.0, until - time.monotonic()))
        for process in started:
            _terminate(process)
    return sum(process.exitcode != 0 for process in started)


def _terminate(process: Any) -> None:
    """End a process and its children that still run; a process that hangs prints its stacks."""
    if process.exitcode is not None:
        return
    print(f"process {process.pid} hangs; its stacks follow", file=sys.stderr, flush=True)
    family = _process_tree(process.pid)
    for number in (signal.SIGABRT, signal.SIGKILL):
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                time.sleep(0.5)  # one after another, so that their stacks do not mix
    process.join()


def _process_tree(pid: int) -> list[int]:
    """Children before their parents, and the process itself."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            child, _, rest = path.read_text().partition(" (")
            children.setdefault(int(rest.rpartition(") ")[2].split()[1]), []).append(int(child))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[::-1]


def _stage(rank: int, ranks: int, meet: str) -> None:
    import torch

    from evener.backend_search import BackendSearch
    from evener.distributed.communicators import communicator_factory

    loaded = BackendSearch(None).load({})
    device = loaded.open_device(rank)
    device.select()
    factory, where, row = communicator_factory(loaded.communicator(), device), device.torch_device, dict[str, Any]()
    began = time.perf_counter()
    stream, ids = (factory(name, range(ranks), rank, ranks, meet) for name in ("pp", "ids"))
    stream.barrier()
    row["open_s"] = round(time.perf_counter() - began, 2)
    sampled = [torch.full((256,), n, dtype=torch.int32, device=where) for n in range(6)]
    arriving = [ids.irecv(torch.empty_like(each), 1) for each in sampled] if rank == 0 else []
    stream.barrier()
    if rank == 1:
        kept = [ids.isend(each, 0) for each in sampled]
        began = time.perf_counter()
        device.synchronize()  # as each capture does: it must not wait for the other rank's next call
        row["synchronize_s"] = round(time.perf_counter() - began, 3)
    stream.barrier()
    for arrived, right in zip(arriving, sampled, strict=False):
        assert torch.equal(arrived(), right), "ids came in another order"
    hidden = [torch.full((1 << 12, 1 << 12), float(n), device=where) for n in range(3)]
    posted = Path(meet.removeprefix("file://") + "-posted")
    began = time.perf_counter()
    if rank == 0:
        kept = [stream.isend(each, 1) for each in hidden]
        row["post_s"] = round(time.perf_counter() - began, 3)
        posted.touch()
    else:
        while not posted.exists():  # isend must not wait until the other side receives: both would hang
            time.sleep(0.01)
        for right in hidden:
            assert torch.equal(stream.receive(torch.empty_like(right), 0), right), "streams came in another order"
    few, count = hidden[0][:8], 200
    for turn in range(2 * count):
        if turn == count:
            device.synchronize()
            stream.barrier()
            began = time.perf_counter()
        kept = kept[-4:]
        if rank == 0:
            kept.append(stream.isend(few, 1))
            ids.irecv(sampled[0], 1)()
        else:
            stream.receive(few, 0)
            kept.append(ids.isend(sampled[0], 0))
    device.synchronize()
    row["round_us"] = round((time.perf_counter() - began) / count * 1e6, 1)
    stream.barrier()
    # In one write: the other rank writes to the same output.
    os.write(sys.stdout.fileno(), (json.dumps({"part": "pipe", "rank": rank, **row}) + "\n").encode())


def _rank(rank: int, ranks: int, meet: str) -> None:
    import torch

    from evener.backend_search import BackendSearch

    loaded = BackendSearch(None).load({})
    device = loaded.open_device(rank)
    device.select()
    offer = loaded.communicator()
    assert offer is not None, "no package brings a communicator"
    ours = offer.value("tp", range(ranks), rank, ranks, meet)
    plain = offer.value("plain", range(ranks), rank, ranks, meet)
    where = device.torch_device
    graphs = loaded.graph_capture(device)
    assert graphs is not None
    for dtype in (torch.bfloat16, torch.float32):
        for kib in KIB:
            count = kib * 1024 // dtype.itemsize
            mine = torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(where, dtype)
            whole = plain.all_gather(mine[None], dim=0)
            wanted, row = whole.float().sum(0), {"ranks": ranks, "KiB": kib, "dtype": str(dtype)}
            for name, end in (("ours_us", ours), ("library_us", plain)):
                got = end.all_reduce(mine.clone())
                off = float((got.float() - wanted).abs().max())
                everybody = plain.all_gather(got[None], dim=0)
                same = all(torch.equal(everybody[0], other) for other in everybody)
                assert off < (0.1 if dtype is torch.bfloat16 else 1e-5) and same, f"{name} {row}: {off}, {same}"
                row[name] = round(_captured(end, mine.clone(), device, graphs.value), 2)
            if rank == 0:
                print(json.dumps(row), flush=True)
    for end in (ours, plain):
        end.barrier()


def _captured(end: Any, tensor: Any, device: Any, graphs: Any) -> float:
    """Microseconds per all-reduce in a capture of many."""
    import torch

    def segment() -> None:
        for _ in range(SUMS_PER_CAPTURE):
            end.all_reduce(tensor.mul_(0.25))

    with torch.inference_mode():
        segment()
        replay = graphs.capture(segment)
        for _ in range(3):
            replay()
        device.synchronize()
        end.barrier()
        device.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            replay()
        device.synchronize()
    return (time.perf_counter() - began) / 10 / SUMS_PER_CAPTURE * 1e6


def tokens(args: argparse.Namespace) -> int:
    """Random prompts on one rank and on all; returns the number of models whose answers differ or are missing."""
    wrong, layouts = 0, args.layouts or [(args.ranks, args.stages)]
    keys = dict(option.split("=", 1) for option in args.pretend[1:])
    if args.pretend:
        keys["backend"] = args.pretend[0]
    for family in args.families:
        for captured in (False, True) if args.eager else (True,):
            found = _within(args.limit * (1 + len(layouts)), family, layouts, captured, keys)
            wrong += found is None or any(row["same"] < row["answers"] or row["lacks"] for row in found)
            for row in found or [{"answers": None}]:
                print(json.dumps({"family": family, "captured": captured, **row}), flush=True)
    return wrong


def _within(limit: float, *words: Any) -> list[dict[str, Any]] | None:
    """The result of ``_compared`` in a process of its own; None if it fails or takes longer."""
    context = multiprocessing.get_context("spawn")
    found, tell = context.Pipe(duplex=False)
    process = context.Process(target=_compared, args=(tell, *words))
    process.start()
    tell.close()
    answered = found.poll(limit)
    try:
        said: list[dict[str, Any]] | None = found.recv() if answered else None
        return said
    except EOFError:  # it has failed and printed why
        return None
    finally:
        process.join(20 if answered else 0)
        _terminate(process)


def _compared(
    tell: Any, family: str, layouts: Sequence[tuple[int, int]], captured: bool, keys: Mapping[str, str]
) -> None:
    alone, rows = None, []
    with tempfile.TemporaryDirectory() as folder:
        for tp, pp in ((1, 1), *layouts):
            began = time.perf_counter()
            answers, lacks = _answers(Path(folder) / f"{tp}-{pp}", family, tp, pp, captured, keys)
            if alone is None:
                alone = answers
                continue
            same = sum(answers[id] == alone[id] for id in alone)
            seconds = round(time.perf_counter() - began, 1)
            rows.append({"ranks": tp, "stages": pp, "answers": len(alone), "same": same, "lacks": lacks,
                         "seconds": seconds})  # fmt: skip
    tell.send(rows)


def _answers(
    folder: Path, family: str, ranks: int, stages: int, captured: bool, more: Mapping[str, str]
) -> tuple[dict[str, list[int]], list[str]]:
    """Tokens by request, of an engine with a large pool and of one with preemptions and aborts; and which expected
    events did not happen."""
    from evener.config import from_overrides
    from evener.engine.processes.start import start_engine
    from evener.engine.wire.messages import Ready
    from evener_conformance.naive.model import find_architecture

    shape = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **FAMILIES[family]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    keys: dict[str, Any] = {"load": "dummy", "dtype": "float32", "infer.max_seq_len": 256, "infer.max_reqs": 8,
                            "infer.step_tokens": 64, "infer.tp_size": ranks, "infer.pp_size": stages,
                            **more}  # fmt: skip
    if not captured:
        keys["infer.use_cuda_graph"] = False
    answers: dict[str, list[int]] = {}
    seen, page = {"prefix_hits": 0, "preemptions": 0}, 0
    for scarce in (False, True):
        if scarce:
            keys["infer.kv_memory"] = page * SMALL_POOL_BLOCKS
        client = start_engine(from_overrides(folder, keys), "process" if ranks * stages > 1 else "inline")
        try:
            ready = client.receive(None)[0]
            assert isinstance(ready, Ready), ready
            memory: Any = ready.info.memory
            page = memory.block_bytes
            for name in ("first", "again"):
                name += ", scarce" if scarce else ", roomy"
                found, stats = _run_requests(client, shape["vocab_size"], name, scarce)
                answers |= found
            seen = {name: count + getattr(stats, name) for name, count in seen.items()}
        finally:
            client.close()
    return answers, [name for name, count in seen.items() if not count]


def _run_requests(client: Any, vocabulary: int, name: str, aborts: bool) -> tuple[dict[str, list[int]], Any]:
    """Answers to prompts of several lengths, greedy and sampled, two with a common prefix; with ``aborts`` one request
    is aborted and left out."""
    import random

    from evener.engine.wire.messages import Abort, Dead, Finished, GetStats, NewRequest, Sampling, StatsReport, Tokens

    rng = random.Random(4)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(n)] for n in (3, 17, 90, 150)]
    prompts.append(prompts[3][:100] + prompts[1])
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        for how in (Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.9, seed=5)):
            id = f"{name}: {number} {how.temperature}"
            answers[id] = []
            client.send(NewRequest(id=id, prompt=prompt, max_tokens=48, sampling=how))
    ended, lost, stats = 0, f"{name}: 2 0.8" if aborts else "", None
    while ended < len(answers):
        for event in client.receive(None):
            assert not isinstance(event, Dead), event.reason
            if isinstance(event, Tokens):
                answers[event.id] += event.ids
                if event.id == lost and len(answers[lost]) > 5:
                    client.send(Abort(lost))
            elif isinstance(event, Finished):
                assert event.error is None, event.error
                ended += 1
    client.send(GetStats())
    while stats is None:
        stats = next((event for event in client.receive(None) if isinstance(event, StatsReport)), None)
    answers.pop(lost, None)
    return answers, stats


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
