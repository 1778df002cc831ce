"""The quantization contract: scheme and kernel meet at ``QuantFormat``.

A *scheme* knows a checkpoint's tensors and says which ``QuantFormat`` each tensor part has; it knows no device. A
*kernel* knows formats; it knows no checkpoint. Between them stands ``PackedWeight``: what ``Packing.pack`` of the
kernel's package made of one or more parts. A merged layer (QKV, gate/up) holds one part a source tensor, and parts may
have different formats. Unquantized is one format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from evener.contracts.checkpoint import Headers

#: Bytes of one element of the dtypes that formats and state use.
DTYPE_BYTES: dict[str, float] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "int4": 0.5,
    "uint4": 0.5, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip


#: Block formats: elements along the in-features and bytes of one block, which holds its own scales. Blocks of a row lie
#: one after another, and rows one after another; the inner order of a block is ggml's.
BLOCKS: dict[str, tuple[int, int]] = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q2_k": (256, 84),
    "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
}  # fmt: skip


@dataclass(frozen=True)
class QuantFormat:
    """How the numbers of one tensor part are stored.

    Attributes:
        storage: element type ("bfloat16", "int8", "int4", "float8_e4m3fn", or a block type such as "q4_k").
        group: elements along the in-features that share a scale; 0 = the whole row, -1 = the whole tensor.
        group_out: rows that share a scale (128 for block-scaled FP8).
        scale: element type of the scales; None = no scales.
        zero: element type of the zero points that are stored beside the scales; None = there are none, or they lie in
            the blocks. A packing that reads none refuses a format that has them.
        order: "row" or the name of a permutation along in-features (act-order).
        activation: element type that activations are quantized to; None = computed in the activations' own type.
        bits: stored bits an element, scales and zeros included.
    """

    storage: str
    group: int = 0
    group_out: int = 1
    scale: str | None = None
    zero: str | None = None
    order: str = "row"
    activation: str | None = None
    bits: float = 0.0

    @property
    def plain(self) -> bool:
        """Unquantized: the storage type is the element type and nothing else is stored."""
        return self.scale is None and self.storage in ("float32", "float16", "bfloat16")

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a ``rows`` x ``columns`` part as stored."""
        bits = self.bits or DTYPE_BYTES[self.storage] * 8
        return int(rows * columns * bits) // 8


def plain(dtype: str) -> QuantFormat:
    """The format of unquantized weights of ``dtype``."""
    return QuantFormat(storage=dtype)


def block_format(storage: str) -> QuantFormat:
    """The format of parts stored in blocks; ``storage`` is a key of ``BLOCKS``. Their one tensor is "weight", uint8
    [rows, bytes of a row]."""
    elements, nbytes = BLOCKS[storage]
    return QuantFormat(storage=storage, group=elements, scale="float16", bits=nbytes * 8 / elements)


#: Four-bit floats (a sign, two bits of exponent, one of mantissa) in blocks of 32 that share a power of two (OCP
#: Microscaling Formats 1.0, 2023). Tensors: "weight" uint8 [rows, columns / 32, 16], the even number of a pair in the
#: low half of a byte; "scale" uint8 [rows, columns / 32], exponents with a bias of 127, 255 for NaN.
MXFP4 = QuantFormat(storage="float4_e2m1", group=32, scale="float8_e8m0fnu", bits=4.25)


@dataclass(frozen=True)
class WeightPart:
    """One source tensor of a linear weight: ``tensors`` as the scheme names them ("weight", "scale", …), shape [rows,
    columns]. ``format`` is the one that it is packed from: a part that nobody packs as stored is dequantized first."""

    name: str
    rows: int
    columns: int
    format: QuantFormat
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class PackedWeight:
    """A linear weight, packed for the kernels that will run it.

    Attributes:
        layout: the name of the packing; kernels name the layouts that they accept.
        shape: (out features, in features), of all parts together; a stack has the number of its matrices in front.
        data: what the packing made; only its kernels look inside. A stack's is indexed by matrix.
        nbytes: bytes that ``data`` holds on the device.
        formats: the parts' formats, in order.
    """

    layout: str
    shape: tuple[int, ...]
    data: Any
    nbytes: int
    formats: tuple[QuantFormat, ...] = ()


class Packing(ABC):
    """How a provider wants weights of some formats laid out.

    Attributes:
        layout: unique name, e.g. "plain" or "cpu.blocked_bf16".
    """

    layout: str

    @abstractmethod
    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        """None when these parts (their ``tensors`` may be empty) can be packed for compute in ``dtype``; else the
        reason."""

    @abstractmethod
    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        """Bytes that ``pack`` will hold on the device; needs no tensors."""

    @abstractmethod
    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        """Pack the parts, stacked along out-features in the given order."""

    def pack_stack(
        self, matrices: Iterable[Sequence[WeightPart]], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        """(optional) Pack ``count`` matrices of equal parts, read one after another. ``data[i]`` is matrix i's.
        Default: a tuple of what ``pack`` makes of each."""
        packed = [self.pack(parts, dtype, device) for parts in matrices]
        data, nbytes = tuple(p.data for p in packed), sum(p.nbytes for p in packed)
        return PackedWeight(self.layout, (count, *packed[0].shape), data, nbytes, packed[0].formats)

    def keeps(self, parts: Sequence[WeightPart]) -> bool:
        """(optional) Whether ``pack`` keeps the parts' own storage, so that memory-mapped weights stay mapped. Default:
        no."""
        del parts
        return False


class QuantScheme(ABC):
    """How a kind of checkpoint stores linear weights.

    Attributes:
        name: what ``quant=`` takes.
    """

    name: str

    @abstractmethod
    def detect(self, config: Mapping[str, Any]) -> bool:
        """True if a checkpoint with this ``config.json`` is stored in this scheme."""

    @abstractmethod
    def part(self, name: str, headers: Headers) -> WeightPart | None:
        """The part stored under weight ``name``, read from file headers ``{tensor: (dtype, shape)}``; None if there is
        none."""

    @abstractmethod
    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        """``{role: checkpoint tensor name}`` of that part, e.g. ``{"weight": "….weight", "scale":
        "….weight_scale_inv"}``."""

    @abstractmethod
    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        """The numbers of ``part`` (with ``tensors``), [rows, columns] of ``dtype``: what kernels must agree with."""

    @abstractmethod
    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        """The piece of ``part`` between two indices along out- or in-features, without dequantizing.

        Raises:
            CheckpointError: the cut falls inside a group; the message names the sizes that fit.
        """

    def examples(self, name: str, seed: int) -> Iterable[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        """(optional) For the conformance kit: small checkpoints whose one linear weight is called ``name``, one for
        each format that the scheme reads. Of each a ``config.json``, the headers, and the tensors by the headers'
        names, as the checkpoint would give them; two groups or more along both axes, random by ``seed``.
        Default: none, which the kit takes for a failure, as nobody can tell whether the scheme is right."""
        del name, seed
        return ()
