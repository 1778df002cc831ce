"""The probe: device nodes and an installed torch_gcu as marks; then torch_gcu in a child process. Torch-free."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from evener.backend.torch_marks import TorchMarks, read
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.errors import BackendError

#: The extension of torch. Never its submodule ``transfer_to_gcu``: that rewrites ``torch.cuda`` for the whole process.
EXTENSION = "torch_gcu"
VISIBILITY = ("TOPS_VISIBLE_DEVICES", "ENFLAME_VISIBLE_DEVICES")
_BUS = ("1e36:*",)
#: Values of ``torch/version.py`` by which a build belongs to another vendor.
_FORKS = ("hip", "maca")


def marks(root: Path = Path("/"), torch: TorchMarks | None = None, installed: bool | None = None) -> Marks:
    """A device node, a torch that is no other vendor's build, and the extension.

    Args:
        root: the folder that holds ``dev``.
        torch: what the installed torch reports; default: read it.
        installed: whether torch_gcu is installed; default: look.
    """
    torch = torch or read()
    nodes = sorted(path.name for path in (root / "dev").glob("gcu[0-9]*"))
    key = {name: os.environ[name] for name in VISIBILITY if name in os.environ}
    reason = _refusal(nodes, torch, find_spec(EXTENSION) is not None if installed is None else installed)
    if reason:
        return Marks(False, (reason,), _BUS, key)
    return Marks(True, (f"/dev/{nodes[0]}, torch {torch.version}, {EXTENSION} is installed",), _BUS, key)


def _refusal(nodes: list[str], torch: TorchMarks, installed: bool) -> str:
    if not nodes:
        return "no /dev/gcu0" + (
            f", though {EXTENSION} is installed: load the driver (efsmi lists the cards), or give the container its "
            "devices: docker run --device=/dev/gcu0 --device=/dev/gcuctl"
            if installed
            else ""
        )
    if torch.version is None:
        return f"/dev/{nodes[0]} is there, but {torch.reason}"
    fork = next((name for name in _FORKS if torch.values.get(name)), None)
    if fork:
        return f"/dev/{nodes[0]} is there, but torch {torch.version} is another vendor's build ({fork})"
    if not installed:
        return f"/dev/{nodes[0]} is there, but {EXTENSION} is not installed; install the one of your TopsRider release"
    return ""


def probe() -> ProbeResult:
    """Import the extension and list the devices.

    Raises:
        BackendError: the extension does not import.
    """
    import torch

    import_extension()
    module = torch.get_device_module("gcu")
    if not module.is_available():
        return ProbeResult(0, reasons=(f"torch {torch.__version__}, but {EXTENSION} sees no device",))
    devices = tuple(
        ProbedDevice(index, str(module.get_device_name(index)), int(module.get_device_properties(index).total_memory))
        for index in range(module.device_count())
    )
    return ProbeResult(100, devices, (f"torch {torch.__version__}", *advice(os.environ)))


def import_extension() -> None:
    """Import torch_gcu, which registers the namespace ``gcu``.

    Raises:
        BackendError: it is missing, or was built for another torch or TopsRider.
    """
    try:
        importlib.import_module(EXTENSION)
    except (ImportError, OSError) as error:
        raise BackendError(
            f"{EXTENSION} does not import ({error}); install the TopsRider, torch and {EXTENSION} of one release"
        ) from error


def advice(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Settings that ``evener doctor`` recommends."""
    lines = []
    if environ.get("TORCH_ECCL_AVOID_RECORD_STREAMS") != "1":
        lines.append("advice: TORCH_ECCL_AVOID_RECORD_STREAMS=1 lets several ranks reuse memory sooner")
    if environ.get("TORCHGCU_INDUCTOR_ENABLE") != "0":
        lines.append("advice: TORCHGCU_INDUCTOR_ENABLE=0, as the vendor's own engine requires")
    return tuple(lines)
