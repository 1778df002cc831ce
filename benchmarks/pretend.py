"""A backend that starts on GPUs that are not its vendor's: to check that its package needs nothing of its vendor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from evener_conformance.distributions import write_distribution

_MODULE = """
from dataclasses import replace

from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener_backend_{name} import descriptor as own

descriptor = replace(own, probe=__name__)


def marks():
    # The file's name is new each time: no cached answer of another run is taken.
    return Marks(True, ("pretended: these are not its vendor's devices",), (), {{"module": __file__}})


def probe():
    import torch

    found = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    devices = tuple(ProbedDevice(index, torch.cuda.get_device_name(index)) for index in found)
    return ProbeResult(100 if devices else 0, devices, (f"torch sees {{len(devices)}} devices",))
"""


def pretend(name: str, folder: Path) -> None:
    """Put an entry point of the backend ``name`` before that of its installed package, for this process and those that
    it starts. Its probe takes every GPU of torch's namespace ``cuda``; all else is the package's own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"pretended_{name}.py").write_text(_MODULE.format(name=name))
    points = {"evener.backends": {name: f"pretended_{name}:descriptor"}}
    write_distribution(folder, f"evener-backend-{name}", points)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
