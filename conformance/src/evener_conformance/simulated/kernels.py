"""The chip's kernels: the reference's computation, behind the chip's own launches and weight layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import DTYPE_BYTES, PackedWeight, Packing, WeightPart
from evener.ops.parts import load_reference
from evener.ops.schemas import OTHER_PRIMITIVES, PRIMITIVES
from evener.resolution.footprint import Sizes, activation_bytes
from evener_conformance.simulated.device import SimulatedDevice

_SCHEMAS = {schema.name: schema for schema in (*PRIMITIVES, *OTHER_PRIMITIVES)}


class ColumnsFirst(Packing):
    """One contiguous [columns, rows] matrix: the chip wants weights transposed."""

    layout = "simulated.columns_first"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        odd = [p.format.storage for p in parts if not p.format.plain]
        return f"stored as {odd[0]}, which the chip cannot multiply by" if odd else None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(p.rows for p in parts) * parts[0].columns * int(DTYPE_BYTES[dtype])

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        wanted = getattr(torch, dtype)
        pieces = [p.tensors["weight"].to(device=device, dtype=wanted) for p in parts]
        return self._weight(torch.cat(pieces).t().contiguous(), parts)

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor]:
        """Of a stack, each matrix, because ``data`` is then a tuple."""
        return packed.data if isinstance(packed.data, tuple) else (packed.data,)

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        wanted = (parts[0].columns, sum(p.rows for p in parts)), getattr(torch, dtype)
        if [(tuple(t.shape), t.dtype) for t in tensors] != [wanted] * (count or 1):
            raise ValueError(f"the tensors are not {count or 1} of {list(wanted[0])} in {dtype}")
        if not count:
            return self._weight(tensors[0], parts)
        made = [self._weight(tensor, parts) for tensor in tensors]
        data, nbytes = tuple(each.data for each in made), sum(each.nbytes for each in made)
        return PackedWeight(self.layout, (count, *made[0].shape), data, nbytes, made[0].formats)

    def _weight(self, data: torch.Tensor, parts: Sequence[WeightPart]) -> PackedWeight:
        shape = data.shape[1], data.shape[0]
        return PackedWeight(self.layout, shape, data, data.nbytes, tuple(p.format for p in parts))


class SimulatedKernel(Kernel):
    """One primitive; inputs are made contiguous and aligned first."""

    capturable = True
    #: Ops that only the newer chip has.
    _NEWER = frozenset({"sample"})

    def __init__(self, device: SimulatedDevice, op: str) -> None:
        self.op, self.name, self._device = op, f"simulated.{op}", device

    def supports(self, call: OpCall) -> str | None:
        variant = call.device.variant
        if self.op in self._NEWER and variant == "older":
            return "the older chip has no unit for it"
        known = call.device.dtypes | {None}
        odd = [call.static.get(key) for key in ("dtype", "out") if call.static.get(key) not in known]
        return f"the {variant} chip has no {odd[0]}" if odd else None

    def workspace(self, call: OpCall) -> int:
        # Inputs with strides or unaligned addresses are copied, and donated inputs are not overwritten.
        rows = call.bucket.high
        return 2 * activation_bytes(_SCHEMAS[self.op], call.static, Sizes(rows, rows))

    def build(self, call: OpCall) -> OpFunction:
        compute: OpFunction = load_reference(_SCHEMAS[self.op])(call.static, _no_other)
        launch, name, alignment = self._device.launch, self.name, self._device.constraints.alignment
        # Core promises that a step's own arrays are aligned; the launch checks it.
        as_is = [tensor.shape == ("T",) for tensor in _SCHEMAS[self.op].inputs]

        def run(*args: Any) -> Any:
            fit = (a if kept else aligned_contiguous(a, alignment) for a, kept in zip(args, as_is, strict=False))
            return launch(name, compute, *fit)

        return run


class SimulatedLinear(SimulatedKernel):
    """``linear`` over transposed weights."""

    packings = (ColumnsFirst(),)

    def build(self, call: OpCall) -> OpFunction:
        launch, name, out = self._device.launch, self.name, getattr(torch, call.static["out"])
        alignment = self._device.constraints.alignment

        def compute(x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            y = x.float() @ data.float()
            return (y if bias is None else y + bias.float()).to(out)

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> Any:
            return launch(name, compute, aligned_contiguous(x, alignment), weight.data, bias)

        return run


class SimulatedGroupedLinear(SimulatedKernel):
    """``grouped_linear`` over transposed matrices."""

    packings = (ColumnsFirst(),)

    def build(self, call: OpCall) -> OpFunction:
        launch, name, rows = self._device.launch, self.name, call.static["rows"]
        alignment = self._device.constraints.alignment

        def compute(
            x: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None, *stack: torch.Tensor
        ) -> torch.Tensor:
            out = x.new_zeros(*slots.shape, rows)
            # Most matrices of a small step have no row: tests have many experts and few tokens.
            for slot in {each for token in slots.tolist() for each in token if 0 <= each < len(stack)}:
                tokens, ranks = (slots == slot).nonzero(as_tuple=True)
                y = x[tokens].float() @ stack[slot].float()
                out[tokens, ranks] = (y if bias is None else y + bias[slot].float()).to(x.dtype)
            return out

        def run(x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
            x, slots, bias = (aligned_contiguous(t, alignment) for t in (x, slots, bias))
            return launch(name, compute, x, slots, bias, *weight.data)

        return run


def aligned_contiguous(value: Any, alignment: int) -> Any:
    """A tensor as the chip reads it: copied if it has strides or is not aligned, as views in a layer may be."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.contiguous()
    return whole.clone() if whole.data_ptr() % alignment else whole


def _no_other(op: str, /, **_: Any) -> OpFunction:
    raise AssertionError(f"a primitive's reference asked for {op}")


def kernels(device: SimulatedDevice, names: Sequence[str]) -> list[Kernel]:
    """One kernel for each op."""
    made = {"linear": SimulatedLinear, "grouped_linear": SimulatedGroupedLinear}
    return [made.get(name, SimulatedKernel)(device, name) for name in names]
