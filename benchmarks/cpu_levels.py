"""Prompts at each level of instructions, and decode steps, beside other engines on the CPU: one command.

    python benchmarks/cpu_levels.py MODELS [--parts prompts decode files] [--levels avx2 avx512 ...]
                                    [--lengths 512 ...] [--repeats 3] [--out docs/results/cpu-levels.jsonl]

``MODELS`` is the folder of ``make model``. Engines take turns, each in a process of its own; medians of seconds and of
processor time, which other programs disturb less. "prompts": SmolLM2-135M in bfloat16, 128, 512 and 1,024 tokens, with
evener's kernels and torch's held to the same level, beside transformers in bfloat16 and in float32 and llama.cpp, whose
build has its own level. "decode": SmolLM2 in bfloat16, Q8_0 and Q4_1, Qwen 0.5B and 1.5B and Gemma 270M in Q4_K_M, one
and 16 requests, beside llama.cpp. "files": prompts of 512 and 1,024 tokens of the same files.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import after_stdlib  # noqa: F401
from launch import EngineChild
from machine import OtherProcesses, cpu_name, record, versions
from tables import requantized
from workload import fixed

#: What holds torch's products to a level of ``cpu.isa``: ATen's, oneDNN's and MKL's names of it.
TORCH = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_vnni": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
}
_SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_REQUESTS, _NEW = (1, 16), 32
#: Files of ``make models`` by the name in a record; the second is made from SmolLM2's. The last is measured only where
#: ``make models ONLY=qwen2.5-1.5b`` fetched it: it is a gigabyte.
FILES = (
    ("SmolLM2-135M-Instruct, Q8_0", "SmolLM2-135M-Instruct.Q8_0.gguf"),
    ("SmolLM2-135M-Instruct, Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    ("Qwen2.5-Coder-0.5B-Instruct, Q4_K_M", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"),
    ("gemma-3-270m, Q4_K_M", "gemma-3-270m.Q4_K_M.gguf"),
    ("Qwen2.5-Coder-1.5B-Instruct, Q4_K_M", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"),
)
SMALL = "SmolLM2-135M-Instruct"


class Entry(NamedTuple):
    """An engine of a comparison: its key in ``engines.ENGINES``, the dtype, and further settings."""

    engine: str
    dtype: str = "bfloat16"
    settings: tuple[str, ...] = ()


class Cost(NamedTuple):
    """Seconds and processor time of the prompts, and of what follows the first tokens."""

    prompt: float
    prompt_processor: float
    decode: float
    decode_processor: float


@contextmanager
def held_to(level: str) -> Iterator[None]:
    """Processes started in the block use no more instructions than ``level``; "auto": all."""
    if level == "auto":
        yield
        return
    before = dict(os.environ)
    os.environ.update(zip(_SWITCHES, TORCH[level], strict=True), EVENER_CPU_ISA=level)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def once(child: EngineChild, requests: int, prompt: int, new: int, seed: int) -> Cost:
    """One run of one job."""
    answer = child.answer(fixed(requests, prompt, new, 40000, seed))
    (first, total), (spent, whole) = (answer["first_s"], answer["total_s"]), answer["processor_s"]
    return Cost(first, spent, total - first, whole - spent)


def measure(
    model: str, entries: Mapping[str, Entry], jobs: Sequence[tuple[int, int, int]], repeats: int, threads: int
) -> tuple[dict[tuple[str, tuple[int, int, int]], Cost], dict[str, str], float]:
    """Medians by entry and job, the engines' own names, and the cores that other processes used."""
    found: dict[tuple[str, tuple[int, int, int]], list[Cost]] = {}
    with ExitStack() as stack, OtherProcesses() as others:
        children = {
            name: stack.enter_context(EngineChild(e.engine, model, e.dtype, threads, e.settings))
            for name, e in entries.items()
        }
        for child in children.values():  # fills caches
            once(child, 1, 128, 1, repeats)
        for job in jobs:
            for turn in range(repeats):
                for name, child in children.items():
                    found.setdefault((name, job), []).append(once(child, *job, turn))
        labels = {name: child.label for name, child in children.items()}
    medians = {key: Cost(*map(statistics.median, zip(*costs, strict=True))) for key, costs in found.items()}
    return medians, labels, others.cores


def rows(
    model: str,
    level: str,
    entries: Mapping[str, Entry],
    jobs: Sequence[tuple[int, int, int]],
    args: argparse.Namespace,
    path: str,
) -> Iterator[dict[str, Any]]:
    """Records of evener beside each other entry: prompts of jobs without decode steps, decode steps of the others."""
    with held_to(level):
        costs, labels, others = measure(path, entries, jobs, args.repeats, args.threads)
    parts, levels, lengths = (" ".join(map(str, given)) for given in (args.parts, args.levels, args.lengths))
    words = f"--parts {parts} --levels {levels} --lengths {lengths} --repeats {args.repeats}"
    words += f" --only {args.only!r}" if args.only else ""
    about: dict[str, Any] = {
        "device": f"{cpu_name()}, {args.threads} cores", "model": model, "unit": "tokens/s", "better": "higher",
        "version": f"evener {versions().get('evener', 'of the source tree')}", "level": level, "others_cores": others,
        "date": date.today().isoformat(),
        "software": f"Python {platform.python_version()}, torch {versions()['torch']}",
        "command": f"python benchmarks/cpu_levels.py MODELS {words}",
    }  # fmt: skip
    for job in jobs:
        requests, prompt, new = job
        tokens = requests * (prompt if new == 1 else new - 1)
        metric = "prompt" if new == 1 else "decode"
        for peer in list(entries)[1:]:
            pair = [costs[name, job] for name in (next(iter(entries)), peer)]
            wall = [c.prompt if new == 1 else c.decode for c in pair]
            processor = [c.prompt_processor if new == 1 else c.decode_processor for c in pair]
            speeds = {k: round(tokens / max(v, 1e-9), 1) for k, v in zip(("ours", "theirs"), wall, strict=True)}
            spent = {f"{k}_processor_s": round(v, 3) for k, v in zip(("ours", "theirs"), processor, strict=True)}
            held = "" if level == "auto" else f", {level}"
            label = re.sub(r" (generate|\S+\.gguf)$", "", labels[peer])
            yield {**about, "case": f"{requests} × {prompt:,} in, {new} out{held}", "metric": metric, **speeds,
                   "peer": f"{label}, {entries[peer].dtype}", **spent}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print the records."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", type=Path)
    made.add_argument(
        "--parts", nargs="+", choices=("prompts", "decode", "files"), default=["prompts", "decode", "files"]
    )
    made.add_argument(
        "--levels", nargs="+", choices=(*TORCH, "auto"), default=["auto", "avx512_bf16", "avx512", "avx2"]
    )
    made.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 1024], help="of prompts")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--only", default="", help="only models whose name has this text")
    made.add_argument("--out", type=Path, help="file that is written anew")
    args = made.parse_args(argv)
    if args.out:
        args.out.write_text("")
    folder, files = args.models / SMALL, args.models / "gguf"
    source = files / FILES[1][1]
    plain = requantized(source, files, "BF16")
    requantized(source, files, "Q8_0")
    whole = Entry("llamacpp", "BF16", (f"gguf={plain}",))

    def put(model: str, level: str, entries: Mapping[str, Entry], jobs: list[tuple[int, int, int]], path: Path) -> None:
        if args.only in model:
            for row in rows(model, level, entries, jobs, args, str(path)):
                record(row, args.out)

    if "prompts" in args.parts:
        beside = {"evener": Entry("evener"), "transformers": Entry("transformers"),
                  "in float32": Entry("transformers", "float32"), "llama.cpp": whole}  # fmt: skip
        for level in args.levels:
            put(f"{SMALL}, bfloat16", level, beside, [(1, prompt, 1) for prompt in args.lengths], folder)
    jobs = [(requests, 128, _NEW) for requests in _REQUESTS] if "decode" in args.parts else []
    if jobs:
        put(f"{SMALL}, bfloat16", "auto", {"evener": Entry("evener"), "llama.cpp": whole}, jobs, folder)
    jobs += [(1, prompt, 1) for prompt in args.lengths if prompt > 128] if "files" in args.parts else []
    for model, name in FILES if jobs else ():
        file = files / name
        if name == FILES[-1][1] and not file.exists():
            continue
        put(model, "auto", {"evener": Entry("evener"), "llama.cpp": Entry("llamacpp", name.split(".")[-2])}, jobs, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
