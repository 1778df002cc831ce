"""The probe: MACA's build of torch and the driver's node as marks; then torch in a child process. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evener.backend.torch_marks import TorchMarks
from evener.contracts.probe import Marks, ProbeResult
from evener_backend_parts.forks import Fork, probe_fork

FORK = Fork(
    vendor="MetaX GPUs",
    value="maca",
    version_tags=("+metax",),
    own_value=True,
    nodes=("mxcd",),
    paths=("opt/maca",),
    pci_ids=("9999:*",),
    # The vendor's libraries read either name.
    visibility=("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    devices_hint="load the driver (mx-smi lists the cards), or give the container its devices: docker run "
    "--device=/dev/mxcd --device=/dev/dri",
)


def marks(root: Path = Path("/"), torch: TorchMarks | None = None) -> Marks:
    """This vendor's build of torch, and a device node."""
    return FORK.marks(root, torch)


def probe() -> ProbeResult:
    """Torch lists the devices. One of an unknown name is usable: its build of torch is the vendor's."""
    return probe_fork(FORK, lambda properties: None, advice)


def advice(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Settings that ``evener doctor`` recommends."""
    if "MACA_PATH" in environ or Path("/opt/maca").is_dir():
        return ()
    return (
        "advice: set MACA_PATH to the folder of the MACA toolkit; it is not in /opt/maca, and Triton compiles with it",
    )
