"""The probe: DTK's build of torch and the driver's nodes as marks; then torch in a child process. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evener.backend.torch_marks import TorchMarks
from evener.contracts.probe import Marks, ProbeResult
from evener_backend_hygon.chips import arch_fault
from evener_backend_parts.forks import Fork, probe_fork, unset

FORK = Fork(
    vendor="Hygon DCU",
    value="hip",
    # Builds are tagged "+das…dtk…".
    version_tags=("+das", "dtk"),
    own_value=False,
    # A container may have /dev/kfd without /dev/mkfd.
    nodes=("mkfd", "kfd"),
    paths=("dev/mkfd", "opt/dtk", "opt/hyhal"),
    pci_ids=("1d94:*",),
    visibility=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    devices_hint="load the driver (hy-smi lists the cards), or give the container its devices: docker run "
    "--device=/dev/kfd --device=/dev/mkfd --device=/dev/dri -v /opt/hyhal:/opt/hyhal:ro",
)
_WANTED = {"HSA_FORCE_FINE_GRAIN_PCIE": ("1", "lets RCCL use peer memory over PCIe")}


def marks(root: Path = Path("/"), torch: TorchMarks | None = None) -> Marks:
    """A HIP build of torch, a device node, and a sign that the build or the driver is this vendor's."""
    return FORK.marks(root, torch)


def probe() -> ProbeResult:
    """Torch lists the devices; each must report a known architecture."""
    return probe_fork(FORK, lambda properties: arch_fault(getattr(properties, "gcnArchName", "")), advice)


def advice(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Settings that ``evener doctor`` recommends."""
    return unset(environ, _WANTED)
