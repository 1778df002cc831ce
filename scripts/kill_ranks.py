"""Kill, stop or cut off one process of an engine at a random moment, again and again, and look what is left.

    python scripts/kill_ranks.py MODEL --draws 900 [--seed 0] [key=value …]

Each draw starts an engine of worker processes (``infer.tp_size=2`` unless keys say otherwise), sends requests, and at a
random moment does to one of its processes what its seed says. Then: every request ends once, nothing is left running,
no file is left of the run, and the next draw starts. Stops at the first draw of which one of these is not true. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.config import from_overrides
from evener.config.schema import Config
from evener.engine.messages import Dead, Finished, NewRequest, Ready, Sampling
from evener.engine.start import start_engine

ROLES = ("front end", "controller", "worker")
DEEDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "cut off": None}
#: Seconds without a sign of life, and within which everything must be over.
SILENCE, LIMIT = 4.0, 90.0


@dataclass(frozen=True)
class Draw:
    """What is done to whom, ``after`` seconds of work, or of the start if it is ``early``."""

    role: str
    deed: str
    worker: int
    early: bool
    after: float

    @classmethod
    def of(cls, seed: int, workers: int) -> Draw:
        """The draw of a seed."""
        dice = random.Random(seed)
        role, deed = dice.choice(ROLES), dice.choice(sorted(DEEDS))
        if role == "front end" and deed != "killed":
            deed = "killed"  # who is stopped there may go on, and nobody listens to who is cut off
        return cls(role, deed, dice.randrange(workers), dice.random() < 0.2, dice.uniform(0, 1.5))


def requests(seed: int) -> list[NewRequest]:
    """A few of different lengths."""
    dice = random.Random(seed)
    sampling = Sampling(temperature=0.0)
    return [
        NewRequest(
            id=f"r{i}", prompt=[dice.randrange(3, 100) for _ in range(dice.randrange(1, 40))], max_tokens=60,
            sampling=sampling,
        )
        for i in range(6)
    ]  # fmt: skip


def children(pid: int) -> list[int]:
    """Processes that ``pid`` has started, from every thread."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return sorted(found)


def tree(pid: int) -> list[int]:
    """``pid`` and everything below it."""
    try:
        return [pid, *(each for child in children(pid) for each in tree(child))]
    except FileNotFoundError:
        return []


def cut_off(pid: int) -> None:
    """Shut down the process's sockets to others, as a cable does that is pulled."""
    import ctypes
    import socket

    libc, handle = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if not os.readlink(entry.path).startswith("socket:"):
                continue
            # 438: pidfd_getfd, the same on every architecture that has it.
            copy = libc.syscall(438, handle, int(entry.name), 0)
            if copy >= 0:
                with socket.socket(fileno=copy) as theirs:
                    try:
                        theirs.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue  # it listens, or was never connected
    os.close(handle)


def front_end(flat: dict[str, Any], seed: int) -> None:
    """In the process that plays the front end: says what it has seen, a JSON line at a time."""
    client = start_engine(from_overrides(flat.pop("model"), flat), "process")
    ends: Counter[str] = Counter()
    try:
        while True:
            for event in client.receive(1.0):
                if isinstance(event, Ready):
                    print(json.dumps({"ready": True}), flush=True)
                    for message in requests(seed):
                        client.send(message)
                elif isinstance(event, Finished):
                    ends[event.id] += 1
                elif isinstance(event, Dead):
                    # As ``AsyncLLM`` does: whoever is open has ended with the engine.
                    ends.update(message.id for message in requests(seed) if message.id not in ends)
                    print(json.dumps({"dead": event.reason, "ends": ends}), flush=True)
                    return
            if len(ends) == len(requests(seed)):
                ends_so_far = dict(ends)
                ends.clear()
                print(json.dumps({"done": ends_so_far}), flush=True)
                for message in requests(seed):
                    client.send(message)
    finally:
        client.close()


def gone(pids: list[int], limit: float) -> list[int]:
    """Those of ``pids`` that still live after ``limit`` seconds."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        left = [pid for pid in pids if alive(pid)]
        if not left:
            return []
        time.sleep(0.05)
    return left


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def play(draw: Draw, config: Config, seed: int) -> str:
    """One draw; returns the reason that the front end was given.

    Raises:
        AssertionError: something that must hold does not.
    """
    from evener.config import to_flat

    workers = config.infer.tp_size * config.infer.pp_size
    command = [sys.executable, __file__, "--front-end", json.dumps(to_flat(config)), "--seed", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as front:
        assert front.stdout is not None
        lines: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: lines.extend(map(json.loads, front.stdout or ())), daemon=True)
        reader.start()
        until = time.monotonic() + 4 * LIMIT
        while not (len(tree(front.pid)) >= 2 + workers if draw.early else lines) and time.monotonic() < until:
            assert front.poll() is None, "it did not start"
            time.sleep(0.02)
        time.sleep(draw.after)
        everybody = tree(front.pid)
        assert len(everybody) >= 2 + workers, f"only {everybody} run"
        controller = children(front.pid)[0]
        target = {"front end": front.pid, "controller": controller}.get(draw.role) or children(controller)[draw.worker]
        cut_off(target) if draw.deed == "cut off" else os.kill(target, DEEDS[draw.deed] or 0)
        try:
            front.wait(LIMIT)
        except subprocess.TimeoutExpired:
            for pid in everybody:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"the front end still waits; it saw {lines}") from None
        reader.join(5)
        left = gone(everybody, 30.0)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"{left} of {everybody} were left"
    if draw.role == "front end":
        return "nobody to tell"
    started = any("ready" in line for line in lines)
    last = lines[-1] if lines else {}
    assert not started or "dead" in last, f"no reason was given: {lines}"
    counts = [{**line.get("ends", {}), **line.get("done", {})} for line in lines]
    twice = [each for each in counts if any(count != 1 for count in each.values())]
    assert not twice, f"a request ended twice: {twice}"
    ended = len(last.get("ends", {}))
    assert not started or ended == len(requests(seed)), f"{ended} requests ended: {last}"
    return str(last.get("dead", "it did not start"))


def main() -> int:
    """Play the draws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--front-end", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.front_end:
        front_end(json.loads(arguments.front_end), arguments.seed)
        return 0
    keys = dict(key.split("=", 1) for key in arguments.keys)
    config = from_overrides(arguments.model, {"infer.tp_size": 2, "infer.silence_limit": SILENCE, **keys})
    counts: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.draws):
        draw = Draw.of(seed, config.infer.tp_size * config.infer.pp_size)
        reason = play(draw, config, seed)
        counts[f"{draw.role} {draw.deed}"] += 1
        when = f"{draw.after:.2f} s{' of the start' * draw.early}"
        print(f"{seed}: {draw.role} {draw.deed} after {when}: {reason}", flush=True)
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
