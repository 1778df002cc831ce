"""Tensors of a model folder that a GGUF file stores in another way, and that are made when they are read. Torch-free
until then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import BLOCKS
from evener.errors import CheckpointError
from evener_formats.gguf.header import MXFP4, UNPACKED, GgufTensor
from evener_formats.gguf.stored import dequantized, folder_rows, memory_map, split_mxfp4

if TYPE_CHECKING:
    import torch

_BLOCK = 32


class Made(ABC):
    """Tensors that are made together.

    Attributes:
        headers: theirs, by their names in a folder.
    """

    headers: Headers

    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All of them, made now."""


class KeysAndValues(Made):
    """The up-projection of keys and values that a file has as two stacks with a matrix for each head.

    Args:
        name: in a folder.
        keys: [heads, rank, width].
        values: [heads, width, rank].

    Raises:
        CheckpointError: they are not of the same heads.
    """

    def __init__(self, name: str, keys: GgufTensor, values: GgufTensor) -> None:
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
            raise CheckpointError(
                f"{keys.file}: the parts of {name} are {list(keys.shape)} and {list(values.shape)}: they are no keys "
                "and values of the same heads; fetch the file again"
            )
        heads, rank, width = keys.shape
        self._name, self._keys, self._values = name, keys, values
        self.headers = {name: ("float32", (heads * (width + values.shape[1]), rank))}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        import torch

        keys, values = dequantized(self._keys), dequantized(self._values)
        return {self._name: torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)}


class OneRow(Made):
    """A matrix of one row that a file has as a vector.

    Args:
        name: in a folder.
        entry: the vector.

    Raises:
        CheckpointError: it is no vector of numbers.
    """

    def __init__(self, name: str, entry: GgufTensor) -> None:
        if len(entry.shape) != 1 or entry.dtype not in ("float32", "float16", "bfloat16"):
            raise CheckpointError(
                f"{entry.file}: {name} is stored as {entry.dtype} {list(entry.shape)}, not as a vector of numbers; "
                "fetch the file again"
            )
        self._name, self._entry = name, entry
        self.headers = {name: (entry.dtype, (1, *entry.shape))}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {self._name: memory_map(self._entry)[None]}


class Mxfp4Matrix(Made):
    """A matrix in MXFP4, as the two tensors that the scheme "mxfp4" reads.

    Args:
        name: in a folder.
        entry: the matrix.
        heads: within which its rows are permuted; 0 if they are not.
    """

    def __init__(self, name: str, entry: GgufTensor, heads: int) -> None:
        self._name, self._entry, self._heads = name, entry, heads
        self.headers = _mxfp4_headers(name, entry.shape)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        blocks, scales = split_mxfp4(folder_rows(memory_map(self._entry), self._heads))
        return {f"{self._name}_blocks": blocks, f"{self._name}_scales": scales.contiguous()}


class UnpackedMatrix(Made):
    """A matrix in a format of ``UNPACKED``, in float32.

    Args: as of ``Mxfp4Matrix``.
    """

    def __init__(self, name: str, entry: GgufTensor, heads: int) -> None:
        self._name, self._entry, self._heads = name, entry, heads
        self.headers = {name: ("float32", entry.shape)}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {self._name: folder_rows(dequantized(self._entry), self._heads)}


class ExpertStack(Made):
    """A stack with a matrix, or a bias, for each expert, whose rows come from several stacks in turn: one of gate, one
    of up, and so on. Unquantized matrices are [experts, columns, rows], as gpt-oss has them.

    Args:
        name: in a folder.
        entries: stacks [experts, rows, columns], or [experts, rows] of biases.

    Raises:
        CheckpointError: they differ in shape or format, or are no stacks, or are biases in blocks.
    """

    def __init__(self, name: str, entries: Sequence[GgufTensor]) -> None:
        shapes, dtypes = {entry.shape for entry in entries}, {entry.dtype for entry in entries}
        (shape, dtype), rank = (entries[0].shape, entries[0].dtype), 2 if name.endswith("_bias") else 3
        if len(shapes) > 1 or len(shape) != rank:
            shown = " and ".join(str(list(each)) for each in sorted(shapes))
            raise CheckpointError(
                f"{entries[0].file}: the parts of {name} are {shown}, not stacks of equal shape for all experts; fetch "
                "the file again"
            )
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{entries[0].file}: the parts of {name} are stored as {' and '.join(sorted(dtypes))}, which cannot be "
                "one weight; fetch a file with experts in MXFP4, as the model was published"
            )
        if rank == 2 and dtype in (*BLOCKS, *UNPACKED, MXFP4):
            raise CheckpointError(f"{entries[0].file}: {name} is stored as {dtype}, as no bias is; fetch another file")
        self._name, self._entries, self._dtype = name, entries, dtype
        whole = shape[0], len(entries) * shape[1], *shape[2:]
        self._transposed = rank == 3 and dtype not in BLOCKS
        if dtype == MXFP4:
            self.headers = _mxfp4_headers(name, whole)
        else:
            of_numbers = "float32" if dtype in UNPACKED else dtype
            self.headers = {name: (of_numbers, (whole[0], *whole[:0:-1]) if self._transposed else whole)}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        import torch

        if self._dtype == MXFP4:
            made = {name: torch.empty(shape, dtype=torch.uint8) for name, (_, shape) in self.headers.items()}
            blocks, scales = made.values()
            # An expert at a time, so that intermediate results are small.
            for first, entry in enumerate(self._entries):
                for number, stored in enumerate(memory_map(entry)):
                    rows = slice(first, None, len(self._entries))
                    blocks[number, rows], scales[number, rows] = split_mxfp4(stored)
            return made
        parts = [(dequantized if entry.dtype in UNPACKED else memory_map)(entry) for entry in self._entries]
        whole = parts[0] if len(parts) == 1 else torch.stack(parts, dim=2).flatten(1, 2)
        return {self._name: whole.transpose(1, 2) if self._transposed else whole}


def _mxfp4_headers(name: str, shape: tuple[int, ...]) -> Headers:
    blocks = (*shape[:-1], shape[-1] // _BLOCK)
    return {f"{name}_blocks": ("uint8", (*blocks, _BLOCK // 2)), f"{name}_scales": ("uint8", blocks)}
