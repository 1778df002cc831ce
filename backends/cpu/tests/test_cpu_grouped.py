"""Integers in groups (GPTQ, AWQ), with zero points and in act-order: packed without a change of any number, and
multiplied as the kit's own reading of the format says.

Tolerance as for other blocks: activations are rounded to 16-bit integers with a scale for 32 columns, an error below
1e-4 of the lengths of the rows that are multiplied.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from packed_blocks import check_products, distance, multiply, pack
from row_invariance import check_invariance
from test_cpu_stored import CPU, DTYPES, rows_of

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import QuantFormat, WeightPart, plain
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import NativeGroupedLinear
from evener_backend_cpu.grouped_packing import is_grouped, most_columns
from evener_conformance.kit.cases.blocks import GROUPED, random_grouped, reference_dequantize

CLOSE = {"float32": 1e-4, "bfloat16": 4e-3}


def part(form: QuantFormat, rows: int, columns: int, seed: int = 1) -> WeightPart:
    return random_grouped(form, rows, columns, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["float16", "bfloat16"])
@pytest.mark.parametrize("order", ["row", "act", "piece"])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("storage", ["uint4", "int8"])
def test_a_product_matches_the_dequantized_product(
    device: CpuDevice, storage: str, zero: bool, order: str, scale: str, dtype: str
) -> None:
    kind = {"uint4": "uint8", "int8": "int8"}[storage] if zero else None
    for rows, columns, group in ((1, 32, 32), (37, 320, 64), (150, 256, 128)):
        groups = columns // 32 * 3 if order == "piece" else 0
        name = "row" if order == "row" else "act"
        form = QuantFormat(storage, group, scale=scale, zero=kind, order=name, groups=groups)
        one = part(form, rows, columns, seed=rows)
        if not is_grouped(one):
            continue  # read by another packing
        packed, values = pack(device, one, dtype=dtype), reference_dequantize(one).double()
        inputs = [rows_of(tokens, columns, dtype) for tokens in (0, 1, 2, 5, 19)]
        check_products(device, packed, values, inputs, CLOSE)


def test_every_number_scale_and_zero_point_is_kept(device: CpuDevice) -> None:
    """Rows of the identity read one column at a time; a power of two rounds nothing."""
    for form in GROUPED.values():
        one = part(form, 48, 256)
        if not is_grouped(one):
            continue
        got = multiply(device, pack(device, one), torch.eye(256) * 32767, out="float32") / 32767
        want = reference_dequantize(one).T
        assert torch.allclose(got, want, rtol=3e-7, atol=3e-7 * float(want.abs().max())), form


def test_parts_of_one_layer_may_each_have_an_order_of_their_own(device: CpuDevice) -> None:
    acts = [part(QuantFormat("uint4", 64, scale="float16", order="act"), rows, 256, seed=rows) for rows in (40, 24)]
    zeros = part(QuantFormat("uint4", 32, scale="bfloat16", zero="uint8"), 17, 256)
    loose = WeightPart("p", 9, 256, plain("float32"), {"weight": torch.randn(9, 256) / 16})
    parts = (acts[0], loose, acts[1], zeros)
    x, bias = rows_of(300, 256, "float32"), torch.randn(90)  # more rows than are gathered at a time
    got = multiply(device, pack(device, *parts), x, bias) - bias
    assert distance(got, x, torch.cat([reference_dequantize(p).double() for p in parts])) < 1e-4


@pytest.mark.parametrize("order", ["row", "act"])
def test_rows_are_bitwise_invariant_to_batch_and_thread_count(device: CpuDevice, order: str) -> None:
    one = part(QuantFormat("uint4", 128, scale="float16", zero="uint8", order=order), 30, 4096)
    x = rows_of(107, 4096, "float32")
    check_invariance(device, partial(multiply, device, pack(device, one)), x, (1, 2, 3, 4, 5, 16))


@pytest.mark.parametrize("order", ["row", "act"])
def test_stacked_experts_stay_packed(device: CpuDevice, order: str) -> None:
    form = QuantFormat("uint4", 64, scale="float16", zero="uint8", order=order)
    experts = [part(form, 48, 256, seed=seed) for seed in range(4)]
    stack = device.blocks.pack_stack(([each] for each in experts), 4, "float32", CPU)
    assert stack.nbytes == 4 * device.blocks.nbytes([replace(experts[0], tensors={})], "float32")
    static = {"rows": 48, "columns": 256, "experts": 4, "dtype": "float32"}
    kernel = NativeGroupedLinear(device)
    call = OpCall("grouped_linear", static, Bucket(1, 512), device.capabilities, {"weight": stack.layout})
    assert kernel.supports(call) is None
    x = rows_of(9, 256, "float32")
    slots = torch.randint(0, 4, (9, 2), dtype=torch.int32)
    got = kernel.build(call)(x, stack, slots, None)
    assert isinstance(got, torch.Tensor)
    values = [reference_dequantize(each).double() for each in experts]
    for token in range(9):
        for place in range(2):
            one = values[int(slots[token, place])]
            assert distance(got[token, place][None], x[token][None], one) < 1e-4


def test_packed_means_packed(device: CpuDevice) -> None:
    for form, bits in (
        (QuantFormat("uint4", 128, scale="float16"), 4.5), (QuantFormat("uint4", 128, scale="bfloat16"), 4.75),
        (QuantFormat("uint4", 32, scale="float16", zero="uint8"), 4.75),
        (QuantFormat("int8", 64, scale="float16", zero="int8"), 8.75),
        (QuantFormat("uint4", 128, scale="float16", order="act"), 4.5 + 32 / 512),
    ):  # fmt: skip
        packed = pack(device, part(form, 512, 4096))
        assert packed.nbytes * 8 / (512 * 4096) == pytest.approx(bits, abs=0.01)
    piece = part(QuantFormat("uint4", 128, scale="float16", order="act", groups=86), 16, 5504)
    assert most_columns(piece) <= 5504 + 31 * 86


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group": 48}, "a multiple of 32"), ({"scale": "float32"}, "float16 or bfloat16"), ({"group": -1}, "-1 x 1"),
        ({"order": "spiral"}, "this order"),
        ({"zero": "float16"}, "these zero points"), ({"group": 0, "order": "act"}, "act-order in groups"),
        ({"group_out": 2}, "x 2 rows"),
    ],
)  # fmt: skip
def test_another_format_is_refused(device: CpuDevice, change: dict[str, object], says: str) -> None:
    form = replace(QuantFormat("uint4", 64, scale="float16"), **change)  # type: ignore[arg-type]
    reason = device.blocks.supports([WeightPart("w", 16, 192, form)], "float32")
    assert reason is not None and says in reason
    odd = device.blocks.supports([WeightPart("w", 16, 80, QuantFormat("uint4", 16, scale="float16"))], "float32")
    assert odd is not None
