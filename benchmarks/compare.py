"""What changed from one run of ``serving.py`` to another: figures at each point of the sweep, and answers."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What makes two rows the same point of a sweep.
_POINT = ("engine", "api", "dataset", "request_rate", "concurrency", "input_len", "output_len")
#: The figures to compare, their units, and whether less is better.
FIGURES = (
    ("request_throughput", "requests/s", False), ("output_throughput", "output tokens/s", False),
    ("goodput", "good requests/s", False), ("median_ttft_ms", "median ms to the first token", True),
    ("median_itl_ms", "median ms between tokens", True), ("median_e2el_ms", "median ms in all", True),
    ("p99_e2el_ms", "99 % within, ms in all", True),
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One figure of one point in two runs.

    Attributes:
        point: the engine and its load.
        part: by how much it is better (above 0) or worse, as a part of what it was.
    """

    point: str
    unit: str
    was: float
    now: float
    part: float


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an ``--out-json`` file.

    Raises:
        SystemExit: it is not one.
    """
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        if not rows or not all("request_throughput" in row and "engine" in row for row in rows):
            raise ValueError("it has no rows of serving.py --out-json")
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"{path} cannot be compared: {error}") from error
    return rows


def read_answers(path: Path) -> list[dict[str, str]]:
    """The requests of an ``--output-csv`` file.

    Raises:
        SystemExit: it is not one.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows or not {"prompt", "text"} <= rows[0].keys():
            raise ValueError("it has no rows of serving.py --output-csv")
    except (OSError, ValueError, csv.Error) as error:
        raise SystemExit(f"{path} cannot be compared: {error}") from error
    return rows


def load_of(row: Mapping[str, Any]) -> str:
    """The load of a row in words."""
    rate, limit = row["request_rate"], row["concurrency"]
    sent = "all at once" if rate is None else f"{rate:g} requests/s"
    return f"{sent}, at most {limit} under way" if limit else sent


def changes(rows: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> list[Change]:
    """The change of each figure that both runs have."""
    before = {tuple(row.get(name) for name in _POINT): row for row in earlier}
    found = []
    for row in rows:
        old = before.get(tuple(row.get(name) for name in _POINT))
        for name, unit, less in FIGURES:
            if old is not None and row.get(name) and old.get(name):
                was, now = float(old[name]), float(row[name])
                part = was / now - 1 if less else now / was - 1
                found.append(Change(f"{row['engine']}, {load_of(row)}", unit, was, now, part))
    return found


@dataclass(frozen=True)
class Difference:
    """An answer that is not what it was.

    Attributes:
        same: how many characters at its beginning are.
    """

    prompt: str
    was: str
    now: str

    @property
    def same(self) -> int:
        return next((at for at, (a, b) in enumerate(zip(self.was, self.now, strict=False)) if a != b),
                    min(len(self.was), len(self.now)))  # fmt: skip


def differences(
    answers: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]
) -> tuple[int, list[Difference]]:
    """How many answers to a prompt both runs have, and those that differ. A prompt that came several times is matched
    in order."""
    before: dict[tuple[str, str], list[str]] = {}
    for row in earlier:
        if not row.get("error"):
            before.setdefault((str(row.get("engine")), str(row["prompt"])), []).append(str(row["text"]))
    both, found = 0, []
    for row in answers:
        olds = before.get((str(row.get("engine")), str(row["prompt"])), [])
        if row.get("error") or not olds:
            continue
        both += 1
        if (old := olds.pop(0)) != row["text"]:
            found.append(Difference(str(row["prompt"]), old, str(row["text"])))
    return both, found
