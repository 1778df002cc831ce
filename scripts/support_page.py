"""The table of backends in ``docs/support.md``: levels and dates come from the records in ``docs/results``.

``make docs`` writes it, and ``make check`` fails if the page is not fresh. ``evener evidence add`` and
``record_checks.py`` write the records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from evener_conformance.first_contact.levels import reached, read_records

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/support.md"
RESULTS = ROOT / "docs/results"
_TABLE = re.compile(r"(<!-- backends -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One row: what a package is for, and which file of ``docs/results`` has its records."""

    package: str
    hardware: str
    limits: str
    results: str


ROWS = (
    Row("evener-backend-cpu", "CPUs that torch runs on", "x86-64 with AVX-512 BF16; others were not run", "cpu"),
    Row("evener-backend-cuda", "NVIDIA, compute capability 7.0 and later", "9.0 alone: H200, H100", "cuda"),
    Row(
        "evener-kernels-triton",
        "whatever has Triton",
        "run on 9.0; compiled for seven targets",
        "triton",
    ),
    Row(
        "evener-backend-ascend",
        "Huawei Ascend",
        "nobody here has touched the hardware; L4: Triton kernels over rows alone; "
        "[doubtful](install-ascend.md#what-is-doubtful): equal routing scores, prompts over pages",
        "ascend",
    ),
    Row("evener-backend-hygon", "Hygon DCU", "nobody here has touched the hardware", "hygon"),
    Row("evener-backend-muxi", "MetaX", "nobody here has touched the hardware", "muxi"),
    Row("evener-backend-gcu", "Enflame", "nobody here has touched the hardware", "gcu"),
)


def generated() -> dict[Path, str]:
    """The page with a fresh table."""
    return {PAGE: with_table(PAGE.read_text("utf-8"))}


def with_table(text: str) -> str:
    """``text`` with the marked table made anew.

    Raises:
        ValueError: it has no such table.
    """
    found, count = _TABLE.subn(lambda match: match[1] + table() + match[2], text)
    if count != 1:
        raise ValueError(f"{PAGE.name} needs one table between <!-- backends --> and <!-- end -->, it has {count}")
    return found


def table() -> str:
    """The rows as Markdown."""
    lines = ["| package | hardware | levels shown | limits | last seen | results |", "| --- " * 6 + "|"]
    for row in ROWS:
        file = RESULTS / f"support-{row.results}.jsonl"
        seen = reached(read_records([file]) if file.is_file() else (), row.package)
        link = f"[checks](results/{file.name})" if file.is_file() else ""
        levels = ", ".join(seen.levels) or "not built"
        lines.append(f"| `{row.package}` | {row.hardware} | {levels} | {row.limits} | {seen.date} | {link} |")
    return "\n".join(lines) + "\n"
