"""Products of activations that are rounded to int8 with int8 weights that have a scale a row.

Only in steps of many tokens, and only on processors with instructions for it, which torch's product of integers uses.
Up to 16 tokens, reading the weights takes most of the time, and ``stored`` reads no more. Sums of integers are exact.

Only in bfloat16. The last bit of the layer before may move an activation from one element to its neighbour: less than
bfloat16 rounds a result, but a hundred times as much as float32 does.
"""

from __future__ import annotations

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpCall
from evener.contracts.quant import PackedWeight, Rounding
from evener.ops.reference.rounding import LARGEST, LEAST
from evener_backend_cpu.stored_packing import LAYOUT

#: Activations of steps of up to so many tokens are used as they are. 4,096 x 4,096 on one core, in ms, activations as
#: they are and rounded: 32 tokens 11.0 and 1.4 (Xeon with AMX), 5.5 and 3.6 (EPYC with VNNI); 1,024 tokens 468 and 52,
#: 162 and 48.
MAX_KEPT_TOKENS = 16
DTYPE = "bfloat16"
#: Features of a processor with products of int8: tiles, or vectors of 64.
_INSTRUCTIONS = frozenset({"amx_int8", "avx512_vnni"})
#: A sum of so many products fits an int32.
_MOST_COLUMNS = (1 << 31) // (127 * 128) - 1
#: Tokens that are multiplied at a time, so that sums stay in the cache.
_AT_ONCE = 256
_ROUNDINGS = (Rounding("int8"), Rounding("int8", -1))


def int8_rounding(call: OpCall, weight: LinearWeight | None) -> Rounding | None:
    """How activations are rounded before the product with ``weight`` in the steps of ``call``; None: not here."""
    if weight is None or call.bucket.low <= MAX_KEPT_TOKENS or not _INSTRUCTIONS & call.device.features:
        return None
    if weight.dtype != DTYPE or weight.layout != LAYOUT or weight.experts or weight.columns > _MOST_COLUMNS:
        return None
    form = weight.parts[0].format
    rows = all(part.format == form for part in weight.parts) and (form.storage, form.group, form.group_out) == (
        "int8", 0, 1,
    )  # fmt: skip
    return form.activation if rows and form.activation in _ROUNDINGS else None


def int8_workspace(call: OpCall) -> int:
    """Bytes of one call: rows in float32, their quotients and elements; integer sums and scaled ones."""
    tokens = min(call.bucket.high, _AT_ONCE)
    return int(tokens * (9 * call.static["columns"] + 8 * call.static["rows"] + 8))


def int8_product(
    x: torch.Tensor, weight: PackedWeight, how: Rounding, bias: torch.Tensor | None, out: torch.dtype
) -> torch.Tensor:
    """x [tokens, columns] rounded, times the weight [rows, columns], in ``out``."""
    held = 3 if how.group < 0 else 2
    tensors = weight.data.tensors
    parts = [tensors[at : at + held] for at in range(0, len(tensors), held)]
    fixed = torch.cat([part[2] for part in parts]).max() if how.group < 0 else None
    y = x.new_empty(x.shape[0], weight.shape[0], dtype=out)
    for some, to in zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True):
        codes, scale = _codes(some, fixed)
        first = 0
        for elements, scales, *_ in parts:
            last = first + len(elements)
            sums = torch._int_mm(codes, elements.t()).float()
            sums *= scale
            sums *= scales.view(1, -1)
            if bias is not None:
                sums += bias[first:last]
            to[:, first:last] = sums
            first = last
    return y


def _codes(x: torch.Tensor, fixed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements int8 of some rows, and their scale float32: one, or one a row."""
    wide, largest = x.float(), LARGEST["int8"]
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=LEAST).div_(largest) if fixed is None else fixed
    return (wide / scale).clamp_(-largest, largest).round_().to(torch.int8), scale
