"""The level of evidence of each package, from records of results. Torch-free.

A record is one line of a ``*.jsonl`` file: JSON with ``subject``, ``outcome`` ("passed…" or another), ``date``, and
``level`` where the check shows one of ``package`` (a distribution; default: the subject). ``evener evidence add``
writes such lines; so may a package's own tests, for the levels below L5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from evener.errors import ConfigError

#: From the weakest to the strongest; docs/support.md says what each one means.
LEVELS = ("L0", "L1", "L2", "L3", "L4", "L5")
#: No line, and no file, is longer; in bytes.
_LONGEST_LINE, _LARGEST_FILE = 64 << 10, 16 << 20


@dataclass(frozen=True)
class Reached:
    """What is known of one package.

    Attributes:
        levels: the levels that a passed check shows, weakest first.
        date: of the newest of those that show the strongest level.
        devices: the devices of these.
    """

    levels: tuple[str, ...] = ()
    date: str = ""
    devices: tuple[str, ...] = ()

    @property
    def highest(self) -> str:
        """The strongest level; empty if there is none."""
        return self.levels[-1] if self.levels else ""


def read_records(files: Iterable[Path]) -> list[Mapping[str, str]]:
    """All records of some files.

    Raises:
        ConfigError: a file cannot be read, is too large, or a line of it is no record.
    """
    found: list[Mapping[str, str]] = []
    for file in files:
        try:
            size = file.stat().st_size
            lines = file.read_bytes().splitlines() if size <= _LARGEST_FILE else [b" " * (_LONGEST_LINE + 1)]
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            try:
                if len(line) > _LONGEST_LINE:
                    raise msgspec.DecodeError("it is too long")
                found.append(msgspec.json.decode(line, type=dict[str, str]))
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{file}, line {number} is no record of a check: {error}") from error
    return found


def package_of(record: Mapping[str, str]) -> str:
    """The distribution that a record is about."""
    return record.get("package", record.get("subject", ""))


def reached(records: Iterable[Mapping[str, str]], package: str) -> Reached:
    """What the passed checks of one package show."""
    passed = (each for each in records if each.get("outcome", "").startswith("passed"))
    mine = [each for each in passed if package_of(each) == package and each.get("level") in LEVELS]
    levels = tuple(level for level in LEVELS if any(each["level"] == level for each in mine))
    best = [each for each in mine if levels and each["level"] == levels[-1]]
    devices = tuple(dict.fromkeys(each.get("device", "") for each in best))
    return Reached(levels, max((each.get("date", "") for each in best), default=""), devices)
