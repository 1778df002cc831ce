"""The cost of the server: the same requests through HTTP and through the engine alone, alternating, in one run.

    python benchmarks/http_ratio.py MODEL --streams 16

The engine alone is ``LLM.generate`` in its own process, from ids to ids, without detokenization. The server is ``evener
serve`` with one streaming client for each request; the clients run on the same cores. The ratio is tokens per second
through HTTP over those of the engine, for each pair of runs; the result is the median.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from launch import EngineChild, Server, evener_server
from machine import OtherProcesses, cpu_seconds, facts, process_tree, record
from stream_client import Sample, post
from workload import Job, fixed


async def _all(url: str, bodies: list[dict[str, Any]]) -> list[Sample]:
    return await asyncio.gather(*(post(f"{url}/v1/completions", body) for body in bodies))


def through_http(server: Server, job: Job) -> tuple[float, float]:
    """(seconds until every request has its first token, seconds in total)."""
    bodies = [
        {
            "model": server.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
        for prompt, count in zip(job.prompts, job.counts, strict=True)
    ]  # fmt: skip
    began = time.perf_counter()
    samples = asyncio.run(_all(server.url, bodies))
    bad = [sample.error for sample in samples if sample.error]
    if bad:
        raise SystemExit(f"{len(bad)} of {len(samples)} requests failed: {bad[0]}")
    got = [sample.output_tokens for sample in samples]
    assert got == job.counts, f"asked for {job.counts} tokens, got {got}"
    return max(s.times[0] for s in samples) - began, max(s.ended for s in samples) - began


def _roles(server: Server) -> dict[str, int]:
    """Process ids of the server's three roles, and of the clients (this process)."""
    found = {"clients": os.getpid(), "front end": server.pid}
    for pid in process_tree(server.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "evener.engine.processes.child" in words:
            found[words[words.index("evener.engine.processes.child") + 1]] = pid
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs; which of the two goes first alternates."""
    settings = [f"infer.threads={args.threads}", "infer.prefix_cache=false", f"dtype={args.dtype}", *args.set]
    pairs: list[dict[str, float]] = []
    with (
        EngineChild("evener", args.model, args.dtype, args.threads, args.set) as engine,
        evener_server(args.model, settings) as server,
    ):
        warm = fixed(args.streams, 16, 4, args.vocab, 10**6)
        engine.run(warm)
        through_http(server, warm)
        roles = _roles(server)
        before = {role: cpu_seconds([pid]) for role, pid in roles.items()}
        for repeat in range(args.repeats):
            job = fixed(args.streams, args.input_len, args.output_len, args.vocab, repeat)
            row = {"tokens": float(job.useful)}
            for who in ("engine", "http") if repeat % 2 == 0 else ("http", "engine"):
                with OtherProcesses() as others:
                    seconds = engine.run(job)[1] if who == "engine" else through_http(server, job)[1]
                row[f"{who}_s"], row[f"{who}_others"] = seconds, others.cores
            pairs.append(row)
        used = {role: cpu_seconds([pid]) - before[role] for role, pid in roles.items()}
        label = engine.label
    tokens = sum(row["tokens"] for row in pairs)
    ratios = [row["engine_s"] / row["http_s"] for row in pairs]
    return {
        **facts(), "what": "http-ratio", "engine": label, "model": Path(args.model).name, "dtype": args.dtype,
        "threads": args.threads, "streams": args.streams, "input_len": args.input_len, "output_len": args.output_len,
        "engine_tok_s": round(statistics.median(r["tokens"] / r["engine_s"] for r in pairs), 1),
        "http_tok_s": round(statistics.median(r["tokens"] / r["http_s"] for r in pairs), 1),
        "ratio": round(statistics.median(ratios), 3), "ratios": [round(r, 3) for r in ratios], "pairs": pairs,
        "cpu_us_per_token": {role: round(1e6 * seconds / tokens, 1) for role, seconds in used.items()},
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model")
    made.add_argument("--streams", type=int, default=16)
    made.add_argument("--input-len", type=int, default=128)
    made.add_argument("--output-len", type=int, default=64)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--threads", type=int, default=facts()["cores"])
    made.add_argument("--vocab", type=int, default=40000, help="token ids are drawn below this")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    made.add_argument("--out", type=Path, help="append the result to this file, as a JSON line")
    return made


def main(argv: list[str]) -> int:
    """Run it."""
    args = parser().parse_args(argv)
    result = measure(args)
    record(result, args.out)
    print(f"\n{args.streams} streams, {args.input_len} in, {args.output_len} out")
    percent = 100 * result["ratio"]
    print(f"engine {result['engine_tok_s']} tokens/s, through HTTP {result['http_tok_s']}: {percent:.1f} %")
    print(f"CPU time per token, microseconds: {result['cpu_us_per_token']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
