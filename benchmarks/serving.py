"""Serving benchmark: load on servers with the OpenAI API, measured at the clients.

    python benchmarks/serving.py --model MODEL_DIR --requests 64 --request-rate 1 2 4 --output-len 64
    python benchmarks/serving.py --base-url http://127.0.0.1:21002 --batch-size 16 --input-len 128 --output-len 128
    python benchmarks/serving.py --model MODEL_DIR --engine evener --engine llamacpp --gguf FILE.gguf --requests 32

It starts the given servers (or uses a running one), sends the same requests to each in turn, and prints rates and
percentiles. ``serving_options.py`` has the options: those of chitu's benchmark_serving and KsanaLLM's
benchmark_throughput, in both spellings.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from arrivals import offsets
from compare import changes, differences, load_of, read_answers, read_rows
from dataset import Message, PromptRequest, affixed, body_of, conversations, cut, length, random_ids
from launch import Server, start_server
from machine import OtherProcesses, facts
from serving_metrics import METRICS, summary
from serving_options import fields_of, parse
from stream_client import Sample, post


class Source:
    """Requests, as the options say; every iteration has new ones, every server gets the same."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._tokenizer = _tokenizer(args.tokenizer_path)
        self._conversations: list[list[Message]] = []
        if args.dataset != "random":
            self._conversations = conversations(args.dataset, args.dataset_path, args.column, not args.no_header)
        if args.shuffle:
            random.Random(args.seed).shuffle(self._conversations)

    def take(self, iteration: int) -> list[PromptRequest]:
        """The requests of one iteration."""
        args, rng = self._args, random.Random(f"{self._args.seed}/{iteration}")
        first = iteration * args.requests
        return [self._one(rng, first + i) for i in range(args.requests)]

    def _one(self, rng: random.Random, number: int) -> PromptRequest:
        args = self._args
        new = length(rng, args.output_len, args.length_spread)
        size = length(rng, args.input_len or 128, args.length_spread)
        if self._conversations and args.input_len:
            made = cut(self._conversations, number, size, self._encode, self._decode)
        elif self._conversations:
            talk = self._conversations[number % len(self._conversations)]
            if args.api == "chat" and args.template is None:
                return PromptRequest(talk, new)
            made = "\n".join(turn["content"] for turn in talk)
        elif args.api == "completions" and args.template is None:
            return PromptRequest(random_ids(rng, size, args.vocab), new)
        else:
            # Text made of tokens may be tokenized to more of them: cut the result.
            made = self._decode(self._encode(self._decode(random_ids(rng, size, args.vocab)))[:size])
        return PromptRequest(affixed(made, args.template), new)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))


def _tokenizer(folder: Path | None) -> Any:
    if folder is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


async def load(
    server: Server,
    asks: Sequence[PromptRequest],
    args: argparse.Namespace,
    when: Sequence[float],
    concurrency: int | None,
) -> list[Sample]:
    """Send ``asks`` at the offsets ``when``, at most ``concurrency`` at a time, and wait for every answer."""
    room = asyncio.Semaphore(concurrency or len(asks))
    path = "/v1/chat/completions" if args.api == "chat" else "/v1/completions"
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    began, fields = time.perf_counter(), fields_of(args)

    async def one(ask: PromptRequest, offset: float) -> Sample:
        await asyncio.sleep(max(0.0, began + offset - time.perf_counter()))
        past_eos = server.past_eos if args.ignore_eos else {}
        body = {"model": server.model, **past_eos, **body_of(ask, args.api == "chat", fields)}
        if not args.stream:
            body |= {"stream": False}
            del body["stream_options"]
        async with room:
            return await post(server.url + path, body, headers, args.timeout)

    return await asyncio.gather(*(one(ask, offset) for ask, offset in zip(asks, when, strict=True)))


def run(
    servers: Sequence[Server], source: Source, args: argparse.Namespace, rate: float, concurrency: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run one point of the sweep on every server: returns a row for each, and a record of each request."""
    samples: dict[str, list[Sample]] = {server.label: [] for server in servers}
    seconds, others = dict.fromkeys(samples, 0.0), {label: list[float]() for label in samples}
    records = []
    for iteration in range(args.iterations):
        asks = source.take(iteration)
        when = offsets(len(asks), rate, burst=args.burst, poisson=args.arrival == "poisson", seed=args.seed + iteration)
        for server in servers:
            with OtherProcesses() as busy:
                got = asyncio.run(load(server, asks, args, when, concurrency))
            samples[server.label] += got
            seconds[server.label] += max(s.ended for s in got) - min(s.sent for s in got)
            others[server.label].append(busy.cores)
            records += [record(server, rate, ask, sample) for ask, sample in zip(asks, got, strict=True)]
    rows = [
        {
            "engine": label, "api": args.api, "dataset": args.dataset,
            "request_rate": None if math.isinf(rate) else rate, "concurrency": concurrency, "burst": args.burst,
            "input_len": args.input_len, "output_len": args.output_len, "iterations": args.iterations,
            **summary(samples[label], max(seconds[label], 1e-9), args.metric_percentiles, args.goal),
            "others_cores": others[label],
        }
        for label in samples
    ]  # fmt: skip
    return rows, records


def record(server: Server, rate: float, ask: PromptRequest, sample: Sample) -> dict[str, Any]:
    """One request for ``--output-csv``; times in milliseconds."""
    good = not sample.error
    return {
        "engine": server.label, "request_rate": rate, "prompt": ask.text, "text": sample.text,
        "prompt_tokens": sample.prompt_tokens, "output_tokens": sample.output_tokens,
        "ttft_ms": round(1000 * sample.ttft, 3) if good else "", "e2el_ms": round(1000 * sample.e2e, 3) if good else "",
        "error": sample.error,
    }  # fmt: skip


def too_slow(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Whether a sweep ends here."""
    return any(
        row.get("mean_e2el_ms", 0) > 1000 * args.max_avg_latency
        or row.get("mean_ttft_ms", 0) > 1000 * args.max_first_token_latency
        for row in rows
    )


def shown(row: dict[str, Any], args: argparse.Namespace) -> str:
    """Print one row in readable form."""
    lines = [
        f"{row['engine']}, {load_of(row)}",
        f"  {row['completed']} of {row['requests']} requests in {row['duration_s']:.2f} s: "
        f"{row['request_throughput']:.2f} requests/s, {row['output_throughput']:.1f} output tokens/s, "
        f"{row['total_token_throughput']:.1f} tokens/s in total",
    ]
    if args.show_decode_token_throughput and row["decode_throughput"] is not None:
        lines.append(f"  {row['decode_throughput']:.1f} tokens/s after the first tokens")
    if "goodput" in row:
        lines.append(f"  {row['goodput']:.2f} requests/s within the goals")
    for name in args.percentile_metrics.split(","):
        if f"mean_{name}_ms" in row:
            tail = "".join(f"  p{p:g} {row[f'p{p:g}_{name}_ms']:.1f}" for p in args.metric_percentiles)
            lines.append(f"  {name:4} ms: mean {row[f'mean_{name}_ms']:.1f}{tail}")
    return "\n".join(lines)


def write(args: argparse.Namespace, rows: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    """Write the requested files."""
    about = {**facts(), "what": "serving", "model": Path(args.model).name if args.model else None}
    mode = "a" if args.append_result else "w"
    targets = [args.out_json] if args.out_json else []
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        targets.append(args.output_dir / "benchmark_results.jsonl")
    for path in targets:
        with path.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps({**about, **row}) + "\n" for row in rows)
    for path, table in ((args.perf_csv, rows), (args.output_csv, records)):
        if path:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(dict.fromkeys(key for row in table for key in row)))
                writer.writeheader()
                writer.writerows(table)
    if args.plot:
        from plot import sweep

        sweep(rows, args.plot)
    compare(args, about, rows, records)


def compare(
    args: argparse.Namespace, about: dict[str, Any], rows: list[dict[str, Any]], records: list[dict[str, Any]]
) -> None:
    """Print what differs from an earlier run, and write the page, if that was asked for."""
    changed = changes(rows, read_rows(args.compare)) if args.compare else []
    for each in changed:
        print(f"{each.point}: {each.was:.2f} {each.unit} became {each.now:.2f}, better by {each.part:+.1%}")
    if args.compare and not changed:
        print(f"{args.compare} has no point of this sweep: nothing to compare")
    answers = differences(records, read_answers(args.compare_answers)) if args.compare_answers else None
    if answers:
        both, different = answers
        print(f"{both - len(different)} of {both} answers are equal to those in {args.compare_answers}")
        for difference in different[:3]:
            at = difference.same
            print(f"  after {at} characters: {difference.was[at : at + 40]!r} became {difference.now[at : at + 40]!r}")
    if args.report:
        from report import page

        args.report.write_text(page(rows, about, changed, answers), "utf-8")


def main(argv: list[str]) -> int:
    """Run it. The exit code is 1 if a request failed."""
    args = parse(argv)
    unknown = set(args.percentile_metrics.split(",")) - set(METRICS)
    if unknown:
        raise SystemExit(f"--percentile-metrics: {', '.join(sorted(unknown))} is not one of {', '.join(METRICS)}")
    source = Source(args)
    rows: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = [stack.enter_context(start_server(engine, args)) for engine in args.engine]
        for i in range(args.warmup):
            for server in servers:
                asyncio.run(load(server, source.take(-1 - i), args, [0.0] * args.requests, None))
        for rate, concurrency in product(args.request_rate, args.concurrency or [None]):
            new, more = run(servers, source, args, rate, concurrency)
            rows += new
            records += more
            for row in new:
                print(shown(row, args), flush=True)
            if too_slow(new, args):
                print("the sweep ends here: slower than --max-avg-latency or --max-first-token-latency")
                break
    write(args, rows, records)
    errors = [record["error"] for record in records if record["error"]]
    if errors:
        print(f"{len(errors)} requests failed, the first with: {errors[0]}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
