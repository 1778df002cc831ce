"""Kill, stop or cut off one process of an engine at a random moment, again and again, and look what is left.

    python scripts/kill_ranks.py MODEL --draws 900 [--jobs 4] [--seed 0] [key=value …]

Each draw starts an engine of worker processes (``infer.tp_size=2`` unless keys say otherwise), sends requests, and at a
random moment does to one of its processes what its seed says: it is killed, stopped, or all its connections break, and
break again. Then every request ends once, nothing is left running, and the next draw, which is the next start, works. A
front end that is stopped cannot say anything: the others end without it, and it goes on and sees that, or is killed.
After the last draw one more engine starts, answers and ends, and no file of any of them is left. Exits with 1 if one of
these was not true. Linux.
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
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.config import from_overrides, to_flat
from evener.config.schema import Config
from evener.engine.messages import Dead, Finished, NewRequest, Ready, Sampling
from evener.engine.start import start_engine

ROLES = ("front end", "controller", "worker")
DEEDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "cut off": None}
#: Seconds without a sign of life, and within which everything must be over.
SILENCE, LIMIT = 4.0, 90.0
#: Seconds between cuts: a connection that is made again is cut again.
CUTS = 0.1


@dataclass(frozen=True)
class Draw:
    """What is done to whom, ``after`` seconds of work, or of the start if it is ``early``. A front end that was stopped
    ``goes_on`` or is killed."""

    role: str
    deed: str
    worker: int
    early: bool
    after: float
    goes_on: bool

    @classmethod
    def of(cls, seed: int, workers: int) -> Draw:
        """The draw of a seed."""
        dice = random.Random(seed)
        role, deed = dice.choice(ROLES), dice.choice(sorted(DEEDS))
        worker, early, after = dice.randrange(workers), dice.random() < 0.2, dice.uniform(0, 1.5)
        return cls(role, deed, worker, early, after, goes_on=dice.random() < 0.5)

    @property
    def kind(self) -> str:
        """Role and deed in words."""
        return f"{self.role} {self.deed}"

    @property
    def silent(self) -> bool:
        """Whether the front end will not say what it has seen."""
        return self.role == "front end" and (self.deed == "killed" or (self.deed == "stopped" and not self.goes_on))


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
    """Shut down the process's sockets to others, as a cable does that is pulled; does nothing to one that has gone."""
    import ctypes
    import socket

    libc = ctypes.CDLL(None, use_errno=True)
    try:
        handle, entries = os.pidfd_open(pid), list(os.scandir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if not os.readlink(entry.path).startswith("socket:"):
                continue
            # 438: pidfd_getfd, the same on every architecture that has it.
            copy = libc.syscall(438, handle, int(entry.name), 0)
            if copy >= 0:
                with socket.socket(fileno=copy) as theirs, contextlib.suppress(OSError):  # it was never connected
                    # One that listens has no cable; libraries abort if it is shut down.
                    if not theirs.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        theirs.shutdown(socket.SHUT_RDWR)
    os.close(handle)


def front_end(flat: dict[str, Any], seed: int) -> None:
    """In the process that plays the front end: says what it has seen, a JSON line at a time."""
    # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


class Front:
    """A front end in a process of its own, which logs to ``log``; whatever its run makes is below ``folder``."""

    def __init__(self, config: Config, seed: int, folder: str, log: Path) -> None:
        self.workers = config.infer.tp_size * config.infer.pp_size
        command = [sys.executable, __file__, "--front-end", json.dumps(to_flat(config)), "--seed", str(seed)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=out, text=True, env={**os.environ, "TMPDIR": folder}
            )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(map(json.loads, self.process.stdout))

    def wait_until(self, early: bool) -> None:
        """Wait for its first word, or for the processes of an early draw."""
        until = time.monotonic() + 4 * LIMIT
        while not (len(tree(self.process.pid)) >= 2 + self.workers if early else self.lines):
            assert self.process.poll() is None and time.monotonic() < until, "it did not start"
            time.sleep(0.02)

    def wait(self) -> None:
        """Wait for its end and its last word."""
        self.process.wait(LIMIT)
        self._reader.join(LIMIT)


def deal(draw: Draw, front: Front, target: int, others: list[int]) -> None:
    """Do to ``target`` what the draw says, and wait until the front end has ended."""
    if draw.deed == "cut off":
        until = time.monotonic() + LIMIT
        while front.process.poll() is None and time.monotonic() < until:
            cut_off(target)
            time.sleep(CUTS)
    else:
        os.kill(target, DEEDS[draw.deed] or 0)
    if (draw.role, draw.deed) == ("front end", "stopped"):
        left = gone(others, LIMIT)
        assert not left, f"the front end is stopped, and {left} of {others} still run"
        os.kill(target, signal.SIGCONT if draw.goes_on else signal.SIGKILL)
    try:
        front.wait()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the front end still waits; it saw {front.lines}") from None


def play(draw: Draw, front: Front, seed: int) -> str:
    """One draw; returns the reason that the front end was given.

    Raises:
        AssertionError: something that must hold does not.
    """
    everybody: list[int] = []
    try:
        front.wait_until(draw.early)
        time.sleep(draw.after)
        everybody = tree(front.process.pid)
        assert len(everybody) >= 2 + front.workers, f"only {everybody} run"
        controller = children(front.process.pid)[0]
        of_role = {"front end": front.process.pid, "controller": controller}
        deal(draw, front, of_role.get(draw.role) or children(controller)[draw.worker], everybody[1:])
        left = gone(everybody, 30.0)
        assert not left, f"{left} of {everybody} were left"
    finally:
        for pid in everybody or tree(front.process.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        front.process.wait()
    return "nobody to tell" if draw.silent else told(front.lines, seed)


def told(lines: list[dict[str, Any]], seed: int) -> str:
    """The reason that the front end was given, if what it has seen is right; raises as ``play``."""
    started = any("ready" in line for line in lines)
    last = lines[-1] if lines else {}
    assert not started or "dead" in last, f"no reason was given: {lines}"
    counts = [{**line.get("ends", {}), **line.get("done", {})} for line in lines]
    twice = [each for each in counts if any(count != 1 for count in each.values())]
    assert not twice, f"a request ended twice: {twice}"
    ended = len(last.get("ends", {}))
    assert not started or ended == len(requests(seed)), f"{ended} requests ended: {last}"
    return str(last.get("dead", "it did not start"))


def judged(config: Config, seed: int, folder: str) -> tuple[Draw, bool]:
    """Play the draw of a seed and print what came of it; whether all was right."""
    draw = Draw.of(seed, config.infer.tp_size * config.infer.pp_size)
    when = f"{seed}: {draw.kind} after {draw.after:.2f} s{' of the start' * draw.early}"
    with tempfile.TemporaryDirectory(prefix="draw-") as mine:
        log = Path(mine, "log")
        try:
            print(f"{when}: {play(draw, Front(config, seed, folder, log), seed)}", flush=True)
        except AssertionError as error:
            print(f"{when}: WRONG: {error}\nIts log ends:\n{log.read_text(errors='replace')[-4000:]}", flush=True)
            return draw, False
    return draw, True


def last_start(config: Config, folder: str) -> list[str]:
    """Start one more engine, let it answer, and end it as people do; the files that are left of all."""
    with tempfile.TemporaryDirectory(prefix="draw-") as mine:
        log = Path(mine, "log")
        front = Front(config, 0, folder, log)
        front.wait_until(early=False)
        front.process.send_signal(signal.SIGINT)
        front.wait()
        assert "KeyboardInterrupt" in log.read_text(), log.read_text()
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def main() -> int:
    """Play the draws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=1, help="draws at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--front-end", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.front_end:
        front_end(json.loads(arguments.front_end), arguments.seed)
        return 0
    keys = dict(key.split("=", 1) for key in arguments.keys)
    config = from_overrides(arguments.model, {"infer.tp_size": 2, "infer.silence_limit": SILENCE, **keys})
    seeds = range(arguments.seed, arguments.seed + arguments.draws)
    with tempfile.TemporaryDirectory(prefix="draws-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        played = list(pool.map(lambda seed: judged(config, seed, folder), seeds))
        left = last_start(config, folder)
    wrong = Counter(draw.kind for draw, right in played if not right)
    kinds = Counter(draw.kind for draw, _ in played)
    print(json.dumps({"draws": len(played), "kinds": kinds, "wrong": wrong, "left": left}))
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
