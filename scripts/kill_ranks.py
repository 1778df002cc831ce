"""Kill, stop or cut off one process of an engine at a random moment, many times, and check that all ends well.

    python scripts/kill_ranks.py MODEL --draws 900 [--jobs 4] [--seed 0] [key=value …]
    python scripts/kill_ranks.py MODEL --each      # one draw of each process and fault

Each draw starts an engine with worker processes (``infer.tp_size=2`` unless a key says otherwise), sends requests, and
injects one fault at a random moment, which its seed decides: a process is killed, is stopped, or loses all connections
whenever it has some. After that each request must end exactly once, no process may be left, and the next draw must
start. A front end that is stopped cannot report anything: the other processes must end without it; then it either
continues and notices, or is killed. After the last draw one more engine must start, answer and end, and no file may be
left.

Exits with 1 if any of these checks fails. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.config import from_overrides, to_flat
from evener.config.schema import Config
from evener.engine.processes.start import start_engine
from evener.engine.wire.messages import Dead, Finished, NewRequest, Ready, Sampling

ROLES = ("front end", "controller", "worker")
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "cut off": None}
#: Seconds without a heartbeat until a process counts as dead, and the limit for everything to end.
HEARTBEAT_TIMEOUT, LIMIT = 4.0, 90.0
#: Seconds between cuts: connections that were made again are cut again.
CUT_INTERVAL = 0.1


@dataclass(frozen=True)
class Scenario:
    """Which process gets which fault, and when: ``after`` seconds of work, or of the start if ``early``.
    A stopped front end continues later if ``goes_on``, or is killed."""

    role: str
    fault: str
    worker: int
    early: bool
    after: float
    goes_on: bool

    @classmethod
    def of(cls, seed: int, workers: int) -> Scenario:
        """The scenario of a seed."""
        rng = random.Random(seed)
        role, fault = rng.choice(ROLES), rng.choice(sorted(FAULTS))
        worker, early, after = rng.randrange(workers), rng.random() < 0.2, rng.uniform(0, 1.5)
        return cls(role, fault, worker, early, after, goes_on=rng.random() < 0.5)

    @property
    def kind(self) -> str:
        """Role and fault in words."""
        return f"{self.role} {self.fault}"

    @property
    def silent(self) -> bool:
        """Whether the front end cannot report what it has seen."""
        return self.role == "front end" and (self.fault == "killed" or (self.fault == "stopped" and not self.goes_on))


def seeds_of_each(first: int, workers: int) -> list[int]:
    """For each role and fault the first seed, of ``first`` on, that draws it."""
    found: dict[str, int] = {}
    for seed in itertools.count(first):
        found.setdefault(Scenario.of(seed, workers).kind, seed)
        if len(found) == len(ROLES) * len(FAULTS):
            return list(found.values())
    raise AssertionError("there is always another seed")


def requests(seed: int) -> list[NewRequest]:
    """A few requests of different lengths."""
    rng = random.Random(seed)
    sampling = Sampling(temperature=0.0)
    return [
        NewRequest(
            id=f"r{i}", prompt=[rng.randrange(3, 100) for _ in range(rng.randrange(1, 40))], max_tokens=60,
            sampling=sampling,
        )
        for i in range(6)
    ]  # fmt: skip


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started, from any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return sorted(found)


def tree(pid: int) -> list[int]:
    """``pid`` and all its descendants."""
    try:
        return [pid, *(each for child in children(pid) for each in tree(child))]
    except FileNotFoundError:
        return []


def cut_off(pid: int) -> None:
    """Shut down the sockets of a process, as if its cable were pulled. Does nothing if the process has ended."""
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
                    # Not those that listen: they have no connection, and libraries abort when they are shut down.
                    if not theirs.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        theirs.shutdown(socket.SHUT_RDWR)
    os.close(handle)


def front_end(flat: dict[str, Any], seed: int) -> None:
    """Run a front end in this process. It prints what it sees as JSON lines."""
    # A shell ignores SIGINT for the programs that it starts in the background, and their children inherit that.
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
                    # As ``AsyncLLM`` does: the requests that are open end with the engine.
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


def wait_for_exit(pids: list[int], limit: float) -> list[int]:
    """Wait until ``pids`` have ended, at most ``limit`` seconds. Returns those that still run."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        left = [pid for pid in pids if alive(pid)]
        if not left:
            return []
        time.sleep(0.05)
    return left


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class FrontEndProcess:
    """A front end in a process of its own. It logs to ``log``; all files of its run are inside ``folder``."""

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
        """Wait for its first line; for an early draw, until its processes run."""
        until = time.monotonic() + 4 * LIMIT
        while not (len(tree(self.process.pid)) >= 2 + self.workers if early else self.lines):
            assert self.process.poll() is None and time.monotonic() < until, "it did not start"
            time.sleep(0.02)

    def wait(self) -> None:
        """Wait until it has ended and its last line was read."""
        self.process.wait(LIMIT)
        self._reader.join(LIMIT)


def inject_fault(draw: Scenario, front: FrontEndProcess, target: int, others: list[int]) -> None:
    """Inject the draw's fault into ``target``, and wait until the front end has ended."""
    if draw.fault == "cut off":
        until = time.monotonic() + LIMIT
        while front.process.poll() is None and time.monotonic() < until:
            cut_off(target)
            time.sleep(CUT_INTERVAL)
    else:
        os.kill(target, FAULTS[draw.fault] or 0)
    if (draw.role, draw.fault) == ("front end", "stopped"):
        left = wait_for_exit(others, LIMIT)
        assert not left, f"the front end is stopped, and {left} of {others} still run"
        os.kill(target, signal.SIGCONT if draw.goes_on else signal.SIGKILL)
    try:
        front.wait()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the front end still waits; it saw {front.lines}") from None


def play(draw: Scenario, front: FrontEndProcess, seed: int) -> str:
    """Play one draw. Returns why the engine died, as the front end was told.

    Raises:
        AssertionError: a check has failed.
    """
    everybody: list[int] = []
    try:
        front.wait_until(draw.early)
        time.sleep(draw.after)
        everybody = tree(front.process.pid)
        assert len(everybody) >= 2 + front.workers, f"only {everybody} run"
        controller = children(front.process.pid)[0]
        of_role = {"front end": front.process.pid, "controller": controller}
        inject_fault(draw, front, of_role.get(draw.role) or children(controller)[draw.worker], everybody[1:])
        left = wait_for_exit(everybody, 30.0)
        assert not left, f"{left} of {everybody} were left"
    finally:
        for pid in everybody or tree(front.process.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        front.process.wait()
    return "nobody to tell" if draw.silent else death_reason(front.lines, seed)


def death_reason(lines: list[dict[str, Any]], seed: int) -> str:
    """Check the lines of a front end, and return the reason that it was given. Raises what ``play`` raises."""
    started = any("ready" in line for line in lines)
    last = lines[-1] if lines else {}
    assert not started or "dead" in last, f"no reason was given: {lines}"
    counts = [{**line.get("ends", {}), **line.get("done", {})} for line in lines]
    twice = [each for each in counts if any(count != 1 for count in each.values())]
    assert not twice, f"a request ended twice: {twice}"
    ended = len(last.get("ends", {}))
    assert not started or ended == len(requests(seed)), f"{ended} requests ended: {last}"
    return str(last.get("dead", "it did not start"))


def run_scenario(config: Config, seed: int, folder: str) -> tuple[Scenario, bool]:
    """Play the draw of a seed and print its result. Returns the draw, and whether all checks held."""
    draw = Scenario.of(seed, config.infer.tp_size * config.infer.pp_size)
    when = f"{seed}: {draw.kind} after {draw.after:.2f} s{' of the start' * draw.early}"
    with tempfile.TemporaryDirectory(prefix="draw-") as mine:
        log = Path(mine, "log")
        try:
            print(f"{when}: {play(draw, FrontEndProcess(config, seed, folder, log), seed)}", flush=True)
        except AssertionError as error:
            print(f"{when}: WRONG: {error}\nIts log ends:\n{log.read_text(errors='replace')[-4000:]}", flush=True)
            return draw, False
    return draw, True


def final_start(config: Config, folder: str) -> list[str]:
    """Start one more engine, let it answer, and end it with Ctrl-C. Returns the files that all engines have left."""
    with tempfile.TemporaryDirectory(prefix="draw-") as mine:
        log = Path(mine, "log")
        front = FrontEndProcess(config, 0, folder, log)
        front.wait_until(early=False)
        front.process.send_signal(signal.SIGINT)
        front.wait()
        assert "KeyboardInterrupt" in log.read_text(), log.read_text()
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def main() -> int:
    """Play the draws and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--each", action="store_true", help="instead of --draws: each process with each fault, once")
    parser.add_argument("--jobs", type=int, default=1, help="draws at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--front-end", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.front_end:
        front_end(json.loads(arguments.front_end), arguments.seed)
        return 0
    keys = dict(key.split("=", 1) for key in arguments.keys)
    config = from_overrides(arguments.model, {"infer.tp_size": 2, "infer.heartbeat_timeout": HEARTBEAT_TIMEOUT, **keys})
    seeds: Sequence[int] = range(arguments.seed, arguments.seed + arguments.draws)
    if arguments.each:
        seeds = seeds_of_each(arguments.seed, config.infer.tp_size * config.infer.pp_size)
    with tempfile.TemporaryDirectory(prefix="draws-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        played = list(pool.map(lambda seed: run_scenario(config, seed, folder), seeds))
        left = final_start(config, folder)
    wrong = Counter(draw.kind for draw, right in played if not right)
    kinds = Counter(draw.kind for draw, _ in played)
    print(json.dumps({"draws": len(played), "kinds": kinds, "wrong": wrong, "left": left}))
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
