"""One token over float8_e4m3fn with products of warp groups, on the host, against the values of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gluon_host import Pointer, on_host

from evener_kernels_triton import stored_token as module
from evener_kernels_triton.jit import stored_token as kernel
from evener_kernels_triton.linear import few_tokens_linear, persistent_gemv
from evener_kernels_triton.stored import Form, StoredMatrix
from evener_kernels_triton.stored_token import reads_stored_token
from evener_kernels_triton.tuning import Tuning

HOPPER = Tuning(132, 227 << 10, True, warpgroups=True, ptx=True, float8=True)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def product(
    rows: int, columns: int, form: Form, activation: str = "", norm: bool = False, spans: int = 4, unit: int = 1,
    places: int = 3, programs: int = 2, outlier: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What the kernel computes, and what is right. Where nothing was written there is no number."""
    draw = torch.Generator().manual_seed(rows + columns)
    halves = 2 if activation else 1
    w = torch.randn(halves * rows, columns, generator=draw).to(torch.float8_e4m3fn)
    blocks = -(-columns // form.wide) if form.wide else 1
    scales = torch.rand(-(-halves * rows // form.high), blocks, generator=draw) + 0.5
    bias = torch.randn(halves * rows, generator=draw).to(torch.bfloat16)
    x = torch.randn(columns, generator=draw).to(torch.bfloat16)
    x[7] *= outlier
    gain, residual = torch.rand(columns, generator=draw).to(torch.bfloat16) + 0.5, torch.randn(columns, generator=draw)
    total, y = torch.full((columns,), torch.nan), torch.full((rows,), torch.nan)
    step = 128 * spans
    steps = -(-columns // (step * unit)) * unit
    on_host(kernel, "stored_token_kernel", 8)(
        programs, *map(Pointer, (x, residual, total, gain, w.view(-1), scales.view(-1), bias, y)), rows, columns,
        blocks, 1e-6, 0.5, ADD=norm, NORM=norm, BIAS=True, ACT=activation, SPANS=spans, T=steps, U=unit, PLACES=places,
        EVEN=columns == step * steps, OVERLAP=True, HIGH=form.high, WIDE=form.wide,
    )  # fmt: skip
    values = (
        w.float()
        * scales.repeat_interleave(form.high, 0)[: halves * rows].repeat_interleave(form.wide or columns, 1)[
            :, :columns
        ]
    )
    v = x.float()
    if norm:
        v = v + residual
        assert torch.equal(total, v)
        v = v * torch.rsqrt(v.pow(2).mean() + 1e-6) * (gain.float() + 0.5)
    want = values.double() @ v.double() + bias.double()
    if activation:
        gate, up = want.chunk(2)
        how = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}[activation]
        want = how(gate) * up
    return y.double(), want


@pytest.mark.parametrize(
    ("rows", "columns", "form", "sizes"),
    [
        (48, 512, Form("e4m3", 1, 0), {}),
        (41, 1024, Form("e4m3", 1, 0), {"norm": True, "unit": 2}),
        (24, 1040, Form("e4m3", 1, 128), {"activation": "silu", "norm": True}),
        (64, 1536, Form("e4m3", 16, 128), {"spans": 8, "places": 5, "programs": 1}),
        (13, 768, Form("e4m3", 8, 256), {"spans": 8, "activation": "gelu_tanh", "places": 2}),
        (9, 2064, Form("e4m3", 1, 0), {"activation": "gelu", "unit": 2, "places": 4, "programs": 1}),
    ],
)
def test_one_token_agrees_with_the_values_of_the_weight(
    rows: int, columns: int, form: Form, sizes: dict[str, int]
) -> None:
    """Torn tiles, rows and columns; several tiles for a program; each way of scales."""
    got, want = product(rows, columns, form, **sizes)  # type: ignore[arg-type]
    assert float((got - want).norm() / want.norm()) < 2e-3  # sums that are rounded to bfloat16 lose as much


def test_a_number_that_is_much_larger_than_the_others_costs_them_little() -> None:
    for outlier in (1.0, 100.0, 3000.0):
        got, want = product(16, 512, Form("e4m3", 1, 0), outlier=outlier)
        assert float((got - want).norm() / want.norm()) < 2e-3, outlier


def test_nan_inputs_give_nan_outputs() -> None:
    got, _ = product(16, 512, Form("e4m3", 1, 0), outlier=float("nan"))
    assert torch.isnan(got).all()


def test_only_what_was_measured_gets_the_kernel() -> None:
    blocks = Form("e4m3", 128, 128)
    for rows, columns in ((6144, 4096), (24576, 4096), (4096, 12288), (10240, 5120)):
        assert reads_stored_token(HOPPER, blocks, rows, columns, torch.bfloat16), (rows, columns)
    for form in (Form("e5m2", 128, 128), Form("int8", 128, 128), Form("e4m3", 1, 64), Form("e4m3")):
        assert not reads_stored_token(HOPPER, form, 4096, 4096, torch.bfloat16), form
    assert not reads_stored_token(HOPPER, blocks, 4096, 4104, torch.bfloat16), "a copy takes 16 bytes of a row"
    assert not reads_stored_token(HOPPER, blocks, 4096, 4096, torch.float16), "two parts do not hold its bits"
    assert not reads_stored_token(HOPPER, blocks, 4096, 1 << 16, torch.bfloat16), "x does not fit"
    assert not reads_stored_token(HOPPER, blocks, 2048, 4096, torch.bfloat16), "too few rows for all units"
    resized = HOPPER.with_changes({"n": 4})
    assert not reads_stored_token(resized, blocks, 4096, 4096, torch.bfloat16), "the sizes are of other kernels"
    older = Tuning(132, 227 << 10, True, ptx=True, float8=True)
    assert not reads_stored_token(older, blocks, 4096, 4096, torch.bfloat16)


def test_a_decoder_layers_products_are_launched_with_the_norm_and_the_activation() -> None:
    """What the kernel is given, without a device: the grid, whole steps, and one launch a product."""
    launches: list[tuple[Any, ...]] = []

    class Recorded:
        pre_run_hooks: Sequence[Any] = ()

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *values, **fixed: launches.append((grid, values, fixed))

    meta = torch.device("meta")
    x, gain = (torch.empty(n, dtype=torch.bfloat16, device=meta) for n in ((1, 5120), (5120,)))
    stream = torch.empty(1, 5120, device=meta)
    weight = StoredMatrix(
        torch.empty(20000, 5120, dtype=torch.uint8, device=meta), torch.empty(157, 40, device=meta),
        Form("e4m3", 128, 128),
    )  # fmt: skip
    own = replace(HOPPER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_kernel", Recorded)
        y = persistent_gemv(
            own, x, weight, torch.bfloat16, residual=stream, total=stream, gain=gain, eps=1e-6, activation="silu"
        )
        z = few_tokens_linear(own, torch.float32, x, weight)
    (grid, values, fixed), (second, _, plain) = launches
    assert (y.shape, y.dtype, z.shape, z.dtype) == ((1, 10000), torch.bfloat16, (1, 20000), torch.float32)
    assert grid == second == (264, 1, 1)
    assert values[4].dtype == torch.float8_e4m3fn and values[7] is y
    assert fixed["ADD"] and fixed["NORM"] and fixed["ACT"] == "silu" and fixed["rows"] == 10000
    assert not (plain["ADD"] or plain["NORM"] or plain["ACT"]) and plain["rows"] == 20000
    assert fixed["T"] == 8 and not fixed["EVEN"], "five steps, and three without columns"
