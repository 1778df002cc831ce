"""GPTQ, AWQ, compressed-tensors and Model Optimizer's layers as their tools save them, written from the published
layouts in plain Python integers: a word of 32 bits takes numbers from its lowest bit up. Nothing here is shared with
the readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: The row of each of the eight numbers of an AWQ word, from its lowest bits.
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Quantized:
    """Random integers of a linear weight [rows, columns].

    Attributes:
        codes: int64 [rows, columns], unsigned.
        zeros: int64 [groups, rows], of the same range.
        scales: [groups, rows].
        index: int64 [columns], the group of each column.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    index: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """float32 [rows, columns]."""
        return (self.codes - self.zeros.T[:, self.index]).float() * self.scales.float().T[:, self.index]


def quantized(
    bits: int, rows: int, columns: int, group: int, *, symmetric: bool = False, act_order: bool = False,
    scale: torch.dtype = torch.float16, seed: int = 1,
) -> Quantized:  # fmt: skip
    """Random integers; ``group`` 0: the whole row."""
    random, groups = torch.Generator().manual_seed(seed), -(-columns // (group or columns))
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=random)
    zeros = torch.randint(0, 1 << bits, (groups, rows), generator=random)
    index = torch.arange(columns) // (group or columns)
    if act_order:
        index = index[torch.randperm(columns, generator=random)]
    scales = (torch.rand(groups, rows, generator=random) + 0.5) / (2**bits * columns**0.5)
    middle = torch.full_like(zeros, 1 << (bits - 1))
    return Quantized(codes, middle if symmetric else zeros, scales.to(scale), index)


def words_of(numbers: Sequence[int], bits: int) -> list[int]:
    """Signed words of 32 bits that hold these numbers, one after another."""
    stream = sum(n << (bits * i) for i, n in enumerate(numbers))
    words = [stream >> (32 * i) & 0xFFFFFFFF for i in range(-(-len(numbers) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def _packed(rows: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.tensor([words_of(row, bits) for row in rows.tolist()], dtype=torch.int64).int()


def gptq_tensors(stem: str, made: Quantized, bits: int, less: int) -> dict[str, torch.Tensor]:
    """Tensors of a layer; ``less`` is what the format takes from a zero point: 1 for "gptq", 0 for "gptq_v2"."""
    zeros = (made.zeros - less) % (1 << bits)
    return {
        f"{stem}.qweight": _packed(made.codes, bits).T.contiguous(), f"{stem}.qzeros": _packed(zeros, bits),
        f"{stem}.scales": made.scales, f"{stem}.g_idx": made.index.int(),
    }  # fmt: skip


def awq_tensors(stem: str, made: Quantized) -> dict[str, torch.Tensor]:
    """Tensors of a layer of four bits in the layout "gemm"."""

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        order = [8 * word + row for word in range(numbers.shape[1] // 8) for row in AWQ_ROWS]
        return _packed(numbers[:, order], 4)

    return {
        f"{stem}.qweight": packed(made.codes.T), f"{stem}.qzeros": packed(made.zeros), f"{stem}.scales": made.scales,
    }  # fmt: skip


def compressed_tensors(
    name: str, made: Quantized, bits: int, symmetric: bool, act_order: bool
) -> dict[str, torch.Tensor]:
    """Tensors of the weight ``name`` in "pack-quantized": numbers along the columns, zero points along the rows."""
    tensors = {
        f"{name}_packed": _packed(made.codes, bits), f"{name}_scale": made.scales.T.contiguous(),
        f"{name}_shape": torch.tensor(made.codes.shape),
    }  # fmt: skip
    if not symmetric:
        tensors[f"{name}_zero_point"] = _packed(made.zeros, bits).T.contiguous()
    return tensors | ({f"{name}_g_idx": made.index.int()} if act_order else {})


def modelopt_tensors(name: str, made: Quantized, factors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Tensors of the weight ``name`` of four bits in W4A16_AWQ: a byte has the signed numbers of two rows, the first in
    its low half. Scales are float32. ``factors``: what activations are multiplied by, for each column."""
    codes = [[(code - 8) % 16 for code in row] for row in made.codes.tolist()]
    bytes_ = [
        [low | high << 4 for low, high in zip(*two, strict=True)] for two in zip(codes[::2], codes[1::2], strict=True)
    ]
    more = {} if factors is None else {f"{name.removesuffix('weight')}pre_quant_scale": factors}
    return {name: torch.tensor(bytes_, dtype=torch.uint8), f"{name}_scale": made.scales.T.float().contiguous(), **more}


def halves_tensors(stem: str, made: Quantized) -> dict[str, torch.Tensor]:
    """Tensors of a layer of four bits in the layout "halves": a byte has the numbers of two columns that are 64 apart,
    in runs of 128; zero points are stored times the scale."""
    rows, columns = made.codes.shape
    width = -(-columns // 128) * 64
    bytes_ = [[0] * width for _ in range(rows)]
    for row, numbers in enumerate(made.codes.tolist()):
        for column, number in enumerate(numbers):
            run, place = divmod(column, 128)
            bytes_[row][64 * run + place % 64] |= number << (4 if place >= 64 else 0)
    return {
        f"{stem}.qweight": torch.tensor(bytes_, dtype=torch.uint8), f"{stem}.scales": made.scales,
        f"{stem}.qzeros": made.zeros.to(made.scales.dtype) * made.scales,
    }  # fmt: skip


def halves_bytes(stem: str, made: Quantized) -> dict[str, torch.Tensor]:
    """Tensors of a layer of eight bits in that layout: signed bytes, without zero points."""
    return {f"{stem}.qweight": (made.codes - 128).to(torch.int8), f"{stem}.scales": made.scales}


def headers_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """As a checkpoint's."""
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
