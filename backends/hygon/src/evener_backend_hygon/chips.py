"""The chips, and core's device capabilities for each. Torch-free.

Written from published facts; nobody here has run one. Where sources are silent the conservative value is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from evener.contracts.device import DeviceCapabilities

#: Bytes of local memory of one work-group, on every GCN-like chip.
LOCAL_MEMORY = 64 << 10


@dataclass(frozen=True)
class Chip:
    """One chip: its product ``name``; whether its matrix unit has bfloat16 and float8 (e4m3)."""

    name: str
    bfloat16: bool
    fp8: bool = False


CHIPS = {
    "gfx906": Chip("Z100", bfloat16=False),
    "gfx926": Chip("K100", bfloat16=False),
    "gfx928": Chip("K100_AI", bfloat16=True),
    "gfx936": Chip("BW1000", bfloat16=True),
    "gfx938": Chip("unnamed in public sources", bfloat16=True, fp8=True),
}


def arch_of(reported: str) -> str:
    """The architecture in what the runtime reports: "gfx936" of "gfx936:sramecc+:xnack-"."""
    return reported.partition(":")[0]


def arch_fault(reported: str) -> str | None:
    """Why a device that reports this architecture is not one of the chips; None if it is."""
    arch = arch_of(reported)
    if arch in CHIPS:
        return None
    return f"its architecture is {arch or 'not reported'}, not one of {', '.join(CHIPS)}"


def capabilities(arch: str, units: int) -> DeviceCapabilities:
    """The device capabilities of a chip.

    Args:
        arch: a key of ``CHIPS``.
        units: its compute units.
    """
    chip = CHIPS[arch]
    half = {"float32", "float16"}
    features = {f"units:{units}", f"shared:{LOCAL_MEMORY}"} | ({"fp8"} if chip.fp8 else set())
    return DeviceCapabilities(
        dtypes=frozenset(half | ({"bfloat16"} if chip.bfloat16 else set())),
        emulated=frozenset(set() if chip.bfloat16 else {"bfloat16"}),
        alignment=512,
        int64=True,
        host_lengths=False,
        graphs=True,
        variant=arch,
        features=frozenset(features),
    )
