"""Linear layers over weights in the plain packing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from evener.contracts.ops import OpFunction, Static, Use
from evener.contracts.quant import DTYPE_BYTES, PackedWeight, Packing, QuantFormat, WeightPart


class PlainPacking(Packing):
    """One contiguous [rows, columns] matrix in the compute dtype."""

    layout = "plain"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        odd = [p.format.storage for p in parts if not p.format.plain]
        return f"stored as {odd[0]}, which the reference does not compute in" if odd else None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(p.rows for p in parts) * parts[0].columns * int(DTYPE_BYTES[dtype])

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        wanted = getattr(torch, dtype)
        pieces = [p.tensors["weight"].to(device=device, dtype=wanted) for p in parts]
        data = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        data = data.contiguous()
        return PackedWeight(
            self.layout, (data.shape[0], data.shape[1]), data, data.nbytes, tuple(p.format for p in parts)
        )

    def pack_stack(
        self, matrices: Iterable[Sequence[WeightPart]], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        data = torch.empty(0)
        formats: tuple[QuantFormat, ...] = ()
        for index, parts in enumerate(matrices):
            if not index:  # the first matrix has the sizes
                shape = count, sum(p.rows for p in parts), parts[0].columns
                data = self.allocate_stack(shape, getattr(torch, dtype), device)
                formats = tuple(p.format for p in parts)
            at = 0
            for part in parts:
                data[index, at : at + part.rows].copy_(part.tensors["weight"])
                at += part.rows
        return PackedWeight(self.layout, tuple(data.shape), data, data.nbytes, formats)

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return len(parts) == 1

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor]:
        return (packed.data,)

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        shape = (*((count,) if count else ()), sum(p.rows for p in parts), parts[0].columns)
        if [(tuple(t.shape), t.dtype) for t in tensors] != [(shape, getattr(torch, dtype))]:
            raise ValueError(f"the plain packing holds one {list(shape)} in {dtype}")
        return PackedWeight(self.layout, shape, tensors[0], tensors[0].nbytes, tuple(p.format for p in parts))

    def allocate_stack(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a stack. A subclass may allocate it elsewhere."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)


PLAIN = PlainPacking()

_WIDENED_ROWS = 16384


def linear(static: Static, use: Use) -> OpFunction:
    out: torch.dtype = getattr(torch, static["out"])

    def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype == out:
            # On CPUs with AMX (torch 2.13, oneDNN), a product of bfloat16 rows that are cut from wider ones also reads
            # what follows them, if their columns are no multiple of 4.
            return F.linear(x.contiguous() if x.dtype == torch.bfloat16 else x, weight.data, bias)
        # One slice of rows at a time, to bound the memory of the copies in a wider dtype.
        pieces = [F.linear(x.to(out), rows.to(out)) for rows in weight.data.split(_WIDENED_ROWS)]
        y = torch.cat(pieces, dim=-1)
        return y if bias is None else y + bias

    return run


def grouped_linear(static: Static, use: Use) -> OpFunction:
    experts, rows = static["experts"], static["rows"]

    def run(
        x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = x.new_zeros(*slots.shape, rows)
        for slot in range(experts):
            tokens, ranks = (slots == slot).nonzero(as_tuple=True)
            own = None if bias is None else bias[slot]
            out[tokens, ranks] = F.linear(x.index_select(0, tokens), weight.data[slot], own)
        return out

    return run
