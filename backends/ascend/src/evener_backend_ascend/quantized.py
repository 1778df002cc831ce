"""Linear layers over int8 weights: ``npu_quant_matmul`` where the format lets activations be rounded to int8, with a
scale a token or a fixed one, and the chip has it, otherwise ``npu_weight_quant_batchmatmul``; and experts, by forms of
``npu_grouped_matmul``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Packing, QuantFormat, Rounding, WeightPart
from evener.ops.reference.rounding import LARGEST
from evener_backend_ascend import calls
from evener_backend_ascend.chip import INT8_EXPERTS, refusal
from evener_backend_ascend.kernels import NpuGroupedLinear, NpuKernel

_SCALES = ("float32", "float16", "bfloat16")
_HALVES = ("float16", "bfloat16")
#: The vendor's products take neither more rows nor more columns of a weight.
_LONGEST = 65535


@dataclass(frozen=True)
class Int8Stack:
    """Codes int8 [matrices, columns, rows] and scales float32 [matrices, rows]. ``fixed``: float32 [matrices, 3], of
    the same fixed scale of activations for each, as ``calls.int8_matmul`` takes it; None: no such scale."""

    codes: torch.Tensor
    scales: torch.Tensor
    fixed: torch.Tensor | None = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        fixed = () if self.fixed is None else (self.fixed[index],)
        return self.codes[index], self.scales[index], *fixed


class Int8Rows(Packing):
    """Weights of int8 codes with one scale a row, or one for the whole tensor, which then every row of the part gets.
    ``data``: codes int8 [columns, rows], which is the order that the vendor recommends, and scales float32 [rows], of
    all parts; where the scale of activations is fixed, also float32 [3] of the largest of the parts': see
    ``calls.int8_matmul``. Of a stack, ``Int8Stack``."""

    layout = "ascend.int8"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        form = parts[0].format
        if any(part.format != form for part in parts):
            return "its parts are stored in different formats"
        if form.storage != "int8" or form.scale not in _SCALES or form.zero or form.order != "row":
            return f"holds int8 codes with float scales and no zero points, and this is stored as {form.storage}"
        if form.group > 0 or form.group_out != 1:
            return f"has one scale a row, and {form.group} columns x {form.group_out} rows share one here"
        rows, columns = sum(part.rows for part in parts), parts[0].columns
        if max(rows, columns) > _LONGEST:
            return f"has no kernel for {rows} x {columns}: at most {_LONGEST} each"
        return None if dtype in _HALVES else f"computes in {' or '.join(_HALVES)}, not in {dtype}"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(part.rows for part in parts) * (parts[0].columns + 4) + (_FIXED_BYTES if _is_fixed(parts) else 0)

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        codes = torch.cat([part.tensors["weight"].to(device) for part in parts])
        scales = torch.cat([_row_scales(part).to(device, torch.float32) for part in parts])
        data: tuple[torch.Tensor, ...] = codes.T.contiguous(), scales
        if _is_fixed(parts):
            own = [part.tensors["activation_scale"].to(device, torch.float32).reshape(1) for part in parts]
            data = *data, _fixed_numbers(torch.cat(own))
        nbytes = self.nbytes(parts, dtype)
        return PackedWeight(self.layout, tuple(codes.shape), data, nbytes, tuple(part.format for part in parts))

    def pack_stack(
        self, matrices: Iterable[Sequence[WeightPart]], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        stack: Int8Stack | None = None
        formats: tuple[QuantFormat, ...] = ()
        nbytes = 0
        for index, parts in enumerate(matrices):
            one = self.pack(parts, dtype, device)
            if stack is None:  # the first matrix has the sizes
                stack = Int8Stack(*(each.new_empty(count, *each.shape) for each in one.data))
                formats, nbytes = one.formats, one.nbytes
            for room, each in zip(stack[index], one.data, strict=True):
                room.copy_(each)
        assert stack is not None, "there is at least one matrix"
        if stack.fixed is not None:
            stack.fixed[:] = _fixed_numbers(stack.fixed[:, 0])
        columns, rows = stack.codes.shape[1:]
        return PackedWeight(self.layout, (count, rows, columns), stack, count * nbytes, formats)


class NpuInt8Linear(NpuKernel):
    """Activations as int8 with one scale a token or a fixed one, as the format says; then sums are of int8 products."""

    op, name, vendor = "linear", "ascend.int8_linear", "npu_weight_quant_batchmatmul"
    packings = (Int8Rows(),)

    def _unsupported(self, call: OpCall) -> str | None:
        given, wanted = call.static["dtype"], call.static["out"]
        return None if given == wanted else f"gives {given}, not {wanted}"

    def rounds(self, call: OpCall, weight: str) -> bool:
        return _quantizes(call)

    def workspace(self, call: OpCall) -> int:
        # The activations in one piece and as codes, their scales, and the weight's scales in the activations' dtype.
        # With a fixed scale the one piece is in float32.
        tokens, s = call.bucket.high, call.static
        return int(tokens * ((5 if _fixed(call) else 3) * s["columns"] + 4) + 6 * s["rows"])

    def build(self, call: OpCall) -> OpFunction:
        product = calls.int8_matmul if _quantizes(call) else calls.int8_weight_matmul
        fixed = _fixed(call)

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            codes, scales, *rest = weight.data
            if not x.shape[0]:
                return x.new_empty(0, codes.shape[1])
            return calls.int8_matmul(x, codes, scales, bias, rest[0]) if fixed else product(x, codes, scales, bias)

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
        fixed = _fixed(call)

        def multiply(x: torch.Tensor, data: Int8Stack, counts: torch.Tensor) -> torch.Tensor:
            if fixed:
                assert data.fixed is not None, "packed with the scale that the format has"
                return calls.grouped_int8_matmul(x, data.codes, data.scales, counts, data.fixed[0])
            return function(x, data.codes, data.scales, counts)

        return multiply

    def workspace(self, call: OpCall) -> int:
        # As 16 experts a token there; the rows also as codes, with a fixed scale in float32 too, and their scales.
        more = (5 if _fixed(call) else 1) * call.static["columns"] + 4 if _quantizes(call) else 0
        return super().workspace(call) + int(call.bucket.high * 16 * more)


#: How the vendor's products may round activations, and what rounds them.
_ROUNDED = {Rounding("int8"): "npu_dynamic_quant", Rounding("int8", -1): "npu_quantize"}
#: A fixed scale, its reciprocal and the smallest activation.
_FIXED_BYTES = 12


def _quantizes(call: OpCall) -> bool:
    """Whether activations are rounded to int8."""
    rounds = _ROUNDED.get(call.static["weight"].parts[0].format.activation)
    return rounds is not None and refusal(call.device.variant, "npu_quant_matmul", rounds) is None


def _fixed(call: OpCall) -> bool:
    """Whether they are, with a fixed scale."""
    return _quantizes(call) and _is_fixed(call.static["weight"].parts)


def _is_fixed(parts: Sequence[WeightPart]) -> bool:
    """Whether the parts have a fixed scale with which activations may be rounded to int8."""
    return parts[0].format.activation == Rounding("int8", -1)


def _row_scales(part: WeightPart) -> torch.Tensor:
    """The scale of each row [rows]. The vendor's products take a single number too, but parts of one weight may have
    different ones, and not all of the kernels do."""
    return part.tensors["scale"].reshape(-1).expand(part.rows)


def _fixed_numbers(scales: torch.Tensor) -> torch.Tensor:
    """Float32 [3]: the largest scale, its reciprocal, and the smallest activation that is not cut off."""
    largest = scales.max()
    return torch.stack((largest, largest.reciprocal(), -LARGEST["int8"] * largest))
