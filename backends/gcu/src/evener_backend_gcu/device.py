"""The device: torch's namespace ``gcu``, which torch_gcu registers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from evener.backend.torch_device import TorchDevice
from evener.contracts.device import DeviceCapabilities
from evener_backend_gcu.probe import EXTENSION

#: torch_gcu adds 10 to the major number; from 14 on it is the generation after S60.
_NEXT_GENERATION = 14
#: Alignment of what the vendor's ops take, in bytes; sources are silent, so it is that of torch's allocators.
ALIGNMENT = 512


def capabilities(major: int, graphs: bool) -> DeviceCapabilities:
    """The device capabilities of a GCU.

    Args:
        major: the major number that torch_gcu reports.
        graphs: whether steps may be captured.
    """
    newer = major >= _NEXT_GENERATION
    return DeviceCapabilities(
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        alignment=ALIGNMENT,
        # Kernels have neither int64 nor float64.
        int64=False,
        host_lengths=True,
        graphs=graphs,
        variant="gcu400" if newer else "gcu300",
        features=frozenset({"fp8"} if newer else ()),
    )


class GcuDevice(TorchDevice):
    """A GCU."""

    def conditions(self) -> Mapping[str, str]:
        """The version of torch_gcu, which follows the release of TopsRider."""
        try:
            return {EXTENSION: version(EXTENSION)}
        except PackageNotFoundError:  # a vendor's build may come without metadata
            return {}
