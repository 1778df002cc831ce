"""Four-bit numbers of a table (NVFP4, NF4, FP4): packed without a change of any number, and multiplied as the kit's own
reading of the formats says.

Tolerance as for other blocks: activations are rounded to 16-bit integers with a scale for 32 columns, an error below
1e-4 of the lengths of the rows that are multiplied. With AMX, rows in bfloat16 are not rounded, and a table's numbers
to 2⁻¹⁷.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from packed_blocks import check_products, distance, multiply, pack, portable_device
from row_invariance import check_invariance
from test_cpu_stored import CPU, DTYPES, rows_of

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import NVFP4, QuantFormat, WeightPart, plain
from evener_backend_cpu.block_packing import KINDS, tile_bytes
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import NativeGroupedLinear
from evener_backend_cpu.native_library import Native
from evener_backend_cpu.primitives import NativeEmbedding
from evener_conformance.kit.cases.blocks import random_table, reference_dequantize

CLOSE = {"float32": 1e-4, "bfloat16": 4e-3}
NF4 = QuantFormat("nf4", 64, scale="float32")
FORMS = {"nvfp4": NVFP4, "nf4": NF4, "fp4": QuantFormat("fp4", 128, scale="float32")}


def part(form: QuantFormat, rows: int, columns: int, seed: int = 1) -> WeightPart:
    return random_table(form, rows, columns, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_matches_the_dequantized_product(device: CpuDevice, form: str, dtype: str) -> None:
    for rows, columns in ((1, 128), (16, 256), (37, 384), (150, 640)):
        one = part(FORMS[form], rows, columns, seed=rows)
        packed, values = pack(device, one, dtype=dtype), reference_dequantize(one).double()
        inputs = [rows_of(tokens, columns, dtype) for tokens in (0, 1, 2, 5, 19, 33, 70)]
        check_products(device, packed, values, inputs, CLOSE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [32, 96, 288])
def test_columns_of_floats_may_be_any_multiple_of_32(device: CpuDevice, columns: int, dtype: str) -> None:
    one = part(NVFP4, 19, columns)
    packed, values = pack(device, one, dtype=dtype), reference_dequantize(one).double()
    for tokens in (5, 20, 40):
        x = rows_of(tokens, columns, dtype)
        assert distance(multiply(device, packed, x, out="float32"), x, values) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_number_and_scale_is_kept(device: CpuDevice, form: str, dtype: str) -> None:
    """Rows of the identity read one column at a time, so nothing is added up: the only differences are a few roundings
    of products of scales in float32. With AMX a number of a table is the sum of two in bfloat16."""
    one = part(FORMS[form], 48, 640)
    x = torch.eye(640, dtype=getattr(torch, dtype))
    got = multiply(device, pack(device, one, dtype=dtype), x, out="float32")
    want = reference_dequantize(one).T
    small = 3e-7 if dtype == "float32" or form == "nvfp4" else 2.0**-17
    assert torch.allclose(got, want, rtol=small, atol=3e-7 * float(want.abs().max()))


@pytest.mark.parametrize("tokens", [1, 20, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_scales_of_eight_bits_and_signs_are_read(device: CpuDevice, dtype: str, tokens: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scale = codes.view(torch.float8_e4m3fn)[:, None].expand(256, 2).contiguous()
    tensors = {"weight": torch.full((256, 16), 0xA2, dtype=torch.uint8), "scale": scale, "factor": torch.tensor(0.125)}
    one = WeightPart("w", 256, 32, NVFP4, tensors)  # 1, -1, 1, -1, …
    x = torch.zeros(tokens, 32, dtype=getattr(torch, dtype))
    x[:, 30] = 1.0
    want = scale[:, 0].float() * 0.125
    for got in multiply(device, pack(device, one, dtype=dtype), x, out="float32"):
        assert torch.allclose(got, want, rtol=3e-7, atol=0, equal_nan=True)
        assert got.isnan().nonzero().flatten().tolist() == [127, 255]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_four_bit_float_times_every_scale(device: CpuDevice, dtype: str) -> None:
    """Rows are sorted so that most tiles have positive normal scales only, which have a way of their own with AMX, and
    others have all kinds."""
    usual, rest = torch.arange(8, 127), torch.tensor([*range(8), *range(128, 255)])
    codes = torch.cat((usual, rest)).to(torch.uint8)
    scale = torch.stack((codes, codes.flip(0)), dim=1)
    scale[:112, 1] = codes[:112].flip(0)
    numbers = torch.arange(0, 16, 2) * 17 + 16  # both of a byte: 0 and 1, 2 and 3, …
    weight = numbers.to(torch.uint8).repeat(len(codes), 2)
    tensors = {"weight": weight, "scale": scale.view(torch.float8_e4m3fn), "factor": torch.tensor(1.0)}
    one = WeightPart("w", len(codes), 32, NVFP4, tensors)
    x = torch.eye(32, dtype=getattr(torch, dtype))
    got = multiply(device, pack(device, one, dtype=dtype), x, out="float32")
    assert torch.allclose(got, reference_dequantize(one).T, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_table_of_tokens_are_those_of_the_dequantized_one(device: CpuDevice, form: str, dtype: str) -> None:
    table, kind = part(FORMS[form], 37, 384), getattr(torch, dtype)
    packed, values = pack(device, table, dtype=dtype), reference_dequantize(table).to(kind)
    weight = LinearWeight("table", (replace(table, tensors={}),), 37, 384, dtype, layout=packed.layout)
    static = {"vocab": 37, "hidden": 384, "scale": 1.0, "dtype": dtype, "weight": weight}
    call = OpCall("embedding", static, Bucket(1, 64), device.capabilities, {"weight": packed.layout})
    ids = torch.tensor([36, 0, 16, 15, 0])
    assert torch.equal(NativeEmbedding(device).build(call)(ids, packed), values[ids])


def test_parts_of_one_layer_may_differ_in_their_format_table_and_factor(device: CpuDevice) -> None:
    loose = WeightPart("p", 9, 256, plain("float32"), {"weight": torch.randn(9, 256) / 16})
    parts = (part(NVFP4, 40, 256, 1), part(NF4, 17, 256, 2), loose, part(NVFP4, 24, 256, 3), part(NF4, 8, 256, 4))
    x, bias = rows_of(70, 256, "float32"), torch.randn(98)
    got = multiply(device, pack(device, *parts), x, bias) - bias
    assert distance(got, x, torch.cat([reference_dequantize(p).double() for p in parts])) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_bitwise_invariant_to_batch_and_thread_count(device: CpuDevice, form: str, dtype: str) -> None:
    one, x = part(FORMS[form], 30, 1024), rows_of(530, 1024, dtype)
    counts = (1, 2, 3, 4, 5, 8, 13, 16, 17, 31, 32, 33, 48, 107)
    check_invariance(device, partial(multiply, device, pack(device, one, dtype=dtype)), x, counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_stacked_experts_stay_packed(device: CpuDevice, form: str, dtype: str) -> None:
    experts = [part(FORMS[form], 48, 256, seed=seed) for seed in range(4)]
    stack = device.blocks.pack_stack(([each] for each in experts), 4, dtype, CPU)
    assert stack.nbytes == 4 * device.blocks.nbytes([replace(experts[0], tensors={})], dtype)
    static = {"rows": 48, "columns": 256, "experts": 4, "dtype": dtype}
    kernel = NativeGroupedLinear(device)
    call = OpCall("grouped_linear", static, Bucket(1, 512), device.capabilities, {"weight": stack.layout})
    assert kernel.supports(call) is None
    run, values = kernel.build(call), [reference_dequantize(each).double() for each in experts]
    for tokens in (9, 75):  # the latter with more than 32 for an expert
        x, slots = rows_of(tokens, 256, dtype), torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2) % 4
        got = run(x, stack, slots, None)
        assert isinstance(got, torch.Tensor)
        for slot in range(4):
            at = (slots == slot).nonzero()
            assert distance(got[at[:, 0], at[:, 1]], x[at[:, 0]], values[slot]) < CLOSE[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_packed_means_packed(device: CpuDevice, form: str) -> None:
    packed = pack(device, part(FORMS[form], 512, 4096))
    assert packed.nbytes * 8 / (512 * 4096) == 4.625  # 4.5 or 4.25 in the file
    native = device.native
    assert isinstance(native, Native)
    for tile in ("float4 float8", "table"):
        for columns in (32, 64, 320, 1536):
            assert native.tile_bytes(KINDS[tile], columns) == tile_bytes(tile, columns)


@pytest.mark.parametrize(
    ("form", "columns", "says"),
    [
        (NVFP4, 48, "48 columns are not a multiple of 32"), (replace(NF4, group=32), 192, "a multiple of 64 columns"),
        (replace(NF4, group=96), 192, "a multiple of 64 columns"), (replace(NF4, scale="float16"), 192, "in float32"),
        (replace(NF4, order="act"), 192, "order of columns"), (replace(NF4, zero="uint8"), 192, "zero points"),
        (replace(NVFP4, scale="float16"), 64, "block format float4_e2m1"),
    ],
)  # fmt: skip
def test_another_format_is_refused(device: CpuDevice, form: QuantFormat, columns: int, says: str) -> None:
    reason = device.blocks.supports([WeightPart("w", 16, columns, form)], "float32")
    assert reason is not None and says in reason


@pytest.mark.parametrize(
    "change",
    [lambda t: {**t, "weight": t["weight"][:-1]}, lambda t: {**t, "weight": t["weight"].to(torch.int8)},
     lambda t: {**t, "scale": t["scale"][:, :-1]}, lambda t: {**t, "scale": t["scale"].to(torch.float16)}],
)  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_another_size_or_dtype_are_refused(
    device: CpuDevice, form: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    one = part(FORMS[form], 16, 256)
    with pytest.raises(ValueError, match="not those of 16 rows of 256"):
        device.blocks.pack([replace(one, tensors=change(dict(one.tensors)))], "float32", CPU)


@pytest.mark.slow
def test_without_vector_instructions_the_results_are_the_same(device: CpuDevice, tmp_path: Path) -> None:
    other = portable_device(tmp_path)
    for form in FORMS.values():
        one, x = part(form, 37, 384), rows_of(5, 384, "float32")
        assert distance(multiply(other, pack(other, one), x), x, reference_dequantize(one).double()) < 1e-4
