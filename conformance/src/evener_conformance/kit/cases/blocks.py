"""Random weights in every storage format that core knows, and cases of ``linear`` and ``grouped_linear`` with them.

Block formats are dequantized here independently of evener's own schemes and kernels, from their layouts in ggml
(``ggml-common.h``) and in the OCP Microscaling Formats (MX) specification 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from evener.contracts.declared import LinearWeight, StackedWeight
from evener.contracts.ops import OpCase
from evener.contracts.quant import BLOCKS, MXFP4, NVFP4, QuantFormat, Rounding, WeightPart, block_format, plain
from evener.ops.reference.rounding import LARGEST

#: A kernel may round activations to 16-bit integers with a shared scale: an error of at most 9e-5 of the two rows'
#: norms. In a narrow compute dtype it may round each scale and each weight, as matrix units take both operands in it:
#: of rows of about unit norm, bfloat16 weights alone leave errors up to 1.1e-2 of a sum of 768.
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (1.6e-2, 1.6e-2), "float16": (4e-3, 4e-3)}
_E4M3 = "float8_e4m3fn"
#: One byte an element with a scale for the whole tensor, for each row, or for blocks of rows and columns.
SCALED = {
    "e4m3 by tensor": QuantFormat("float8_e4m3fn", -1, scale="float32"),
    "e4m3 by row": QuantFormat("float8_e4m3fn", scale="float32"),
    "e4m3 by block": QuantFormat("float8_e4m3fn", 128, 128, scale="float32"),
    "e5m2 by row": QuantFormat("float8_e5m2", scale="bfloat16"),
    "int8 by row": QuantFormat("int8", scale="float32"),
    "int8 by group": QuantFormat("int8", 32, scale="float16"),
    # The same, with activations that a kernel may round.
    "e4m3 by block, x by 128": QuantFormat(_E4M3, 128, 128, scale="float32", activation=Rounding(_E4M3, 128)),
    "e4m3 by row, x by token": QuantFormat(_E4M3, scale="float32", activation=Rounding(_E4M3)),
    "e4m3 by tensor, x fixed": QuantFormat(_E4M3, -1, scale="float32", activation=Rounding(_E4M3, -1)),
    "int8 by tensor, x fixed": QuantFormat("int8", -1, scale="float32", activation=Rounding("int8", -1)),
    "int8 by row, x by token": QuantFormat("int8", scale="float32", activation=Rounding("int8")),
    "int8 by row, x fixed": QuantFormat("int8", scale="float32", activation=Rounding("int8", -1)),
}
#: Integers of four or eight bits in groups: with and without zero points, in act-order, and a piece of a weight in
#: act-order that was cut along the in-features, which has more scales than its columns need.
GROUPED = {
    "uint4 by 128": QuantFormat("uint4", 128, scale="float16"),
    "uint4 by row": QuantFormat("uint4", scale="bfloat16"),
    "uint4 by 32, zeros": QuantFormat("uint4", 32, scale="float16", zero="uint8"),
    "uint4 by 64, act": QuantFormat("uint4", 64, scale="bfloat16", order="act"),
    "uint4 by 128, zeros, act, piece": QuantFormat("uint4", 128, scale="float16", zero="uint8", order="act", groups=40),
    # Activations that a kernel may round, of four-bit weights.
    "uint4 by 128, x int8": QuantFormat("uint4", 128, scale="bfloat16", activation=Rounding("int8")),
    "uint4 by 32, zeros, x e4m3": QuantFormat("uint4", 32, scale="float16", zero="uint8", activation=Rounding(_E4M3)),
    "int8 by 64, zeros": QuantFormat("int8", 64, scale="float16", zero="int8"),
    "int8 by 128, act": QuantFormat("int8", 128, scale="bfloat16", order="act"),
}
#: Four-bit numbers of a table: that of E2M1 with two kinds of scales, and one that each part has.
TABLES = {
    "nvfp4": NVFP4,
    "nf4 by 64": QuantFormat("nf4", 64, scale="float32"),
    "fp4 by 128": QuantFormat("fp4", 128, scale="float32"),
}
#: All formats whose scales are tensors of their own, except MXFP4.
_BESIDE = {**SCALED, **GROUPED, **TABLES}
#: Every storage that core knows, except the plain ones.
STORAGES = (*BLOCKS, MXFP4.storage, *_BESIDE)
#: Storages of the parts of one matrix: QKV of Q4_K_M and Q5_0 files, and other mixes that a layer may have.
MIXES = (("q4_k", "q4_k", "q6_k"), ("q5_0", "q5_0", "q8_0"), ("q8_0", "plain", "q4_1"), ("plain", MXFP4.storage),
         ("e4m3 by tensor",) * 3, ("e4m3 by block", "e4m3 by block"), ("plain", "int8 by row"),
         ("uint4 by 128",) * 3, ("uint4 by 64, act",) * 2, ("uint4 by 32, zeros", "plain"),
         ("nvfp4",) * 3, ("nf4 by 64", "plain", "fp4 by 128"), ("e4m3 by tensor, x fixed",) * 3,
         ("int8 by tensor, x fixed",) * 3, ("int8 by row, x fixed",) * 3)  # fmt: skip
#: Offsets of the float16 numbers in a block, in bytes.
_FLOAT16_OFFSETS = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip
_FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def format_of(storage: str) -> QuantFormat:
    """The format of parts of a storage that is not plain."""
    return MXFP4 if storage == MXFP4.storage else _BESIDE[storage] if storage in _BESIDE else block_format(storage)


def storage_of(form: QuantFormat) -> str:
    """The storage whose parts have this format, which is not plain."""
    return next((name for name, known in _BESIDE.items() if known == form), form.storage)


def unit_of(storage: str) -> int:
    """Columns of one block."""
    if storage in _BESIDE:
        return max(32, _BESIDE[storage].group)
    return MXFP4.group if storage == MXFP4.storage else BLOCKS.get(storage, (1, 0))[0]


def random_part(storage: str, rows: int, columns: int, generator: torch.Generator) -> WeightPart:
    """A part of random valid bits, whose rows have a norm of about 1.

    Args:
        storage: one of ``STORAGES``, or a plain type.
    """
    if storage not in STORAGES:
        values = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return WeightPart("part", rows, columns, plain(storage), {"weight": values.to(getattr(torch, storage))})
    if storage in SCALED:
        return _random_scaled(SCALED[storage], rows, columns, generator)
    if storage in GROUPED:
        return random_grouped(GROUPED[storage], rows, columns, generator)
    if storage in TABLES:
        return random_table(TABLES[storage], rows, columns, generator)
    count = columns // unit_of(storage)
    if storage == MXFP4.storage:
        weight = torch.randint(256, (rows, count, 16), generator=generator, dtype=torch.uint8)
        scale = torch.randint(118, 123, (rows, count), generator=generator, dtype=torch.uint8)
        return WeightPart("part", rows, columns, MXFP4, {"weight": weight, "scale": scale})
    data = torch.randint(256, (rows, count, BLOCKS[storage][1]), generator=generator, dtype=torch.uint8)
    scales = {at: torch.randn(rows, count, 1, generator=generator) for at in _FLOAT16_OFFSETS[storage]}
    for length in (1.0, columns**-0.5):  # the second pass uses the size of the first pass's numbers
        for at, scale in scales.items():
            data[..., at : at + 2] = (scale * length).half().view(torch.uint8)
        size = float(_DEQUANTIZERS[storage](data).square().mean().sqrt())
        scales = {at: scale / size for at, scale in scales.items()} if length == 1.0 else scales
    return WeightPart("part", rows, columns, block_format(storage), {"weight": data.flatten(1)})


def _random_scaled(form: QuantFormat, rows: int, columns: int, generator: torch.Generator) -> WeightPart:
    """Scales differ by up to a factor of four, so that one in the wrong place is seen. Those of whole tensors differ by
    2.5, as all rows have the same: if all had twice the usual norm, errors would be larger than ``TOLERANCE`` has."""
    if form.storage == "int8":
        weight = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
        size = 74.0  # their standard deviation
    else:
        weight = torch.randn(rows, columns, generator=generator).to(getattr(torch, form.storage))
        size = 1.0
    shape = () if form.group == -1 else (-(-rows // form.group_out), -(-columns // (form.group or columns)))
    least, spread = (0.55, 2.5) if form.group == -1 else (0.5, 4)
    scale = (least * spread ** torch.rand(shape, generator=generator)) * columns**-0.5 / size
    tensors = {"weight": weight, "scale": scale.to(getattr(torch, str(form.scale)))}
    if form.activation is not None and form.activation.group < 0:  # some activations about normal are cut off
        tensors["activation_scale"] = (2 + torch.rand((), generator=generator)) / LARGEST[form.activation.storage]
    return WeightPart("part", rows, columns, form, tensors)


def random_grouped(form: QuantFormat, rows: int, columns: int, generator: torch.Generator) -> WeightPart:
    """A part in a format as those of ``GROUPED``. Scales and zero points differ so much that one in the wrong place is
    seen."""

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    groups, four = form.row_scales(columns), form.storage == "uint4"
    size = 74.0 if not four else 6.5 if form.zero else 4.6  # the numbers' standard deviation
    scale = (0.5 * 4 ** torch.rand(rows, groups, generator=generator)) * columns**-0.5 / size
    # As GPTQ's files give them: a transposed view, also of a single group.
    tensors = {"scale": scale.to(getattr(torch, str(form.scale))).T.clone(memory_format=torch.contiguous_format).T}
    if four:
        tensors["weight"] = integers(0, 256, rows, columns // 2).to(torch.uint8)
    else:
        tensors["weight"] = integers(-128, 128, rows, columns).to(torch.int8)
    if form.zero:
        low, high = (0, 16) if four else (-32, 32)
        tensors["zero"] = integers(low, high, rows, groups).to(getattr(torch, form.zero))
    if form.order == "act":
        mixed = torch.randperm(columns, generator=generator) // form.group
        mixed = integers(0, groups, columns) if form.groups else mixed
        tensors["group_index"] = mixed.to(torch.int32)
    return WeightPart("part", rows, columns, form, tensors)


def random_table(form: QuantFormat, rows: int, columns: int, generator: torch.Generator) -> WeightPart:
    """A part in a format as those of ``TABLES``. Scales differ by up to a factor of four, and a table of its own has no
    order and no symmetry, so that a number or a scale in the wrong place is seen."""
    scale = 0.5 * 4 ** torch.rand(rows, columns // form.group, generator=generator)
    tensors = {"weight": torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)}
    if form == NVFP4:  # 3 is the numbers' standard deviation
        whole = (0.5 + torch.rand((), generator=generator)) / 100
        tensors |= {"scale": (scale * columns**-0.5 / 3 / whole).to(torch.float8_e4m3fn), "factor": whole}
    else:
        table = torch.rand(16, generator=generator) * 2 - 1
        size = float(table.square().mean().sqrt())
        tensors |= {"scale": scale * columns**-0.5 / size, "table": table}
    return WeightPart("part", rows, columns, form, tensors)


def _table_values(part: WeightPart) -> torch.Tensor:
    """The numbers of a part in one of the formats ``TABLES``, in groups of any size."""
    stored, scale = part.tensors["weight"].long(), part.tensors["scale"].float()
    if part.format == NVFP4:
        table, scale = torch.tensor([*_FLOATS, *(-value for value in _FLOATS)]), scale * part.tensors["factor"]
    else:
        table = part.tensors["table"]
    numbers = torch.stack((table[stored & 15], table[stored >> 4]), dim=-1).flatten(-2)
    return numbers * scale[:, torch.arange(part.columns) // part.format.group]


def _is_table(form: QuantFormat) -> bool:
    own = form.storage in ("nf4", "fp4") and form.group > 0
    return form == NVFP4 or (own and form == QuantFormat(form.storage, form.group, scale="float32"))


def _grouped_values(part: WeightPart) -> torch.Tensor:
    """The numbers of a part whose format differs from one of ``GROUPED`` in sizes only."""
    form, stored = part.format, part.tensors["weight"]
    wide = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2) if form.storage == "uint4" else stored
    group = part.tensors["group_index"].long() if form.order == "act" else (
        torch.arange(part.columns, device=stored.device) // (form.group or part.columns)
    )  # fmt: skip
    zero = part.tensors["zero"].float()[:, group] if form.zero else 8.0 if form.storage == "uint4" else 0.0
    return (wide.float() - zero) * part.tensors["scale"].float()[:, group]


def _is_grouped(form: QuantFormat) -> bool:
    zeros = {"uint4": (None, "uint8"), "int8": (None, "int8")}.get(form.storage, ())
    fits = form.scale in ("float32", "float16", "bfloat16")
    return form.zero in zeros and fits and form.group_out == 1 and form.group >= 0


def _spread(scale: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """The scale of each element of a part in one of the formats ``SCALED``."""
    form = part.format
    if form.group == -1:
        return scale
    rows = scale.float().repeat_interleave(form.group_out, 0)[: part.rows]
    return rows.repeat_interleave(form.group or part.columns, 1)[:, : part.columns]


def reference_dequantize(part: WeightPart) -> torch.Tensor:
    """A part of a known format, dequantized: [rows, columns] of float32."""
    data, storage = part.tensors["weight"], part.format.storage
    if part.format.plain:
        return data.float()
    if part.format in SCALED.values():
        return data.float() * _spread(part.tensors["scale"].float(), part)
    if _is_grouped(part.format):
        return _grouped_values(part)
    if _is_table(part.format):
        return _table_values(part)
    if part.format == MXFP4:
        values = torch.tensor([*_FLOATS, *(-value for value in _FLOATS)])
        pairs = torch.stack((values[(data & 15).long()], values[(data >> 4).long()]), dim=-1).flatten(-2)
        return (pairs * 2.0 ** (part.tensors["scale"].double() - 127)[..., None]).float().flatten(1)
    return _DEQUANTIZERS[storage](data.unflatten(1, (-1, BLOCKS[storage][1]))).reshape(part.rows, part.columns)


def is_known_format(part: WeightPart) -> bool:
    """Whether ``reference_dequantize`` knows a part's format."""
    form = part.format
    return (
        form.plain
        or form == MXFP4
        or form in SCALED.values()
        or _is_grouped(form)
        or _is_table(form)
        or (form.storage in BLOCKS and form == block_format(form.storage))
    )


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _unpack_bits(data: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` numbers of 8 / ``count`` bits from each byte, low bits first: [..., count, bytes]."""
    bits = 8 // count
    return (data.int()[..., None, :] >> (torch.arange(count) * bits)[:, None]) & ((1 << bits) - 1)


def _legacy_quant(fifth_bit: bool, least: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Q4_0, Q4_1, Q5_0, Q5_1: d (q - middle) or d q + m."""

    def values(blocks: torch.Tensor) -> torch.Tensor:
        quants = _unpack_bits(blocks[..., -16:], 2).flatten(-2)
        if fifth_bit:  # bit j of 32 is the fifth bit of number j
            quants = quants + 16 * _unpack_bits(blocks[..., -20:-16], 8).transpose(-1, -2).flatten(-2)
        if least:
            return _half(blocks, 0) * quants + _half(blocks, 2)
        return _half(blocks, 0) * (quants - (16 if fifth_bit else 8))

    return values


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[..., 2:].contiguous().view(torch.int8)


def _scaled_groups(blocks: torch.Tensor, scales: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 numbers."""
    values: torch.Tensor = quants.flatten(-3).unflatten(-1, (16, 16))
    return (scales[..., None] * values).flatten(-2)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    quants = _unpack_bits(blocks[..., 16:80].unflatten(-1, (2, 32)), 4)
    low, high = _unpack_bits(blocks[..., :16], 2).unbind(-2)
    least = _scaled_groups(blocks, _half(blocks, 82) * high, torch.ones_like(quants))
    return _scaled_groups(blocks, _half(blocks, 80) * low, quants) - least


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    third = _unpack_bits(blocks[..., :32], 8).unflatten(-2, (2, 4))
    quants = _unpack_bits(blocks[..., 32:96].unflatten(-1, (2, 32)), 4) + 4 * third - 4
    scales = (
        _unpack_bits(blocks[..., 96:104], 2).flatten(-2) + 16 * _unpack_bits(blocks[..., 104:108], 4).flatten(-2) - 32
    )
    return _scaled_groups(blocks, _half(blocks, 108) * scales, quants)


def _q4_k_or_q5_k(fifth_bit: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Q4_K, Q5_K: 8 groups of 32 numbers, with scales and minima of six bits."""

    def values(blocks: torch.Tensor) -> torch.Tensor:
        first, second, rest = blocks[..., 4:16].int().split(4, -1)
        scales = torch.cat((first & 63, (rest & 15) | first >> 6 << 4), -1)
        minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
        quants = _unpack_bits(blocks[..., -128:].unflatten(-1, (4, 32)), 2).flatten(-3, -2)
        if fifth_bit:
            quants = quants + 16 * _unpack_bits(blocks[..., 16:48], 8)
        found = (_half(blocks, 0) * scales)[..., None] * quants - (_half(blocks, 2) * minima)[..., None]
        return found.flatten(-2)

    return values


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _unpack_bits(blocks[..., :128].unflatten(-1, (2, 64)), 2).unflatten(-1, (2, 32)).flatten(-3, -2)
    quants = low + 16 * _unpack_bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 4) - 32
    return _scaled_groups(blocks, _half(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8), quants)


_DEQUANTIZERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q4_0": _legacy_quant(False, False), "q4_1": _legacy_quant(False, True), "q5_0": _legacy_quant(True, False),
    "q5_1": _legacy_quant(True, True), "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k_or_q5_k(False),
    "q5_k": _q4_k_or_q5_k(True), "q6_k": _q6_k,
}  # fmt: skip


def mixed_parts(mix: Sequence[str], blocks: int, generator: torch.Generator) -> tuple[WeightPart, ...]:
    """Parts of these storages, with different numbers of rows; each row has ``blocks`` of the largest block. Of three
    or more, the first and the last have smaller fixed scales of activations than the others, whose largest is that of
    all: a scale of the wrong part is seen."""
    columns = blocks * max(32, *map(unit_of, mix))
    parts = [random_part(storage, 17 + 16 * (i == 0), columns, generator) for i, storage in enumerate(mix)]
    for i in (0, -1) if len(mix) > 2 else ():
        if (fixed := parts[i].tensors.get("activation_scale")) is not None:
            parts[i] = replace(parts[i], tensors={**parts[i].tensors, "activation_scale": 0.6 * fixed})
    return tuple(parts)


def make_case(
    op: str,
    matrices: Sequence[tuple[WeightPart, ...]],
    tokens: int,
    dtype: str,
    generator: torch.Generator,
    unbiased: bool = False,
) -> OpCase:
    """``linear`` with the first of the matrices, or ``grouped_linear`` with all of them. ``unbiased``: no bias, and
    a result in float32 if the op has such a parameter, as for the logits of a head."""
    rows, columns = sum(p.rows for p in matrices[0]), matrices[0][0].columns
    bare = tuple(WeightPart(p.name, p.rows, p.columns, p.format) for p in matrices[0])
    sizes = {"columns": columns, "rows": rows, "dtype": dtype}
    x = torch.randn(tokens, columns, generator=generator).to(getattr(torch, dtype))
    bias = torch.randn(len(matrices), rows, generator=generator).to(getattr(torch, dtype))
    if op == "linear":
        weight = LinearWeight("weight", bare, rows, columns, dtype)
        out = "float32" if unbiased else dtype
        return OpCase({**sizes, "weight": weight, "out": out}, (x, matrices[0], None if unbiased else bias[0]))
    stack = StackedWeight("stack", bare, rows, columns, dtype, experts=len(matrices))
    slots = torch.randint(-1, len(matrices), (tokens, 2), generator=generator, dtype=torch.int32)
    inputs = (x, tuple(matrices), slots, None if unbiased else bias)
    return OpCase({**sizes, "weight": stack, "experts": len(matrices)}, inputs)


def format_mixes(dtype: str) -> Iterator[tuple[str, ...]]:
    """Each storage alone, then mixes of several. Plain parts have ``dtype``: the loader converts them."""
    yield from ((storage,) for storage in (dtype, *STORAGES))
    yield from (tuple(dtype if storage == "plain" else storage for storage in mix) for mix in MIXES)
