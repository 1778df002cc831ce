"""Chats of several turns whose blocks had left the device: the time to the first token of a later turn, with host
memory for blocks (``infer.kv_host_memory``) and without, and with files (``offload.kv_files``) after a restart.

    python benchmarks/chat_turns.py MODEL --kv 256MiB --host 4GiB
    python benchmarks/chat_turns.py MODEL --kv 256MiB --host 4GiB --files FOLDER
    python benchmarks/chat_turns.py MODEL --chats 16 --prompt 8192 --kv 8GiB --host 64GiB --set backend=NAME

All chats have their first turn, then all their second, and so on. ``--kv`` has to be too little for all of them, so
that a chat's blocks have left when its next turn comes. Turns come one after another, or with ``--at-once`` those of
all chats together. Token ids are random; the chats have nothing in common. The engines run in one process, one after
the other, ``--repeats`` times in turn. With ``--files`` a third one has the first turn, ends, and is started again for
the later ones. Prints a JSON line for each run of each engine, then a table.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from machine import facts, record

from evener.config import from_overrides
from evener.engine.processes.start import start_engine
from evener.engine.wire.client import EngineClient
from evener.engine.wire.messages import Finished, GetStats, NewRequest, Ready, Sampling, StatsReport, Tokens


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", help="model folder; token ids go in and come out")
    made.add_argument("--chats", type=int, default=16)
    made.add_argument("--turns", type=int, default=2)
    made.add_argument("--prompt", type=int, default=1024, help="tokens of a first turn")
    made.add_argument("--more", type=int, default=32, help="tokens that a later turn adds")
    made.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    made.add_argument("--kv", default="128MiB", help="infer.kv_memory of both engines")
    made.add_argument("--host", default="4GiB", help="infer.kv_host_memory of the second")
    made.add_argument("--files", type=Path, help="offload.kv_files of a third engine: an empty folder")
    made.add_argument("--at-once", action="store_true", help="the turns of all chats come together")
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--vocab", type=int, default=40000, help="token ids are drawn below this")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both engines")
    made.add_argument("--out", type=Path, help="append the JSON lines to this file")
    return made


class Chats:
    """All chats over one engine."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self._args, self._random = args, random.Random(seed)
        self._said = [self._ids(args.prompt) for _ in range(args.chats)]

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(10, self._args.vocab) for _ in range(count)]

    def turn(self, client: EngineClient, number: int) -> tuple[list[float], int]:
        """One turn of each chat. Returns the seconds to the first token of each, and how many prompt tokens were not
        computed."""
        messages = [
            NewRequest(id=f"{number}.{at}", prompt=list(tokens), max_tokens=self._args.answer, sampling=_GREEDY)
            for at, tokens in enumerate(self._said)
        ]
        firsts, cached = list[float](), 0
        for group in [messages] if self._args.at_once else [[message] for message in messages]:
            answers, found, reused = self._run(client, group)
            firsts, cached = firsts + found, cached + reused
            for message in group:
                tokens = self._said[int(message.id.split(".")[1])]
                tokens += [*answers[message.id], *self._ids(self._args.more)]
        return firsts, cached

    @staticmethod
    def _run(client: EngineClient, messages: Sequence[NewRequest]) -> tuple[dict[str, list[int]], list[float], int]:
        began, firsts, cached = time.perf_counter(), dict[str, float](), dict[str, int]()
        answers: dict[str, list[int]] = {message.id: [] for message in messages}
        for message in messages:
            client.send(message)
        running = set(answers)
        while running:
            for event in client.receive(600):
                if isinstance(event, Tokens):
                    firsts.setdefault(event.id, time.perf_counter() - began)
                    answers[event.id] += event.ids
                    cached[event.id] = event.cached
                elif isinstance(event, Finished):
                    if event.reason == "error":
                        raise SystemExit(f"a request failed: {event.error}")
                    running.remove(event.id)
        return answers, [firsts[message.id] for message in messages], sum(cached.values())


_GREEDY = Sampling(temperature=0.0)
#: The engines; with the last, all that is not on the device comes from files.
WITHOUT, HOST, FILES = "without", "host memory", "files after a restart"


def counters(client: EngineClient) -> dict[str, int]:
    """The engine's counters so far."""
    client.send(GetStats())
    while True:
        for event in client.receive(60):
            if isinstance(event, StatsReport):
                return {**event.counters, "computed_tokens": event.computed_tokens, "preemptions": event.preemptions}


@contextmanager
def started(args: argparse.Namespace, engine: str) -> Iterator[tuple[EngineClient, Ready]]:
    """An engine that has computed something."""
    length = args.prompt + args.turns * (args.answer + args.more)
    keys: dict[str, Any] = {"infer.kv_memory": args.kv, "infer.max_reqs": args.chats, "infer.max_seq_len": length + 16}
    keys |= {"infer.kv_host_memory": args.host} if engine != WITHOUT else {}
    keys |= {"offload.kv_files": str(args.files)} if engine == FILES else {}
    keys |= dict(each.split("=", 1) for each in args.set)
    client = start_engine(from_overrides(args.model, keys), "thread")
    try:
        (ready,) = client.receive(600)
        if not isinstance(ready, Ready):
            raise SystemExit(f"the engine did not start: {ready}")
        client.send(NewRequest(id="warm", prompt=[7] * 64, max_tokens=4, sampling=_GREEDY))
        while not any(isinstance(event, Finished) for event in client.receive(600)):
            pass
        yield client, ready
    finally:
        client.close()


def run(args: argparse.Namespace, engine: str, seed: int) -> dict[str, Any]:
    """One engine, all turns."""
    chats, firsts, cached = Chats(args, seed), list[list[float]](), list[int]()
    numbers = list(range(args.turns))
    for part in [numbers[:1], numbers[1:]] if engine == FILES else [numbers]:
        with started(args, engine) as (client, ready):
            for number in part:
                found, reused = chats.turn(client, number)
                firsts.append(found)
                cached.append(reused)
            counted = counters(client)
    later = [each for turn in firsts[1:] for each in turn]
    return {
        "what": "chat turns", "engine": engine, "device": ready.info.device,
        "model": Path(args.model).name, "dtype": ready.info.dtype, "chats": args.chats, "turns": args.turns,
        "prompt": args.prompt, "more": args.more, "answer": args.answer, "kv": args.kv, "at_once": args.at_once,
        "first_turn_s": round(statistics.mean(firsts[0]), 4), "later_mean_s": round(statistics.mean(later), 4),
        "later_median_s": round(statistics.median(later), 4), "later_worst_s": round(max(later), 4),
        "cached": cached, **counted,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of means over the repeats."""
    lines = ["| engine | first turn, s | later turns, s | median | worst | tokens computed |", "| --- |" + " --- |" * 5]
    means = {}
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        names = ("first_turn_s", "later_mean_s", "later_median_s", "later_worst_s", "computed_tokens")
        values = [statistics.mean(row[name] for row in own) for name in names]
        means[engine] = values[1]
        lines.append(f"| {engine} | " + " | ".join(f"{value:.3f}" for value in values[:-1]) + f" | {values[-1]:.0f} |")
    ratios = [f"{means[WITHOUT] / mean:.2f} times with {engine}" for engine, mean in means.items() if engine != WITHOUT]
    return "\n".join([*lines, "", f"The first token of a later turn comes sooner: {', '.join(ratios)}."])


def main(argv: list[str]) -> int:
    """Run it."""
    args = parser().parse_args(argv)
    rows = []
    for seed in range(args.repeats):
        for engine in (WITHOUT, HOST, FILES)[: 3 if args.files else 2]:
            rows.append({**facts(), **run(args, engine, seed)})
            record(rows[-1], args.out)
    print("\n" + table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
