"""The probe of a vendor whose build of torch answers to the namespace ``cuda``. Torch-free when imported.

Such a build reports a value of its own in ``torch/version.py``. No single mark decides: containers hide device nodes,
and a value such as ``hip`` belongs to several vendors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from evener.backend.torch_marks import TorchMarks, read
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult

#: Distribution with the kernels that these backends run on.
KERNELS = "evener-kernels-triton"
#: Names of ``torch/version.py`` by which a build belongs to a vendor.
BUILD_VALUES = ("hip", "maca")


@dataclass(frozen=True, kw_only=True)
class Fork:
    """One vendor's build of torch and its marks.

    Attributes:
        vendor: the vendor's devices, in messages ("Hygon DCU").
        value: the name in ``torch/version.py`` that its builds set.
        version_tags: parts of ``torch.__version__`` that only its builds have ("+das").
        own_value: whether no other vendor's builds set ``value``; otherwise a tag or a path of ``paths`` must be there.
        nodes: device nodes as patterns below ``/dev``; one of them must be there.
        paths: (optional) files or folders that only the vendor's driver or toolkit installs, from the root.
        pci_ids: see ``Marks.pci_ids``.
        visibility: variables that restrict the devices of a process; all that are set should have the same value.
        devices_hint: what to type so that a container sees the devices.
    """

    vendor: str
    value: str
    version_tags: tuple[str, ...]
    own_value: bool
    nodes: tuple[str, ...]
    paths: tuple[str, ...]
    pci_ids: tuple[str, ...]
    visibility: tuple[str, ...]
    devices_hint: str

    def marks(
        self, root: Path = Path("/"), torch: TorchMarks | None = None, environ: Mapping[str, str] | None = None
    ) -> Marks:
        """Whether this machine's torch is the vendor's build and a device node is there.

        Args:
            root: the folder that holds ``dev`` and ``opt``.
            torch: what the installed torch reports; default: read it.
            environ: default ``os.environ``.
        """
        torch, environ = torch or read(), os.environ if environ is None else environ
        key = {name: environ[name] for name in self.visibility if name in environ}
        found = [f"/dev/{pattern}" for pattern in self.nodes if any((root / "dev").glob(pattern))]
        reason = self._refusal(root, torch) or ("" if found else self._no_node(torch))
        if reason:
            return Marks(False, (reason,), self.pci_ids, key)
        seen = ", ".join([f"torch {torch.version}", *found, *self._paths(root)])
        return Marks(True, (seen, *self._disagreement(key)), self.pci_ids, key)

    def _refusal(self, root: Path, torch: TorchMarks) -> str:
        """Why the torch that is installed is not this vendor's; empty if it is."""
        if torch.version is None:
            return torch.reason
        others = [name for name in BUILD_VALUES if name != self.value and torch.values.get(name)]
        tagged = any(tag in torch.version for tag in self.version_tags)
        mine = bool(torch.values.get(self.value)) or (self.own_value and tagged)
        if mine and others:
            return (
                f"torch {torch.version} reports both {self.value} and {others[0]}, which are builds of two vendors; "
                "reinstall one vendor's torch"
            )
        if not mine:
            return f"torch {torch.version} is not a build for {self.vendor}: torch.version.{self.value} is not set"
        if not (self.own_value or tagged or self._paths(root)):
            return (
                f"torch {torch.version} sets torch.version.{self.value}, which other vendors' builds set too, and "
                f"nothing else here is of {self.vendor}: no {' or '.join(self.version_tags)} in the version, no "
                f"{', '.join('/' + path for path in self.paths)}"
            )
        return ""

    def _paths(self, root: Path) -> list[str]:
        return [f"/{path}" for path in self.paths if (root / path).exists()]

    def _no_node(self, torch: TorchMarks) -> str:
        nodes = " or ".join(f"/dev/{pattern}" for pattern in self.nodes)
        return f"torch {torch.version} is a build for {self.vendor}, but there is no {nodes}; {self.devices_hint}"

    def _disagreement(self, given: Mapping[str, str]) -> tuple[str, ...]:
        """Advice where only some of the visibility variables are set, or they differ."""
        if not given or (len(given) == len(self.visibility) and len(set(given.values())) == 1):
            return ()
        words = ", ".join(f"{name}={given[name]}" if name in given else f"{name} unset" for name in self.visibility)
        return (f"advice: {words}; give all of them the same value, because libraries read different ones",)


def probe_fork(
    fork: Fork, name_fault: Callable[[object], str | None], advice: Callable[[Mapping[str, str]], tuple[str, ...]]
) -> ProbeResult:
    """Ask the fork's runtime for its devices. Imports torch; runs in the probe's child process.

    Args:
        name_fault: takes what ``torch.cuda.get_device_properties`` returns; why such a device cannot be used, or None.
        advice: takes the environment; lines that ``evener doctor`` shows.
    """
    import torch

    if not torch.cuda.is_available():
        return ProbeResult(
            0, reasons=(f"torch {torch.__version__} sees no device: the driver may not fit, or {fork.devices_hint}",)
        )
    devices, reasons = [], [f"torch {torch.__version__}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        fault = name_fault(properties)
        if fault:
            reasons.append(f"device {index} ({properties.name}): {fault}")
        else:
            devices.append(ProbedDevice(index, properties.name, properties.total_memory))
    reasons += [*missing_kernels(), *advice(os.environ)]
    return ProbeResult(100 if devices else 0, tuple(devices), tuple(dict.fromkeys(reasons)))


def missing_kernels() -> tuple[str, ...]:
    """Advice if the portable kernels are not installed. They are no requirement of a fork's package: pip would replace
    the vendor's Triton by one that does not know the device."""
    try:
        version(KERNELS)
    except PackageNotFoundError:
        return (f"advice: ops run on the slow reference; type pip install --no-deps {KERNELS}",)
    return ()


def unset(environ: Mapping[str, str], wanted: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """Advice for variables that do not have the wanted value: ``{name: (value, reason)}``."""
    return tuple(
        f"advice: {name}={value} {reason}" for name, (value, reason) in wanted.items() if environ.get(name) != value
    )
