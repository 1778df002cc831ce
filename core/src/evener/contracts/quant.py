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

from evener.contracts.storage import BLOCKS, DTYPE_BYTES, MXFP4, NVFP4, QuantFormat, Rounding, block_format, plain

if TYPE_CHECKING:
    import torch

    from evener.contracts.checkpoint import Checkpoint, Headers

__all__ = [
    "BLOCKS", "DTYPE_BYTES", "MXFP4", "NVFP4", "PackedWeight", "Packing", "QuantFormat", "QuantScheme", "Rounding",
    "WeightPart", "block_format", "plain",
]  # fmt: skip


@dataclass(frozen=True)
class WeightPart:
    """One source tensor of a linear weight, [rows, columns].

    Attributes:
        name: its name in the checkpoint.
        format: the format that it is packed from. A part that no packing supports as stored is dequantized first.
        tensors: empty until it is loaded; then by the scheme's names for what the checkpoint stores, and for a packing
            as ``evener.contracts.storage`` describes them for the format.
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
        """(optional) Whether ``pack`` returns the parts' own storage, so that memory-mapped weights stay mapped. With
        plain parts it may return more beside it. Default: no."""
        del parts
        return False

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor] | None:
        """(optional) The tensors from which ``restored`` makes the same weight in another process; a model cache
        writes them to a file. They depend on nothing but the layout, the parts and the dtype. Default: None, such
        weights are packed at every start."""
        del packed
        return None

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        """(required with ``saved``) What ``pack``, or with a ``count`` ``pack_stack``, made of parts like these, which
        have no tensors.

        Args:
            tensors: what ``saved`` gave, on ``device``. On a host they are mapped from a file, at multiples of 64
                bytes; the weight may keep them, and nobody may write them.

        Raises:
            ValueError: they are not those of such a weight.
        """
        raise NotImplementedError


class QuantScheme(ABC):
    """How a kind of checkpoint stores linear weights.

    Attributes:
        name: the value of ``quant=`` that chooses it.
    """

    name: str

    @abstractmethod
    def detect(self, config: Mapping[str, Any]) -> bool:
        """True if a checkpoint with this ``config.json`` uses this scheme."""

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        """(optional) The scheme for one checkpoint, whose ``config.json`` was detected: asked once, before the methods
        below. For schemes whose sizes or exceptions are only in the config, or in other files or small tensors of
        ``checkpoint``. Default: itself.

        Raises:
            CheckpointError: the config asks for something that the scheme does not read.
        """
        del config, checkpoint
        return self

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
        """The values of ``part`` (with ``tensors`` as stored), [rows, columns] in ``dtype``. They define what kernels
        compute."""

    @abstractmethod
    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        """The piece of ``part`` (with ``tensors`` as stored) from index ``start`` to ``stop`` along the out- or
        in-features, not dequantized.

        Raises:
            CheckpointError: the cut is not at multiples of ``format.cut_unit``; the message names that number.
        """

    def arrange(self, part: WeightPart) -> WeightPart:
        """(optional) ``part``, or a piece that was cut from it, with the tensors that ``evener.contracts.storage``
        describes for its format, in place of those of the checkpoint. Packings get its result. Default: they are the
        same.

        Raises:
            CheckpointError: the stored numbers are not those of such a weight, e.g. a group that does not exist.
        """
        return part

    def numbers(self, part: WeightPart) -> Iterable[torch.Tensor]:
        """(optional) The float numbers that ``part`` (with ``tensors``) stores, of any shape: its scales, also those
        inside of blocks. A checkpoint in which one is NaN or infinite is refused. Default: its tensors of a float
        dtype."""
        return [tensor for tensor in part.tensors.values() if tensor.is_floating_point()]

    def examples(self, name: str, seed: int) -> Iterable[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        """(optional) For the conformance kit: small checkpoints with one linear weight, called ``name``; one for each
        format that the scheme reads. Each is a ``config.json`` (a key that ends in ".json" is a file beside it), the
        headers, and the tensors by their names there, as a checkpoint would give them: random by ``seed``, with at
        least two groups along both axes. Default: none; the kit reports that as a failure, because then it cannot check
        the scheme."""
        del name, seed
        return ()
