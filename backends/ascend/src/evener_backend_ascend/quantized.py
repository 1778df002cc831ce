"""Linear layers over int8 weights: ``npu_quant_matmul`` where the format lets activations be rounded to int8 with a
scale a token and the chip has it, otherwise ``npu_weight_quant_batchmatmul``; and experts, by forms of
``npu_grouped_matmul``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Packing, QuantFormat, Rounding, WeightPart
from evener_backend_ascend import calls
from evener_backend_ascend.chip import INT8_EXPERTS, refusal
from evener_backend_ascend.kernels import NpuGroupedLinear, NpuKernel

_SCALES = ("float32", "float16", "bfloat16")
_HALVES = ("float16", "bfloat16")
#: The vendor's products take neither more rows nor more columns of a weight.
_LONGEST = 65535


@dataclass(frozen=True)
class Int8Stack:
    """Codes int8 [matrices, columns, rows] and scales float32 [matrices, rows]."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes[index], self.scales[index]


class Int8Rows(Packing):
    """Weights of int8 codes with one scale a row. ``data``: codes int8 [columns, rows], which is the order that the
    vendor recommends, and scales float32 [rows], of all parts; of a stack, ``Int8Stack``."""

    layout = "ascend.int8"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        form = parts[0].format
        if any(part.format != form for part in parts):
            return "its parts are stored in different formats"
        if form.storage != "int8" or form.scale not in _SCALES or form.zero or form.order != "row":
            return f"holds int8 codes with float scales and no zero points, and this is stored as {form.storage}"
        if (form.group, form.group_out) != (0, 1):
            return f"has one scale a row, and {form.group} columns x {form.group_out} rows share one here"
        rows, columns = sum(part.rows for part in parts), parts[0].columns
        if max(rows, columns) > _LONGEST:
            return f"has no kernel for {rows} x {columns}: at most {_LONGEST} each"
        return None if dtype in _HALVES else f"computes in {' or '.join(_HALVES)}, not in {dtype}"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(part.rows for part in parts) * (parts[0].columns + 4)

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        codes = torch.cat([part.tensors["weight"].to(device) for part in parts])
        scales = torch.cat([part.tensors["scale"].to(device, torch.float32).reshape(-1) for part in parts])
        rows, columns = codes.shape
        data = codes.T.contiguous(), scales
        return PackedWeight(self.layout, (rows, columns), data, rows * (columns + 4), tuple(p.format for p in parts))

    def pack_stack(
        self, matrices: Iterable[Sequence[WeightPart]], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        stack: Int8Stack | None = None
        formats: tuple[QuantFormat, ...] = ()
        for index, parts in enumerate(matrices):
            one = self.pack(parts, dtype, device)
            codes, scales = one.data
            if stack is None:  # the first matrix has the sizes
                stack = Int8Stack(codes.new_empty(count, *codes.shape), scales.new_empty(count, *scales.shape))
                formats = one.formats
            stack.codes[index], stack.scales[index] = codes, scales
        assert stack is not None, "there is at least one matrix"
        columns, rows = stack.codes.shape[1:]
        return PackedWeight(self.layout, (count, rows, columns), stack, count * rows * (columns + 4), formats)


class NpuInt8Linear(NpuKernel):
    """Activations as int8 with one scale a token, where the format says so; then sums are of int8 products."""

    op, name, vendor = "linear", "ascend.int8_linear", "npu_weight_quant_batchmatmul"
    packings = (Int8Rows(),)

    def _unsupported(self, call: OpCall) -> str | None:
        given, wanted = call.static["dtype"], call.static["out"]
        return None if given == wanted else f"gives {given}, not {wanted}"

    def rounds(self, call: OpCall, weight: str) -> bool:
        return _quantizes(call)

    def workspace(self, call: OpCall) -> int:
        # The activations in one piece and as codes, their scales, and the weight's scales in the activations' dtype.
        tokens, s = call.bucket.high, call.static
        return int(tokens * (3 * s["columns"] + 4) + 6 * s["rows"])

    def build(self, call: OpCall) -> OpFunction:
        product = calls.int8_matmul if _quantizes(call) else calls.int8_weight_matmul

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            codes, scales = weight.data
            return product(x, codes, scales, bias) if x.shape[0] else x.new_empty(0, codes.shape[1])

        return run


class NpuInt8GroupedLinear(NpuGroupedLinear):
    """The same of experts."""

    name, vendor = "ascend.int8_grouped_linear", INT8_EXPERTS
    packings: tuple[Packing, ...] = (Int8Rows(),)

    def _unsupported(self, call: OpCall) -> str | None:
        dtype = call.static["dtype"]
        return super()._unsupported(call) if dtype in _HALVES else f"computes in {' or '.join(_HALVES)}, not in {dtype}"

    def rounds(self, call: OpCall, weight: str) -> bool:
        return _quantizes(call)

    def product(self, call: OpCall) -> Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]:
        function = calls.grouped_int8_matmul if _quantizes(call) else calls.grouped_int8_weight_matmul

        def multiply(x: torch.Tensor, data: Int8Stack, counts: torch.Tensor) -> torch.Tensor:
            return function(x, data.codes, data.scales, counts)

        return multiply


def _quantizes(call: OpCall) -> bool:
    """Whether activations are rounded to int8."""
    how = call.static["weight"].parts[0].format.activation
    return how == Rounding("int8") and refusal(call.device.variant, "npu_quant_matmul") is None
