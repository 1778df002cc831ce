"""What clients find at the server's door when many come: open streams, priorities, and the time that a key takes.

    python benchmarks/front_door.py streams MODEL --streams 1000 --rounds 3
    python benchmarks/front_door.py priorities MODEL --seconds 40
    python benchmarks/front_door.py keys --keys 1000

``streams`` opens so many streams at once, several times, and reads the memory of the server's processes ten times a
second: it is bounded if later rounds need no more than the first. Each stream must tell its end once.

``priorities`` measures how many requests a second the server can answer, and then sends twice as many: one of five
with the key of a high priority. It does so again with equal priorities, for comparison.

``keys`` measures the check of a key alone, in this process, with keys in random order: the first of the list, the last,
a wrong one, and one that differs from a right one in its last character only.

Each prints a JSON line, and appends it to ``--out``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from arrivals import offsets
from dataset import random_ids
from launch import Server, evener_server
from machine import OtherProcesses, cpu_name, facts, process_tree, record
from serving_metrics import percentile
from stream_client import Sample, post

from evener_server.api_keys import ApiKeys

_MIB = 2**20


def _body(server: Server, draw: random.Random, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": server.model, "prompt": random_ids(draw, args.input_len, args.vocab), "max_tokens": args.output_len,
        "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def _send(server: Server, bodies: Sequence[dict[str, Any]], when: Sequence[float], keys: Sequence[str]
                ) -> list[Sample]:  # fmt: skip
    """Send each body at its offset, with its key if that is not empty, and wait for all answers."""
    began = time.perf_counter()

    async def one(body: dict[str, Any], offset: float, key: str) -> Sample:
        await asyncio.sleep(max(0.0, began + offset - time.perf_counter()))
        return await post(f"{server.url}/v1/completions", body, {"Authorization": f"Bearer {key}"} if key else {})

    return await asyncio.gather(*map(one, bodies, when, keys))


class Memory:
    """Reads the memory of a process and its descendants, ten times a second during the block.

    Attributes:
        anonymous: the most that they had of their own at one time (anonymous and shared pages), in bytes: not the
            weights, which are pages of a file.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.anonymous = 0

    def now(self) -> int:
        """Bytes at this moment."""
        total = 0
        for pid in process_tree(self._pid):
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue  # it has ended in the meantime
            found = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
            total += 1024 * (int(found["Pss_Anon"]) + int(found["Pss_Shmem"]))
        return total

    async def watch(self) -> None:
        """Read until it is cancelled."""
        while True:
            self.anonymous = max(self.anonymous, self.now())
            await asyncio.sleep(0.1)


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Many streams at once, in rounds."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    draw, rounds = random.Random(0), []
    settings = [f"serve.max_queue={max(1024, args.streams)}", *args.set]
    with evener_server(args.model, settings) as server:
        asyncio.run(_send(server, [_body(server, draw, args) for _ in range(8)], [0.0] * 8, [""] * 8))
        rest = Memory(server.pid).now()

        async def one_round(bodies: list[dict[str, Any]]) -> tuple[list[Sample], int]:
            memory = Memory(server.pid)
            watch = asyncio.create_task(memory.watch())
            samples = await _send(server, bodies, [0.0] * len(bodies), [""] * len(bodies))
            watch.cancel()
            return samples, memory.anonymous

        for _ in range(args.rounds):
            began = time.perf_counter()
            with OtherProcesses() as others:
                samples, most = asyncio.run(one_round([_body(server, draw, args) for _ in range(args.streams)]))
            wrong = [sample.error for sample in samples if sample.error]
            open_at_once = max(sum(s.sent <= at < s.ended for s in samples) for at in [s.sent for s in samples])
            rounds.append({
                "whole": sum(not s.error and s.output_tokens == args.output_len for s in samples),
                "one_end": sum(s.ends == 1 for s in samples), "open_at_once": open_at_once,
                "memory_mib": round(most / _MIB), "seconds": round(time.perf_counter() - began, 1),
                "others_cores": others.cores, **({"first_error": wrong[0]} if wrong else {}),
            })  # fmt: skip
        after = Memory(server.pid).now()
    return {
        "case": f"{args.streams:,} streams at once, {args.input_len} tokens in, {args.output_len} out, "
        f"{args.rounds} rounds",
        "streams": args.streams, "rest_mib": round(rest / _MIB), "after_mib": round(after / _MIB), "rounds": rounds,
    }  # fmt: skip


def priorities(args: argparse.Namespace) -> dict[str, Any]:
    """Twice as many requests as the server can answer, one of five with a high priority."""
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        rate = 0.0
        for name, points in (("priorities", args.points), ("equal", 0)):
            keys = Path(folder) / f"{name}.yaml"
            keys.write_text(
                f"keys:\n  - {{name: high, key: sk-high, priority: {points}}}\n  - {{name: low, key: sk-low}}\n"
            )
            keys.chmod(0o600)
            settings = [f"server.api_key_file={keys}", f"infer.max_reqs={args.at_once}", "serve.max_queue=100000"]
            with evener_server(args.model, [*settings, *args.set], "sk-low") as server:
                draw, count = random.Random(0), 8 * args.at_once
                for _ in range(2):  # the second time it is warm
                    began = time.perf_counter()
                    bodies = [_body(server, draw, args) for _ in range(count)]
                    asyncio.run(_send(server, bodies, [0.0] * count, ["sk-low"] * count))
                    answered = count / (time.perf_counter() - began)
                # Both runs get the same load.
                rate = rate or 2 * answered
                sent = max(20, round(rate * args.seconds))
                who = [draw.choices(("sk-high", "sk-low"), (1, 4))[0] for _ in range(sent)]
                bodies = [_body(server, draw, args) for _ in range(sent)]
                with OtherProcesses() as others:
                    samples = asyncio.run(_send(server, bodies, offsets(sent, rate, seed=1), who))
            runs[name] = {"can_answer_per_s": round(answered, 2), "others_cores": others.cores}
            for key in ("high", "low"):
                mine = [sample for sample, one in zip(samples, who, strict=True) if one == f"sk-{key}"]
                first = [sample.ttft for sample in mine if not sample.error]
                runs[name][key] = {
                    "requests": len(mine), "whole": len(first),
                    **{f"ttft_{label}_s": round(percentile(first, at), 2) for label, at in
                       (("p50", 50), ("p90", 90), ("max", 100))},
                }  # fmt: skip
    return {
        "case": f"{rate:.1f} requests a second for {args.seconds:g} s, twice what it can answer with "
        f"infer.max_reqs={args.at_once}; one of five is {args.points} points higher",
        "requests_per_s": round(rate, 2), "runs": runs,
    }  # fmt: skip


def keys(args: argparse.Namespace) -> dict[str, Any]:
    """The time of ``ApiKeys.find`` for right and wrong keys, in random order."""
    draw = random.Random(0)
    made = [f"sk-{draw.getrandbits(256):064x}" for _ in range(args.keys)]
    found = ApiKeys(made)
    first, last = made[0], made[-1]
    asked = {
        "first": first, "last": last, "wrong": f"sk-{draw.getrandbits(256):064x}",
        "last character wrong": first[:-1] + ("1" if first[-1] == "0" else "0"),
    }  # fmt: skip
    kinds = [(name, key.encode()) for name, key in asked.items()]
    times: dict[str, list[int]] = {name: [] for name in asked}
    with OtherProcesses() as others:
        for _ in range(args.repeats):
            draw.shuffle(kinds)
            for name, key in kinds:
                began = time.perf_counter_ns()
                found.find(key)
                times[name].append(time.perf_counter_ns() - began)
    medians = {name: statistics.median(each) / 1000 for name, each in times.items()}
    return {
        "case": f"{args.keys:,} keys, each kind checked {args.repeats:,} times in random order",
        "median_us": {name: round(value, 2) for name, value in medians.items()},
        "spread": round(max(medians.values()) / min(medians.values()) - 1, 4),
        "quartile_distance_us": {name: round((percentile(each, 75) - percentile(each, 25)) / 1000, 2)
                                 for name, each in times.items()},
        "others_cores": others.cores,
    }  # fmt: skip


_WHAT = {"streams": streams, "priorities": priorities, "keys": keys}


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("what", choices=_WHAT)
    made.add_argument("model", nargs="?", help="model folder; not for keys")
    made.add_argument("--streams", type=int, default=1000)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seconds", type=float, default=40.0, help="how long requests come (priorities)")
    made.add_argument("--points", type=int, default=10, help="how much higher the high priority is")
    made.add_argument("--at-once", type=int, default=8, help="infer.max_reqs (priorities)")
    made.add_argument("--keys", type=int, default=1000)
    made.add_argument("--repeats", type=int, default=5000, help="checks of each kind of key")
    made.add_argument("--input-len", type=int, default=32, metavar="TOKENS")
    made.add_argument("--output-len", type=int, default=32, metavar="TOKENS")
    made.add_argument("--vocab", type=int, default=40000, help="token ids are drawn below this")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of evener serve")
    made.add_argument("--out", type=Path, metavar="FILE", help="append the result to this file, as a JSON line")
    return made


def main(argv: list[str]) -> int:
    """Run it. The exit code is 1 if a stream did not end well, or more than once."""
    made = parser()
    args = made.parse_args(argv)
    if args.what != "keys" and args.model is None:
        made.error(f"{args.what} needs a model folder: front_door.py {args.what} MODEL_DIR")
    about = facts()
    record(
        {
            "device": f"{cpu_name()}, {about['cores']} cores",
            "model": Path(args.model).name if args.model else "none", "what": args.what,
            **(row := _WHAT[args.what](args)), "versions": about["versions"], "date": about["when"][:10],
            "command": " ".join(["python benchmarks/front_door.py", *_shown(argv, args)]),
        },
        args.out,
    )  # fmt: skip
    rounds = row.get("rounds", ())
    return 1 if any(each["whole"] < args.streams or each["one_end"] < args.streams for each in rounds) else 0


def _shown(argv: Sequence[str], args: argparse.Namespace) -> list[str]:
    """The command line for a record: without the folders of this machine."""
    hidden = {str(args.model): "MODEL_DIR", str(args.out): "FILE"}
    return [hidden.get(word, word) for word in argv]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
