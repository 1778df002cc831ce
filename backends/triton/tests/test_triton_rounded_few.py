"""Few tokens over float8_e4m3fn with products of warp groups, on the host, against the values of what they multiply."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from gluon_host import Pointer, on_host

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight, QuantFormat, Rounding, WeightPart
from evener.contracts.weights import MLPWeights
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton import composites
from evener_kernels_triton import rounded_few as module
from evener_kernels_triton.jit import rounded_few as kernel
from evener_kernels_triton.rounded import RoundedRows, activation_sizes, rounded_product, rounds
from evener_kernels_triton.rounded_few import few_sizes, few_sums
from evener_kernels_triton.stored import STORED, Form, StoredMatrix
from evener_kernels_triton.tuning import Tuning


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def product(
    tokens: int, rows: int, columns: int, form: Form, group: int, n: int = 64, unit: int = 1, places: int = 3,
    splits: int = 1, bias: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What the kernel computes, and what is right. Where nothing was written there is no number."""
    draw = torch.Generator().manual_seed(rows + columns)
    w = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    x = torch.randn(tokens, columns, generator=draw).to(torch.float8_e4m3fn)
    steps = -(-columns // 128)
    blocks = steps if form.wide else 1
    of_w = torch.rand(-(-rows // form.high), blocks, generator=draw) + 0.5
    of_x = torch.rand(1 if group < 0 else steps * tokens if group else tokens, generator=draw) + 0.5
    added = torch.randn(rows, generator=draw)
    each = -(-steps // (splits * unit)) * unit
    spans, m = -(-steps // each), max(16, 1 << (tokens - 1).bit_length())
    tiles = -(-rows // n)
    parts, arrived = torch.full((tiles * spans * n * m,), torch.nan), torch.zeros(tiles, dtype=torch.int32)
    y = torch.full((tokens * rows,), torch.nan)
    on_host(kernel, "rounded_few_kernel", 8)(
        (tiles, spans), *map(Pointer, (x.view(-1), of_x, w.view(-1), of_w.view(-1), added, y, parts, arrived)), tokens,
        rows, columns, blocks, Pointer(y), each, BIAS=bias, ACT="", SPLITS=spans, BM=m, BN=n, U=unit, PLACES=places,
        STEPS=1 << (each - 1).bit_length(), EVEN=columns % (each * 128) == 0, HIGH=form.high, BLOCKS=form.wide > 0,
        FIXED=group < 0, EARLY=False, OVERLAP=True,
    )  # fmt: skip
    assert not arrived.any(), "counters are for the next launch too"
    a = x.double() * (
        of_x.view(steps, tokens).t().repeat_interleave(128, 1)[:, :columns] if group > 0 else of_x.view(-1, 1)
    )
    b = w.double() * of_w.repeat_interleave(form.high, 0)[:rows].repeat_interleave(form.wide or columns, 1)[:, :columns]
    return y.view(tokens, rows).double(), a @ b.t() + (added.double() if bias else 0.0)


BLOCKS, ROWS = Form("e4m3", 128, 128), Form("e4m3", 1, 0)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "form", "group", "sizes"),
    [
        (16, 128, 1024, BLOCKS, 128, {}),
        (5, 192, 2048, BLOCKS, 128, {"unit": 2, "splits": 2}),
        (33, 136, 1040, BLOCKS, 128, {"n": 128, "places": 4, "splits": 4}),
        (24, 100, 1024, ROWS, 0, {"unit": 2, "splits": 4, "places": 2}),
        (2, 64, 400, ROWS, -1, {"bias": False}),
        (64, 200, 1152, ROWS, 0, {"n": 128, "splits": 2, "unit": 2}),
        (3, 392, 1024, BLOCKS, 128, {"n": 256, "splits": 2}),
        (20, 392, 512, ROWS, 0, {"n": 256}),
    ],
)
def test_few_tokens_agree_with_the_values_of_the_weight(
    tokens: int, rows: int, columns: int, form: Form, group: int, sizes: dict[str, int]
) -> None:
    """Torn tiles of rows, tokens and columns; several spans; each way of scales."""
    got, want = product(tokens, rows, columns, form, group, **sizes)  # type: ignore[arg-type]
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize(("tokens", "inner", "activation"), [(16, 256, "silu"), (21, 128, "gelu")])
def test_gate_and_up_are_activated_and_rounded_in_the_launch(tokens: int, inner: int, activation: str) -> None:
    draw = torch.Generator().manual_seed(tokens)
    columns, m = 512, 1 << (tokens - 1).bit_length()
    w = torch.randn(2 * inner, columns, generator=draw).to(torch.float8_e4m3fn)
    x = torch.randn(tokens, columns, generator=draw).to(torch.float8_e4m3fn)
    of_w, of_x = torch.rand(2 * inner // 128, 4, generator=draw) + 0.5, torch.rand(4, tokens, generator=draw) + 0.5
    y = torch.full((tokens * inner,), torch.nan).to(torch.float8_e4m3fn)
    made = torch.full((inner // 128 * tokens,), torch.nan)
    nothing = Pointer(torch.empty(0))
    on_host(kernel, "rounded_few_kernel", 8)(
        (inner // 128, 1), *map(Pointer, (x.view(-1), of_x.view(-1), w.view(-1), of_w.view(-1))), nothing, Pointer(y),
        nothing, nothing, tokens, inner, columns, 4, Pointer(made), 4, BIAS=False, ACT=activation, SPLITS=1, BM=m,
        BN=256, U=1, PLACES=3, STEPS=4, EVEN=True, HIGH=128, BLOCKS=True, FIXED=False, EARLY=False, OVERLAP=True,
    )  # fmt: skip
    a = x.double() * of_x.t().repeat_interleave(128, 1)
    gate, up = (a @ (w.double() * of_w.repeat_interleave(128, 0).repeat_interleave(128, 1)).t()).chunk(2, 1)
    want = (F.silu(gate) if activation == "silu" else F.gelu(gate)) * up
    scales = made.view(-1, tokens).t().repeat_interleave(128, 1).double()
    largest = want.abs().view(tokens, -1, 128).amax(2).repeat_interleave(128, 1) / 448
    assert float((scales / largest - 1).abs().max()) < 2.0**-8, "values are rounded to bfloat16 before"
    got = y.view(tokens, inner).double() * scales
    assert float((got - want).norm() / want.norm()) < 0.04, "as much as three bits of mantissa lose"


class Recorded:
    """Stands for the kernel, whose parameters it has; launches go to ``made``."""

    pre_run_hooks: Sequence[Any] = ()
    made: ClassVar[list[tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*values: Any, num_warps: int, launch_pdl: bool, **fixed: Any) -> None:
            inspect.signature(kernel.rounded_few_kernel.fn).bind(*values, **fixed)
            assert num_warps == fixed["BN"] // 16 and launch_pdl
            self.made.append((grid, values, fixed))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Launches of the kernel, of which none runs."""
    monkeypatch.setattr(module, "_kernel", Recorded)
    Recorded.made.clear()
    return Recorded.made


HOPPER = Tuning(132, 227 << 10, True, warpgroups=True, ptx=True, float8=True)
META = torch.device("meta")


def stored(rows: int, columns: int, form: Form, group: int) -> StoredMatrix:
    """A weight without values."""
    blocks = -(-columns // form.wide) if form.wide else 1
    return StoredMatrix(
        torch.empty(rows, columns, dtype=torch.uint8, device=META),
        torch.empty(-(-rows // form.high), blocks, device=META), form, Rounding("float8_e4m3fn", group),
    )  # fmt: skip


def rows_of(tokens: int, columns: int, group: int) -> RoundedRows:
    """Rounded rows without values."""
    x = torch.empty(tokens, columns, dtype=torch.float8_e4m3fn, device=META)
    return RoundedRows(x, torch.empty(-(-columns // group) if group else 1, tokens, device=META), group, tokens)


@pytest.mark.parametrize("tokens", [2, 16, 24, 64])
@pytest.mark.parametrize(("form", "group"), [(BLOCKS, 128), (ROWS, 0)], ids=["blocks", "rows"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (10240, 5120), (5120, 25600)]
)
def test_programs_of_few_tokens_cover_the_weight_and_fit_on_a_unit(
    launches: list[tuple[Any, ...]], tokens: int, rows: int, columns: int, form: Form, group: int
) -> None:
    p = few_sizes(HOPPER, tokens, rows, columns, form, group)
    assert p is not None
    y = rounded_product(HOPPER, torch.bfloat16, rows_of(tokens, columns, group), stored(rows, columns, form, group))
    ((grid, values, fixed),) = launches
    assert y.shape == (tokens, rows) and values[5].data_ptr() == y.data_ptr()
    m, n, each = fixed["BM"], fixed["BN"], fixed["each"]
    assert grid == (-(-rows // n), fixed["SPLITS"], 1) and tokens <= m <= max(16, 2 * tokens)
    assert grid[1] * each * 128 >= columns > (grid[1] - 1) * each * 128, "no span is empty"
    assert each % fixed["U"] == 0 and each >= (fixed["PLACES"] - 1) * fixed["U"], "the ring is of this span"
    factors = max(1, n // 128) * fixed["STEPS"] * m * 4 if form.wide else 0
    held = fixed["PLACES"] * fixed["U"] * (n + m) * 128 + factors
    assert held <= HOPPER.shared - 1024
    sums = values[6].nbytes if fixed["SPLITS"] > 1 else 0
    assert sums == few_sums(p, tokens, rows, columns)


def test_only_products_that_were_measured_go_to_the_kernel_of_few_tokens() -> None:
    asked = few_sizes
    assert asked(HOPPER, 65, 4096, 4096, BLOCKS, 128) is None, "a program has all tokens"
    assert asked(HOPPER, 16, 2048, 4096, BLOCKS, 128) is None and asked(HOPPER, 16, 4096, 2048, BLOCKS, 128) is None
    for form, group in ((Form("int8"), 0), (Form("e4m3", 64, 128), 128), (BLOCKS, 0), (BLOCKS, 64), (ROWS, 128)):
        assert asked(HOPPER, 16, 4096, 4096, form, group) is None, (form, group)
    assert asked(HOPPER, 16, 4096, 4104, BLOCKS, 128) is None, "a copy takes 16 bytes of a row"
    assert asked(HOPPER.with_changes({"n": 64}), 16, 4096, 4096, BLOCKS, 128) is None, "sizes are of other kernels"
    assert asked(replace(HOPPER, warpgroups=False), 16, 4096, 4096, BLOCKS, 128) is None


def declared(rows: int, columns: int, form: Form, group: int, **more: Any) -> LinearWeight:
    """A weight of one part."""
    how = Rounding("float8_e4m3fn", group)
    made = QuantFormat("float8_e4m3fn", form.wide, form.high, scale="float32", activation=how)
    return LinearWeight("w", (WeightPart("w", rows, columns, made, {}),), rows, columns, "bfloat16",
                        layout=STORED.layout, **more)  # fmt: skip


def test_activations_are_rounded_from_two_tokens_on_where_the_kernel_is_used() -> None:
    for form, group in ((BLOCKS, 128), (ROWS, 0)):
        large, small = declared(4096, 4096, form, group), declared(1024, 4096, form, group)
        assert [rounds(HOPPER, tokens, large) for tokens in (1, 2, 16, 64)] == [False, True, True, True]
        assert [rounds(HOPPER, tokens, small) for tokens in (2, 16, 17)] == [False, False, True]
        experts = declared(4096, 4096, form, group, experts=8)
        assert [rounds(HOPPER, tokens, experts) for tokens in (2, 4, 5)] == [False, False, True]


@pytest.mark.parametrize(("tokens", "bias", "inside"), [(16, False, True), (64, False, True), (16, True, False)])
def test_an_mlp_block_rounds_its_activation_in_the_product_of_gate_and_up(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tokens: int, bias: bool, inside: bool
) -> None:
    inner, hidden = 12288, 4096
    up, down = declared(2 * inner, hidden, BLOCKS, 128), declared(hidden, inner, BLOCKS, 128)
    static = {"gate_up": up, "down": down, "activation": "silu", "hidden": hidden, "eps": 1e-6, "offset": 0.0,
              "dtype": "bfloat16", "post_norm": False}  # fmt: skip
    device = HostDevice(0)
    call = OpCall("mlp_block", static, Bucket(tokens, tokens), device.capabilities)
    stream = torch.empty(tokens, hidden, device=META)
    monkeypatch.setattr(composites, "norm_round", lambda *asked: (rows_of(tokens, hidden, 128), stream, stream))
    monkeypatch.setattr(composites, "act_round", lambda *asked: rows_of(tokens, inner, 128))
    weights = MLPWeights(
        torch.empty(hidden, device=META), packed(stored(2 * inner, hidden, BLOCKS, 128)),
        packed(stored(hidden, inner, BLOCKS, 128)), torch.empty(2 * inner, device=META) if bias else None,
    )  # fmt: skip
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=META)
    y, after = composites.TritonMlpBlock(device, HOPPER).build(call)(x, stream, weights)
    assert y.shape == x.shape and after is stream
    (_, first, fixed), (_, second, plain) = launches
    assert fixed["ACT"] == ("silu" if inside else "") and plain["ACT"] == ""
    assert not inside or (second[0] is first[5] and second[1] is first[12]), "the second multiplies what the first made"
    assert not inside or (fixed["BN"], first[5].shape, first[12].shape) == (
        256,
        (tokens, inner),
        (inner // 128, tokens),
    )


def packed(matrix: StoredMatrix) -> PackedWeight:
    """A weight as kernels get it."""
    return PackedWeight(STORED.layout, tuple(matrix.shape), matrix, 0, ())


def test_the_activation_has_a_launch_of_its_own_where_a_tile_has_no_whole_scale() -> None:
    gate_up, down = declared(24576, 4096, BLOCKS, 128), declared(4096, 12288, BLOCKS, 128)
    assert activation_sizes(HOPPER, 16, gate_up, down) is not None
    assert activation_sizes(HOPPER, 65, gate_up, down) is None and activation_sizes(HOPPER, 1, gate_up, down) is None
    rows = declared(24576, 4096, ROWS, 0), declared(4096, 12288, ROWS, 0)
    assert activation_sizes(HOPPER, 16, *rows) is None, "a scale needs a whole row"
    assert activation_sizes(HOPPER, 16, gate_up, rows[1]) is None
    torn = declared(24832, 4096, BLOCKS, 128), declared(4096, 12416, BLOCKS, 128)
    assert activation_sizes(HOPPER, 16, *torn) is not None
    torn = declared(24704, 4096, BLOCKS, 128), declared(4096, 12352, BLOCKS, 128)
    assert activation_sizes(HOPPER, 16, *torn) is None, "the up rows begin inside a block"
    wide = declared(34816, 5120, BLOCKS, 128), declared(5120, 17408, BLOCKS, 128)
    assert activation_sizes(HOPPER, 64, *wide) is None, "the ring and the factors do not fit"
