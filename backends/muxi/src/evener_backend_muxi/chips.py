"""The chips, and core's device capabilities for each. Torch-free.

Written from published facts; nobody here has run one. Where sources are silent the conservative value is taken.
"""

from __future__ import annotations

from evener.contracts.device import DeviceCapabilities

#: Chips that public sources name. They differ in memory and links, not in what kernels may use.
CHIPS = ("C500", "C550")
#: Older drivers report a number in place of the chip's name. The capabilities are the same.
UNNAMED = "unnamed"


def chip_of(reported: str) -> str:
    """The chip in the device's name ("MetaX C550"); "unnamed" if it names none."""
    return next((chip for chip in CHIPS if chip.lower() in reported.lower()), UNNAMED)


def capabilities(chip: str, units: int, shared: int) -> DeviceCapabilities:
    """The device capabilities of a chip. float8 is off: the vendor's own stack leaves it off.

    Args:
        chip: one of ``CHIPS``, or ``UNNAMED``.
        units: its multiprocessors.
        shared: bytes of shared memory that one program may have.
    """
    return DeviceCapabilities(
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        alignment=512,
        int64=True,
        host_lengths=False,
        graphs=True,
        variant=chip,
        features=frozenset({f"units:{units}", f"shared:{shared}"}),
    )
