"""The probe: device nodes and torch's build as marks; then NVML and torch in a child process. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from evener.backend.torch_marks import TorchMarks, read
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener_backend_cuda import nvml
from evener_backend_cuda.capability import MIN_CAPABILITY

#: Variables that restrict or reorder the GPUs that a process sees.
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
_BUS = ("10de:*",)
_DRIVER = Path("/proc/driver/nvidia/version")


def marks(dev: Path = Path("/dev"), driver: Path = _DRIVER, torch: TorchMarks | None = None) -> Marks:
    """A device node, and a torch that was built for this vendor and not for another one that uses the same
    namespace."""
    found = torch or read()
    nodes = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    version = driver.read_text().partition("\n")[0].strip() if driver.is_file() else ""
    key = {"driver": version, **{name: os.environ[name] for name in VISIBILITY if name in os.environ}}
    if not nodes and not (dev / "dxg").exists():  # WSL shows its GPUs behind one node
        return Marks(False, ("no /dev/nvidia0",), _BUS, key)
    reason = _refusal(found)
    if reason:
        return Marks(False, (reason,), _BUS, key)
    return Marks(True, (f"/dev/{nodes[0] if nodes else 'dxg'}, torch {found.version}",), _BUS, key)


def _refusal(torch: TorchMarks) -> str | None:
    """Why this torch is not built for this vendor; None if it is."""
    if torch.version is None:
        return torch.reason
    for name in ("hip", "maca"):
        if torch.values.get(name):
            return f"torch {torch.version} is built for {name.upper()}, which uses the same namespace"
    if "+metax" in torch.version or "+das" in torch.version:
        return f"torch {torch.version} is another vendor's build"
    if not torch.values.get("cuda"):
        return f"torch {torch.version} is built without CUDA; install a build with it"
    return None


def probe() -> ProbeResult:
    """NVML lists the machine's GPUs, torch those that this process may use. Their names must agree."""
    try:
        machine = nvml.read()
    except nvml.NvmlError as error:
        return ProbeResult(0, reasons=(f"the driver does not answer: {error}",))
    import torch

    if not torch.cuda.is_available():
        return ProbeResult(0, reasons=(f"driver {machine.driver}, but torch {torch.__version__} cannot use it",))
    devices, reasons = [], [f"driver {machine.driver}, CUDA {torch.version.cuda}"]
    names = {gpu.name for gpu in machine.gpus}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if properties.name not in names:
            reasons.append(f"device {index} ({properties.name}) is not known to the driver")
        elif (properties.major, properties.minor) < MIN_CAPABILITY:
            oldest = f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} is the oldest"
            reasons.append(f"device {index} ({properties.name}) has compute capability "
                           f"{properties.major}.{properties.minor}; {oldest}")  # fmt: skip
        else:
            devices.append(ProbedDevice(index, properties.name, properties.total_memory))
    return ProbeResult(100 if devices else 0, tuple(devices), _unique(reasons))


def _unique(reasons: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))
