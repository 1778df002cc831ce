"""The content of an evidence file: what ran on which hardware, part by part. Torch-free.

The file is JSON. ``seal`` is a hash of everything else in it: it shows damage and edits by mistake, and proves nothing
about who wrote it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from evener.errors import ConfigError

#: Format of the file; raised when readers have to change.
FORMAT = 1
#: No evidence file is larger, in bytes.
LARGEST = 8 << 20
#: A text in it has at most this many characters, and a part at most this many cases that did not pass.
LONGEST_TEXT, MOST_CASES = 4_000, 200

#: How a part ended. ``not run``: a part that it depends on failed.
Outcome = Literal["passed", "failed", "not applicable", "not run"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "not applicable", "not run")
#: Levels of evidence that a run can reach; "" where it did not pass.
Level = Literal["", "L3", "L5"]


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case of the conformance kit that did not pass; as ``kit.outcome.CaseResult``."""

    subject: str
    provider: str
    dtype: str
    case: str
    outcome: str
    detail: str
    place: str


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured time. ``seconds``: the median; ``bytes_read``: what had to be read at least, 0 if unknown."""

    what: str
    seconds: float
    bytes_read: int = 0


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one part ended.

    Attributes:
        seconds: how long it ran.
        detail: why it failed, or was not run.
        counts: cases by outcome, for parts of the conformance kit.
        cases: the first cases that did not pass.
        printed: the end of what its process printed, if that process died.
    """

    name: str
    outcome: Outcome
    seconds: float
    detail: str = ""
    counts: dict[str, int] = {}
    cases: tuple[Case, ...] = ()
    printed: str = ""


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What identifies the installed backend.

    Attributes:
        sha256: hash of its files; equal for every installation of one wheel (``wheel.wheel_hash`` computes it).
        files: how many files it is of.
        changed: whether a file is not what the wheel's RECORD says, or the installation is an editable one.
    """

    distribution: str
    version: str
    sha256: str
    files: int
    changed: bool


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An evidence file.

    Attributes:
        backend: its name, as ``--backend`` takes it.
        level: the level of evidence that the run reached; "" if it did not pass.
        date: the day, in UTC, as YYYY-MM-DD.
        seed: of all random inputs.
        simulated: whether the device says that it is simulated; ``pretended``: whether the hardware was not asked for.
        versions: of evener, the conformance kit, torch, Python, the system and each package that took part.
        device: name, variant, memory, capabilities, driver, as texts.
        command: what was typed.
    """

    format: int
    backend: str
    wheel: Wheel
    level: Level
    date: str
    seed: int
    simulated: bool
    pretended: bool
    versions: dict[str, str]
    device: dict[str, str]
    command: str
    parts: tuple[Part, ...]
    timings: tuple[Timing, ...] = ()
    seal: str = ""

    def part(self, name: str) -> Part | None:
        """The part with this name."""
        return next((part for part in self.parts if part.name == name), None)


def seal_of(evidence: Evidence) -> str:
    """The hash of everything in it but the seal."""
    plain = msgspec.json.encode(msgspec.structs.replace(evidence, seal=""), order="deterministic")
    return hashlib.sha256(plain).hexdigest()


def write(path: Path, evidence: Evidence) -> None:
    """Write it, sealed. The file appears whole or not at all.

    Raises:
        ConfigError: it cannot be written there.
    """
    sealed = msgspec.structs.replace(evidence, seal=seal_of(evidence))
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file with --out") from error


def read(path: Path) -> Evidence:
    """Read a file that a stranger may have written.

    Raises:
        ConfigError: it is no evidence file, too large, of another format, or not what was sealed.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > LARGEST:
        raise ConfigError(f"{path} is larger than {LARGEST >> 20} MiB; no evidence file is")
    try:
        found = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        number = msgspec.json.decode(found["format"], type=int) if "format" in found else 0
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no evidence file: {error}; `evener first-contact` writes one") from error
    if number != FORMAT:
        raise ConfigError(f"{path} has format {number}, and this version reads {FORMAT}; install the version of "
                          "evener-conformance that wrote it, or run `evener first-contact` again")  # fmt: skip
    try:
        evidence = msgspec.json.decode(data, type=Evidence)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no evidence file: {error}; `evener first-contact` writes one") from error
    if seal_of(evidence) != evidence.seal:
        raise ConfigError(f"{path} was changed after it was written: its seal does not fit; run `evener first-contact` "
                          "again, and leave the file as it is")  # fmt: skip
    for text in _texts(msgspec.to_builtins(evidence)):
        if len(text) > LONGEST_TEXT or not text.replace("\n", " ").isprintable():
            raise ConfigError(f"{path} has a text that no run writes: {text[:60]!r}…")
    return evidence


def _texts(value: object) -> Sequence[str]:
    """Every text in plain data, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for each in pair for text in _texts(each)]
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in _texts(each)]
    return []
