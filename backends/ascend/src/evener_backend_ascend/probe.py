"""The probe: device nodes and the installed torch_npu as marks, then torch_npu itself in a child process.

Torch-free. Without CANN, a plain ``import torch`` fails where torch_npu is installed, unless
TORCH_DEVICE_BACKEND_AUTOLOAD is 0; core sets that before it imports torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from importlib_metadata import PackageNotFoundError, version

from evener.backend.torch_marks import TorchMarks, read
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.errors import BackendError
from evener_backend_ascend.chip import chip_of

#: Variables on which the result depends.
VISIBILITY = ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")
_SETTINGS = (
    "TASK_QUEUE_ENABLE", "HCCL_OP_EXPANSION_MODE", "PYTORCH_NPU_ALLOC_CONF", "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_HOME_PATH",
)  # fmt: skip
_BUS = ("19e5:d100", "19e5:d500", "19e5:d801", "19e5:d802", "19e5:d803")
_SOURCE = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def marks(dev: Path = Path("/dev"), torch: TorchMarks | None = None, extension: str | None = None) -> Marks:
    """A device node with its manager's, and a torch_npu of torch's version.

    Args:
        extension: torch_npu's version; default: that of the installed one, "" for none.
    """
    found = torch or read()
    extension = installed_extension() if extension is None else extension
    key = {name: os.environ[name] for name in (*VISIBILITY, *_SETTINGS) if name in os.environ}
    key["torch_npu"] = extension
    nodes = sorted(path.name for path in dev.glob("davinci[0-9]*"))
    if not nodes:
        return Marks(False, ("no /dev/davinci0",), _BUS, key)
    if not (dev / "davinci_manager").exists():
        return Marks(False, (f"/dev/{nodes[0]}, but no /dev/davinci_manager; pass it to the container",), _BUS, key)
    reason = _mismatch(found, extension)
    return Marks(not reason, (reason or f"/dev/{nodes[0]}, torch_npu {extension}",), _BUS, key)


def installed_extension() -> str:
    """The version of the installed torch_npu, without importing it; "" if there is none."""
    if importlib.util.find_spec("torch_npu") is None:
        return ""
    try:
        return version("torch-npu")
    except PackageNotFoundError:
        return ""


def _mismatch(torch: TorchMarks, extension: str) -> str:
    """Why this torch and this torch_npu do not belong together; "" if they do."""
    if torch.version is None:
        return torch.reason
    wanted = ".".join(torch.version.split(".")[:2])
    if not extension:
        return f"torch_npu is not installed; pip install 'torch-npu=={wanted}.*' pyyaml"
    if ".".join(extension.split(".")[:2]) != wanted:
        return f"torch_npu {extension} does not fit torch {torch.version}; pip install 'torch-npu=={wanted}.*'"
    return ""


def probe() -> ProbeResult:
    """The chips that torch_npu sees, and advice on the environment.

    Raises:
        BackendError: torch_npu cannot be imported.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch

    try:
        import torch_npu
    except ImportError as error:
        raise BackendError(f"torch_npu cannot be imported: {error}; if CANN is installed, type: {_SOURCE}") from error
    npu = torch_npu.npu
    if not npu.is_available():
        return ProbeResult(0, reasons=("torch_npu sees no device that it can use; type: npu-smi info",))
    number = int(npu.get_soc_version())
    chip = chip_of(number)
    if chip is None:
        return ProbeResult(0, reasons=(f"the chip's number is {number}, which this package does not know",))
    devices = tuple(
        ProbedDevice(index, str(npu.get_device_name(index)), int(npu.get_device_properties(index).total_memory))
        for index in range(npu.device_count())
    )
    reasons = (f"generation {chip.name}, torch_npu {torch_npu.__version__}, torch {torch.__version__}",)
    return ProbeResult(100, devices, reasons + advice(os.environ))


def advice(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Settings that the vendor recommends and that are not set, and such that do harm."""
    found = []
    if environment.get("TASK_QUEUE_ENABLE") == "0":
        found.append("advice: TASK_QUEUE_ENABLE=0 submits each op from the main thread; unset it or set 1")
    if "HCCL_OP_EXPANSION_MODE" not in environment:
        found.append("advice: HCCL_OP_EXPANSION_MODE=AIV shortens small all-reduces on one machine")
    if "expandable_segments" not in environment.get("PYTORCH_NPU_ALLOC_CONF", ""):
        found.append("advice: PYTORCH_NPU_ALLOC_CONF=expandable_segments:True reduces fragmentation")
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        found.append("advice: ASCEND_LAUNCH_BLOCKING=1 makes every op wait, and NPU graphs fail; unset it")
    return tuple(found)
