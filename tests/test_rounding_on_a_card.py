"""Launches that round activations, on a card, whose instructions the host does not have."""

from __future__ import annotations

import pytest
import torch

from evener.contracts.quant import QuantFormat, Rounding, WeightPart
from evener_conformance.kit.subject import open_subject
from evener_kernels_triton.rounded import round_rows
from evener_kernels_triton.stored import STORED
from evener_kernels_triton.tuning import Tuning

ROWS, COLUMNS = 4096, 2048


def numbers(device: torch.device) -> torch.Tensor:
    """bfloat16 [ROWS, COLUMNS] of all sizes, with zeros of both signs, infinities and what is no number."""
    draw = torch.Generator(device).manual_seed(3)
    sizes = torch.logspace(-12, 12, ROWS, device=device)[:, None]
    x = (torch.randn(ROWS, COLUMNS, generator=draw, device=device) * sizes).bfloat16()
    x[::7, :5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], device=device)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.011, 1.0, 3e-8, 7e5])
def test_a_fixed_scale_divides_bit_for_bit(scale: float) -> None:
    """The launch multiplies by the inverse and corrects the quotient, which takes a quarter of the instructions."""
    device = open_subject("cuda").device
    form = QuantFormat("float8_e4m3fn", -1, scale="float32", activation=Rounding("float8_e4m3fn", -1))
    tensors = {
        "weight": torch.zeros(16, COLUMNS, dtype=torch.float8_e4m3fn), "scale": torch.ones(1, 1),
        "activation_scale": torch.tensor([scale]),
    }  # fmt: skip
    part = WeightPart("w", 16, COLUMNS, form, tensors)
    weight = STORED.pack([part], "bfloat16", device.torch_device).data
    x = numbers(device.torch_device)
    got = round_rows(Tuning.of(device.capabilities), x, weight)
    assert weight.fixed is not None
    want = (x.float() / weight.fixed).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    bits, none = got.elements.view(torch.uint8), x.isnan()
    assert bool((bits[none] & 127 == 127).all()), "it stays no number"
    assert torch.equal(bits[~none], want[~none])
