"""Choosing one backend, and the packages whose needs it serves. It warns about accelerators that no
installed backend supports: they are found on the PCI bus by their device class, not by their vendor."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evener.contracts.probe import ProbeResult
from evener.errors import BackendError, EvenerError, NoBackendError, ProbeError, did_you_mean
from evener.plugins.catalog import Catalog, Package
from evener.plugins.discover import NAME
from evener.plugins.probe import ProbeOutcome, ProbeRun, read_attribute
from evener.plugins.report import PackageRecord, Report, Step, error_text, package_record, read_steps, unusable

#: Added to the message about a package that is not used, while the start goes on.
_LEFT_OUT = " (it was left out)"
SYSFS = Path("/sys/bus/pci")
_DISPLAY, _COMPUTE = "0x0300", ("0x0302", "0x1200")
# A server's management controller is a display controller too, with a frame buffer of tens of MiB; accelerators map
# at least this many bytes.
_SMALLEST_APERTURE = 256 << 20


@dataclass(frozen=True)
class Selection:
    """What a run uses.

    Attributes:
        backend: the primary backend.
        packages: the kernel, graph, collective and plugin packages whose needs the backend serves, in the catalog's
            order.
        probe: the backend's answer.
        reason: why it was chosen, in words.
        report: every step of every candidate.
    """

    backend: Package
    packages: tuple[Package, ...]
    probe: ProbeResult
    reason: str
    report: Report

    @property
    def all_packages(self) -> tuple[Package, ...]:
        """The backend, then ``packages``."""
        return (self.backend, *self.packages)


@dataclass(frozen=True)
class Assessment:
    """The result of choosing: a selection, or the error that says why there is none; and a report in both cases."""

    report: Report
    selection: Selection | None = None
    error: EvenerError | None = None


def requested_backend(requested: str | None, environ: Mapping[str, str] | None = None) -> tuple[str | None, str]:
    """The backend that was asked for and the option that did so (the argument goes before ``EVENER_BACKEND``);
    (None, "") if none was."""
    environ = os.environ if environ is None else environ
    if requested:
        return requested, f"backend={requested}"
    named = environ.get("EVENER_BACKEND", "").strip()
    return (named, f"EVENER_BACKEND={named}") if named else (None, "")


def choose(
    catalog: Catalog, requested: str | None = None, *, probes: ProbeRun | Mapping[str, ProbeOutcome] | None = None,
    environ: Mapping[str, str] | None = None, pci_root: Path = SYSFS,
) -> Selection:  # fmt: skip
    """Choose a backend: the one that was asked for, otherwise the one with the highest score.

    Args:
        catalog: what is installed.
        requested: ``--backend``.
        probes: probes already started with ``ProbeRun.start``, or their results; default: run them now.
        environ: where ``EVENER_BACKEND`` is read; default ``os.environ``.
        pci_root: where the PCI bus is read, for the warning about accelerators that no installed backend supports.

    Raises:
        NoBackendError: the backend that was asked for is not installed, is disabled or cannot run here; or none can.
        ProbeError: a backend's hardware seems to be here but its probe failed, and no other backend was asked for.
        BackendError: two backends have the highest score.
        PluginError: the descriptor of the backend that was asked for cannot be used; with the cause.
    """
    assessment = assess(catalog, requested, probes=probes, environ=environ, pci_root=pci_root)
    if isinstance(assessment.error, ProbeError):  # callers of `assess` show the steps themselves
        raise ProbeError(f"{assessment.error}; `evener doctor --fresh` shows its steps") from assessment.error.__cause__
    if assessment.selection is None:
        assert assessment.error is not None, "an assessment has a selection or an error"
        raise assessment.error
    return assessment.selection


def assess(
    catalog: Catalog, requested: str | None = None, *, probes: ProbeRun | Mapping[str, ProbeOutcome] | None = None,
    environ: Mapping[str, str] | None = None, pci_root: Path = SYSFS,
) -> Assessment:  # fmt: skip
    """As ``choose``, but the error is returned with the report, not raised; for ``evener doctor``."""
    name, source = requested_backend(requested, environ)
    if probes is None:
        probes = ProbeRun.start(catalog.backends, only=name, environ=environ)
    probed = probes.result() if isinstance(probes, ProbeRun) else probes
    warnings = _warnings(catalog, probed, pci_root)
    try:
        chosen, result, reason = _named(catalog, probed, name, source) if name else _highest(catalog, probed)
    except EvenerError as error:
        records = _records(catalog, probed, None, "")
        # A warning that repeats the error is left out.
        warnings = tuple(line for line in warnings if line.removesuffix(_LEFT_OUT) not in str(error))
        return Assessment(Report(records, warnings=warnings, error=error_text(error)), error=error)
    records = _records(catalog, probed, chosen, reason)
    report = Report(records, chosen.name, reason, warnings)
    others = tuple(package for package in catalog.packages if package is not chosen and _refusal(package, chosen) == "")
    return Assessment(report, Selection(chosen, others, result, reason, report))


def _named(
    catalog: Catalog, probed: Mapping[str, ProbeOutcome], name: str, source: str
) -> tuple[Package, ProbeResult, str]:
    package = next((each for each in catalog.backends if each.name == name), None)
    if package is None:
        raise _not_usable(catalog, name, source)
    probe = probed[name]
    if probe.error is not None:
        raise ProbeError(f"{source}: {probe.error}; {_what_to_type(probe)}") from probe.error.__cause__
    if probe.marks is None or not probe.marks.fit:
        raise NoBackendError(
            f"{source}: {package} does not find its hardware here: {_reasons(probe)}; "
            f"type `evener doctor` to see every backend's reasons"
        )
    if probe.result is None:
        raise ValueError(f"{package} was not probed: start the probes with only={name!r} or without `only`")
    if probe.result.score == 0:
        raise NoBackendError(f"{source}: {package} cannot run here: {_reasons(probe)}; {_what_to_type(probe)}")
    return package, probe.result, f"named by {source}"


def _not_usable(catalog: Catalog, name: str, source: str) -> EvenerError:
    for problem in catalog.problems:
        if problem.group == "evener.backends" and problem.name == name:
            return problem.error
    for disabled in catalog.disabled:
        if disabled.group == "evener.backends" and disabled.name == name:
            return NoBackendError(f"{source}: {disabled} is installed but disabled: {disabled.reason}")
    installed = [package.name for package in catalog.backends]
    typed = name.lower()
    install = f"; or type: pip install evener-backend-{typed}" if NAME.fullmatch(typed) else ""
    near = did_you_mean(name, installed)
    if near.endswith("?"):
        install = install.replace("; or type", " Or type")
    return NoBackendError(f"{source}: no backend {name!r} is installed{near}{install}")


def _highest(catalog: Catalog, probed: Mapping[str, ProbeOutcome]) -> tuple[Package, ProbeResult, str]:
    failed = [(probe, probe.error) for probe in probed.values() if probe.hardware_seen and probe.error is not None]
    if failed:
        first, error = failed[0]
        also = "".join(f"; also {other}" for _, other in failed[1:])
        raise ProbeError(f"{error}, but its hardware is here{also}; {_what_to_type(first)}") from error.__cause__
    able = [
        (package, result)
        for package in catalog.backends
        if (result := probed[package.name].result) is not None and result.score > 0
    ]
    if not able:
        raise _none_able(catalog, probed)
    top = max(result.score for _, result in able)
    best = [(package, result) for package, result in able if result.score == top]
    if len(best) > 1:
        names = " and ".join(str(package) for package, _ in best)
        raise BackendError(
            f"{names} both fit this machine (score {top}); choose one with --backend {best[0][0].name} "
            f"or EVENER_BACKEND={best[0][0].name}"
        )
    package, result = best[0]
    over = [f"{other.name} {other_result.score}" for other, other_result in able if other is not package]
    reason = f"highest score {top}" + (f" over {', '.join(over)}" if over else "")
    return package, result, reason + (f": {'; '.join(result.reasons)}" if result.reasons else "")


def _none_able(catalog: Catalog, probed: Mapping[str, ProbeOutcome]) -> NoBackendError:
    lines = [f"{package}: {_reasons(probed[package.name])}" for package in catalog.backends]
    lines += [str(problem.error) for problem in catalog.problems if problem.group == "evener.backends"]
    lines += [f"{each}: {each.reason}" for each in catalog.disabled if each.group == "evener.backends"]
    install = "install the one for your hardware (pip install evener-backend-<name>), or evener-backend-cpu"
    if not lines:
        return NoBackendError(f"no backend is installed; {install}")
    error = NoBackendError(f"no installed backend can run here; {install}\n  " + "\n  ".join(lines))
    causes = [probe.error for probe in probed.values() if probe.error is not None]
    causes += [problem.error for problem in catalog.problems if problem.group == "evener.backends"]
    error.__cause__ = causes[0] if causes else None
    return error


def _what_to_type(probe: ProbeOutcome) -> str:
    return f"name another backend with --backend, or uninstall {probe.package.distribution}"


def _reasons(probe: ProbeOutcome) -> str:
    """The reasons that a probe gave for its answer."""
    if probe.error is not None:
        return str(probe.error)
    said = probe.result.reasons if probe.result is not None else probe.marks.reasons if probe.marks else ()
    return "; ".join(said) or probe.note or "it gave no reason"


def _warnings(catalog: Catalog, probed: Mapping[str, ProbeOutcome], pci_root: Path) -> tuple[str, ...]:
    lines = list(catalog.warnings)
    lines += [f"{problem.error}{_LEFT_OUT}" for problem in catalog.problems]
    for probe in probed.values():
        if probe.error is not None:
            lines.append(f"{probe.error}{_LEFT_OUT}")
        elif probe.result is not None and probe.result.score == 0:
            lines.append(f"{probe.package}: its hardware seems to be here, but it cannot run: {_reasons(probe)}")
    claims = [claim for probe in probed.values() if probe.marks is not None for claim in probe.marks.pci_ids]
    alone = unclaimed(accelerators(pci_root), claims)
    if alone:
        shown = ", ".join(f"{device.ident} at {device.address}" for device in alone)
        lines.append(f"no installed backend supports {shown}; install its vendor's package, evener-backend-<name>")
    return tuple(lines)


def _refusal(package: Package, backend: Package) -> str:
    """Why ``package`` cannot be used with ``backend``; empty if it can."""
    if package.group == "evener.backends":
        return f"backend {backend.name!r} was chosen"
    missing = sorted(package.descriptor.needs - backend.descriptor.serves)
    return f"needs {', '.join(missing)}, which backend {backend.name!r} does not serve" if missing else ""


def _records(
    catalog: Catalog, probed: Mapping[str, ProbeOutcome], chosen: Package | None, reason: str
) -> tuple[PackageRecord, ...]:
    records: list[PackageRecord] = []
    for package in catalog.packages:
        if package.group == "evener.backends":
            records.append(_backend_record(package, probed[package.name], chosen, reason))
        elif chosen is None:
            records.append(package_record(package, "refused", "no backend was chosen", read_steps(package)))
        else:
            refusal = _refusal(package, chosen)
            served = f"all its needs are served by {chosen.name!r}"
            steps = (*read_steps(package), Step("needs", not refusal, refusal or served))
            records.append(package_record(package, "refused" if refusal else "chosen", refusal or served, steps))
    return (*records, *unusable(catalog))


def _backend_record(package: Package, probe: ProbeOutcome, chosen: Package | None, reason: str) -> PackageRecord:
    steps = [*read_steps(package)]
    if probe.marks is None:
        steps.append(Step("marks", False, error_text(probe.error) if probe.error else ""))
    else:
        steps.append(Step("marks", probe.marks.fit, "; ".join(probe.marks.reasons)))
        if probe.marks.fit:
            steps.append(_probe_step(probe))
    devices = probe.result.devices if probe.result is not None else ()
    shown = tuple(f"{each.index}: {each.name} ({each.memory / 2**30:.1f} GiB)" for each in devices)
    if package is chosen:
        return package_record(package, "chosen", reason, tuple(steps), shown)
    able = probe.result is not None and probe.result.score > 0
    why = _refusal(package, chosen) if chosen is not None and able else "" if able else _reasons(probe)
    return package_record(package, "refused", why or "no backend was chosen", tuple(steps), shown)


def _probe_step(probe: ProbeOutcome) -> Step:
    if probe.error is not None:
        return Step("probe", False, error_text(probe.error))
    if probe.result is None:
        return Step("probe", False, probe.note)
    how = {"marks": "from its marks", "cache": "cached answer"}.get(probe.source, f"{probe.seconds:.1f} s")
    parts = [f"score {probe.result.score} ({how})", *probe.result.reasons, *([probe.note] if probe.note else [])]
    return Step("probe", probe.result.score > 0, "; ".join(parts))


@dataclass(frozen=True)
class PciDevice:
    """One device: ``address`` (``0000:17:00.0``) and ``ident`` (``vendor:device`` in lower-case hex)."""

    address: str
    ident: str


def accelerators(root: Path = SYSFS) -> tuple[PciDevice, ...]:
    """Display, 3D and processing accelerators, by address; empty where there is no PCI bus to read.

    Args:
        root: the folder that holds ``devices``.
    """
    found: list[PciDevice] = []
    for folder in sorted(root.glob("devices/*")):
        kind = read_attribute(folder / "class")[:6]
        if kind in _COMPUTE or (kind == _DISPLAY and _largest_aperture(folder) >= _SMALLEST_APERTURE):
            ident = ":".join(read_attribute(folder / name).removeprefix("0x").lower() for name in ("vendor", "device"))
            found.append(PciDevice(folder.name, ident))
    return tuple(found)


def unclaimed(devices: Iterable[PciDevice], claims: Iterable[str]) -> tuple[PciDevice, ...]:
    """The devices that match no claim; a claim is ``vendor:device``, where ``*`` stands for anything."""
    claims = tuple(claim.lower() for claim in claims)
    return tuple(device for device in devices if not any(fnmatch.fnmatchcase(device.ident, claim) for claim in claims))


def _largest_aperture(folder: Path) -> int:
    """Bytes of the largest memory range; a device that does not list its ranges may be anything, so it counts."""
    lines = read_attribute(folder / "resource").splitlines()
    sizes = [int(end, 16) - int(start, 16) + 1 for start, end, *_ in (line.split() for line in lines if line.strip())]
    return max(sizes, default=_SMALLEST_APERTURE)
