"""For tests of plugin discovery: temporary packages with real metadata and real modules, in a folder on ``sys.path``,
and the steps of start-up over them alone."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from evener.plugins.catalog import Catalog
from evener.plugins.choose import Selection, choose
from evener.plugins.discover import discover
from evener.plugins.load import LoadedPackages, load
from evener.plugins.probe import ProbeCache, ProbeRun

#: Group of entry points and contract versions of each kind of package.
GROUP_OF = {
    "backend": "evener.backends", "kernels": "evener.kernels", "graphs": "evener.graphs",
    "collectives": "evener.collectives", "plugin": "evener.plugins",
}  # fmt: skip
CONTRACTS = {
    "backend": '"probe": 2, "device": 2', "kernels": '"ops": 2', "graphs": '"graph": 1',
    "collectives": '"communicator": 2', "plugin": "",
}  # fmt: skip

DEVICE = """
from evener.contracts.device import DeviceCapabilities
from evener.contracts.hooks import hookimpl

class Chip:
    torch_device, capabilities = "cpu", DeviceCapabilities()

    def __init__(self, index):
        self.name = f"device {index}"

@hookimpl
def evener_device(index, options):
    return Chip(index)
"""

MARKS_FIT = """
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult

def marks():
    return Marks(True, ("its device node is there",))
"""


class Site:
    """A folder that packages are installed into, and the steps of start-up over it alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = ProbeCache(folder / "cache", boot_id="this boot")

    def add(
        self,
        kind: str,
        name: str,
        fields: str = "",
        *,
        module: str | None = None,
        probe: str | None = None,
        contracts: str | None = None,
        init: str | None = None,
        distribution: str | None = None,
        import_name: str | None = None,
    ) -> str:
        """Install a package; returns its distribution's name.

        Args:
            kind: backend, kernels, graphs, collectives or plugin.
            name: of the entry point and the descriptor.
            fields: more fields of the descriptor, as source; ``{pkg}`` is the import name.
            module: source of the hooks' module; a backend's default opens a device. Other kinds: none.
            probe: source of the probe module; a backend's default is a score of 100 from marks.
            contracts: entries of the descriptor's ``contracts``.
            init: the whole source of the package's ``__init__`` instead of a descriptor.
        """
        distribution = distribution or f"dist-{name}"
        pkg = import_name or distribution.replace("-", "_").replace(".", "_")
        home = self.folder / pkg
        home.mkdir()
        if kind == "backend":
            module = DEVICE if module is None else module
            probe = score_of(100) if probe is None else probe
            fields = f'probe="{pkg}.probe", {fields}'
        if module is not None:
            (home / "plugin.py").write_text(textwrap.dedent(module))
            fields = f'module="{pkg}.plugin", {fields}'
        if probe is not None:
            (home / "probe.py").write_text(textwrap.dedent(probe))
        fields = fields.replace("{pkg}", pkg)
        contracts = CONTRACTS[kind] if contracts is None else contracts
        (home / "__init__.py").write_text(
            "from evener.contracts.descriptor import Descriptor, Option\n"
            f'descriptor = Descriptor(name="{name}", summary="A test.", contracts={{{contracts}}}, {fields})\n'
            if init is None
            else init
        )
        info = self.folder / f"{pkg}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP_OF[kind]}]\n{name} = {pkg}:descriptor\n")
        importlib.invalidate_caches()
        return distribution

    def discover(self, **environ: str) -> Catalog:
        return discover(path=[str(self.folder)], environ=environ)

    def probe(self, *, fresh: bool = False, timeout: float | None = None, only: str | None = None) -> ProbeRun:
        catalog = self.discover()
        return ProbeRun.start(catalog.backends, fresh=fresh, timeout=timeout, only=only, environ={}, cache=self.cache)

    def choose(self, requested: str | None = None, *, timeout: float | None = None, **environ: str) -> Selection:
        catalog = self.discover(**environ)
        probes = ProbeRun.start(catalog.backends, only=requested, timeout=timeout, environ={}, cache=self.cache)
        return choose(catalog, requested, probes=probes, environ=environ, pci_root=self.folder / "no-pci")

    def load(self, options: Mapping[str, Mapping[str, Any]] | None = None, **environ: str) -> LoadedPackages:
        return load(self.choose(None, timeout=None, **environ), options)


def score_of(score: int, reason: str = "it is here") -> str:
    """Source of a probe whose marks give the result."""
    return f"""{MARKS_FIT}
def result_from_marks(marks):
    return ProbeResult({score}, (ProbedDevice(0, "a chip", 2**30),), ("{reason}",))
"""


def probing(body: str) -> str:
    """Source of a probe whose ``probe()`` is ``body``."""
    return f"{MARKS_FIT}\ndef probe():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty folder on ``sys.path``; what a test imports from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
    importlib.invalidate_caches()
