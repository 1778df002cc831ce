"""Host memory that reports a forked GPU's properties, with the vendor's own hooks: the whole engine runs as it would
there, and Triton's kernels are interpreted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evener_conformance.distributions import write_distribution

_MODULE = """
from dataclasses import replace

from evener.contracts.hooks import hookimpl
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener_backend_{vendor} import descriptor as own
from evener_backend_{vendor}.chips import capabilities
from evener_conformance.reference.device import HostDevice
{hooks}

descriptor = replace(own, module="{vendor}_on_host", probe="{vendor}_on_host")


def marks():
    return Marks(True, ("host memory",))


def result_from_marks(marks):
    return ProbeResult(1, (ProbedDevice(0, "host"),), ("it is simulated",))


class OnHost(HostDevice):
    def __init__(self):
        super().__init__(0)
        self.name = "host memory with the properties of {chip}"
        # What host memory cannot do stays off.
        self.capabilities = replace(capabilities({arguments}), host_memory=True, graphs=False)


@hookimpl
def evener_device(index, options):
    return OnHost()
"""
_CHIPS = {
    "hygon": ("gfx936", '"gfx936", 80', "from evener_backend_hygon.plugin import evener_state_providers"),
    "muxi": ("C550", '"C550", 104, 65536',
             "from evener_backend_muxi.plugin import evener_kernels, evener_state_providers"),
}  # fmt: skip


def install_on_host(vendor: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the vendor's backend over host memory, for this process and its children."""
    chip, arguments, hooks = _CHIPS[vendor]
    folder.mkdir(parents=True, exist_ok=True)
    text = _MODULE.format(vendor=vendor, chip=chip, arguments=arguments, hooks=hooks)
    (folder / f"{vendor}_on_host.py").write_text(text)
    write_distribution(
        folder, f"evener-backend-{vendor}", {"evener.backends": {vendor: f"{vendor}_on_host:descriptor"}}
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
