"""Weights of one byte an element under Triton's interpreter, against their dequantized values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import every_access_checked

from evener.contracts.quant import QuantFormat, WeightPart
from evener_kernels_triton.linear import dequantized, few_tokens_linear, gemv, persistent_gemv, skinny
from evener_kernels_triton.stored import KINDS, STORED, StoredMatrix
from evener_kernels_triton.tuning import Tuning

HOST = torch.device("cpu")
SMALL, LARGE = Tuning(4, 48 << 10, False), Tuning(132, 227 << 10, False)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def part(
    rows: int, columns: int, storage: str, group: int, high: int, seed: int = 0, scale: str = "float32"
) -> WeightPart:
    draw = torch.Generator().manual_seed(seed)
    if storage == "int8":
        weight = torch.randint(-128, 128, (rows, columns), generator=draw, dtype=torch.int8)
    else:
        weight = torch.randn(rows, columns, generator=draw).to(getattr(torch, storage))
    wide, tall = (columns if group <= 0 else group), (rows if group == -1 else high)
    shape = (-(-rows // tall), -(-columns // wide))
    scales = (torch.rand(shape, generator=draw) + 0.5).to(getattr(torch, scale))
    form = QuantFormat(storage, group, high if group != -1 else 1, scale=scale)
    return WeightPart(f"part {seed}", rows, columns, form, {"weight": weight, "scale": scales})


def values(one: WeightPart) -> torch.Tensor:
    """The part's numbers in float32, by the definition of its format."""
    form, scale = one.format, one.tensors["scale"].float()
    tall, wide = (one.rows if form.group == -1 else form.group_out), (form.group if form.group > 0 else one.columns)
    spread = scale.repeat_interleave(tall, 0)[: one.rows].repeat_interleave(wide, 1)[:, : one.columns]
    return one.tensors["weight"].float() * spread


FORMS = [(-1, 1), (0, 1), (64, 1), (32, 16), (128, 128)]
#: Each form and each storage is quick once.
QUICK = {("int8", -1), ("float8_e4m3fn", 0), ("float8_e5m2", 64), ("float8_e4m3fn", 32), ("int8", 128)}
STORED_FORMS = [
    pytest.param(storage, *form, marks=[] if (storage, form[0]) in QUICK else pytest.mark.slow)
    for storage in KINDS for form in FORMS
]  # fmt: skip


def packed(parts: list[WeightPart]) -> StoredMatrix:
    assert STORED.supports(parts, "float32") is None
    made = STORED.pack(parts, "float32", HOST)
    assert made.nbytes == STORED.nbytes([replace(p, tensors={}) for p in parts], "float32")
    assert made.shape == (sum(p.rows for p in parts), parts[0].columns)
    return made.data


@pytest.mark.parametrize(("storage", "group", "high"), STORED_FORMS)
@pytest.mark.parametrize("rows", [(128, 32), (50, 14)], ids=["whole blocks", "torn blocks"])
def test_a_stored_matrix_of_two_parts_has_their_values(
    storage: str, group: int, high: int, rows: tuple[int, ...]
) -> None:
    parts = [part(count, 200, storage, group, high, seed) for seed, count in enumerate(rows)]
    want = torch.cat([values(p) for p in parts])
    with every_access_checked():
        torch.testing.assert_close(dequantized(SMALL, packed(parts), torch.float32), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tuning", [pytest.param(SMALL, marks=pytest.mark.slow), LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("storage", "group", "high"), STORED_FORMS)
@pytest.mark.parametrize("tokens", [1, 17])
def test_products_with_a_stored_matrix_are_those_of_its_values(
    tuning: Tuning, storage: str, group: int, high: int, tokens: int
) -> None:
    parts = [part(count, 200, storage, group, high, seed) for seed, count in enumerate((48, 32))]
    draw = torch.Generator().manual_seed(7)
    x, bias = torch.randn(tokens, 200, generator=draw), torch.randn(80, generator=draw)
    want = x @ torch.cat([values(p) for p in parts]).T + bias
    with every_access_checked():
        got = few_tokens_linear(tuning, torch.float32, x, packed(parts), bias)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tuning", [pytest.param(SMALL, marks=pytest.mark.slow), LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("storage", "group", "high"), STORED_FORMS)
def test_one_token_with_a_norm_before_and_an_activation_after(
    tuning: Tuning, storage: str, group: int, high: int
) -> None:
    parts = [part(40, 200, storage, group, high, seed) for seed in range(2)]
    draw = torch.Generator().manual_seed(7)
    x, residual, gain = (torch.randn(size, generator=draw) for size in ((1, 200), (1, 200), (200,)))
    bias, total = torch.randn(80, generator=draw), torch.full((1, 200), torch.nan)
    with every_access_checked():
        got = persistent_gemv(
            tuning, x, packed(parts), torch.float32, bias=bias, activation="silu", residual=residual, total=total,
            gain=gain, eps=0.1, offset=1.0,
        )  # fmt: skip
    stream = x + residual
    normed = stream * (stream.square().mean() + 0.1).rsqrt() * (gain + 1)
    gate, up = (normed @ torch.cat([values(p) for p in parts]).T + bias).chunk(2, 1)
    torch.testing.assert_close(total, stream)
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(("columns", "kernels"), [(9000, {"stored_gemv_kernel"}), (202, {"stored_kernel"})])
def test_one_token_with_long_rows_or_rows_of_no_whole_words(columns: int, kernels: set[str]) -> None:
    one = part(24, columns, "float8_e4m3fn", 128, 16)
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(7)).bfloat16()
    with every_access_checked() as programs:
        got = few_tokens_linear(LARGE, torch.float32, x, packed([one]))
    torch.testing.assert_close(got, x.float() @ values(one).T, rtol=1e-4, atol=1e-2)
    assert set(programs) == kernels


def test_an_activation_in_a_product_of_one_token_with_long_rows() -> None:
    parts = [part(12, 9000, "float8_e4m3fn", 128, 1, seed) for seed in range(2)]
    x, bias = (torch.randn(size, generator=torch.Generator().manual_seed(7)) for size in ((1, 9000), (24,)))
    with every_access_checked() as programs:
        got = gemv(LARGE, x, packed(parts), torch.float32, bias=bias, activation="gelu")
    gate, up = (x @ torch.cat([values(p) for p in parts]).T + bias).chunk(2, 1)
    torch.testing.assert_close(got, torch.nn.functional.gelu(gate) * up, rtol=1e-4, atol=2e-2)
    assert set(programs) == {"stored_gemv_kernel"}


@pytest.mark.parametrize("tuning", [pytest.param(SMALL, marks=pytest.mark.slow), LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("group", "high"), FORMS)
@pytest.mark.parametrize("columns", [200, 1280], ids=["one span", "several spans"])
def test_an_activation_in_a_product_of_a_few_tokens(tuning: Tuning, group: int, high: int, columns: int) -> None:
    parts = [part(40, columns, "float8_e4m3fn", group, high, seed) for seed in range(2)]
    draw = torch.Generator().manual_seed(7)
    x, bias = torch.randn(5, columns, generator=draw) / columns**0.5, torch.randn(80, generator=draw)
    with every_access_checked() as programs:
        got = skinny(tuning, x, packed(parts), torch.float32, bias=bias, activation="silu")
    gate, up = (x @ torch.cat([values(p) for p in parts]).T + bias).chunk(2, 1)
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=2e-3)
    assert set(programs) == {"stored_kernel"}


@pytest.mark.parametrize("storage", KINDS)
def test_every_element_is_multiplied_exactly_by_one_token(storage: str) -> None:
    """Each of the 256, subnormal numbers too, alone in its row."""
    bytes = torch.zeros(256, 16, dtype=torch.uint8)
    bytes[torch.arange(256), torch.arange(256) % 16] = torch.arange(256, dtype=torch.uint8)
    weight = bytes.view(getattr(torch, storage))
    form = QuantFormat(storage, 0, scale="float32")
    one = WeightPart("all", 256, 16, form, {"weight": weight, "scale": torch.ones(256)})
    want = weight.float().sum(1)
    got = few_tokens_linear(LARGE, torch.float32, torch.ones(1, 16), packed([one]))[0]
    assert torch.equal(got[want.isfinite()], want[want.isfinite()])


def test_every_float8_keeps_its_value_without_the_devices_own_conversion() -> None:
    bytes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    for storage in ("float8_e4m3fn", "float8_e5m2"):
        floats = bytes.view(getattr(torch, storage))
        finite = floats.float().isfinite()
        form = QuantFormat(storage, 0, scale="float32")
        one = WeightPart("all", 16, 16, form, {"weight": floats, "scale": torch.ones(16)})
        got = dequantized(SMALL, packed([one]), torch.float32)
        assert torch.equal(got[finite], floats.float()[finite])


def test_parts_that_cannot_be_one_matrix_are_refused() -> None:
    e4m3, int8 = part(16, 64, "float8_e4m3fn", 0, 1), part(16, 64, "int8", 0, 1)
    blocks, plain = part(16, 64, "float8_e4m3fn", 32, 16), WeightPart("p", 16, 64, QuantFormat("bfloat16"))
    for parts, said in (
        ([e4m3, int8], "differently"), ([e4m3, blocks], "differently"), ([plain], "not bfloat16"),
        ([replace(e4m3, format=replace(e4m3.format, zero="int8"))], "zero points"),
        ([replace(blocks, format=replace(blocks.format, group=24))], "power of two"),
        ([replace(e4m3, format=replace(e4m3.format, scale="float64"))], "scales"),
    ):  # fmt: skip
        assert said in (STORED.supports(parts, "float32") or "")
    assert "float64" in (STORED.supports([e4m3], "float64") or "")


def test_a_part_with_another_shape_than_it_says_is_refused() -> None:
    one = part(16, 64, "int8", 0, 1)
    with pytest.raises(ValueError, match="part 0"):
        STORED.pack([replace(one, columns=32)], "float32", HOST)


def test_a_stack_is_indexed_by_matrix() -> None:
    matrices = [[part(32, 64, "float8_e4m3fn", 32, 16, seed)] for seed in range(3)]
    made = STORED.pack_stack(iter(matrices), 3, "float32", HOST)
    assert made.shape == (3, 32, 64) and made.nbytes == 3 * STORED.nbytes(matrices[0], "float32")
    for index, parts in enumerate(matrices):
        torch.testing.assert_close(dequantized(SMALL, made.data[index], torch.float32), values(parts[0]))
