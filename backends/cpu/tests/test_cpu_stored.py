"""Weights of one byte an element, read as stored: against torch's own conversion times the scales, in float64.

Tolerance, relative to the lengths of the rows that are multiplied: float32 1e-6 (sums in another order), bfloat16 4e-3
(the result is rounded). No weight is rounded, and no activation but where a test says so, so no format has a tolerance
of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packed_blocks import check_products, distance, multiply, portable_device
from row_invariance import check_invariance

from evener.backend.native_code import Unavailable
from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import MXFP4, QuantFormat, Rounding, WeightPart, plain
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import NativeGroupedLinear, NativeMoeBlock
from evener_backend_cpu.primitives import NativeInt8Linear, NativeLinear
from evener_backend_cpu.stored_packing import KINDS, StoredPacking

DTYPES = ["float32", "bfloat16"]
CLOSE = {"float32": 1e-6, "bfloat16": 4e-3}
#: Rows and columns that share a scale; 0: all of them.
BLOCKS = {"whole": (0, 0), "rows": (1, 0), "blocks": (128, 128), "small blocks": (16, 16), "wide rows": (1, 64)}
CPU = torch.device("cpu")


def part(
    storage: str, rows: int, columns: int, high: int, wide: int, scale: str = "float32", seed: int = 0
) -> WeightPart:
    """Random bytes that are numbers, with scales of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (rows, columns), generator=random, dtype=torch.int16).to(torch.uint8)
    weight = bits.view(getattr(torch, storage))
    if storage != "int8":
        # e5m2 reaches 57344; keep to what weights use, so that sums in float32 mean something.
        least = weight.float().abs() <= 448
        weight = torch.where(least, weight.float(), torch.ones(())).to(weight.dtype)
    shape = (-(-rows // (high or rows)), -(-columns // (wide or columns)))
    scales = torch.exp2(torch.randint(-12, -5, shape, generator=random).float())
    scales = scales if scale == "float8_e8m0fnu" else scales * 1.3125
    group = -1 if (high, wide) == (0, 0) else wide
    form = QuantFormat(storage, group=group, group_out=high or 1, scale=scale)
    return WeightPart("w", rows, columns, form, {"weight": weight, "scale": scales.to(getattr(torch, scale))})


def dequantized(part: WeightPart) -> torch.Tensor:
    """[rows, columns] of float64."""
    weight = part.tensors["weight"].double()
    if part.format.plain:
        return weight
    scale = part.tensors["scale"].float().double()
    high, wide = -(-part.rows // scale.shape[0]), part.format.group
    high, wide = (part.format.group_out if wide >= 0 else high), (wide if wide > 0 else part.columns)
    return weight * scale.repeat_interleave(high, 0)[: part.rows].repeat_interleave(wide, 1)[:, : part.columns]


def rows_of(tokens: int, columns: int, dtype: str) -> torch.Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1))
    return x.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", list(KINDS))
def test_every_byte_is_the_number_that_torch_reads(device: CpuDevice, storage: str, dtype: str) -> None:
    weight = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(getattr(torch, storage))[:, None]
    for columns in (1, 32):  # a tail, and a whole vector
        wide = torch.zeros(256, columns).to(weight.dtype)
        wide[:, :1] = weight
        form = QuantFormat(storage, group=-1, scale="float32")
        stored = WeightPart("w", 256, columns, form, {"weight": wide, "scale": torch.ones(())})
        packed = device.stored.pack([stored], dtype, CPU)
        for tokens in (1, 5):
            x = torch.zeros(tokens, columns, dtype=getattr(torch, dtype))
            x[:, 0] = 1
            got = multiply(device, packed, x, out="float32")
            # Adding the zeros of other columns turns -0 into 0.
            want = weight.float().flatten()
            assert torch.equal(got.nan_to_num(nan=9e9), want.expand(tokens, -1).nan_to_num(nan=9e9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", list(BLOCKS))
@pytest.mark.parametrize("storage", list(KINDS))
def test_a_product_matches_the_dequantized_product(device: CpuDevice, storage: str, blocks: str, dtype: str) -> None:
    for rows, columns in ((1, 7), (37, 272), (150, 300)):
        stored = part(storage, rows, columns, *BLOCKS[blocks], seed=rows)
        values = dequantized(stored)
        packed = device.stored.pack([stored], dtype, CPU)
        inputs = [rows_of(tokens, columns, dtype) for tokens in (0, 1, 2, 3, 4, 5, 19)]
        check_products(device, packed, values, inputs, CLOSE)


@pytest.mark.parametrize("scale", ["bfloat16", "float16", "float8_e8m0fnu"])
def test_scales_may_be_stored_in_any_float_type(device: CpuDevice, scale: str) -> None:
    stored = part("float8_e4m3fn", 200, 260, 128, 128, scale)
    x = rows_of(3, 260, "float32")
    got = multiply(device, device.stored.pack([stored], "float32", CPU), x)
    assert distance(got, x, dequantized(stored)) < CLOSE["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_one_layer_may_differ_and_have_a_bias(device: CpuDevice, dtype: str) -> None:
    values = torch.randn(9, 160).to(getattr(torch, dtype))
    parts = [
        part("float8_e4m3fn", 130, 160, 128, 128), WeightPart("p", 9, 160, plain(dtype), {"weight": values}),
        part("int8", 21, 160, 1, 0),
    ]  # fmt: skip
    assert device.stored.supports(parts, dtype) is None
    packed = device.stored.pack(parts, dtype, CPU)
    x, bias = rows_of(7, 160, dtype), torch.randn(160).to(getattr(torch, dtype))
    got = multiply(device, packed, x, bias, "float32") - bias.float()
    assert distance(got, x, torch.cat([dequantized(p) for p in parts])) < 2e-5  # the bias is added and taken away


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_bitwise_invariant_to_batch_and_thread_count(device: CpuDevice, dtype: str) -> None:
    packed = device.stored.pack([part("float8_e4m3fn", 30, 4200, 128, 128)], dtype, CPU)
    x = rows_of(107, 4200, dtype)  # more than a panel
    check_invariance(device, partial(multiply, device, packed), x, (1, 2, 3, 4, 5, 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_multiplied_as_stored(device: CpuDevice, dtype: str) -> None:
    matrices = [[part("float8_e4m3fn", 40, 200, 16, 128, seed=i)] for i in range(3)]
    packed = device.stored.pack_stack(iter(matrices), 3, dtype, CPU)
    static = {"rows": 40, "columns": 200, "experts": 3, "dtype": dtype}
    call = OpCall("grouped_linear", static, Bucket(1, 64), device.capabilities, {"weight": packed.layout})
    x, slots = rows_of(9, 200, dtype), torch.randint(-1, 3, (9, 2), dtype=torch.int32)
    got = NativeGroupedLinear(device).build(call)(x, packed, slots)
    assert isinstance(got, torch.Tensor)
    for token, row in enumerate(slots.tolist()):
        for at, slot in enumerate(row):
            if slot < 0:
                assert not got[token, at].any()
            else:
                one = x[token : token + 1]
                assert distance(got[token : token + 1, at], one, dequantized(matrices[slot][0])) < CLOSE[dtype]


def test_a_packed_weight_takes_one_byte_an_element_and_its_scales(device: CpuDevice) -> None:
    for blocks, scales in (("whole", 1), ("rows", 1000), ("blocks", 8 * 16)):
        stored = part("float8_e4m3fn", 1000, 2048, *BLOCKS[blocks])
        packed = device.stored.pack([stored], "bfloat16", CPU)
        held = sum(t.nbytes for t in packed.data.tensors)
        assert held == packed.nbytes == device.stored.nbytes([replace(stored, tensors={})], "bfloat16")
        assert held == 1000 * 2048 + 4 * scales


def test_refusals_name_the_reason(device: CpuDevice) -> None:
    form = QuantFormat("int8", scale="float32")
    cases = (
        (plain("float32"), "float32", "every part is plain"), (form, "float16", "not float16"),
        (MXFP4, "float32", "not float4_e2m1"), (replace(form, scale="int32"), "float32", "not int32"),
        (replace(form, zero="int8"), "float32", "zero points"),
    )  # fmt: skip
    for each, dtype, reason in cases:
        refusal = device.stored.supports([WeightPart("w", 8, 64, each)], dtype)
        assert refusal is not None and reason in refusal
    without = StoredPacking(SimpleNamespace(native=Unavailable("no C++ compiler was found")))
    assert without.supports([WeightPart("w", 8, 64, form)], "float32") == "no C++ compiler was found"


def test_scales_that_do_not_cover_the_columns_are_refused_before_memory_is_touched(device: CpuDevice) -> None:
    packed = device.stored.pack([part("int8", 32, 64, 16, 16)], "float32", CPU)
    packed.data.parts[0].blocks = 3
    with pytest.raises(ValueError, match="3 scales for 64 columns"):
        multiply(device, packed, torch.ones(1, 64))


@pytest.mark.slow
def test_without_vector_instructions_the_results_are_the_same(tmp_path: Path) -> None:
    other = portable_device(tmp_path)
    for storage in KINDS:
        for dtype in DTYPES:
            test_every_byte_is_the_number_that_torch_reads(other, storage, dtype)
            test_a_product_matches_the_dequantized_product(other, storage, "blocks", dtype)


TILES, VECTORS = frozenset({"amx_int8"}), frozenset({"avx512_vnni"})
BY_TOKEN, FIXED = Rounding("int8"), Rounding("int8", -1)


def int8_call(
    device: CpuDevice, parts: list[WeightPart], bucket: Bucket, dtype: str = "bfloat16", out: str | None = None,
    features: frozenset[str] = TILES,
) -> OpCall:  # fmt: skip
    """A linear layer whose weight is stored by the CPU's packing, on a processor with these features."""
    rows, columns = sum(each.rows for each in parts), parts[0].columns
    weight = LinearWeight("w", tuple(parts), rows, columns, dtype, layout=device.stored.layout)
    static = {"weight": weight, "rows": rows, "columns": columns, "dtype": dtype, "out": out or dtype}
    capabilities = replace(device.capabilities, features=features)
    return OpCall("linear", static, bucket, capabilities, {"weight": device.stored.layout})


def rounded_parts(how: Rounding | None, columns: int, *rows: int) -> list[WeightPart]:
    """Int8 parts with scales a row. Their fixed scales differ, and cut off some of normal activations."""
    made = []
    for number, count in enumerate(rows):
        one = part("int8", count, columns, 1, 0, seed=number)
        tensors = dict(one.tensors)
        if how == FIXED:
            tensors["activation_scale"] = torch.tensor((1.5 + 0.5 * (number % 2)) / 127)
        made.append(replace(one, format=replace(one.format, activation=how), tensors=tensors))
    return made


@pytest.mark.parametrize("how", [BY_TOKEN, FIXED], ids=str)
def test_activations_of_int8_weights_are_rounded_by_the_formula_in_large_steps(
    device: CpuDevice, how: Rounding
) -> None:
    dtype = "bfloat16"
    parts = rounded_parts(how, 300, 150, 9)
    packed = device.stored.pack(parts, dtype, CPU)
    assert packed.nbytes == device.stored.nbytes([replace(each, tensors={}) for each in parts], dtype)
    values, bias = torch.cat([dequantized(each) for each in parts]), rows_of(1, 159, dtype)[0]
    for tokens, out in ((17, dtype), (300, "float32")):  # more than are multiplied at a time
        kernel, call = NativeInt8Linear(device), int8_call(device, parts, Bucket(17, 512), dtype, out)
        assert kernel.supports(call) is None and kernel.rounds(call, "weight")
        x = rows_of(tokens, 300, dtype)
        x[3] = 0
        # In float32, so that a quotient in the middle of two elements goes the same way.
        scale = (
            x.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 127 if how == BY_TOKEN else torch.tensor(2 / 127)
        )
        near = (x.float() / scale).round().clamp(-127, 127).double() * scale.double()
        got = kernel.build(call)(x, packed, bias)
        assert isinstance(got, torch.Tensor) and got.dtype == getattr(torch, out)
        without = got.double() - bias.double()
        assert distance(without, near, values) < (CLOSE["bfloat16"] if out == "bfloat16" else 1e-5)
        assert out == "bfloat16" or distance(without, x, values) > 1e-3, "activations were not rounded"
        assert torch.equal(kernel.build(call)(x[:0], packed, bias), got[:0])


def test_activations_are_kept_in_small_steps_and_where_nothing_is_gained(device: CpuDevice) -> None:
    kernel, kept = NativeInt8Linear(device), NativeLinear(device)
    large = Bucket(17, 32)
    int8, rows = rounded_parts(FIXED, 64, 8), part("int8", 8, 64, 1, 64)
    grouped = [replace(rows, format=replace(rows.format, group=32, activation=BY_TOKEN))]
    for parts, bucket, features, dtype in (
        (int8, Bucket(9, 16), TILES, "bfloat16"), (int8, large, frozenset[str](), "bfloat16"),
        (int8, large, TILES, "float32"), (rounded_parts(None, 64, 8), large, TILES, "bfloat16"),
        (grouped, large, TILES, "bfloat16"), ([int8[0], *rounded_parts(BY_TOKEN, 64, 8)], large, TILES, "bfloat16"),
    ):  # fmt: skip
        call = int8_call(device, parts, bucket, dtype, features=features)
        assert "rounds activations of int8 weights" in (kernel.supports(call) or "")
        assert kept.supports(call) is None and not kept.rounds(call, "weight")
    for features in (TILES, VECTORS):
        assert kernel.supports(int8_call(device, int8, large, features=features)) is None
    assert kept.batch_invariant and not kernel.batch_invariant
    # Blocks of experts keep theirs, and kernels of whole layers leave such steps to single ops.
    assert NativeMoeBlock.keeps_int8


def test_the_fixed_scale_is_that_of_all_parts_after_a_restart(device: CpuDevice) -> None:
    parts = rounded_parts(FIXED, 64, 8, 8)
    packed = device.stored.pack(parts, "bfloat16", CPU)
    bare = [replace(each, tensors={}) for each in parts]
    again = device.stored.restored(list(device.stored.saved(packed)), bare, 0, "bfloat16", CPU)
    run = NativeInt8Linear(device).build(int8_call(device, parts, Bucket(17, 32)))
    x = rows_of(20, 64, "bfloat16")
    assert torch.equal(run(x, again, None), run(x, packed, None)) and again.nbytes == packed.nbytes
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        device.stored.restored([t for t in device.stored.saved(packed) if t.numel() > 1], bare, 0, "bfloat16", CPU)
