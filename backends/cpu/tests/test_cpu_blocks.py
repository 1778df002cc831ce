"""Weights in blocks: against the gguf library's own dequantization (MXFP4: the standard's table), in float32.

Tolerance of every format, relative to the lengths of the rows that are multiplied: float32 9e-5 (activations are 16-bit
integers that share a scale over 32 columns: at most sqrt(32) / 65534), bfloat16 4e-3 (the result is rounded). No weight
is rounded, so no format has a tolerance of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy
import pytest
import torch
from packed_blocks import check_products, distance, multiply, portable_device
from row_invariance import check_invariance

from evener.backend.native_code import Unavailable
from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import BLOCKS, MXFP4, WeightPart, block_format, plain
from evener_backend_cpu.block_packing import FORMATS, KINDS, LANES, LAYOUT, BlockPacking, tile_bytes
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.native_library import Native
from evener_backend_cpu.primitives import NativeEmbedding, NativeLinear

DTYPES = ["float32", "bfloat16"]
CLOSE = {"float32": 9e-5, "bfloat16": 4e-3}
#: Where the float16 scales of a block lie.
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip
#: Those whose blocks hold their scales; integers in groups have tests of their own.
STORAGES = [storage for storage in KINDS if storage in FORMATS]


def part(storage: str, rows: int, columns: int, seed: int = 0, name: str = "part") -> WeightPart:
    """Random valid blocks: any bits, with scales near those of real weights, of both signs, some of them zero."""
    random = numpy.random.default_rng(seed)
    if storage in DTYPES:
        values = torch.from_numpy(random.standard_normal((rows, columns), numpy.float32)) * columns**-0.5
        return WeightPart(name, rows, columns, plain(storage), {"weight": values.to(getattr(torch, storage))})
    if storage == MXFP4.storage:
        shape = (rows, columns // 32)
        weight = torch.from_numpy(random.integers(0, 256, (*shape, 16), dtype=numpy.uint8))
        scale = torch.from_numpy(random.integers(115, 123, shape, dtype=numpy.uint8))
        return WeightPart(name, rows, columns, MXFP4, {"weight": weight, "scale": scale})
    elements, nbytes = BLOCKS[storage]
    blocks = random.integers(0, 256, (rows, columns // elements, nbytes), dtype=numpy.uint8)
    for at in HALVES[storage]:
        scales = random.standard_normal(blocks.shape[:2]).astype(numpy.float16) * numpy.float16(0.01)
        scales[random.random(scales.shape) < 0.05] = 0
        blocks[:, :, at : at + 2] = scales[..., None].view(numpy.uint8)
    stored = torch.from_numpy(blocks.reshape(rows, -1).copy())
    return WeightPart(name, rows, columns, block_format(storage), {"weight": stored})


def dequantized(part: WeightPart) -> torch.Tensor:
    stored = part.tensors["weight"]
    if part.format.plain:
        return stored.float()
    if part.format == MXFP4:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        pairs = torch.stack((values[(stored & 15).long()], values[(stored >> 4).long()]), dim=-1)
        return (pairs.flatten(2) * 2.0 ** (part.tensors["scale"].float() - 127)[..., None]).flatten(1)
    kind = gguf.GGMLQuantizationType[part.format.storage.upper()]
    return torch.from_numpy(gguf.quants.dequantize(stored.numpy(), kind)).reshape(part.rows, part.columns)


def rows_of(tokens: int, columns: int, dtype: str, seed: int = 1) -> torch.Tensor:
    """Rows with an outlier, as residual streams have them."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 100
    return x.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_rows_of_a_table_in_blocks_are_those_of_the_dequantized_table(
    device: CpuDevice, storage: str, dtype: str
) -> None:
    table, form = part(storage, 37, 512, seed=3), getattr(torch, dtype)
    values, packed = dequantized(table).to(form), device.blocks.pack([table], dtype, torch.device("cpu"))
    kernel = NativeEmbedding(device)
    weight = LinearWeight("table", (replace(table, tensors={}),), 37, 512, dtype, layout=packed.layout)
    for scale in (1.0, 22.6):
        static = {"vocab": 37, "hidden": 512, "scale": scale, "dtype": dtype, "weight": weight}
        call = OpCall("embedding", static, Bucket(1, 64), device.capabilities, {"weight": packed.layout})
        assert kernel.supports(call) is None
        run = kernel.build(call)
        for ids in (torch.arange(37, dtype=torch.int32), torch.tensor([36, 0, 16, 15, 0]), torch.empty(0).int()):
            rows = values[ids.long()]
            assert torch.equal(run(ids, packed), rows * torch.tensor(scale, dtype=form).item())
        with pytest.raises(ValueError, match="the ids has 37, outside 0 to 36"):
            run(torch.tensor([1, 37]), packed)


def test_a_table_in_another_order_is_left_to_others(device: CpuDevice) -> None:
    static: dict[str, object] = {"vocab": 8, "hidden": 64, "scale": 1.0, "dtype": "float32"}
    act = replace(part("q8_0", 8, 64), format=replace(block_format("q8_0"), order="act"))
    weight = LinearWeight("table", (replace(act, tensors={}),), 8, 64, "float32", layout="cpu.blocks")
    static |= {"weight": weight}
    call = OpCall("embedding", static, Bucket(1, 64), device.capabilities, {"weight": "cpu.blocks"})
    assert "another order" in str(NativeEmbedding(device).supports(call))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_product_with_quantized_blocks_matches_the_dequantized_product(
    device: CpuDevice, storage: str, dtype: str
) -> None:
    for rows, columns in ((1, 256), (16, 512), (37, 768)):
        weight = part(storage, rows, columns, seed=rows)
        values = dequantized(weight)
        packed = device.blocks.pack([weight], dtype, torch.device("cpu"))
        inputs = [rows_of(tokens, columns, dtype) for tokens in (0, 1, 2, 3, 17)]
        check_products(device, packed, values, inputs, CLOSE)


@pytest.mark.parametrize("storage", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", MXFP4.storage])
@pytest.mark.parametrize("columns", [32, 96, 576])
def test_columns_may_be_any_multiple_of_the_block(device: CpuDevice, storage: str, columns: int) -> None:
    weight = part(storage, 19, columns)
    packed = device.blocks.pack([weight], "float32", torch.device("cpu"))
    x, bias = rows_of(5, columns, "float32"), torch.randn(19)
    assert distance(multiply(device, packed, x, bias), x, dequantized(weight), bias) < CLOSE["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_one_layer_may_have_different_formats_or_none(device: CpuDevice, dtype: str) -> None:
    names = [("q5_0", 40), (dtype, 21), ("q8_0", 16), ("q4_k", 7), ("q6_k", 33)]
    parts = [part(storage, rows, 256, seed=i, name=storage) for i, (storage, rows) in enumerate(names)]
    assert device.blocks.supports(parts, dtype) is None
    packed = device.blocks.pack(parts, dtype, torch.device("cpu"))
    assert packed.nbytes == device.blocks.nbytes(parts, dtype)
    assert [f.storage for f in packed.formats] == [name for name, _ in names]
    x, bias = rows_of(70, 256, dtype), torch.randn(117).to(getattr(torch, dtype))
    values = torch.cat([dequantized(p) for p in parts])
    assert distance(multiply(device, packed, x, bias), x, values, bias) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_bitwise_invariant_to_batch_and_thread_count(device: CpuDevice, dtype: str) -> None:
    packed = device.blocks.pack([part("q4_k", 50, 512), part("q6_k", 41, 512)], dtype, torch.device("cpu"))
    x = rows_of(512, 512, dtype)
    check_invariance(device, partial(multiply, device, packed), x, (1, 2, 5, 16, 130))


@pytest.mark.parametrize("storage", ["q4_0", "q4_1", "q4_k", MXFP4.storage])
def test_few_rows_have_the_bits_of_single_ones_though_tiles_compute_them(device: CpuDevice, storage: str) -> None:
    """Tiles of four-bit quants take more than 8 rows; up to 8 after whole sixteens are left to other code."""
    columns = 512 if storage == "q4_k" else 608
    packed = device.blocks.pack([part(storage, 50, columns)], "bfloat16", torch.device("cpu"))
    x = rows_of(36, columns, "bfloat16")
    single = torch.cat([multiply(device, packed, row[None]) for row in x])
    for count in (3, 8, 9, 12, 13, 19, 28, 36):  # those in floats take other code from 17 and from 33 rows on
        assert torch.equal(multiply(device, packed, x[:count]), single[:count]), count


@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 20), ("bfloat16", 40)])
def test_mxfp4_scales_cover_every_power_of_two(device: CpuDevice, dtype: str, tokens: int) -> None:
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    weight = torch.full((256, 1, 16), 0x52, dtype=torch.uint8)  # 1, 3, 1, 3, …
    stored = WeightPart("x", 256, 32, MXFP4, {"weight": weight, "scale": scale})
    packed = device.blocks.pack([stored], dtype, torch.device("cpu"))
    x = torch.full((tokens, 32), 2.0**-6, dtype=getattr(torch, dtype))  # a sum of 64 / 64
    for got in multiply(device, packed, x, out="float32"):
        # Below 40, factors of two products are no normal numbers. 3 times the largest scale is infinite in bfloat16.
        assert got[255].isnan() and (got[:40] < 2.0**-86).all()
        last = 255 if dtype == "float32" else 254
        torch.testing.assert_close(got[40:last], 2.0 ** (torch.arange(40.0, last) - 127), rtol=1e-4, atol=0)


def test_nan_inputs_stay_nan(device: CpuDevice) -> None:
    packed = device.blocks.pack([part("q8_0", 16, 64)], "float32", torch.device("cpu"))
    x = torch.randn(3, 64)
    x[0, 40], x[1, 7], x[2] = float("nan"), float("inf"), 0
    got = multiply(device, packed, x)
    assert not got[:2].isfinite().any() and (got[2] == 0).all()


def test_sizes_are_known_before_anything_is_packed(device: CpuDevice) -> None:
    native = device.native
    assert isinstance(native, Native)
    for storage in STORAGES:
        kind = KINDS[storage]
        for columns in (256, 1536) if FORMATS[storage].group == 256 else (32, 320, 1536):
            assert native.tile_bytes(kind, columns) == tile_bytes(storage, columns)
    for storage in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", MXFP4.storage):  # the file's bits
        format_bytes = FORMATS[storage].nbytes(LANES, 1536)
        assert format_bytes <= tile_bytes(storage, 1536) <= 1.035 * format_bytes


def test_refusals_name_the_reason(device: CpuDevice) -> None:
    blocks = device.blocks
    cases = (
        ([part("float32", 8, 64)], "float32", "every part is plain"),
        ([part("q8_0", 8, 64)], "float16", "not float16"),
        ([WeightPart("x", 8, 320, block_format("q4_k"))], "float32", "320 columns"),
        ([WeightPart("x", 8, 320, replace(MXFP4, group=16))], "float32", "block format float4_e2m1"),
        ([WeightPart("x", 8, 256, replace(block_format("q8_0"), zero="float16"))], "float32", "block format q8_0"),
    )
    for parts, dtype, reason in cases:
        refusal = blocks.supports(parts, dtype)
        assert refusal is not None and reason in refusal
    without = BlockPacking(SimpleNamespace(threads=1, native=Unavailable("no C++ compiler was found")))
    assert without.supports([part("q8_0", 8, 64)], "float32") == "no C++ compiler was found"


@pytest.mark.slow
def test_without_vector_instructions_the_results_are_the_same(device: CpuDevice, tmp_path: Path) -> None:
    other = portable_device(tmp_path)
    for storage in STORAGES:
        weight = part(storage, 37, 512)
        x = rows_of(5, 512, "float32")
        got = multiply(other, other.blocks.pack([weight], "float32", torch.device("cpu")), x)
        assert distance(got, x, dequantized(weight)) < CLOSE["float32"]


def test_the_layout_has_a_name_of_its_own(device: CpuDevice) -> None:
    assert device.blocks.layout == LAYOUT == NativeLinear(device).packings[1].layout
