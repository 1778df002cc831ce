"""Running the kit: one backend, all its checks, one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evener.testing.conformance.outcome import CaseResult
from evener.testing.conformance.perf import timings
from evener.testing.conformance.plan import Plan, Request
from evener.testing.conformance.result import Result, facts_of
from evener.testing.conformance.subject import Subject, open_subject


def run(
    backend: str, request: Request, pretend: bool = False, options: Mapping[str, Mapping[str, Any]] | None = None,
    mode: str = "test", say: Callable[[str], None] = lambda _: None,
) -> Result:  # fmt: skip
    """Check a backend.

    Args:
        pretend: without its hardware; see ``open_subject``.
        mode: "test" checks everything; "support" only says what is served; "perf" times kernels that pass.
        say: gets text when a part begins, and the rest of that line when it is done; all of it takes minutes.

    Raises:
        EvenerError: as ``open_subject`` and ``Plan``.
    """
    return run_on(open_subject(backend, pretend, options), request, mode, say)


def run_on(
    subject: Subject, request: Request, mode: str = "test", say: Callable[[str], None] = lambda _: None
) -> Result:  # fmt: skip
    """As ``run``, of a backend that was opened."""
    plan = Plan(subject, request)
    wanted = plan.checks_in(mode)
    cases: list[CaseResult] = []
    if mode == "perf":
        cases += timings(subject, plan.dtypes, request)
    else:
        for number, check in enumerate(wanted, 1):
            say(f"{number} of {len(wanted)}: {check.name}: ")
            found = list(check.run())
            failed = sum(each.outcome == "failed" for each in found)
            say(f"{len(found)} case{'s' * (len(found) != 1)}" + f", {failed} failed" * bool(failed) + "\n")
            cases += found
    whole = mode == "test" and not (request.ops or request.dtypes)
    return Result(cases, facts_of(subject, mode, request.seed, request.thorough), whole)
