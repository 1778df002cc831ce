"""``quant=int4``: the stored tensors are those of compressed-tensors, their numbers are as near as four bits allow, and
odd groups and shapes have a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from evener.contracts.conversion.quantizer import Matrix
from evener.contracts.quant import WeightPart
from evener.errors import ConfigError
from evener_formats.compressed import CompressedTensors
from evener_formats.quantize.four_bits import FourBitQuantizer

NAME = "model.layers.0.mlp.up_proj.weight"


def matrix(name: str = NAME, columns: int = 256, kind: str = "linear", stack: Sequence[int] = ()) -> Matrix:
    return Matrix(name, (*stack, 24, columns), kind)  # type: ignore[arg-type]


def read_back(quantizer: FourBitQuantizer, one: Matrix, values: torch.Tensor) -> tuple[WeightPart, torch.Tensor]:
    tensors, headers = quantizer.quantize(one, values), quantizer.stored(one)
    assert {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()} == headers
    scheme = CompressedTensors().configured({"quantization_config": quantizer.settings})
    part = scheme.part(one.name, headers)
    assert part is not None
    roles = scheme.tensors(one.name, headers)
    part = replace(part, tensors={role: tensors[stored] for role, stored in roles.items()})
    return part, scheme.dequantize(part, "float32")


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (96, 32)])
def test_numbers_are_within_half_a_step_and_fewer_of_them_clipped_than_would_show(columns: int, group: int) -> None:
    values = torch.randn(24, columns, generator=torch.Generator().manual_seed(columns))
    quantizer = FourBitQuantizer("int4", {}, [matrix(columns=columns)])
    part, held = read_back(quantizer, matrix(columns=columns), values)
    assert (part.format.storage, part.format.group, part.format.scale, part.format.zero) == (
        "uint4", group, "float16", None
    )  # fmt: skip
    groups, made = values.reshape(-1, group), held.reshape(-1, group)
    simple = groups.abs().amax(1, keepdim=True) / 7
    usual = (groups / simple).round().clamp(-8, 7) * simple
    error, of_usual = (made - groups).square().sum(1), (usual - groups).square().sum(1)
    # The usual scale is one of those that are tried; rounding it to 16 bits costs next to nothing.
    assert bool((error <= of_usual * 1.01).all()) and float(error.sum()) < 0.95 * float(of_usual.sum())


def test_groups_of_zeros_and_of_huge_and_tiny_numbers_stay_finite() -> None:
    values = torch.ones(24, 256)
    values[0], values[1], values[2], values[3, 1:] = 0.0, 3e38, 1e-30, 0.0
    _, held = read_back(FourBitQuantizer("int4", {}, [matrix()]), matrix(), values)
    assert bool(held.isfinite().all()) and not held[0].any() and float(held[1].min()) > 4e5 and not held[2].any()
    assert float(held[3, 0]) == pytest.approx(1, rel=0.15) and not held[3, 1:].any()


def test_matrices_of_other_groups_are_named_and_others_stay_as_they_are() -> None:
    found = [
        matrix(), matrix("model.layers.1.mlp.up_proj.weight"), matrix("model.layers.0.mlp.down_proj.weight", 96),
        matrix("model.layers.0.odd.weight", 40), matrix("lm_head.weight", kind="head"),
        matrix("model.layers.0.mlp.gate.weight", kind="router"),
    ]  # fmt: skip
    quantizer = FourBitQuantizer("int4", {"quant_rules": '{"model.layers.1.mlp.up_proj": "none"}'}, found)
    assert [bool(quantizer.stored(each)) for each in found] == [True, False, True, False, False, False]
    groups = quantizer.settings["config_groups"].values()
    assert {(each["weights"]["group_size"], *each["targets"]) for each in groups} == {
        (128, "Linear"), (32, "model.layers.0.mlp.down_proj"),
    }  # fmt: skip
    assert set(quantizer.settings["ignore"]) == {
        "model.layers.1.mlp.up_proj", "model.layers.0.odd", "lm_head", "model.layers.0.mlp.gate"
    }  # fmt: skip
    assert read_back(quantizer, found[2], torch.randn(24, 96))[0].format.group == 32
    with pytest.raises(ConfigError, match="has the format 'q8_0'"):
        FourBitQuantizer("int4", {"quant_rules": '{"lm_head": "q8_0"}'}, found)


def test_a_stack_of_experts_is_stored_as_a_stack() -> None:
    one = matrix("model.layers.0.mlp.experts.up_proj", kind="expert", stack=(3,))
    values = torch.randn(3, 24, 256, generator=torch.Generator().manual_seed(4))
    quantizer = FourBitQuantizer("int4", {}, [one])
    tensors = quantizer.quantize(one, values)
    for expert in range(3):
        alone = quantizer.quantize(replace(one, shape=(24, 256)), values[expert])
        assert all(torch.equal(tensors[name][expert], alone[name]) for name in tensors)
    scheme = CompressedTensors().configured({"quantization_config": quantizer.settings})
    part = scheme.part(one.name, quantizer.stored(one))
    assert part is not None and (part.rows, part.columns, part.format.storage) == (24, 256, "uint4")
