"""The record of start-up: every step of every candidate, as plain data for ``evener doctor`` and ``--json``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from evener.plugins.catalog import Catalog, Disabled, Origin, Package, Problem


@dataclass(frozen=True)
class Step:
    """One step: ``found``, ``contracts``, ``marks``, ``probe``, ``needs``; whether it went well, and what was seen."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate(Origin):
    """One entry point's way through start-up.

    Attributes:
        verdict: ``chosen``, ``refused``, ``broken``, ``disabled``, or ``installed`` when nothing was chosen yet.
        reason: why, in words.
        devices: what its probe found, one text a device.
        evidence: how far it is verified, in its author's words; empty if the author says nothing.
    """

    summary: str
    verdict: str
    reason: str
    steps: tuple[Step, ...]
    devices: tuple[str, ...] = ()
    evidence: str = ""


@dataclass(frozen=True)
class Report:
    """Every candidate, and what came of it all.

    Attributes:
        candidates: backends first, in the order of the entry-point groups.
        backend: name of the chosen one, or None.
        reason: why it was chosen.
        warnings: one line each.
        error: why nothing was chosen, or None.
    """

    candidates: tuple[Candidate, ...]
    backend: str | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()
    error: str | None = None

    @property
    def ok(self) -> bool:
        """A backend was chosen, and nothing that was asked for has a problem."""
        return self.backend is not None and self.error is None

    @property
    def unread(self) -> list[str]:
        """Of packages that may have what was not found, a line each with the reason why nobody looked."""
        unusable = [each for each in self.candidates if each.verdict in ("broken", "disabled")]
        return [f"\n  {each.distribution} may have it, but is {each.verdict}: {each.reason}" for each in unusable]


def candidate(
    origin: Origin, verdict: str, reason: str, steps: tuple[Step, ...], devices: tuple[str, ...] = ()
) -> Candidate:
    """The record of ``origin``; its summary comes from the descriptor where one was read."""
    return Candidate(
        **{each.name: getattr(origin, each.name) for each in fields(Origin)},
        summary=origin.descriptor.summary if isinstance(origin, Package) else "",
        verdict=verdict,
        reason=reason,
        steps=steps,
        devices=devices,
        evidence=origin.descriptor.evidence if isinstance(origin, Package) else "",
    )


def read_steps(package: Package) -> tuple[Step, ...]:
    """The steps that every usable package has behind it."""
    contracts = ", ".join(f"{name} {version}" for name, version in package.descriptor.contracts.items())
    return (Step("found", True, f"{package.distribution} {package.version}"), Step("contracts", True, contracts))


def unusable(catalog: Catalog) -> tuple[Candidate, ...]:
    """The records of packages that are broken or disabled."""
    return (*map(_broken, catalog.problems), *map(_disabled, catalog.disabled))


def catalog_report(catalog: Catalog) -> Report:
    """What is installed, before anything is probed or chosen (``evener plugins``)."""
    usable = tuple(candidate(package, "installed", "", read_steps(package)) for package in catalog.packages)
    return Report((*usable, *unusable(catalog)), warnings=catalog.warnings)


def error_text(error: BaseException) -> str:
    """The error's message and those of its causes, one a line."""
    lines = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        if str(error) not in lines[-1]:
            lines.append(f"caused by {type(error).__name__}: {error}")
    return "\n".join(lines)


def _broken(problem: Problem) -> Candidate:
    found = Step("found", problem.step != "found", f"{problem.distribution} {problem.version}")
    failed = Step(problem.step, False, error_text(problem.error))
    steps = (failed,) if problem.step == "found" else (found, failed)
    return candidate(problem, "broken", str(problem.error), steps)


def _disabled(origin: Disabled) -> Candidate:
    steps = (Step("found", True, f"{origin.distribution} {origin.version}"),)
    return candidate(origin, "disabled", origin.reason, steps)
