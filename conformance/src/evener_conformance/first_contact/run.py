"""All parts of first contact, and the evidence that comes of them. Torch-free."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

import importlib_metadata

from evener.errors import ConfigError
from evener_conformance.first_contact.child import Task
from evener_conformance.first_contact.evidence_file import FORMAT, Evidence, Level, Part, Timing, Wheel
from evener_conformance.first_contact.parts import NEEDED_FOR_A_LEVEL, PARTS, PlannedPart
from evener_conformance.first_contact.private_data import Redactor
from evener_conformance.first_contact.supervisor import Findings, run_part
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
        command: what was typed.
    """

    backend: str
    pretend: bool
    options: Mapping[str, Mapping[str, str]]
    parts: frozenset[str]
    silence: float
    seed: int
    command: str


def first_contact(request: ContactRequest, say: Callable[[str], None]) -> Evidence:
    """Run the parts one after another, each in a process of its own.

    Raises:
        ConfigError: the backend is not installed, or a part has another name.
    """
    names = [each.name for each in PARTS]
    if unknown := sorted(request.parts - set(names)):
        raise ConfigError(f"--part {unknown[0]}: there is no such part; the parts are {', '.join(names)}")
    redact, done, found = Redactor(), dict[str, Part](), dict[str, Findings]()
    wheel: Wheel | None = None
    for planned in PARTS:
        # The first part finds the backend, which nothing else can do without.
        if request.parts and planned.name not in request.parts and planned.needs:
            continue
        say(f"{planned.name}: {planned.summary} … ")
        part, findings = _one(request, planned, done, redact)
        done[planned.name] = part
        if findings is not None:
            found[planned.name] = findings
        why = f": {part.detail}" if part.outcome == "failed" and part.detail else ""
        say(f"{part.outcome}, {part.seconds:.0f} s{why}\n")
        if planned.name == "packages" and findings is not None:
            name = findings.facts["fact"].get("distribution")
            if name is None:
                raise ConfigError(part.detail or f"no backend {request.backend!r} is installed")
            wheel = installed_wheel(name)
    assert wheel is not None
    return _evidence(request, wheel, done, found, redact)


def _one(
    request: ContactRequest, planned: PlannedPart, done: Mapping[str, Part], redact: Redactor
) -> tuple[Part, Findings | None]:
    for name in planned.needs:
        before = done.get(name)
        # A part with some right cases says that its subject works at all.
        if before is not None and before.outcome in ("failed", "not run") and not before.counts.get("passed"):
            return Part(planned.name, "not run", 0.0, f"it needs the part {name!r}"), None
    options = {name: dict(values) for name, values in request.options.items()}
    task = Task(planned.name, planned.area, request.backend, request.pretend, options, request.seed)
    return run_part(task, request.silence, redact)


def _evidence(
    request: ContactRequest, wheel: Wheel, parts: Mapping[str, Part], found: Mapping[str, Findings], redact: Redactor
) -> Evidence:
    versions = {name: importlib_metadata.version(name) for name in ("evener", "evener-conformance")}
    versions |= {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
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
