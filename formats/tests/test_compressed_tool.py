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
from evener_formats.described import described

NAME, ROWS, COLUMNS = "model.layers.0.mlp.experts.3.up_proj.weight", 160, 512
INT8, E4M3, FIXED = Rounding("int8"), Rounding("float8_e4m3fn"), Rounding("float8_e4m3fn", -1)
FP8, FP4 = "float8_e4m3fn", "float4_e2m1"
#: Every scheme of the tool, what evener rounds activations to, and the storage that we keep. Activations of four bits
#: and scales of activations that are powers of two are not rounded.
PRESETS = {
    "W4A16_ASYM": (None, "uint4"), "W8A8": (INT8, "int8"), "INT8": (INT8, "int8"), "W4AFP8": (E4M3, "uint4"),
    "FP8": (FIXED, FP8), "FP8_DYNAMIC": (E4M3, FP8), "FP8_BLOCK": (Rounding("float8_e4m3fn", 128), FP8),
    "NVFP4A16": (None, FP4), "NVFP4": (None, FP4), "MXFP4A16": (None, FP4), "MXFP4": (None, FP4),
    "MXFP4XFP8": (None, FP4), "MXFP6A16": (None, FP8), "MXFP6A8": (None, FP8), "MXFP8A16": (None, FP8),
    "MXFP8": (None, FP8), "W2A4": (None, "uint4"), "W2A8": (INT8, "uint4"), "W2A16": (None, "uint4"),
    "W3A4": (None, "uint4"), "W3A8": (INT8, "uint4"), "W3A16": (None, "uint4"), "W4A4": (None, "uint4"),
    "W4A8": (INT8, "uint4"), "W4A16": (None, "uint4"), "W5A8": (INT8, "int8"), "W5A16": (None, "int8"),
    "W6A8": (INT8, "int8"), "W6A16": (None, "int8"), "W7A8": (INT8, "int8"), "W7A16": (None, "int8"),
    "W8A16": (None, "int8"),
}  # fmt: skip
#: Those that may also have zero points.
ASYMMETRIC = ("W2A16", "W3A16", "W4A8", "W4A16", "W5A8", "W6A16", "W7A16", "W8A16")


def stored_by_tool(preset: str, symmetric: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """(config.json, tensors by name, the numbers that the tool reads from them)."""
    # With transformers and torch's compiler that takes seconds, of each process that collects tests.
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    weights, inputs = scheme.weights, scheme.input_activations
    assert weights is not None
    weights.symmetric = symmetric
    form = infer_module_format(torch.nn.Linear, scheme)
    draw = torch.Generator().manual_seed(len(preset))
    weight = torch.randn(ROWS, COLUMNS, generator=draw)
    high, wide = weights.block_structure or {"tensor": (ROWS, COLUMNS), "channel": (1, COLUMNS)}.get(
        str(weights.strategy), (1, weights.group_size or 0)
    )
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -ROWS % high))
    blocks = filled.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
    whole = generate_gparam(weight.min(), weight.max()) if weights.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights, whole)
    wanted = weights.scale_dtype is None
    given = {"weight": weight, "weight_scale": scale.flatten() if scale.numel() == 1 else scale}
    given["weight_scale"] = given["weight_scale"].bfloat16() if wanted else given["weight_scale"]
    given |= {} if whole is None else {"weight_global_scale": whole}
    given |= {} if symmetric else {"weight_zero_point": zero}
    compressor = BaseCompressor.load_from_registry(form.value)
    stored = compressor.compress(dict(given), scheme)
    values = compressor.decompress(dict(stored), scheme)["weight"]
    if inputs is not None and inputs.dynamic is not True:  # what llm-compressor stores beside them
        stored["input_scale" if inputs.num_bits == 8 else "input_global_scale"] = torch.tensor([0.5])
    group = scheme.model_dump(mode="json")
    config = {"quant_method": "compressed-tensors", "format": form.value, "config_groups": {"group_0": group}}
    stem = NAME.removesuffix("weight")
    return {"quantization_config": config}, {stem + end: tensor for end, tensor in stored.items()}, values


def read(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[QuantScheme, WeightPart]:
    scheme, headers = CompressedTensors().configured(config), headers_of(tensors)
    part = scheme.part(NAME, headers)
    assert part is not None and set(scheme.tensors(NAME, headers).values()) == set(tensors)
    return scheme, replace(part, tensors={r: tensors[n] for r, n in scheme.tensors(NAME, headers).items()})


def test_every_scheme_of_the_tool_is_here() -> None:
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    assert set(PRESETS) == {*PRESET_SCHEMES} - {"UNQUANTIZED"}


@pytest.mark.parametrize(
    ("preset", "symmetric"),
    [*((preset, preset != "W4A16_ASYM") for preset in PRESETS), *((preset, False) for preset in ASYMMETRIC)],
)
def test_our_numbers_are_those_of_the_tool(preset: str, symmetric: bool) -> None:
    config, tensors, values = stored_by_tool(preset, symmetric)
    how, storage = PRESETS[preset]
    scheme, part = read(config, tensors)
    assert (part.format.storage, part.format.activation) == (storage, how)
    # The tool multiplies in the dtype of its scales; those of NVFP4 it rounds twice.
    found = scheme.dequantize(part, "float32")
    if preset.startswith("NVFP4"):
        assert torch.allclose(found, values.float(), rtol=2**-7, atol=0)
    else:
        assert torch.equal(found.bfloat16(), values.bfloat16())
    if storage != FP8:
        assert torch.equal(reference_dequantize(scheme.arrange(part)), found)
    pieces = [scheme.cut(part, "in", 0, 256), scheme.cut(part, "in", 256, 512)]
    assert torch.equal(torch.cat([scheme.dequantize(piece, "float32") for piece in pieces], 1), found)
    pieces = [scheme.cut(part, "out", 0, 128), scheme.cut(part, "out", 128, 160)]
    assert torch.equal(torch.cat([scheme.dequantize(piece, "float32") for piece in pieces]), found)


@pytest.mark.parametrize("preset", PRESETS)
def test_without_weights_the_tensors_are_those_that_the_tool_writes(preset: str) -> None:
    config, tensors, _ = stored_by_tool(preset, preset != "W4A16_ASYM")
    scheme = CompressedTensors().configured(config)
    made = described(scheme, config["quantization_config"], NAME, ROWS, COLUMNS)
    wanted = {name: header for name, header in headers_of(tensors).items() if "input_global" not in name}
    assert {name: shape for name, (_, shape) in made.items()} == {name: shape for name, (_, shape) in wanted.items()}
    for name, (kind, _) in wanted.items():
        assert made[name][0] == kind or {made[name][0], kind} <= {"float32", "bfloat16"}


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
    [({"weight": torch.zeros(160, 512)}, r"stored as float32 \[160, 512\] with scales"),
     ({"weight_scale": torch.ones(160, 3).bfloat16()}, r"with scales bfloat16 \[160, 3\].*groups of 128, symmetric"),
     ({"weight_zero_point": torch.zeros(160, 4).to(torch.int8)}, r"zero points int8 \[160, 4\]")],
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
