"""The quantization contract: scheme and kernel meet at ``QuantFormat``.

A *scheme* reads a checkpoint's tensors and gives each tensor part its ``QuantFormat``; it knows no device. A *kernel*
computes with formats; it knows no checkpoint. Between them is ``PackedWeight``, which ``Packing.pack`` of the kernel's
package makes from one or more parts. A merged layer (QKV, gate/up) has one part per source tensor, and its parts may
have different formats. Unquantized is a format too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from evener.contracts.checkpoint import Headers

#: Bytes per element of the dtypes that formats and state use.
DTYPE_BYTES: dict[str, float] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "int4": 0.5,
    "uint4": 0.5, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip


#: Block formats: elements along the in-features, and bytes, of one block, which contains its own scales. The blocks of
#: a row are contiguous, and so are rows; the layout inside a block is ggml's.
BLOCKS: dict[str, tuple[int, int]] = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q2_k": (256, 84),
    "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
}  # fmt: skip


@dataclass(frozen=True)
class QuantFormat:
    """How the elements of one tensor part are stored.

    Attributes:
        storage: element type ("bfloat16", "int8", "int4", "float8_e4m3fn", or a block type such as "q4_k").
        group: how many elements along the in-features share a scale; 0: the whole row, -1: the whole tensor.
        group_out: how many rows share a scale (128 for block-scaled FP8).
        scale: element type of the scales; None: no scales.
        zero: element type of zero points that are stored as a tensor; None: there are none, or they are inside the
            blocks. A packing that does not read zero points must refuse a format that has them.
        order: "row", or the name of a permutation along the in-features (act-order).
        activation: element type to which activations are quantized; None: they keep their own type.
        bits: stored bits per element, with scales and zero points.
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
        """True if unquantized: elements are stored in a float dtype, without scales."""
        return self.scale is None and self.storage in ("float32", "float16", "bfloat16")

    def nbytes(self, rows: int, columns: int) -> int:
        """Stored bytes of a part of ``rows`` x ``columns``."""
        bits = self.bits or DTYPE_BYTES[self.storage] * 8
        return int(rows * columns * bits) // 8


def plain(dtype: str) -> QuantFormat:
    """The format of unquantized weights of ``dtype``."""
    return QuantFormat(storage=dtype)


def block_format(storage: str) -> QuantFormat:
    """The format of parts stored in blocks; ``storage`` is a key of ``BLOCKS``. Such a part has one tensor, "weight",
    uint8 [rows, bytes per row]."""
    elements, nbytes = BLOCKS[storage]
    return QuantFormat(storage=storage, group=elements, scale="float16", bits=nbytes * 8 / elements)


#: Four-bit floats (a sign, two bits of exponent, one of mantissa) in blocks of 32 that share a power of two (OCP
#: Microscaling Formats 1.0, 2023). Tensors: "weight" uint8 [rows, columns / 32, 16], the even number of a pair in the
#: low half of a byte; "scale" uint8 [rows, columns / 32], exponents with a bias of 127, 255 for NaN.
MXFP4 = QuantFormat(storage="float4_e2m1", group=32, scale="float8_e8m0fnu", bits=4.25)


@dataclass(frozen=True)
class WeightPart:
    """One source tensor of a linear weight, [rows, columns].

    Attributes:
        name: its name in the checkpoint.
        format: the format that it is packed from. A part that no packing supports as stored is dequantized first.
        tensors: by the scheme's names ("weight", "scale", …); empty until it is loaded.
    """

    name: str
    rows: int
    columns: int
    format: QuantFormat
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class PackedWeight:
    """A linear weight, packed for the kernels that will use it.

    Attributes:
        layout: the packing's ``layout``.
        shape: (out features, in features) of all parts together; for a stack (matrices, out features, in features).
        data: what the packing made; only kernels of that layout read it. A stack's is indexed by matrix.
        nbytes: bytes of ``data`` on the device.
        formats: the formats of the parts, in order.
    """

    layout: str
    shape: tuple[int, ...]
    data: Any
    nbytes: int
    formats: tuple[QuantFormat, ...] = ()


class Packing(ABC):
    """Converts weights of some formats to the memory layout that some kernels read.

    Attributes:
        layout: unique name, e.g. "plain" or "cpu.blocked_bf16".
    """

    layout: str

    @abstractmethod
    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        """None if it can pack these parts (their ``tensors`` may be empty) for compute in ``dtype``; otherwise the
        reason."""

    @abstractmethod
    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        """``nbytes`` of what ``pack`` will return; needs no tensors."""

    @abstractmethod
    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        """Pack the parts, concatenated along the out-features in this order."""

    def pack_stack(
        self, matrices: Iterable[Sequence[WeightPart]], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        """(optional) Pack ``count`` matrices with equal parts, which are read one after another. ``data[i]`` belongs to
        matrix i. Default: ``data`` is a tuple of the ``data`` that ``pack`` makes from each."""
        packed = [self.pack(parts, dtype, device) for parts in matrices]
        data, nbytes = tuple(p.data for p in packed), sum(p.nbytes for p in packed)
        return PackedWeight(self.layout, (count, *packed[0].shape), data, nbytes, packed[0].formats)

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        """(optional) Whether ``pack`` returns the parts' own storage, so that memory-mapped weights stay mapped.
        Default: no."""
        del parts
        return False


class QuantScheme(ABC):
    """How a kind of checkpoint stores linear weights.

    Attributes:
        name: the value of ``quant=`` that chooses it.
    """

    name: str

    @abstractmethod
    def detect(self, config: Mapping[str, Any]) -> bool:
        """True if a checkpoint with this ``config.json`` uses this scheme."""

    @abstractmethod
    def part(self, name: str, headers: Headers) -> WeightPart | None:
        """The part (without tensors) of the weight ``name``, from the headers ``{tensor: (dtype, shape)}``; None if the
        checkpoint has no such weight. It is not asked about vectors (norms, biases): those are read as they are."""

    @abstractmethod
    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        """``{role: checkpoint tensor name}`` of that part, e.g. ``{"weight": "….weight", "scale":
        "….weight_scale_inv"}``."""

    @abstractmethod
    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        """The values of ``part`` (with ``tensors``), [rows, columns] in ``dtype``. They define what kernels compute."""

    @abstractmethod
    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        """The piece of ``part`` from index ``start`` to ``stop`` along the out- or in-features, not dequantized.

        Raises:
            CheckpointError: the cut is inside a group; the message names the sizes that are possible.
        """

    def numbers(self, part: WeightPart) -> Iterable[torch.Tensor]:
        """(optional) The float numbers that ``part`` (with ``tensors``) stores, of any shape: its scales, also those
        inside of blocks. A checkpoint in which one is NaN or infinite is refused. Default: its tensors of a float
        dtype."""
        return [tensor for tensor in part.tensors.values() if tensor.is_floating_point()]

    def examples(self, name: str, seed: int) -> Iterable[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        """(optional) For the conformance kit: small checkpoints with one linear weight, called ``name``; one for each
        format that the scheme reads. Each is a ``config.json``, the headers, and the tensors by their names in the
        headers, as a checkpoint would give them: random by ``seed``, with at least two groups along both axes.
        Default: none; the kit reports that as a failure, because then it cannot check the scheme."""
        del name, seed
        return ()
