"""Engine-only benchmark: the same work on several engines, in turn, in one run.

    python benchmarks/offline.py MODEL --engine evener --engine transformers

Each engine lives in a process of its own; their repeats alternate, so that a machine that slows down slows all of them.
Prints one JSON line an engine and job, then a table with ratios against the first engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from engines import ENGINES  # noqa: E402  (found beside this file)
from workload import Job, fixed, mixed  # noqa: E402


def jobs_of(args: argparse.Namespace, seed: int) -> list[Job]:
    """The jobs of one repeat; another seed gives other token ids, so that nothing is found in a cache."""
    jobs = [mixed(args.workload, args.vocab, seed)] if not args.fixed or args.mixed else []
    for text in args.fixed:
        batch, prompt, new = (int(x) for x in text.split(","))
        jobs.append(fixed(batch, prompt, new, args.vocab, seed))
    return jobs


def serve(args: argparse.Namespace) -> int:
    """Child: load one engine, then run a repeat for each seed that arrives on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    overrides = dict(pair.split("=", 1) for pair in args.set)
    began = time.perf_counter()
    run, label = ENGINES[args.serve](args.model, args.dtype, args.threads, overrides)
    run(fixed(1, 16, 2, args.vocab, 10**6))
    print(json.dumps({"label": label, "ready_s": round(time.perf_counter() - began, 2)}), file=answers, flush=True)
    for line in sys.stdin:
        rows = []
        for job in jobs_of(args, int(line)):
            first, total = run(job)
            rows.append({"job": job.name, "first_s": first, "total_s": total, "useful": job.useful,
                         "prompt": sum(map(len, job.prompts)), "requests": len(job.counts)})  # fmt: skip
        print(json.dumps(rows), file=answers, flush=True)
    return 0


def start(engine: str, argv: list[str], threads: int) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start an engine's process and wait until it is ready."""
    child = subprocess.Popen(
        [sys.executable, __file__, *argv, "--serve", engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"{engine} did not start; see its message above")
    return child, json.loads(line)


def summary(label: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the repeats of one engine and job."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    totals, firsts = [r["total_s"] for r in rows], [r["first_s"] for r in rows]
    more = rows[0]["useful"] - rows[0]["requests"]
    return {
        "engine": label, "job": rows[0]["job"], "model": Path(args.model).name, "dtype": args.dtype,
        "threads": args.threads,
        "repeats": len(rows), "total_s": [median(totals), round(min(totals), 4), round(max(totals), 4)],
        "useful_tok_s": median([r["useful"] / r["total_s"] for r in rows]),
        "prefill_tok_s": median([r["prompt"] / r["first_s"] for r in rows]),
        "decode_tok_s": median([more / (t - f) for t, f in zip(totals, firsts, strict=True)]) if more else None,
        "first_s": median(firsts),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", action="append", choices=sorted(ENGINES), help="may be given several times")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--workload", type=Path, default=HERE / "workload-16.json")
    parser.add_argument(
        "--fixed", action="append", default=[], metavar="BATCH,PROMPT,NEW", help="equal lengths instead"
    )
    parser.add_argument("--mixed", action="store_true", help="the workload file as well as --fixed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=40000, help="token ids are drawn below this")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        return serve(args)
    children = {e: start(e, argv, args.threads) for e in args.engine or ["evener", "transformers"]}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for seed in range(args.repeats):
        for engine, (child, _) in children.items():
            assert child.stdin is not None and child.stdout is not None
            print(seed, file=child.stdin, flush=True)
            for row in json.loads(child.stdout.readline()):
                rows.setdefault((engine, row["job"]), []).append(row)
    found = [summary(children[engine][1]["label"], several, args) for (engine, _), several in rows.items()]
    for (child, facts), engine in zip(children.values(), children, strict=True):
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
        print(f"{engine}: {facts['label']}, ready after {facts['ready_s']} s", file=sys.stderr)
    report(found, args.out)
    return 0


def report(found: list[dict[str, Any]], out: Path | None) -> None:
    """JSON lines, then a table."""
    for row in found:
        print(json.dumps(row))
    if out:
        with out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
    base = {r["job"]: r for r in found if r["engine"] == found[0]["engine"]}
    print("\n| job | engine | useful tok/s | prefill tok/s | decode tok/s | the first engine is … × as fast |")
    print("|---|---|---|---|---|---|")
    for r in sorted(found, key=lambda r: r["job"]):
        ratio = base[r["job"]]["useful_tok_s"] / r["useful_tok_s"]
        decode = "" if r["decode_tok_s"] is None else f"{r['decode_tok_s']:.1f}"
        speeds = f"{r['useful_tok_s']:.1f} | {r['prefill_tok_s']:.0f} | {decode}"
        print(f"| {r['job']} | {r['engine']} | {speeds} | {ratio:.2f} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
