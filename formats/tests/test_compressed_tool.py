"""Weights as compressed-tensors itself stores them: our numbers are those of its own decompression."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from integer_files import headers_of

from evener.contracts.quant import QuantScheme, WeightPart
from evener.contracts.storage import Rounding
from evener.errors import CheckpointError
from evener_conformance.kit.cases.blocks import reference_dequantize
from evener_formats.compressed import CompressedTensors

NAME, ROWS, COLUMNS = "model.layers.0.mlp.experts.3.up_proj.weight", 48, 512
INT8, E4M3 = Rounding("int8"), Rounding("float8_e4m3fn")
#: The tool's schemes, what they round activations to, and the storage that we keep.
PRESETS = {
    "W4A8": (INT8, "uint4"), "W4AFP8": (E4M3, "uint4"), "W4A16": (None, "uint4"), "W8A16": (None, "int8"),
    "W8A8": (INT8, "int8"), "FP8_DYNAMIC": (E4M3, "float8_e4m3fn"),
}  # fmt: skip


def stored_by_tool(preset: str, symmetric: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """(config.json, tensors by name, the numbers that the tool reads from them)."""
    # With transformers and torch's compiler that takes seconds, of each process that collects tests.
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    weights = scheme.weights
    assert weights is not None
    weights.symmetric = symmetric
    form = infer_module_format(torch.nn.Linear, scheme)
    draw = torch.Generator().manual_seed(len(preset))
    weight, groups = torch.randn(ROWS, COLUMNS, generator=draw), COLUMNS // (weights.group_size or COLUMNS)
    parted = weight.unflatten(1, (groups, -1))
    most = {4: 7.5, 8: 127.0}[weights.num_bits] if weights.type == "int" else 448.0
    scale = (parted.abs().amax(-1) / most).bfloat16()
    given = {"weight": weight, "weight_scale": scale}
    if not symmetric:
        low = -(1 << weights.num_bits - 1)
        given["weight_zero_point"] = torch.randint(low // 4, -low // 4, scale.shape, generator=draw).to(torch.int8)
    compressor = BaseCompressor.load_from_registry(form.value)
    stored = compressor.compress(dict(given), scheme)
    values = compressor.decompress(dict(stored), scheme)["weight"]
    group = scheme.model_dump(mode="json")
    config = {"quant_method": "compressed-tensors", "format": form.value, "config_groups": {"group_0": group}}
    stem = NAME.removesuffix("weight")
    return {"quantization_config": config}, {stem + end: tensor for end, tensor in stored.items()}, values


def read(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[QuantScheme, WeightPart]:
    scheme, headers = CompressedTensors().configured(config), headers_of(tensors)
    part = scheme.part(NAME, headers)
    assert part is not None and set(scheme.tensors(NAME, headers).values()) == set(tensors)
    return scheme, replace(part, tensors={r: tensors[n] for r, n in scheme.tensors(NAME, headers).items()})


@pytest.mark.parametrize(
    ("preset", "symmetric"), [*((preset, True) for preset in PRESETS), ("W4A8", False), ("W4A16", False)]
)
def test_our_numbers_are_those_of_the_tool(preset: str, symmetric: bool) -> None:
    config, tensors, values = stored_by_tool(preset, symmetric)
    how, storage = PRESETS[preset]
    scheme, part = read(config, tensors)
    assert (part.format.storage, part.format.activation) == (storage, how)
    # The tool multiplies in the dtype of its scales.
    assert torch.equal(scheme.dequantize(part, "float32").bfloat16(), values.bfloat16())
    if storage != "float8_e4m3fn":  # stored as it is arranged
        assert torch.equal(reference_dequantize(scheme.arrange(part)), scheme.dequantize(part, "float32"))
    pieces = [scheme.cut(part, "in", 0, 256), scheme.cut(part, "in", 256, 512)]
    together = torch.cat([scheme.dequantize(piece, "float32") for piece in pieces], 1)
    assert torch.equal(together, scheme.dequantize(part, "float32"))


@pytest.mark.parametrize("spoilt", ["weight_scale", "weight_zero_point", "weight"])
def test_a_fault_in_one_number_of_a_scale_a_zero_point_or_a_group_is_seen(spoilt: str) -> None:
    config, tensors, values = stored_by_tool("W4A8", False)
    name = NAME.removesuffix("weight") + spoilt
    one = tensors[name].clone()
    if spoilt == "weight":  # two groups change places
        one[5] = one[5].roll(128)
    else:
        one[5, 1] += 1
    scheme, part = read(config, tensors | {name: one})
    wrong = scheme.dequantize(part, "float32").bfloat16() != values.bfloat16()
    assert bool(wrong[5].any()) and not bool(wrong[:5].any() or wrong[6:].any())


@pytest.mark.parametrize(
    ("change", "says"),
    [({"weight": torch.zeros(48, 512)}, r"stored as float32 \[48, 512\] with scales"),
     ({"weight_scale": torch.ones(48, 3).bfloat16()}, r"with scales bfloat16 \[48, 3\].*groups of 128, symmetric"),
     ({"weight_zero_point": torch.zeros(48, 4).to(torch.int8)}, r"zero points int8 \[48, 4\]")],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_config_are_refused(change: dict[str, torch.Tensor], says: str) -> None:
    config, tensors, _ = stored_by_tool("W4A8", True)
    stem = NAME.removesuffix("weight")
    with pytest.raises(CheckpointError, match=says):
        read(config, tensors | {stem + end: tensor for end, tensor in change.items()})


def test_numbers_that_are_none_of_four_bits_are_refused() -> None:
    config, tensors, _ = stored_by_tool("W4A8", True)
    tensors[NAME][3, 3] = 9
    scheme, part = read(config, tensors)
    with pytest.raises(CheckpointError, match=r"has numbers from -8 to 9, which do not fit in 4 bits \(-8 to 7\)"):
        scheme.arrange(part)


def test_a_rank_gets_whole_bytes_of_four_bits_in_channels() -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    scheme = CompressedTensors().configured({"quantization_config": settings})
    numbers, scale = torch.arange(-8, 4).to(torch.int8).expand(2, 12), torch.ones(2, 1).bfloat16()
    tensors = {"a.weight": numbers.contiguous(), "a.weight_scale": scale}
    headers = headers_of(tensors)
    found = scheme.part("a.weight", headers)
    assert found is not None and found.format.cut_unit(1) == 2
    whole = replace(found, tensors={role: tensors[name] for role, name in scheme.tensors("a.weight", headers).items()})
    assert torch.equal(scheme.dequantize(scheme.cut(whole, "in", 4, 10), "float32"), numbers[:, 4:10].float())
    with pytest.raises(CheckpointError, match=r"cannot cut 0\.\.3 .* multiples of 2, such as 0 and 4"):
        scheme.cut(whole, "in", 0, 3)
