"""Running the kit: one backend, all its checks, one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evener_conformance.kit.checklist import Checklist, CheckRequest
from evener_conformance.kit.outcome import CaseResult
from evener_conformance.kit.perf import timings
from evener_conformance.kit.result import Result, run_facts
from evener_conformance.kit.subject import Subject, open_subject


def run(
    backend: str, request: CheckRequest, pretend: bool = False, options: Mapping[str, Mapping[str, Any]] | None = None,
    mode: str = "test", say: Callable[[str], None] = lambda _: None,
) -> Result:  # fmt: skip
    """Check a backend.

    Args:
        pretend: check without its hardware; see ``open_subject``.
        mode: "test" checks everything; "support" only shows what is served; "perf" times kernels that pass.
        say: called with text when a check begins, and with the rest of that line when it is done.

    Raises:
        EvenerError: as ``open_subject`` and ``Checklist``.
    """
    return run_on(open_subject(backend, pretend, options), request, mode, say)


def run_on(
    subject: Subject, request: CheckRequest, mode: str = "test", say: Callable[[str], None] = lambda _: None
) -> Result:
    """As ``run``, for a backend that is open already."""
    checklist = Checklist(subject, request)
    wanted = checklist.checks_in(mode)
    cases: list[CaseResult] = []
    if mode == "perf":
        cases += timings(subject, checklist.dtypes, request)
    else:
        for number, check in enumerate(wanted, 1):
            say(f"{number} of {len(wanted)}: {check.name}: ")
            found = list(check.run())
            failed = sum(each.outcome == "failed" for each in found)
            say(f"{len(found)} case{'s' * (len(found) != 1)}" + f", {failed} failed" * bool(failed) + "\n")
            cases += found
    whole = mode == "test" and not (request.ops or request.dtypes)
    return Result(cases, run_facts(subject, mode, request.seed, request.thorough), whole)
