"""Engine-only benchmark: the same work on several engines, alternating, in one run.

    python benchmarks/offline.py MODEL --engine evener --engine transformers
    python benchmarks/offline.py MODEL --engine evener --engine llamacpp --set llamacpp:gguf=FILE.gguf
    python benchmarks/offline.py MODEL --engine evener --engine openai-url --set openai-url:url=http://HOST:PORT/v1

Each engine has its own process; their repeats alternate, so that a machine that slows down slows all of them. Prints
one JSON line for each engine and job, then a table with ratios to the first engine. For an engine that another Python
has: EVENER_BENCH_PYTHON_LLAMACPP=/path/to/python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from engines import ENGINES
from launch import HERE, EngineChild
from machine import OtherProcesses, facts
from workload import Job, fixed, mixed


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", help="model folder; token ids go in and come out")
    made.add_argument("--engine", action="append", choices=sorted(ENGINES), help="may be given several times")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--workload", type=Path, default=HERE / "workload-16.json")
    made.add_argument("--fixed", action="append", default=[], metavar="BATCH,PROMPT,NEW", help="equal lengths instead")
    made.add_argument("--mixed", action="store_true", help="the workload file as well as --fixed")
    made.add_argument("--batch-size", type=int, nargs="+", default=[], help="with --input-len and --output-len: one "
                      "job a size")  # fmt: skip
    made.add_argument("--input-len", type=int, default=128)
    made.add_argument("--output-len", type=int, default=64)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--vocab", type=int, default=40000, help="token ids are drawn below this")
    made.add_argument(
        "--set", action="append", default=[], metavar="[ENGINE:]KEY=VALUE", help="a setting of one engine; of evener "
        "where none is named",
    )  # fmt: skip
    made.add_argument("--out", type=Path, help="append the JSON lines to this file")
    return made


def settings_of(engine: str, given: Sequence[str]) -> list[str]:
    """The ``--set`` values for ``engine``."""
    found = []
    for text in given:
        name, colon, rest = text.partition(":")
        named = bool(colon) and name in ENGINES
        if (name if named else "evener") == engine:
            found.append(rest if named else text)
    return found


def jobs_of(args: argparse.Namespace, seed: int) -> list[Job]:
    """The jobs of one repeat; each seed gives other token ids, so that nothing is in a cache."""
    lengths = [tuple(int(x) for x in text.split(",")) for text in args.fixed]
    lengths += [(size, args.input_len, args.output_len) for size in args.batch_size]
    jobs = [mixed(args.workload, args.vocab, seed)] if not lengths or args.mixed else []
    return jobs + [fixed(batch, prompt, new, args.vocab, seed) for batch, prompt, new in lengths]


def row_of(job: Job, first: float, total: float, others: float) -> dict[str, Any]:
    """One run of one job."""
    return {"job": job.name, "first_s": first, "total_s": total, "useful": job.useful, "others": others,
            "prompt": sum(map(len, job.prompts)), "requests": len(job.counts)}  # fmt: skip


def summary(label: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats of one engine and job."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    totals, firsts = [r["total_s"] for r in rows], [r["first_s"] for r in rows]
    more = rows[0]["useful"] - rows[0]["requests"]
    return {
        "engine": label, "job": rows[0]["job"],
        "repeats": len(rows), "total_s": [median(totals), round(min(totals), 4), round(max(totals), 4)],
        "useful_tok_s": median([r["useful"] / r["total_s"] for r in rows]),
        "prefill_tok_s": median([r["prompt"] / r["first_s"] for r in rows]),
        "decode_tok_s": median([more / (t - f) for t, f in zip(totals, firsts, strict=True)]) if more else None,
        "first_s": median(firsts),
        "others_cores": [r["others"] for r in rows],
    }  # fmt: skip


def table(found: list[dict[str, Any]]) -> str:
    """A Markdown table; each job's engines are compared with the first."""
    base = {r["job"]: r for r in found if r["engine"] == found[0]["engine"]}
    lines = [
        "| job | engine | useful tok/s | prompt tok/s | decode tok/s | the first engine is … × as fast |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted(found, key=lambda r: str(r["job"])):
        ratio = base[r["job"]]["useful_tok_s"] / r["useful_tok_s"]
        decode = "" if r["decode_tok_s"] is None else f"{r['decode_tok_s']:.1f}"
        speeds = f"{r['useful_tok_s']:.1f} | {r['prefill_tok_s']:.0f} | {decode}"
        lines.append(f"| {r['job']} | {r['engine']} | {speeds} | {ratio:.2f} |")
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every job on every engine, ``repeats`` times, engines alternating."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(EngineChild(e, args.model, args.dtype, args.threads, settings_of(e, args.set)))
            for e in args.engine or ["evener", "transformers"]
        ]
        for seed in range(args.repeats):
            for engine in engines:
                for job in jobs_of(args, seed):
                    with OtherProcesses() as others:
                        first, total = engine.run(job)
                    rows.setdefault((engine.name, job.name), []).append(row_of(job, first, total, others.cores))
        by_name = {engine.name: engine for engine in engines}
    about = {**facts(), "what": "offline", "model": Path(args.model).name, "dtype": args.dtype, "threads": args.threads}
    return [
        {**about, "ready_s": by_name[name].ready_s, **summary(by_name[name].label, several)}
        for (name, _), several in rows.items()
    ]


def main(argv: list[str]) -> int:
    """Run it."""
    args = parser().parse_args(argv)
    found = measure(args)
    for row in found:
        print(json.dumps(row))
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
    print("\n" + table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
