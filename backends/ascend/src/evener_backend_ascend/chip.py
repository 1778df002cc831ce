"""The generations of chips, and what each can do. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from evener.contracts.device import DeviceCapabilities


@dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
        name: ``DeviceCapabilities.variant`` of its devices.
        numbers: what ``torch_npu.npu.get_soc_version()`` returns for its models.
        dtypes: with native kernels.
        paged: it has the kernels of this package; the vendor documents them for these generations only.
        triton: Huawei's Triton compiles the portable kernels over rows for it.
    """

    name: str
    numbers: range
    dtypes: frozenset[str]
    paged: bool
    triton: bool


_HALF = frozenset({"float32", "float16"})
_ALL = _HALF | {"bfloat16"}
CHIPS = (
    Chip("310p", range(200, 206), _HALF, False, False),
    Chip("910b", range(220, 226), _ALL, True, True),
    Chip("910_93", range(250, 256), _ALL, True, True),
    Chip("950", range(260, 261), _ALL, False, True),
)
#: What the portable Triton kernels read: those over rows compile for these chips, up to rows of this length (the
#: compiler checks a program's memory), and the runtime takes this many programs.
TRITON = frozenset({"triton:rows", "row:8192", "programs:65535"})
#: Variants for which ``Chip.paged`` holds.
PAGED = frozenset(chip.name for chip in CHIPS if chip.paged)


def chip_of(number: int) -> Chip | None:
    """The generation of a chip's number; None for one that this package does not know."""
    return next((chip for chip in CHIPS if number in chip.numbers), None)


def capabilities(chip: Chip, triton: bool = False) -> DeviceCapabilities:
    """The device capabilities of a generation.

    Args:
        triton: whether the portable Triton kernels over rows are offered.
    """
    return DeviceCapabilities(
        dtypes=chip.dtypes, alignment=512, int64=True, host_lengths=True, graphs=chip.paged, graph_update=chip.paged,
        variant=chip.name, features=TRITON if triton and chip.triton else frozenset(),
    )  # fmt: skip


def refusal(variant: str) -> str | None:
    """Why this package has no kernels for a variant; None if it has."""
    if variant in PAGED:
        return None
    return f"the vendor documents the kernel for {' and '.join(sorted(PAGED))}, not for {variant or 'this chip'}"
