"""Printing a result: what failed, where, and how to repeat it. Torch-free."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from evener_conformance.kit.outcome import CaseResult
from evener_conformance.kit.result import Result

_STYLE = {"passed": "green", "failed": "bold red", "unknown": "yellow", "not applicable": "dim"}
_SHOWN = 40
#: Columns if the output is not a terminal: more than any line has, so that files and pipes get whole lines.
_WIDE = 100_000


def render(result: Result) -> Group:
    """Counts by area, then everything that is wrong."""
    facts = result.facts
    table = Table(box=None, pad_edge=False)
    for name in ("area", "passed", "failed", "unknown", "not applicable"):
        table.add_column(name, justify="left" if name == "area" else "right")
    for area, counts in result.summary().items():
        table.add_row(area, *(_count(counts.get(o, 0), o) for o in _STYLE))
    lines: list[object] = [table, ""]
    if facts["mode"] == "support":
        lines += [_matrix(result), ""]
    if facts["mode"] == "perf":
        lines += [_times(result), ""]
    causes = result.causes
    lines += [_case(cases, facts) for cases in causes[:_SHOWN]]
    if len(causes) > _SHOWN:
        lines.append(f"… and {sum(map(len, causes[_SHOWN:]))} more; --json FILE has them all")
    unseen = dict.fromkeys((f"{c.area}/{c.subject}", c.detail) for c in result.optional_unknowns)
    lines += [f"[{_STYLE['unknown']}]unknown[/] {escape(what)}: {escape(why)}\n" for what, why in unseen]
    lines.append(_verdict(result))
    return Group(*lines)  # type: ignore[arg-type]


def _matrix(result: Result) -> Table:
    """A table of subject by compute dtype: how many cases were computed, and the first reason why not."""
    table = Table(box=None, pad_edge=False)
    dtypes = sorted({c.dtype for c in result.cases if c.dtype})
    for name in ("op", "provider", *dtypes, "why not"):
        table.add_column(name)
    rows: dict[tuple[str, str], dict[str, list[CaseResult]]] = {}
    for case in result.cases:
        rows.setdefault((case.subject, case.provider), {}).setdefault(case.dtype, []).append(case)
    for (subject, provider), found in rows.items():
        refused = [
            c.detail for cases in found.values() for c in cases
            if c.outcome == "not applicable" and (c.dtype or c.case == "all")
        ]  # fmt: skip
        table.add_row(escape(subject), escape(provider), *(_served(found.get(d, [])) for d in dtypes),
                      escape(refused[0] if refused else ""))  # fmt: skip
    return table


def _served(cases: list[CaseResult]) -> str:
    done = sum(c.outcome == "passed" for c in cases)
    if any(c.outcome == "failed" for c in cases):
        return "[bold red]wrong[/]"
    return f"[green]{done} of {len(cases)}[/]" if done else "[dim]no[/]"


def _times(result: Result) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("op", "provider", "type", "case", "time"):
        table.add_column(name)
    for c in result.cases:
        table.add_row(escape(c.subject), escape(c.provider), c.dtype, c.case, escape(c.detail))
    return table


def _count(number: int, outcome: str) -> str:
    return f"[{_STYLE[outcome]}]{number}[/]" if number else "[dim]0[/]"


def _rerun_command(case: CaseResult, facts: Mapping[str, Any]) -> str:
    """The command that repeats a case, to be pasted into a shell."""
    part = case.area if case.area in ("device", "graphs", "collectives", "model") else case.subject
    words = ["evener", "conformance", "--backend", facts["backend"]["name"]]
    words += ["--pretend"] * facts["pretended"] + ["--thorough"] * facts.get("thorough", False)
    words += ["--mode", facts["mode"]] * (facts["mode"] != "test")
    words += ["--op", part, "--seed", str(facts["seed"])] + (["--dtype", case.dtype] if case.dtype else [])
    options = facts["backend"]["options"]
    words += [f"{name}.{key}={value}" for name, values in options.items() for key, value in values.items()]
    return shlex.join(words)


def _case(cases: Sequence[CaseResult], facts: Mapping[str, Any]) -> str:
    case, others = cases[0], len(cases) - 1
    where = f"{case.area}/{case.subject}" + (f" [{case.dtype}]" if case.dtype else "")
    of = f"    of       {escape(case.place)}\n" if case.place else ""
    more = f"             and {others} more like it; --json FILE has them all\n" if others else ""
    return (
        f"[{_STYLE[case.outcome]}]{case.outcome}[/] {escape(where)} {escape(case.provider)}\n{of}"
        f"    at       {escape(case.case)}\n    because  {escape(case.detail)}\n{more}"
        f"    again    {escape(_rerun_command(case, facts))}\n"
    )


def _verdict(result: Result) -> str:
    facts, counts = result.facts, [c.outcome for c in result.cases]
    how = " (pretended: without its hardware)" if facts["pretended"] else ""
    who = f"{facts['backend']['name']} {facts['backend']['version']} on {escape(facts['device']['name'])}"
    seen = f"{counts.count('passed')} of {len(counts) - counts.count('not applicable')} cases passed"
    more = f", {len(result.optional_unknowns)} unknown where nothing is required" if result.optional_unknowns else ""
    word = "[bold green]passes[/]" if result.passed else "[bold red]does not pass[/]"
    if set(counts) <= {"not applicable"}:
        reasons = dict.fromkeys(c.detail for c in result.cases if c.detail)
        word = f"[bold red]does not pass, as nothing was checked[/] ({escape('; '.join([*reasons][:3])) or 'no cases'})"
    part = "" if result.whole else ", of a part of the kit"
    return f"{who} {word}: {seen}{more}{part}; level {facts['level']}{how}, seed {facts['seed']}"


def show(result: Result, lines: Iterable[str] = ()) -> None:
    """Print it."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=_WIDE)
    for line in lines:
        console.print(line)
    for part in render(result).renderables:
        # Without hard line breaks a terminal wraps by itself, and a command copied from it stays one line.
        console.print(part, soft_wrap=isinstance(part, str))
