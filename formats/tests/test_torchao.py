"""torchao's safetensors files, written here in its layout; ``make test-tools`` reads those of torchao itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from integer_files import headers_of

from evener.contracts.quant import QuantScheme, WeightPart
from evener.contracts.storage import Rounding
from evener.errors import CheckpointError
from evener_formats.torchao import TorchaoScheme

NAME, PREFIX = "a.q_proj.weight", "a.q_proj._weight_"
INT8, E4M3 = Rounding("int8"), Rounding("float8_e4m3fn")
SYMMETRIC, ASYMMETRIC = ({"_type": "MappingType", "_data": kind} for kind in ("SYMMETRIC", "ASYMMETRIC"))
INT4 = {"_type": "torch.dtype", "_data": "int4"}


def config(kind: str, **data: Any) -> dict[str, Any]:
    """A ``config.json`` with one config for all layers."""
    quant_type = {"default": {"_type": kind, "_version": 2, "_data": data}}
    return {"quantization_config": {"quant_method": "torchao", "quant_type": quant_type}}


def read(settings: Mapping[str, Any], stored: Mapping[str, torch.Tensor]) -> tuple[QuantScheme, WeightPart]:
    scheme, tensors = TorchaoScheme().configured(settings), {PREFIX + end: each for end, each in stored.items()}
    headers = headers_of(tensors)
    part, roles = scheme.part(NAME, headers), scheme.tensors(NAME, headers)
    assert part is not None and set(roles.values()) == set(tensors)
    return scheme, replace(part, tensors={role: tensors[each] for role, each in roles.items()})


def integers(groups: int, least: int = -8, zeros: bool = False) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What is stored of a weight of 6 x 64, and its values."""
    draw = torch.Generator().manual_seed(groups)
    numbers = torch.randint(least, -least, (6, 64), generator=draw)
    scale = torch.rand(6, groups, generator=draw) + 0.5
    zero = torch.randint(-3, 4, (6, groups), generator=draw) * zeros
    values = (numbers - zero.repeat_interleave(64 // groups, 1)) * scale.repeat_interleave(64 // groups, 1)
    return {"qdata": numbers.to(torch.int8), "scale": scale, "zero_point": zero.to(torch.int8)}, values


@pytest.mark.parametrize(
    ("settings", "groups", "storage", "how", "zeros"),
    [
        (config("Int8WeightOnlyConfig"), 1, "int8", None, False),
        (config("Int8WeightOnlyConfig"), 2, "int8", None, False),
        (config("Int8DynamicActivationInt8WeightConfig", act_mapping_type=SYMMETRIC), 1, "int8", INT8, False),
        (config("Int8DynamicActivationInt8WeightConfig", act_mapping_type=ASYMMETRIC), 1, "int8", None, False),
        (config("IntxWeightOnlyConfig", weight_dtype=INT4, mapping_type=SYMMETRIC), 2, "uint4", None, False),
        (config("IntxWeightOnlyConfig", weight_dtype=INT4, mapping_type=ASYMMETRIC), 2, "uint4", None, True),
        (config("Int8DynamicActivationIntxWeightConfig", weight_dtype=INT4, act_mapping_type=ASYMMETRIC), 2, "uint4",
         None, False),
    ],
)  # fmt: skip
def test_integers_are_read_in_rows_and_groups(
    settings: dict[str, Any], groups: int, storage: str, how: Rounding | None, zeros: bool
) -> None:
    stored, values = integers(groups, zeros=zeros)
    scheme, part = read(settings, stored)
    assert (part.format.storage, part.format.activation, part.format.zero is not None) == (storage, how, zeros)
    assert torch.equal(scheme.dequantize(part, "float32"), values)
    assert torch.equal(scheme.dequantize(scheme.cut(part, "out", 2, 6), "float32"), values[2:])
    assert torch.equal(scheme.dequantize(scheme.cut(part, "in", 32, 64), "float32"), values[:, 32:]) or groups == 1


@pytest.mark.parametrize("scales", [(6, 1), (1, 1)])
def test_floats_are_read_with_a_scale_a_row_or_for_all(scales: tuple[int, int]) -> None:
    scale = torch.rand(scales) + 0.5
    numbers = torch.randn(6, 64).to(torch.float8_e4m3fn)
    settings = config("Float8DynamicActivationFloat8WeightConfig", activation_dtype={"_data": "float8_e4m3fn"})
    scheme, part = read(settings, {"qdata": numbers, "scale": scale})
    assert part.format.activation == E4M3
    assert torch.equal(scheme.dequantize(part, "float32"), numbers.float() * scale)


def test_layers_with_configs_of_their_own_are_read_and_others_are_plain() -> None:
    each = {"_type": "IntxWeightOnlyConfig", "_data": {"weight_dtype": INT4, "mapping_type": ASYMMETRIC}}
    inner = {"a": each, "b": {"_type": "Int8WeightOnlyConfig", "_data": {}}, "c": None}
    settings = config("FqnToConfig", fqn_to_config=inner)
    settings["quantization_config"]["quant_type"]["default"]["_data"] = inner
    stored, values = integers(2, zeros=True)
    scheme, part = read(settings, stored)
    assert part.format.storage == "int8" and torch.equal(scheme.dequantize(part, "float32"), values)
    plain = scheme.part("b.weight", {"b.weight": ("bfloat16", (3, 4))})
    assert plain is not None and plain.format.plain and scheme.part("d.weight", {}) is None


@pytest.mark.parametrize(
    "quant_type",
    ["int4_weight_only", None, {}, {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}, {"default": {"a": {}}},
     {"default": {"_type": "FqnToConfig", "_data": {"a": {"_type": "NVFP4WeightOnlyConfig"}}}}],
)  # fmt: skip
def test_layouts_for_one_kind_of_device_are_refused_by_name(quant_type: Any) -> None:
    settings = {"quantization_config": {"quant_method": "torchao", "quant_type": quant_type}}
    with pytest.raises(CheckpointError, match=r"reads safetensors files of Int8WeightOnlyConfig"):
        TorchaoScheme().configured(settings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"act_pre_scale": torch.ones(64)}, r"with a\.q_proj\._weight_act_pre_scale"),
        ({"qdata": torch.ones(6, 64, dtype=torch.int32)}, r"as int32 \[6, 64\]"), ({"scale": None}, "is stored by"),
        ({"scale": torch.ones(5, 1)}, r"scales float32 \[5, 1\]"),
        ({"qdata": torch.ones(64).to(torch.int8)}, r"is int8 \[64\]"),
        ({"zero_point": torch.ones(6, 1, dtype=torch.int8)}, "zero points .* are not all zero"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(change: Mapping[str, torch.Tensor | None], says: str) -> None:
    stored = {end: each for end, each in {**integers(1)[0], **change}.items() if each is not None}
    with pytest.raises(CheckpointError, match=says):
        scheme, part = read(config("Int8WeightOnlyConfig"), stored)
        scheme.arrange(part)


def test_fixed_scales_of_activations_belong_to_their_weight_and_are_not_used() -> None:
    stored, values = integers(1)
    scheme, part = read(config("Int8StaticActivationInt8WeightConfig"), {**stored, "act_quant_scale": torch.ones(1)})
    assert part.format.activation is None and torch.equal(scheme.dequantize(part, "float32"), values)
