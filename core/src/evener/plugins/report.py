"""Start-up's report as text (``evener doctor``, ``evener plugins``) and as JSON."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evener.plugins.trace import Candidate, Report

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"chosen": "green", "refused": "yellow", "broken": "red", "disabled": "dim", "installed": "none"}


def to_json(report: Report) -> dict[str, Any]:
    """Plain data: the report's own fields and ``ok``."""
    return {"ok": report.ok, **asdict(report)}


def render(report: Report, *, steps: bool = True, width: int | None = None, color: bool | None = None) -> str:
    """Tables, then warnings, then what was chosen or why nothing was.

    Args:
        report: from ``assess``, ``Selection.report`` or ``catalog_report``.
        steps: show every step of every candidate (``evener doctor``), not only its verdict (``evener plugins``).
        width: columns; default: the terminal's.
        color: with the terminal's colour codes; default: if standard output is a terminal.
    """
    from rich.console import Console

    width = width or shutil.get_terminal_size((120, 24)).columns
    color = sys.stdout.isatty() if color is None else color
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, highlight=False)
    console.print(_summary_table(report.candidates, steps))
    if steps:
        console.print(_step_table(report.candidates))
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if report.backend is not None:
        console.print(f"backend: {report.backend} ({report.reason})", style="bold", markup=False)
    if report.error is not None:
        console.print(f"error: {report.error}", style="red", markup=False)
    return out.getvalue()


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _summary_table(candidates: tuple[Candidate, ...], steps: bool) -> Table:
    from rich.text import Text

    table = _table("group", "name", "package", "verdict", "what, why, devices")
    for each in candidates:
        # A fault is told once: by the steps, where they are shown.
        why = "see its steps" if steps and any(each.reason in step.detail for step in each.steps) else each.reason
        what = "\n".join(part for part in (each.summary, why, *each.devices, *_evidence(each)) if part)
        cells = (each.group.removeprefix("evener."), each.name, f"{each.distribution} {each.version}")
        table.add_row(*map(Text, cells), Text(each.verdict, style=_STYLES[each.verdict]), Text(what))
    return table


def _evidence(found: Candidate) -> list[str]:
    """How far a package that computes is verified; of the others nobody asks."""
    if found.evidence:
        return [f"verified to {found.evidence}"]
    reads = found.verdict not in ("broken", "disabled") and found.group in ("evener.backends", "evener.kernels")
    return ["verified: its author says nothing"] if reads else []


def _step_table(candidates: tuple[Candidate, ...]) -> Table:
    from rich.text import Text

    table = _table("name", "step", "", "detail")
    for each in candidates:
        for step in each.steps:
            mark = Text("yes", style="green") if step.ok else Text("no", style="red")
            table.add_row(Text(each.name), Text(step.name), mark, Text(step.detail))
    return table
