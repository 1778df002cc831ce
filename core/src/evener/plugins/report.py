"""The start-up report: every step of every package, as plain data, as text (``evener doctor``, ``evener plugins``) and
as JSON."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from evener.plugins.catalog import Catalog, Disabled, Origin, Package, Problem
from evener.plugins.guard import printable

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"chosen": "green", "refused": "yellow", "broken": "red", "disabled": "dim", "installed": "none"}


@dataclass(frozen=True)
class Step:
    """One step (``found``, ``contracts``, ``marks``, ``probe`` or ``needs``): whether it succeeded, and the details."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class PackageRecord(Origin):
    """What happened to one entry point during start-up.

    Attributes:
        verdict: ``chosen``, ``refused``, ``broken``, ``disabled``, or ``installed`` when nothing was chosen yet.
        reason: why, in words.
        devices: what its probe found, one text a device.
        evidence: how far it is verified, from its descriptor; empty if that says nothing.
    """

    summary: str
    verdict: str
    reason: str
    steps: tuple[Step, ...]
    devices: tuple[str, ...] = ()
    evidence: str = ""


@dataclass(frozen=True)
class Report:
    """Every package, and the choice.

    Attributes:
        candidates: backends first, in the order of the entry-point groups.
        backend: name of the chosen one, or None.
        reason: why it was chosen.
        warnings: one line each.
        error: why nothing was chosen, or None.
    """

    candidates: tuple[PackageRecord, ...]
    backend: str | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether a backend was chosen, without an error."""
        return self.backend is not None and self.error is None

    @property
    def unusable_hints(self) -> list[str]:
        """A line for each broken or disabled package, which may have what was not found, with the reason."""
        unusable = [each for each in self.candidates if each.verdict in ("broken", "disabled")]
        return [f"\n  {each.distribution} may have it, but is {each.verdict}: {each.reason}" for each in unusable]


def package_record(
    origin: Origin, verdict: str, reason: str, steps: tuple[Step, ...], devices: tuple[str, ...] = ()
) -> PackageRecord:
    """The record of ``origin``, whose texts are made printable; its summary comes from the descriptor where one was
    read."""
    about = origin.descriptor if isinstance(origin, Package) else None
    return PackageRecord(
        **{each.name: printable(getattr(origin, each.name)) for each in fields(Origin)},
        summary=printable(about.summary) if about else "", verdict=verdict, reason=printable(reason),
        steps=tuple(replace(step, detail=printable(step.detail)) for step in steps),
        devices=tuple(map(printable, devices)), evidence=printable(about.evidence) if about else "",
    )  # fmt: skip


def read_steps(package: Package) -> tuple[Step, ...]:
    """The steps that every usable package has passed."""
    contracts = ", ".join(f"{name} {version}" for name, version in package.descriptor.contracts.items())
    return (Step("found", True, f"{package.distribution} {package.version}"), Step("contracts", True, contracts))


def unusable(catalog: Catalog) -> tuple[PackageRecord, ...]:
    """The records of packages that are broken or disabled."""
    return (*map(_broken, catalog.problems), *map(_disabled, catalog.disabled))


def error_text(error: BaseException) -> str:
    """The error's message and those of its causes, one a line, for a terminal."""
    lines = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        if str(error) not in lines[-1]:
            lines.append(f"caused by {type(error).__name__}: {error}")
    return printable("\n".join(lines))


def _broken(problem: Problem) -> PackageRecord:
    found = Step("found", problem.step != "found", f"{problem.distribution} {problem.version}")
    failed = Step(problem.step, False, error_text(problem.error))
    steps = (failed,) if problem.step == "found" else (found, failed)
    return package_record(problem, "broken", str(problem.error), steps)


def _disabled(origin: Disabled) -> PackageRecord:
    steps = (Step("found", True, f"{origin.distribution} {origin.version}"),)
    return package_record(origin, "disabled", origin.reason, steps)


def to_json(report: Report) -> dict[str, Any]:
    """Plain data: the report's fields, and ``ok``."""
    return {"ok": report.ok, **asdict(report)}


def render(report: Report, *, steps: bool = True, width: int | None = None, color: bool | None = None) -> str:
    """Tables, then warnings, then what was chosen or why nothing was.

    Args:
        report: from ``assess`` or ``Selection.report``, or of packages alone.
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


def _summary_table(candidates: tuple[PackageRecord, ...], steps: bool) -> Table:
    from rich.text import Text

    table = _table("group", "name", "package", "verdict", "what, why, devices")
    for each in candidates:
        # The steps, if they are shown, give the reason already.
        why = "see its steps" if steps and any(each.reason in step.detail for step in each.steps) else each.reason
        what = "\n".join(part for part in (each.summary, why, *each.devices, *_evidence(each)) if part)
        cells = (each.group.removeprefix("evener."), each.name, f"{each.distribution} {each.version}")
        table.add_row(*map(Text, cells), Text(each.verdict, style=_STYLES[each.verdict]), Text(what))
    return table


def _evidence(found: PackageRecord) -> list[str]:
    """How far a backend or kernel package is verified; nothing for other groups."""
    if found.evidence:
        return [f"verified to {found.evidence}"]
    reads = found.verdict not in ("broken", "disabled") and found.group in ("evener.backends", "evener.kernels")
    return ["verified: its descriptor does not say"] if reads else []


def _step_table(candidates: tuple[PackageRecord, ...]) -> Table:
    from rich.text import Text

    table = _table("name", "step", "", "detail")
    for each in candidates:
        for step in each.steps:
            mark = Text("yes", style="green") if step.ok else Text("no", style="red")
            table.add_row(Text(each.name), Text(step.name), mark, Text(step.detail))
    return table
