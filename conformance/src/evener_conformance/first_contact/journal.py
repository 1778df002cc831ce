"""What a run has found so far, in a file beside the evidence, so that an interrupted run can go on. Torch-free.

One JSON line for the run, then one for each part or check that ended and did not fail.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from evener.errors import ConfigError
from evener_conformance.first_contact.child import Task
from evener_conformance.first_contact.evidence_file import LARGEST, Part, Timing
from evener_conformance.first_contact.supervisor import Findings

_INSTEAD = "leave --resume out to start again"


class RunIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be the same for two runs to be one.

    Attributes:
        wheel: hash of the backend's files.
        versions: of evener, the kit, Python and the system.
    """

    backend: str
    pretend: bool
    options: dict[str, dict[str, str]]
    seed: int
    wheel: str
    versions: dict[str, str]


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part, or one check of it, that ended: the result of ``supervisor.run_part``."""

    check: str
    part: Part
    facts: dict[str, dict[str, str]]
    timings: list[Timing]
    level: tuple[str, bool]
    listed: dict[str, list[str]]

    @property
    def findings(self) -> Findings:
        """What its processes wrote."""
        return Findings(timings=self.timings, facts=self.facts, level=self.level, listed=self.listed)


class Journal:
    """A file of results. Several threads may use it."""

    def __init__(self, path: Path, ended: list[Ended]) -> None:
        self._path, self._lock = path, threading.Lock()
        self._ended = {(each.part.name, each.check): each for each in ended}

    def find(self, task: Task) -> tuple[Part, Findings] | None:
        """The result of an earlier run for a task. None for the device's part: it says which device it is now."""
        ended = self._ended.get((task.part, task.only)) if task.part != "device" else None
        return None if ended is None else (ended.part, ended.findings)

    def add(self, task: Task, part: Part, found: Findings) -> None:
        """Keep a result, unless it failed: that is tried again.

        Raises:
            ConfigError: the device is not that of the earlier run.
        """
        before = self._ended.get((task.part, task.only))
        if before is not None and part.outcome == "passed":
            was, now = (" ".join(facts["device"].get(name, "") for name in ("name", "variant")).strip()
                        for facts in (before.facts, found.facts))  # fmt: skip
            if was != now:
                raise ConfigError(f"--resume: the interrupted run was on the device {was!r}, and this is {now!r}; "
                                  f"{_INSTEAD}")  # fmt: skip
        if part.outcome not in ("passed", "not applicable"):
            return
        line = msgspec.json.encode(Ended(task.only, part, found.facts, found.timings, found.level, found.listed))
        with self._lock, self._path.open("ab") as file:
            file.write(line + b"\n")


def journal_path(out: Path) -> Path:
    """The journal of an evidence file."""
    return out.with_name(out.name + ".journal")


def journal_seed(out: Path) -> int:
    """The seed of the run that was interrupted.

    Raises:
        ConfigError: there is no journal, or it cannot be read.
    """
    return _read(journal_path(out))[0].seed


@contextmanager
def open_journal(out: Path, identity: RunIdentity, resume: bool) -> Iterator[Journal]:
    """The journal of a run. It is deleted when the run ends, and stays when the run is interrupted.

    Raises:
        ConfigError: it cannot be read or written, or, with ``resume``, it is of another run.
    """
    path, ended = journal_path(out), list[Ended]()
    if resume:
        before, ended = _read(path)
        for name in identity.__struct_fields__:
            was, now = getattr(before, name), getattr(identity, name)
            if was != now:
                raise ConfigError(f"--resume: the interrupted run has {name} {was}, and this one {now}; {_INSTEAD}")
    try:
        # A line that was cut off when the run was interrupted goes.
        path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in (identity, *ended)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file with --out") from error
    yield Journal(path, ended)
    with contextlib.suppress(FileNotFoundError):  # somebody else removed it
        path.unlink()


def _read(path: Path) -> tuple[RunIdentity, list[Ended]]:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"--resume: {path} cannot be read: {error.strerror}; {_INSTEAD}") from error
    if len(data) > LARGEST:
        raise ConfigError(f"--resume: {path} is larger than {LARGEST >> 20} MiB; {_INSTEAD}")
    try:
        first, *lines = data[: data.rfind(b"\n") + 1].splitlines() or [b""]
        return msgspec.json.decode(first, type=RunIdentity), [msgspec.json.decode(line, type=Ended) for line in lines]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"--resume: {path} is no journal: {error}; {_INSTEAD}") from error
