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
        triton: what the portable Triton kernels read of it; empty where Huawei's Triton does not compile them.
    """

    name: str
    numbers: range
    dtypes: frozenset[str]
    paged: bool
    triton: frozenset[str]


_HALF = frozenset({"float32", "float16"})
_ALL = _HALF | {"bfloat16"}
#: Triton kernels over rows compile up to rows of this length, because a program's memory is checked; the runtime takes
#: this many programs. For 950 the compiler takes no reduction that gives an index.
_ROWS = frozenset({"triton:rows", "row:8192", "programs:65535"})
_ARGMAX = _ROWS | {"triton:argmax"}
CHIPS = (
    Chip("310p", range(200, 206), _HALF, False, frozenset()),
    Chip("910b", range(220, 226), _ALL, True, _ARGMAX),
    Chip("910_93", range(250, 256), _ALL, True, _ARGMAX),
    Chip("950", range(260, 261), _ALL, False, _ROWS),
)
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
        variant=chip.name, features=chip.triton if triton else frozenset(),
    )  # fmt: skip


def refusal(variant: str) -> str | None:
    """Why this package has no kernels for a variant; None if it has."""
    if variant in PAGED:
        return None
    return f"the vendor documents the kernel for {' and '.join(sorted(PAGED))}, not for {variant or 'this chip'}"
