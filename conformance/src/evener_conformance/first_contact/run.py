"""All parts of first contact, and the evidence that comes of them. Torch-free."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import importlib_metadata

from evener.errors import ConfigError
from evener_conformance.first_contact.child import Task
from evener_conformance.first_contact.evidence_file import FORMAT, Evidence, Level, Part, Timing, Wheel
from evener_conformance.first_contact.journal import Journal, RunIdentity, open_journal
from evener_conformance.first_contact.parallel import ParallelParts, run_or_recall, start_checks
from evener_conformance.first_contact.parts import NEEDED_FOR_A_LEVEL, PARTS, PlannedPart
from evener_conformance.first_contact.private_data import Redactor
from evener_conformance.first_contact.supervisor import Findings
from evener_conformance.first_contact.wheel import installed_wheel


@dataclass(frozen=True)
class ContactRequest:
    """What a run does.

    Attributes:
        backend: its name.
        pretend: without the hardware, as ``evener conformance --pretend``.
        options: options of packages, by package name.
        parts: names of parts; all if empty.
        silence: seconds that one check may take.
        jobs: processes at a time that check kernels; with 1, a part's checks share a process.
        out: the evidence file; the journal is written beside it.
        resume: keep what an interrupted run found.
        command: what was typed.
    """

    backend: str
    pretend: bool
    options: Mapping[str, Mapping[str, str]]
    parts: frozenset[str]
    silence: float
    seed: int
    jobs: int
    out: Path
    resume: bool
    command: str


def first_contact(request: ContactRequest, say: Callable[[str], None]) -> Evidence:
    """Run the parts, each in a process of its own or in several.

    Raises:
        ConfigError: the backend is not installed, a part has another name, or the journal cannot be used.
    """
    names = [each.name for each in PARTS]
    if unknown := sorted(request.parts - set(names)):
        raise ConfigError(f"--part {unknown[0]}: there is no such part; the parts are {', '.join(names)}")
    redact, done, found = Redactor(), dict[str, Part](), dict[str, Findings]()
    wheel: Wheel | None = None
    # The first part finds the backend, which nothing else can do without; the device's part lists the checks.
    needed = {"packages", "device"} if request.jobs > 1 else {"packages"}
    parts = [each for each in PARTS if not request.parts or each.name in request.parts | needed]
    with ExitStack() as stack:
        running: ParallelParts | None = None
        journal: Journal | None = None
        for planned in parts:
            say(f"{planned.name}: {planned.summary} … ")
            part, findings = _one(request, planned, done, redact, running, journal)
            done[planned.name] = part
            if findings is not None:
                found[planned.name] = findings
            why = _describe_failure(part)
            say(f"{part.outcome}, {part.seconds:.0f} s{why}\n")
            if planned.name == "packages" and findings is not None:
                name = findings.facts["fact"].get("distribution")
                if name is None:
                    raise ConfigError(part.detail or f"no backend {request.backend!r} is installed")
                wheel = installed_wheel(name)
                journal = stack.enter_context(open_journal(request.out, _identity(request, wheel), request.resume))
            if planned.name == "device" and findings is not None and part.counts.get("passed") and request.jobs > 1:
                assert journal is not None, "the first part opens it"
                # A run of one process at a time may have ended the part.
                left = [each for each in parts if each.area and each.name not in done]
                areas = [each.area for each in left if journal.find(_task(request, each)) is None]
                common, listed = _task(request, planned), findings.listed
                running = stack.enter_context(
                    start_checks(common, areas, listed, request.jobs, request.silence, redact, journal)
                )
    assert wheel is not None
    return _evidence(request, wheel, done, found, redact)


def _task(request: ContactRequest, planned: PlannedPart) -> Task:
    options = {name: dict(values) for name, values in request.options.items()}
    return Task(planned.name, planned.area, request.backend, request.pretend, options, request.seed)


def _one(
    request: ContactRequest, planned: PlannedPart, done: Mapping[str, Part], redact: Redactor,
    running: ParallelParts | None, journal: Journal | None,
) -> tuple[Part, Findings | None]:  # fmt: skip
    for name in planned.needs:
        before = done.get(name)
        # A part with some right cases says that its subject works at all.
        if before is not None and before.outcome in ("failed", "not run") and not before.counts.get("passed"):
            return Part(planned.name, "not run", 0.0, f"it needs the part {name!r}"), None
    if running is not None and planned.name in running:
        return running.wait(planned.name)
    return run_or_recall(_task(request, planned), request.silence, redact, journal)


def _describe_failure(part: Part) -> str:
    """Why a part failed; of wrong cases the first."""
    if part.outcome != "failed":
        return ""
    wrong = next((each for each in part.cases if each.outcome == "failed"), None)
    case = wrong and f"{wrong.provider} {wrong.subject}[{wrong.dtype}] {wrong.case}: {wrong.detail[:300]}"
    return "".join(f": {text}" for text in (part.detail, case) if text)


def _versions() -> dict[str, str]:
    versions = {name: importlib_metadata.version(name) for name in ("evener", "evener-conformance")}
    return versions | {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}


def _identity(request: ContactRequest, wheel: Wheel) -> RunIdentity:
    options = {name: dict(values) for name, values in request.options.items()}
    return RunIdentity(request.backend, request.pretend, options, request.seed, wheel.sha256, _versions())


def _evidence(
    request: ContactRequest, wheel: Wheel, parts: Mapping[str, Part], found: Mapping[str, Findings], redact: Redactor
) -> Evidence:
    versions = _versions()
    device, timings, claimed, simulated = dict[str, str](), tuple[Timing, ...](), "", False
    for findings in found.values():
        versions |= findings.facts["version"]
        device |= {name: text for name, text in findings.facts["fact"].items() if name != "distribution"}
        device |= findings.facts["device"]
        timings += tuple(findings.timings)
        if findings.level[0]:
            claimed, simulated = findings.level
    return Evidence(
        format=FORMAT, backend=request.backend, wheel=wheel, level=_level(claimed, parts, request.pretend),
        date=datetime.now(timezone.utc).date().isoformat(), seed=request.seed, simulated=simulated,
        pretended=request.pretend, versions=versions, device=device, command=redact(request.command, 500),
        parts=tuple(parts.values()), timings=timings,
    )  # fmt: skip


def _level(claimed: str, parts: Mapping[str, Part], pretended: bool) -> Level:
    """The level that the run reached: none unless every part that is needed passed, and none failed."""
    needed = [name for name in NEEDED_FOR_A_LEVEL if not (pretended and name == "engine")]
    if any(name not in parts or parts[name].outcome != "passed" for name in needed):
        return ""
    if any(part.outcome in ("failed", "not run") for part in parts.values()):
        return ""
    return "L5" if claimed == "L5" else "L3" if claimed == "L3" else ""
