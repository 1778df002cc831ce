"""Linear layers and experts over integers in groups, by the vendor's products of four and eight bits. Weights are
packed when they are loaded, as the vendor's own engine does it, so a checkpoint needs no conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import DTYPE_BYTES, PackedWeight, Packing, WeightPart
from evener_backend_gcu.device import ALIGNMENT
from evener_backend_parts.vllm_ops import VendorKernel, aligned

FOUR, EIGHT = "_C::gptq_gemm_gcu", "_C::weight_only_quant"
#: Columns in a run: a byte has the number of a column of its first half and that of one in its second half.
RUN = 128
#: Columns of a group that the vendor's tools know.
GROUPS = (64, 128)
_SCALES = ("float16", "bfloat16", "float32")


class _InGroups(Packing):
    """What both packings take: parts of one format, whose groups are neighbouring columns."""

    storage: str

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        form = parts[0].format
        if any(replace(part.format, zero=None) != replace(form, zero=None) for part in parts):
            return "its parts are stored in different formats"
        if form.storage != self.storage or form.scale not in _SCALES or form.order != "row" or form.group_out != 1:
            return f"holds {self.storage} in groups of neighbouring columns, and this is stored as {form.elements}"
        return self._refusal(parts)

    def _refusal(self, parts: Sequence[WeightPart]) -> str | None:
        raise NotImplementedError


class GcuNibbles(_InGroups):
    """Four bits. ``data``: uint8 [columns / 2, rows]; byte j of a run of 64 has column j in its low half, column 64 + j
    in its high half; scales and zero points times scales, [groups, rows] in the compute dtype; and what the op takes as
    the order of groups, int32 [groups], which it does not read."""

    layout, storage = "gcu.uint4", "uint4"

    def _refusal(self, parts: Sequence[WeightPart]) -> str | None:
        form, columns = parts[0].format, parts[0].columns
        if form.group not in GROUPS:
            return f"has groups of {' or '.join(map(str, GROUPS))} columns, and here are {form.group or columns}"
        return f"{columns} columns are not a multiple of {RUN}" if columns % RUN else None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        rows, columns, groups = _sizes(parts)
        return rows * columns // 2 + int(2 * rows * groups * DTYPE_BYTES[dtype]) + 4 * groups

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        bytes_, scales, products = [], [], []
        for part in parts:
            stored = part.tensors["weight"].to(device)
            numbers = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
            low, high = numbers.unflatten(1, (-1, 2, RUN // 2)).unbind(2)
            bytes_.append((low | high << 4).flatten(1))
            scale = part.tensors["scale"].to(device)
            zero = part.tensors["zero"].to(device, scale.dtype) if part.format.zero else 8
            scales.append(scale)
            products.append(zero * scale)
        kind = getattr(torch, dtype)
        data = (
            torch.cat(bytes_).T.contiguous(), torch.cat(scales).T.to(kind).contiguous(),
            torch.cat(products).T.to(kind).contiguous(), torch.arange(scales[0].shape[1], device=device).int(),
        )  # fmt: skip
        rows, columns, _ = _sizes(parts)
        formats = tuple(part.format for part in parts)
        return PackedWeight(self.layout, (rows, columns), data, self.nbytes(parts, dtype), formats)


class GcuBytes(_InGroups):
    """Eight bits. ``data``: int8 [rows, columns] and scales in the compute dtype, [rows] or [groups, rows]. A scale
    for the whole tensor is given to every row."""

    layout, storage = "gcu.int8", "int8"

    def _refusal(self, parts: Sequence[WeightPart]) -> str | None:
        form = parts[0].format
        if any(part.format.zero for part in parts):
            return "has no zero points of eight bits"
        if form.group > 0 and form.group not in GROUPS:
            return f"has groups of {' or '.join(map(str, GROUPS))} columns or whole rows, and here are {form.group}"
        return None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        rows, columns, groups = _sizes(parts)
        return rows * columns + int(rows * groups * DTYPE_BYTES[dtype])

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        kind = getattr(torch, dtype)
        numbers = torch.cat([part.tensors["weight"].to(device) for part in parts]).contiguous()
        stored = [part.tensors["scale"].to(device, kind) for part in parts]
        if parts[0].format.group > 0:
            scale = torch.cat(stored).T.contiguous()
        else:
            scale = torch.cat([each.reshape(-1).expand(part.rows) for each, part in zip(stored, parts, strict=True)])
        formats = tuple(part.format for part in parts)
        return PackedWeight(self.layout, tuple(numbers.shape), (numbers, scale), self.nbytes(parts, dtype), formats)


class GcuIntegers(VendorKernel):
    """``linear`` over these weights."""

    op = "linear"
    packings = (GcuNibbles(), GcuBytes())

    def refusal(self, call: OpCall) -> str | None:
        given, wanted = call.static["dtype"], call.static.get("out", call.static["dtype"])
        if given != wanted:
            return f"gives {given}, not {wanted}"
        return self.ops.refusal(FOUR, call.device.variant) or self.ops.refusal(EIGHT, call.device.variant)

    def workspace(self, call: OpCall) -> int:
        return 2 * call.bucket.high * int(call.static["columns"])  # activations at another address

    def build(self, call: OpCall) -> OpFunction:
        return self._product

    def _product(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._multiply(x, weight.layout, weight.data, weight.formats[0].group, weight.shape[-2], bias)

    def _multiply(
        self, x: torch.Tensor, layout: str, data: tuple[torch.Tensor, ...], group: int, rows: int,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if not x.shape[0]:
            return x.new_empty(0, rows)
        x = aligned(x, ALIGNMENT)
        if layout == GcuNibbles.layout:
            numbers, scales, products, order = data
            found: torch.Tensor = self.ops.function(FOUR)(
                a=x, b_q_weight=numbers, b_gptq_qzeros=products, b_gptq_scales=scales, b_g_idx=order, bit=4, bias=bias,
                group_size=group,
            )  # fmt: skip
            return found
        out = x.new_empty(x.shape[0], rows)
        self.ops.function(EIGHT)(output=out, input=x, qweight=data[0], bias=bias, scale=data[1], group_size=group or -1)
        return out


class GcuIntegerExperts(GcuIntegers):
    """``grouped_linear`` over these weights: one product for each expert that has tokens. Which these are is read on
    the host, as the reference does it."""

    op, capturable = "grouped_linear", False

    def workspace(self, call: OpCall) -> int:
        # Rows of one expert, and their products.
        return 4 * call.bucket.high * 16 * int(call.static["columns"] + call.static["rows"])

    def build(self, call: OpCall) -> OpFunction:
        experts, rows = int(call.static["experts"]), int(call.static["rows"])

        def run(
            x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            out, group = x.new_zeros(*slots.shape, rows), weight.formats[0].group
            for slot in range(experts):
                tokens, ranks = (slots == slot).nonzero(as_tuple=True)
                own = None if bias is None else aligned(bias[slot], ALIGNMENT)
                out[tokens, ranks] = self._multiply(
                    x.index_select(0, tokens), weight.layout, weight.data[slot], group, rows, own
                )
            return out

        return run


def _sizes(parts: Sequence[WeightPart]) -> tuple[int, int, int]:
    """Rows of all parts together, columns, and groups of a row."""
    columns = parts[0].columns
    return sum(part.rows for part in parts), columns, parts[0].format.row_scales(columns)
