"""Plans, or loads and runs, mutated model folders in forked children, and reports what must not happen.

A folder may be refused with an ``EvenerError``, or work. A signal, any other exception, or more than 20 seconds is a
failure, which the report gives with the command that makes the same folder again::

    python tests/folder_fuzzer.py --count 500
    python tests/folder_fuzzer.py --mode run --first 17 --count 1 --keep /tmp/folder

It is a program of its own, because a process that forks must not have threads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from model_folders import Folders, weight_files

from evener_models import descriptor

if TYPE_CHECKING:
    from evener.plugins.load import LoadedPackages

#: Seconds that one folder may take.
LIMIT_S: float = 20
#: Bytes that a child may allocate beyond what its parent had.
LIMIT_BYTES = 3 << 30
#: Folders of one child.
BATCH = 50
#: Weights of more bytes are planned, not loaded: 300 folders are to be run in a minute.
LOADED_BYTES = 64 << 20
KEYS = {
    "backend": "cpu", "infer.threads": 1, "infer.kv_memory": "2MiB", "infer.max_reqs": 4, "infer.step_tokens": 16,
}  # fmt: skip


@dataclass
class Report:
    """What happened: how many folders had which outcome, and for each failure its number, changes and trace."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)


@cache
def packages(backend: str) -> LoadedPackages:
    """What a search for the backend finds. It depends on no model folder, so one is enough for all of them."""
    from evener.backend_search import BackendSearch

    return BackendSearch(backend).load({})


class Found:
    """In place of a search: its result."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def load(self, options: Mapping[str, object]) -> LoadedPackages:
        assert not options
        return packages(self._backend)


def plan(folder: Path) -> str:
    """Everything up to the weights: configuration, architecture, ops, memory, file headers; the tokenizer too."""
    from evener.config import from_overrides
    from evener_inspection import explanation

    with mock.patch.object(explanation, "BackendSearch", Found):
        found = explanation.explain(from_overrides(folder, KEYS))
    _read_texts(folder)
    if found["memory"]["problem"]:
        return "does not fit"
    return "weights of another model" if found["model"]["problem"] else "planned"


def run(folder: Path) -> str:
    """As ``plan``; if the model is small, load it and generate three tokens."""
    from evener import LLM, SamplingParams
    from evener.config import from_overrides
    from evener_inspection.explanation import explain

    found = explain(from_overrides(folder, KEYS))
    if found["memory"]["problem"] or found["memory"]["weights"] > LOADED_BYTES:
        return "planned, too large"
    overrides = dict(KEYS) if any(folder.glob("*.safetensors*")) else {**KEYS, "load": "dummy"}
    llm = LLM(folder, executor="inline", **overrides)
    try:
        (made,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    finally:
        llm.close()
    return f"ran to {made.outputs[0].finish_reason}"


def _read_texts(folder: Path) -> None:
    from evener.frontend.chat import open_chat
    from evener.frontend.defaults import GenerationDefaults
    from evener.frontend.tokenizer import Tokenizer
    from evener.loading.checkpoint import open_files

    files = open_files(folder)
    tokenizer = Tokenizer.of(files)
    open_chat(files, tokenizer)
    GenerationDefaults.of(files, None if tokenizer is None else tokenizer.eos_id)


MODES = {"plan": plan, "run": run}


def fuzz(folders: Folders, numbers: Sequence[int], mode: str, scratch: Path) -> Report:
    """Try each folder; returns what happened."""
    report, left = Report(), list(numbers)
    while left:
        batch, left = left[:BATCH], left[BATCH:]
        done = _run_child(folders, batch, mode, scratch, report)
        left = batch[done:] + left
    return report


def _run_child(folders: Folders, batch: Sequence[int], mode: str, scratch: Path, report: Report) -> int:
    """Try the folders of ``batch`` in one child; returns how many it dealt with, a fatal one included."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            _child(folders, batch, mode, scratch, writer)
        finally:
            os._exit(0)
    os.close(writer)
    done, late = 0, False
    for line in _lines(reader):
        if line is None:
            late = True
            os.kill(child, signal.SIGKILL)
            break
        outcome = json.loads(line)
        done += 1
        report.outcomes[outcome["outcome"]] += 1
        if "trace" in outcome:
            report.failures.append(outcome)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if done < len(batch):
        number = batch[done]
        why = f"took more than {LIMIT_S} s" if late else f"ended the process ({_ending(status)})"
        report.failures.append({"number": number, "changes": folders.make(number).changes, "trace": why})
        report.outcomes[why] += 1
        done += 1
    return done


def _lines(reader: int) -> Iterator[bytes | None]:
    """Lines of the pipe until it is closed; None when none came in time."""
    rest = b""
    while True:
        if not select.select([reader], [], [], LIMIT_S)[0]:
            yield None
            return
        data = os.read(reader, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _ending(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def _child(folders: Folders, batch: Sequence[int], mode: str, scratch: Path, writer: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + LIMIT_BYTES, hard))
    for number in batch:
        made, where = folders.make(number), scratch / "folder"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        made.write(where)
        outcome: dict[str, Any] = {"number": number, "changes": made.changes}
        try:
            outcome["outcome"] = attempt(mode, where)
        except BaseException as error:
            outcome |= {"outcome": type(error).__name__, "trace": traceback.format_exc()[-3000:]}
        os.write(writer, json.dumps(outcome).encode() + b"\n")


def attempt(mode: str, folder: Path) -> str:
    """What came of the folder; only errors that evener raises on purpose are caught."""
    from evener.errors import EvenerError

    try:
        return MODES[mode](folder)
    except EvenerError as error:
        if not str(error) or len(str(error)) > 10_000:
            raise ValueError(f"an error of {len(str(error))} characters") from error
        return f"refused: {type(error).__name__}"


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmData")


def warm_up(folders: Folders, scratch: Path, mode: str) -> None:
    """Import and compile what every child needs; afterwards the process has no thread but its first."""
    import torch

    torch.set_num_threads(1)
    where = scratch / "warm"
    where.mkdir()
    folders.sound().write(where)
    attempt(mode, where)
    for architecture in descriptor.architectures:
        for sharded in (False, True):
            weight_files(architecture, sharded)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=sorted(MODES), default="plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--keep", type=Path, help="write the first folder there instead of trying it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folders = Folders(scratch, given.seed)
        numbers = range(given.first, given.first + given.count)
        if given.keep is not None:
            given.keep.mkdir(parents=True)
            made = folders.make(given.first)
            made.write(given.keep)
            print("\n".join(made.changes))
            return 0
        warm_up(folders, scratch, given.mode)
        began = time.monotonic()
        report = fuzz(folders, numbers, given.mode, scratch)
    for failure in report.failures:
        again = f"--mode {given.mode} --seed {given.seed} --first {failure['number']} --count 1"
        print(f"{'; '.join(failure['changes'])}\n{failure['trace']}\nagain: python tests/folder_fuzzer.py {again}\n")
    print(json.dumps({"failures": len(report.failures), "outcomes": report.outcomes.most_common(),
                      "seconds": round(time.monotonic() - began, 1)}))  # fmt: skip
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
