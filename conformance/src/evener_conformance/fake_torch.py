"""Fake builds of torch that use another vendor's namespace, as forked builds do: a fake torch package that probes read
and import, and a backend that recognizes its marks.

Core names no vendor, so each test gives its own namespace and marks: ``FakeTorch(namespace=…, marks={…})``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evener_conformance.distributions import write_distribution

_TORCH = """
from types import SimpleNamespace

from torch import version
from torch.version import __version__


class _Namespace:
    devices = {devices!r}

    def is_available(self):
        return bool(self.devices)

    def device_count(self):
        return len(self.devices)

    def get_device_name(self, index=0):
        return self.devices[index][0]

    def get_device_properties(self, index=0):
        name, memory = self.devices[index]
        return SimpleNamespace(**{{"name": name, "total_memory": memory, "major": 9, "minor": 0, **{properties!r}}})


{namespace} = _Namespace()
"""

_BACKEND = """
from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name={name!r}, summary="A forked torch; for tests.", contracts={{"probe": 2, "device": 2}}, probe="{package}.probe",
    module="{package}.plugin", serves=frozenset({{"namespace:{namespace}"}}),
)
"""

_PROBE = """
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.backend.torch_marks import read


def marks():
    torch = read()
    wanted = {marks!r}
    found = [f"torch.version.{{name}} is {{torch.values[name]}}" for name in wanted if torch.values.get(name)]
    return Marks(bool(found), tuple(found) or (f"torch {{torch.version}} has none of {{', '.join(wanted)}}",))


def probe():
    import torch

    module = getattr(torch, {namespace!r})
    found = tuple(ProbedDevice(i, module.get_device_name(i), module.get_device_properties(i).total_memory)
                  for i in range(module.device_count()))
    return ProbeResult({score} if module.is_available() else 0, found, (f"torch {{torch.__version__}}",))
"""


@dataclass(frozen=True, kw_only=True)
class FakeTorch:
    """What a build of torch reports.

    Attributes:
        namespace: the module of torch that it uses.
        version: ``torch.__version__``.
        marks: further assignments in ``torch/version.py`` that identify the build.
        devices: (name, bytes of memory) of each.
        properties: what every device's properties report besides these.
    """

    namespace: str
    version: str
    marks: Mapping[str, str | None] = field(default_factory=dict)
    devices: tuple[tuple[str, int], ...] = (("a forked chip", 64 << 30),)
    properties: Mapping[str, str | int] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the fake package as ``folder/torch``. With ``folder`` first in PYTHONPATH, a new process and its
        probes' child processes find this torch only. Returns the package's folder."""
        package = folder / "torch"
        package.mkdir(parents=True)
        lines = [f"{name} = {value!r}" for name, value in {"__version__": self.version, **self.marks}.items()]
        (package / "version.py").write_text("\n".join(lines) + "\n")
        values = {"namespace": self.namespace, "devices": self.devices, "properties": dict(self.properties)}
        (package / "__init__.py").write_text(_TORCH.format(**values))
        return package


def install_vendor_fork_backend(
    folder: Path, name: str, namespace: str, marks: tuple[str, ...], score: int = 100
) -> Path:
    """Install a vendor's backend for such a torch: its marks fit if ``torch/version.py`` sets one of ``marks``. It can
    be chosen, but its device does not exist. Returns the ``.dist-info``."""
    package = f"evener_backend_{name}"
    (folder / package).mkdir(parents=True)
    values = {"name": name, "package": package, "namespace": namespace, "marks": marks, "score": score}
    for file, text in (("__init__", _BACKEND), ("probe", _PROBE)):
        (folder / package / f"{file}.py").write_text(text.format(**values))
    return write_distribution(folder, f"evener-backend-{name}", {"evener.backends": {name: f"{package}:descriptor"}})
