"""Checkpoints of Model Optimizer: the numbers that independent code wrote, factors of columns, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from integer_files import Quantized, headers_of, modelopt_tensors, quantized

from evener.contracts.quant import QuantScheme, Rounding, WeightPart
from evener.errors import CheckpointError
from evener_conformance.kit.cases.blocks import reference_dequantize
from evener_formats.described import described
from evener_formats.modelopt import ModelOptScheme

NAME = "model.layers.0.mlp.down_proj.weight"
STEM = NAME.removesuffix("weight")
ROWS, COLUMNS, GROUP = 48, 128, 32


def scheme_of(algorithm: str, **more: Any) -> QuantScheme:
    return ModelOptScheme().configured(
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, **more}}
    )


def read(scheme: QuantScheme, tensors: dict[str, torch.Tensor]) -> WeightPart:
    headers = headers_of(tensors)
    part = scheme.part(NAME, headers)
    assert part is not None
    return replace(part, tensors={role: tensors[name] for role, name in scheme.tensors(NAME, headers).items()})


def four_bits(scale: torch.dtype = torch.bfloat16) -> Quantized:
    return quantized(4, ROWS, COLUMNS, GROUP, symmetric=True, scale=scale)


def factors() -> torch.Tensor:
    return (torch.rand(COLUMNS, generator=torch.Generator().manual_seed(9)) + 0.5).bfloat16()


def check_cuts(scheme: QuantScheme, part: WeightPart, values: torch.Tensor) -> None:
    assert torch.equal(scheme.dequantize(part, "float32"), values)
    assert torch.equal(scheme.dequantize(part, "bfloat16"), values.bfloat16())
    for start, stop in ((0, 16), (16, 48), (2, 46)):
        assert torch.equal(scheme.dequantize(scheme.cut(part, "out", start, stop), "float32"), values[start:stop])
    for start, stop in ((0, 64), (64, 128), (32, 96)):
        assert torch.equal(scheme.dequantize(scheme.cut(part, "in", start, stop), "float32"), values[:, start:stop])


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "w4a8_awq", "MIXED_PRECISION"])
def test_four_bits_of_two_rows_are_in_a_byte_and_stay_packed(algorithm: str) -> None:
    made = four_bits()
    tensors = modelopt_tensors(NAME, made, None)
    if "8" in algorithm:
        tensors |= {f"{NAME}_scale_2": torch.tensor(0.01), f"{STEM}input_scale": torch.tensor(0.1)}
    scheme = scheme_of(algorithm)
    part = read(scheme, tensors)
    form = part.format
    assert (form.storage, form.group, form.scale, form.activation) == ("uint4", GROUP, "bfloat16", None)
    check_cuts(scheme, part, made.values)
    assert torch.equal(reference_dequantize(scheme.arrange(part)), made.values)


def test_four_bits_in_whole_rows_have_one_group() -> None:
    made = quantized(4, ROWS, COLUMNS, 0, symmetric=True, scale=torch.bfloat16)
    scheme = scheme_of("W4A16_AWQ")
    part = read(scheme, modelopt_tensors(NAME, made, None))
    assert part.format.group == 0
    assert torch.equal(reference_dequantize(scheme.arrange(part)), made.values)
    assert torch.equal(scheme.dequantize(part, "float32"), made.values)


def test_float32_scales_are_rounded_to_bfloat16_where_a_weight_stays_packed_and_kept_where_it_does_not() -> None:
    made, each = four_bits(torch.float32), factors()
    rounded = replace(made, scales=made.scales.bfloat16())
    assert not torch.equal(made.scales, rounded.scales.float())
    scheme = scheme_of("W4A16_AWQ")
    check_cuts(scheme, read(scheme, modelopt_tensors(NAME, made, None)), rounded.values)
    part = read(scheme, modelopt_tensors(NAME, made, each))
    check_cuts(scheme, part, made.values * each.float())
    assert part.format.storage == "uint4 with factors of columns" and part.format.cut_unit(1) == GROUP


@pytest.mark.parametrize(("algorithm", "how"), [("W8A16", None), ("W8A8_SQ_PER_CHANNEL", Rounding("int8", -1))])
def test_int8_has_a_scale_for_each_row_and_fixed_scales_of_activations(algorithm: str, how: Rounding | None) -> None:
    draw = torch.Generator().manual_seed(4)
    numbers = torch.randint(-128, 128, (ROWS, COLUMNS), generator=draw).to(torch.int8)
    scale = torch.rand(ROWS, generator=draw) + 0.5
    tensors = {NAME: numbers, f"{NAME}_scale": scale}
    tensors |= {} if how is None else {f"{STEM}input_scale": torch.tensor(0.5)}
    scheme, values = scheme_of(algorithm), numbers.float() * scale[:, None]
    part = read(scheme, tensors)
    assert part.format.activation == how and (part.format.storage, part.format.group) == ("int8", 0)
    check_cuts(scheme, part, values)
    assert torch.equal(reference_dequantize(scheme.arrange(part)), values)
    factored = read(scheme, {**tensors, f"{STEM}pre_quant_scale": factors()})
    assert factored.format.activation is None
    check_cuts(scheme, factored, values * factors().float())


def test_factors_of_floats_are_read_too() -> None:
    scheme = scheme_of("NVFP4_AWQ")
    for config, headers, tensors in ModelOptScheme().examples(NAME, 3):
        if config["quantization_config"]["quant_algo"] == "NVFP4_AWQ":
            part = scheme.part(NAME, headers)
            assert part is not None and part.format.storage == "float4_e2m1 with factors of columns"
            bare = read(scheme, {name: t for name, t in tensors.items() if "pre_quant" not in name})
            each = tensors[f"{STEM}pre_quant_scale"].float()
            found = scheme.dequantize(read(scheme, dict(tensors)), "float32")
            assert torch.equal(found, scheme.dequantize(bare, "float32") * each)
            return
    raise AssertionError("no example has factors")


@pytest.mark.parametrize(
    ("change", "message"),
    [({f"{STEM}pre_quant_scale": torch.ones(COLUMNS - 1)}, "one number for each of the 128 columns"),
     ({f"{STEM}pre_quant_scale": torch.ones(COLUMNS, dtype=torch.int32)}, r"is int32 \[128\]"),
     ({f"{NAME}_scale": torch.ones(ROWS, 5)}, "four bits are uint8"),
     ({f"{NAME}_scale": torch.ones(ROWS, COLUMNS)}, "an even number of columns"),
     ({NAME: torch.zeros(2, ROWS // 2, COLUMNS, dtype=torch.uint8)}, "four bits are uint8"),
     ({f"{NAME}_scale": torch.ones(ROWS)}, "four bits are uint8")],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    tensors = modelopt_tensors(NAME, four_bits(), factors()) | change
    with pytest.raises(CheckpointError, match=f"{message}.*fetch the files again"):
        scheme_of("W4A16_AWQ").part(NAME, headers_of(tensors))


def test_a_factor_that_is_not_finite_is_among_the_numbers_that_are_checked() -> None:
    each = factors()
    each[3] = torch.nan
    scheme = scheme_of("W4A16_AWQ")
    part = read(scheme, modelopt_tensors(NAME, four_bits(), each))
    assert any(bool(numbers.isnan().any()) for numbers in scheme.numbers(part))


@pytest.mark.parametrize(
    ("algorithm", "factored"),
    [("W4A16_AWQ", True), ("W4A8_AWQ", True), ("W8A8_SQ_PER_CHANNEL", True), ("W8A16", False)],
)
def test_made_weights_have_factors_where_the_tool_leaves_them(algorithm: str, factored: bool) -> None:
    settings = {"quant_method": "modelopt", "quant_algo": algorithm}
    scheme = ModelOptScheme().configured({"quantization_config": settings})
    for stem, moved in (("model.layers.0.mlp.down_proj", False), ("model.layers.0.self_attn.q_proj", True),
                        ("model.layers.0.mlp.experts.3.up_proj", False)):  # fmt: skip
        made = described(scheme, settings, f"{stem}.weight", 256, 384)
        assert len(made) > 1
        assert (f"{stem}.pre_quant_scale" in made) == (factored and not (moved and "AWQ" in algorithm))


def test_other_algorithms_of_modelopt_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the quant_algo 'NVFP4_SVD'; modelopt reads FP8.*use such a checkpoint"):
        scheme_of("NVFP4_SVD")


@pytest.mark.parametrize(
    ("algorithm", "how"),
    [("FP8", Rounding("float8_e4m3fn", -1)), ("FP8_PER_CHANNEL_PER_TOKEN", Rounding("float8_e4m3fn")),
     ("fp8_pb_wo", None), ("MXFP8", None)],
)  # fmt: skip
def test_scales_of_modelopt_are_for_the_tensor_rows_blocks_or_groups(algorithm: str, how: Rounding | None) -> None:
    draw = torch.Generator().manual_seed(4)
    weight = torch.randn(256, 384, generator=draw).to(torch.float8_e4m3fn)
    size = {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (256,), "fp8_pb_wo": (2, 1, 3, 1)}.get(algorithm, (256, 12))
    scale, wide = torch.rand(size, generator=draw) + 0.5, torch.ones(256, 384)
    if algorithm == "MXFP8":
        scale = torch.randint(120, 130, size, generator=draw).to(torch.uint8)
        wide = (2.0 ** (scale.float() - 127)).repeat_interleave(32, 1)
    elif algorithm == "fp8_pb_wo":
        wide = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        wide = wide * scale.reshape(-1, 1)
    tensors = {NAME: weight, f"{NAME}_scale": scale}
    tensors |= {f"{NAME.removesuffix('weight')}input_scale": torch.tensor(0.5)} if algorithm == "FP8" else {}
    settings = {"quant_method": "modelopt", "quant_algo": algorithm}
    scheme, headers = ModelOptScheme().configured({"quantization_config": settings}), headers_of(tensors)
    part = scheme.part(NAME, headers)
    assert part is not None and part.format.activation == how
    full = replace(part, tensors={role: tensors[name] for role, name in scheme.tensors(NAME, headers).items()})
    values = weight.float() * wide
    assert torch.equal(scheme.dequantize(full, "float32"), values)
    assert torch.equal(scheme.dequantize(scheme.cut(full, "in", 128, 256), "float32"), values[:, 128:256])
    assert torch.equal(scheme.dequantize(scheme.cut(full, "out", 128, 256), "float32"), values[128:])
    made = described(scheme, settings, NAME, 256, 384)
    assert {name: shape for name, (_, shape) in made.items()} == {name: shape for name, (_, shape) in headers.items()}
