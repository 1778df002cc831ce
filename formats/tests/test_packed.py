"""Packed weights of compressed-tensors and ModelOpt: the numbers that independent code wrote; rules by layer name; what
does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from integer_files import compressed_tensors, headers_of, quantized

from evener.contracts.quant import NVFP4, QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener_conformance.kit.cases.blocks import reference_dequantize
from evener_conformance.kit.formats import scheme_results
from evener_conformance.kit.outcome import Check
from evener_formats.compressed import CompressedTensors
from evener_formats.modelopt import ModelOptScheme

NAME = "model.layers.0.mlp.up_proj.weight"
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}


def config(weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights)}}
    found = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return {"quantization_config": {**found, **more}}


def read(settings: Mapping[str, Any], tensors: dict[str, torch.Tensor], name: str = NAME) -> tuple[Any, WeightPart]:
    scheme = CompressedTensors().configured(settings)
    headers = headers_of(tensors)
    part = scheme.part(name, headers)
    assert part is not None
    return scheme, replace(part, tensors={r: tensors[n] for r, n in scheme.tensors(name, headers).items()})


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (4, 0), (8, 64), (8, 0)])
def test_a_packed_layer_has_the_numbers_that_were_written(
    bits: int, group: int, act_order: bool, symmetric: bool
) -> None:
    act_order &= group > 0
    made = quantized(bits, 40, 256, group, symmetric=symmetric, act_order=act_order, scale=torch.bfloat16)
    weights = {
        **WEIGHTS, "num_bits": bits, "symmetric": symmetric, "actorder": "group" if act_order else "weight",
        "strategy": "group" if group else "channel", "group_size": group or None,
    }  # fmt: skip
    scheme, part = read(config(weights), compressed_tensors(NAME, made, bits, symmetric, act_order))
    assert torch.equal(scheme.dequantize(part, "float32"), made.values)
    arranged = scheme.arrange(part)
    assert torch.equal(reference_dequantize(arranged), made.values)
    assert sum(t.nbytes for t in arranged.tensors.values()) == part.format.nbytes(part.rows, part.columns)


@pytest.mark.parametrize("scheme", [CompressedTensors(), ModelOptScheme()], ids=lambda each: str(each.name))
def test_the_kit_passes_the_schemes_with_their_examples_and_their_cuts(scheme: QuantScheme) -> None:
    results = list(scheme_results(Check("formats", "linear", "mine", lambda: ()), scheme, 5))
    assert [r.detail for r in results if r.outcome != "passed"] == [] and len(results) > 8


@pytest.mark.parametrize("compressed", [True, False])
def test_four_bit_floats_have_the_values_of_their_description(compressed: bool) -> None:
    """compressed-tensors divides the scales by the one for the whole, ModelOpt multiplies; the even column is low."""
    name, whole = "a.weight", torch.tensor([1024.0 if compressed else 1 / 1024])
    codes = torch.arange(16).repeat(2, 4)  # two rows of 64
    codes[1] = codes[1].flip(0)
    scale = torch.tensor([[1.0, 2.0, 448.0, 0.5], [3.0, 4.0, 16.0, 0.125]]).to(torch.float8_e4m3fn)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    want = values[codes] * scale.float().repeat_interleave(16, 1) / 1024
    data = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    tensors = {f"{name}_scale": scale, "a.input_scale": torch.tensor(1.0)}
    if compressed:
        scheme: QuantScheme = CompressedTensors()
        tensors |= {f"{name}_packed": data, f"{name}_global_scale": whole, "a.input_global_scale": whole}
    else:
        scheme = ModelOptScheme()
        tensors |= {name: data, f"{name}_scale_2": whole}
    headers = headers_of(tensors)
    part = scheme.part(name, headers)
    assert part is not None and part.format == NVFP4 and (part.rows, part.columns) == (2, 64)
    roles = scheme.tensors(name, headers)
    assert set(roles.values()) == set(tensors)
    part = replace(part, tensors={role: tensors[stored] for role, stored in roles.items()})
    assert torch.equal(scheme.dequantize(part, "float32"), want)
    assert {r: t.dtype for r, t in scheme.arrange(part).tensors.items()} == {
        "weight": torch.uint8, "scale": torch.float8_e4m3fn, "factor": torch.float32,
    }  # fmt: skip


def test_each_layer_has_the_settings_of_the_most_exact_target() -> None:
    """A name comes before an expression, and an expression before the class."""

    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {**WEIGHTS, "num_bits": bits}}

    groups = {
        "a": group(4, "Linear"), "b": group(8, r"re:.*layers\.1\..*"), "c": group(4, "model.layers.1.mlp.up_proj"),
    }  # fmt: skip
    settings = config(WEIGHTS, config_groups=groups, ignore=["lm_head"])
    for name, bits in ((NAME, 4), (NAME.replace("0", "1"), 4), ("model.layers.1.mlp.down_proj.weight", 8)):
        made = quantized(bits, 40, 256, 32, symmetric=True, scale=torch.bfloat16)
        scheme, part = read(settings, compressed_tensors(name, made, bits, True, False), name)
        assert torch.equal(scheme.dequantize(part, "float32"), made.values), name
    plain = CompressedTensors().configured(settings).part("lm_head.weight", {"lm_head.weight": ("bfloat16", (6, 10))})
    assert plain is not None and plain.format.plain


@pytest.mark.parametrize(
    "change",
    [
        {"num_bits": 9}, {"num_bits": "4"}, {"type": "float"}, {"strategy": "tensor"}, {"group_size": 0},
        {"group_size": -5}, {"group_size": None}, {"symmetric": "yes"}, {"actorder": "sideways"},
    ],
)  # fmt: skip
def test_settings_of_another_kind_are_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"(use such a checkpoint|published with these weights)"):
        CompressedTensors().configured(config({**WEIGHTS, **change}))


@pytest.mark.parametrize("groups", [[1], {"a": 3}, {"a": {"targets": ["re:(a*)*"], "weights": WEIGHTS}}])
def test_broken_groups_are_refused(groups: Any) -> None:
    with pytest.raises(CheckpointError, match="correct"):
        CompressedTensors().configured(config(WEIGHTS, config_groups=groups))


@pytest.mark.parametrize("change", ["short", "dtype", "bits", "zeros", "g_idx", "no group", "shape"])
def test_tensors_that_do_not_fit_are_refused(change: str) -> None:
    made = quantized(4, 40, 256, 32, symmetric=True, scale=torch.bfloat16)
    tensors, settings = compressed_tensors(NAME, made, 4, True, False), config(WEIGHTS)
    if change == "short":
        tensors[f"{NAME}_packed"] = tensors[f"{NAME}_packed"][:, :-1]
    elif change == "dtype":
        tensors[f"{NAME}_packed"] = tensors[f"{NAME}_packed"].float()
    elif change == "bits":
        settings = config({**WEIGHTS, "num_bits": 8})
    elif change == "zeros":
        tensors[f"{NAME}_zero_point"] = torch.zeros(5, 8, dtype=torch.int32)
    elif change == "g_idx":
        tensors[f"{NAME}_g_idx"] = torch.zeros(256, dtype=torch.int32)
    elif change == "no group":
        settings = config(WEIGHTS, config_groups={"a": {"targets": ["lm.head"], "weights": WEIGHTS}})
    else:
        tensors[f"{NAME}_shape"] = torch.tensor([40, 250])
    with pytest.raises(CheckpointError, match=r"up_proj.*(published with these weights|fetch the files again)"):
        scheme, part = read(settings, tensors)
        scheme.arrange(part)


@pytest.mark.parametrize(
    "headers",
    [
        {"w": ("uint8", (6, 8)), "w_scale": ("float8_e4m3fn", (6, 2)), "w_scale_2": ("float32", ())},
        {"w": ("uint8", (6, 16)), "w_scale": ("float8_e5m2", (6, 2)), "w_scale_2": ("float32", ())},
        {"w": ("uint8", (6, 16)), "w_scale": ("float8_e4m3fn", (6, 2)), "w_scale_2": ("float32", (6,))},
        {"w": ("uint8", (6, 0)), "w_scale": ("float8_e4m3fn", (6, 0)), "w_scale_2": ("float32", ())},
        {"w": ("uint8", (6,)), "w_scale": ("float8_e4m3fn", (6, 2)), "w_scale_2": ("float32", ())},
    ],
)
def test_four_bit_floats_that_do_not_fit_are_refused(headers: Any) -> None:
    with pytest.raises(CheckpointError, match=r"NVFP4 is uint8.*fetch the files again"):
        ModelOptScheme().part("w", headers)


@pytest.mark.parametrize("whole", [0.0, float("nan"), float("inf")])
def test_a_scale_for_the_whole_that_is_none_is_refused(whole: float) -> None:
    tensors = {
        "w": torch.zeros(6, 16, dtype=torch.uint8), "w_scale": torch.ones(6, 2).to(torch.float8_e4m3fn),
        "w_scale_2": torch.tensor(whole),
    }  # fmt: skip
    scheme, headers = ModelOptScheme(), headers_of(tensors)
    part = scheme.part("w", headers)
    assert part is not None
    part = replace(part, tensors={role: tensors[n] for role, n in scheme.tensors("w", headers).items()})
    with pytest.raises(CheckpointError, match="which is no scale"):
        scheme.arrange(part)
