"""The algorithms of ``evener quantize`` on single matrices: GPTQ is the published update, done naively; AWQ's scales
and clips lessen the error of results; both are stored as an independent writer of the formats stores them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from evener_quantize.awq import channel_scales, clips, result_error
from evener_quantize.gptq import DAMPING, gptq
from evener_quantize.rounding import Grid, Rounded, nearest
from evener_quantize.settings import Settings
from evener_quantize.written import headers_of, tensors_of
from integer_files import Quantized, awq_tensors, gptq_tensors
from integer_files import headers_of as headers

from evener.errors import ConfigError, EngineError
from evener_formats.words import pack, unpack

ROWS, COLUMNS, GROUP = 64, 192, 32


def matrix(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and XᵀX of correlated inputs with some channels much larger than the rest."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(COLUMNS // 4, COLUMNS, generator=random)
    x = torch.randn(1000, COLUMNS // 4, generator=random) @ mixed + 0.3 * torch.randn(1000, COLUMNS, generator=random)
    x[:, ::17] *= 20
    return torch.randn(ROWS, COLUMNS, generator=random) / COLUMNS**0.5, x.T @ x / 1000


def error(weight: torch.Tensor, made: Rounded, gram: torch.Tensor) -> float:
    return result_error(made.values() - weight, gram)


@pytest.mark.parametrize("order", ["none", "static", "groups"])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (3, True), (2, False), (8, True)])
def test_gptq_has_less_error_in_the_results_than_rounding_to_nearest(bits: int, symmetric: bool, order: Any) -> None:
    weight, gram = matrix()
    grid = Grid(bits, symmetric, least_zero=1)
    made = gptq(weight, gram, grid, GROUP, order)
    most = 0.95 if order == "none" else 0.1
    assert error(weight, made, gram) < most * error(weight, nearest(weight, grid, GROUP), gram)


def test_an_order_by_inputs_has_less_error_than_none() -> None:
    weight, gram = matrix()
    grid = Grid(3, True)
    errors = {order: error(weight, gptq(weight, gram, grid, GROUP, order), gram)
              for order in ("none", "static", "groups")}  # fmt: skip
    assert errors["static"] < errors["none"] > errors["groups"]


@pytest.mark.parametrize("order", ["static", "groups", "none"])
def test_gptq_gives_the_codes_of_the_published_update_done_naively(order: Any) -> None:
    # Optimal Brain Quantization in a fixed order (equations 2 and 3): the rest of the matrix, and the inverse of the
    # rest of the Hessian, computed anew for each column.
    weight, gram = matrix(3)
    made = gptq(weight, gram, Grid(4, True), GROUP, order)
    chosen = gram.diagonal().argsort(descending=True, stable=True) if order != "none" else torch.arange(COLUMNS)
    hessian = (gram + torch.eye(COLUMNS) * gram.diagonal().mean() * DAMPING).double()[chosen][:, chosen]
    work, expected = weight.double()[:, chosen], torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    own = weight.view(ROWS, -1, GROUP)
    for at in range(COLUMNS):
        if order == "static":
            members = own[:, int(chosen[at]) // GROUP]
            scale = (members.abs().amax(1) / 7.5).half().double()
        elif at % GROUP == 0:
            scale = (work[:, at : at + GROUP].abs().amax(1) / 7.5).half().double()
        rounded = (work[:, at] / scale).round().clamp(-8, 7) * scale
        inverse = torch.linalg.inv(hessian[at:, at:])
        step = (work[:, at] - rounded) / inverse[0, 0]
        work[:, at + 1 :] -= step[:, None] * inverse[0, 1:]
        expected[:, chosen[at]] = rounded
    same = (made.values() - expected).abs() < 1e-4
    assert float(same.float().mean()) > 0.99  # a number halfway between two codes may go either way


def test_a_column_without_input_is_rounded_to_nearest() -> None:
    weight, gram = matrix()
    gram[7] = gram[:, 7] = 0
    grid = Grid(4, True)
    made = gptq(weight, gram, grid, GROUP, "static")
    torch.testing.assert_close(made.values()[:, 7], nearest(weight, grid, GROUP).values()[:, 7])
    silent = gptq(weight, torch.zeros(COLUMNS, COLUMNS), grid, GROUP, "static")
    assert torch.equal(silent.codes, nearest(weight, grid, GROUP).codes)


def test_inputs_of_one_token_are_enough_and_those_that_are_not_finite_are_refused() -> None:
    weight, _ = matrix()
    x = torch.randn(1, COLUMNS, generator=torch.Generator().manual_seed(5))
    grid = Grid(4, True)
    made = gptq(weight, x.T @ x, grid, GROUP, "static")
    assert error(weight, made, x.T @ x) < 0.2 * error(weight, nearest(weight, grid, GROUP), x.T @ x)
    with pytest.raises(EngineError, match="too large, or NaN"):
        gptq(weight, x.T @ x * torch.inf, grid, GROUP, "none")


def test_scales_of_channels_and_clips_lessen_the_error_of_the_results() -> None:
    weight, gram = matrix()
    grid, magnitude = Grid(4, False), gram.diagonal().sqrt()
    plain = error(weight, nearest(weight, grid, GROUP), gram)
    scales = channel_scales([(weight, gram)], magnitude, grid, GROUP)
    scaled = result_error(nearest(weight * scales, grid, GROUP).values() / scales - weight, gram)
    assert scaled < 0.7 * plain
    assert scales[::17].mean() > 2 * scales[1::17].mean()
    blocks = torch.block_diag(*(gram[at : at + GROUP, at : at + GROUP] for at in range(0, COLUMNS, GROUP)))
    clipped = nearest(weight, grid, GROUP, clips(weight, blocks, grid, GROUP))
    assert error(weight, clipped, blocks) < 0.95 * error(weight, nearest(weight, grid, GROUP), blocks)


def test_matrices_that_get_few_inputs_count_little_when_scales_are_chosen() -> None:
    """Experts read the same channels; a token goes to some of them."""
    (a, gram), (b, other) = matrix(), matrix(7)
    other, grid = torch.diag(torch.linspace(1, 30, COLUMNS)), Grid(4, False)
    alone = channel_scales([(a, gram)], gram.diagonal().sqrt(), grid, GROUP)
    both = [(a, gram), (b, 1e6 * other)]
    assert torch.equal(alone, channel_scales(both, gram.diagonal().sqrt(), grid, GROUP, shares=[1.0, 1e-9]))
    assert not torch.equal(alone, channel_scales(both, gram.diagonal().sqrt(), grid, GROUP))


def test_channels_that_the_same_rows_make_get_the_same_scales() -> None:
    weight, gram = matrix()
    scales = channel_scales([(weight, gram)], gram.diagonal().sqrt(), Grid(4, False), GROUP, repeat=(3, 16))
    units = scales.view(-1, 3, 16)
    assert torch.equal(units[:, 0], units[:, 1]) and torch.equal(units[:, 0], units[:, 2])
    assert len(units[:, 0].unique()) > 16


@pytest.mark.parametrize("least", [0, 1])
def test_a_grid_has_zero_and_reaches_the_ends_of_its_group(least: int) -> None:
    grid, random = Grid(4, False, least), torch.Generator().manual_seed(2)
    groups = torch.randn(50, 32, generator=random) + torch.linspace(-4, 4, 50)[:, None]
    groups[0] = 0
    scale, zero = grid.fit(groups)
    assert int(zero.min()) >= least and int(zero.max()) <= 15 and torch.equal(scale, scale.half().float())
    values = (grid.codes(groups, scale[:, None], zero[:, None]) - zero[:, None]) * scale[:, None]
    assert bool(((values - groups).abs() <= 0.76 * scale[:, None]).all()) and not values[0].any()


def rounded(bits: int, symmetric: bool, order: Any = "none") -> tuple[Rounded, Quantized]:
    weight, gram = matrix(4)
    made = gptq(weight, gram, Grid(bits, symmetric, 1), GROUP, order)
    as_stored = Quantized(made.codes.long(), made.zeros.long().T, made.scales.T, made.index.long())
    torch.testing.assert_close(as_stored.values, made.values())
    return made, as_stored


@pytest.mark.parametrize(
    ("bits", "symmetric", "order"),
    [(4, True, "static"), (4, False, "groups"), (3, True, "groups"), (2, False, "none"), (8, False, "none")],
)
def test_gptq_tensors_are_those_of_an_independent_writer(bits: int, symmetric: bool, order: Any) -> None:
    made, as_stored = rounded(bits, symmetric, order)
    settings = Settings("gptq", bits, GROUP, symmetric, order)
    tensors = tensors_of("a.b.weight", made, settings)
    expected = gptq_tensors("a.b", as_stored, bits, less=1)
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[n], expected[n]) for n in expected)
    assert headers_of("a.b.weight", ROWS, COLUMNS, GROUP, settings) == headers(expected)


def test_awq_tensors_are_those_of_an_independent_writer() -> None:
    made, as_stored = rounded(4, symmetric=False)
    settings = Settings("awq", 4, GROUP, symmetric=False, order="none")
    tensors, expected = tensors_of("a.b.weight", made, settings), awq_tensors("a.b", as_stored)
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[n], expected[n]) for n in expected)
    assert headers_of("a.b.weight", ROWS, COLUMNS, GROUP, settings) == headers(expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_numbers_are_read_back(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (3, 5, 96), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    assert torch.equal(unpack(pack(numbers, bits), bits), numbers)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"bits": 5}, "2, 3, 4, 8 bits"),
        ({"method": "awq", "bits": 8, "symmetric": False, "order": "none"}, "leave --bits out, or use"),
        ({"group": 48}, "multiple of 32"), ({"method": "awq"}, "leave it out"), ({"tokens": 0}, "at least 1"),
        ({"method": "rtn"}, "gptq or awq"), ({"order": "random"}, "none, static, groups"),
    ],
)  # fmt: skip
def test_settings_that_no_format_has_are_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Settings(**asked)
