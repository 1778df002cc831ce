"""The layout "halves": the numbers that independent code wrote, cut and whole; a folder without a word of it in its
config; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from integer_files import Quantized, halves_bytes, halves_tensors, headers_of, quantized

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.conversion.views import ViewRequest
from evener.contracts.quant import QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener_conformance.kit.cases.blocks import reference_dequantize
from evener_conformance.kit.formats import HeldCheckpoint
from evener_formats.awq import AwqScheme
from evener_formats.described import described
from evener_formats.gptq import GptqScheme
from evener_formats.halves import HalvesFolder, HalvesScheme

STEM, NAME = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj.weight"
GPTQ = {"quant_method": "gptq", "layout": "halves", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}


def read(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[QuantScheme, WeightPart]:
    config = {"quantization_config": dict(settings)}
    (found,) = [each for each in (GptqScheme(), AwqScheme(), HalvesScheme()) if each.detect(config)]
    scheme = found.configured(config)
    headers = headers_of(dict(tensors))
    part = scheme.part(NAME, headers)
    assert part is not None
    return scheme, replace(part, tensors={role: tensors[each] for role, each in scheme.tensors(NAME, headers).items()})


@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "columns", "group"),
    [("gptq", 256, 64), ("awq", 256, 128), ("gptq", 192, 64), ("gptq", 96, 32), ("awq", 256, 0), ("gptq", 384, 256)],
)
def test_four_bits_have_the_numbers_that_were_written(
    method: str, columns: int, group: int, scale: torch.dtype
) -> None:
    made = quantized(4, 24, columns, group, scale=scale)
    scheme, part = read({**GPTQ, "quant_method": method, "group_size": group or -1}, halves_tensors(STEM, made))
    assert (part.rows, part.columns, part.format.group) == (24, columns, group)
    assert torch.equal(scheme.dequantize(part, "float32"), made.values)
    arranged = scheme.arrange(part)
    assert torch.equal(reference_dequantize(arranged), made.values) and arranged.format.storage == "uint4"
    assert sum(t.nbytes for t in arranged.tensors.values()) == part.format.nbytes(part.rows, part.columns)


@pytest.mark.parametrize("group", [64, 0])
def test_eight_bits_have_the_numbers_that_were_written(group: int) -> None:
    made = quantized(8, 24, 192, group, symmetric=True)
    scheme, part = read({**GPTQ, "quant_method": "w8a16", "group_size": group or -1}, halves_bytes(STEM, made))
    assert torch.equal(scheme.dequantize(part, "float32"), made.values) and part.format.zero is None


@pytest.mark.parametrize("more", [{}, {"bits": 8}])
def test_dummy_weights_of_eight_bits_are_eight_bits_whether_the_config_says_bits_or_not(more: dict[str, Any]) -> None:
    settings = {"quant_method": "w8a16", "layout": "halves", "group_size": 64, **more}
    scheme = HalvesScheme().configured({"quantization_config": settings})
    found = described(scheme, settings, NAME, 24, 192)
    assert found == headers_of(halves_bytes(STEM, quantized(8, 24, 192, 64, symmetric=True)))


@pytest.mark.parametrize(("columns", "start", "stop"), [(384, 128, 256), (192, 128, 192), (192, 0, 128)])
def test_a_piece_keeps_whole_runs_and_has_its_numbers(columns: int, start: int, stop: int) -> None:
    made = quantized(4, 24, columns, 64)
    scheme, part = read(GPTQ, halves_tensors(STEM, made))
    piece = scheme.cut(scheme.cut(part, "in", start, stop), "out", 5, 17)
    assert torch.equal(scheme.dequantize(piece, "float32"), made.values[5:17, start:stop])
    assert piece.tensors["qweight"].shape[1] == -(-stop // 128) * 64 - start // 2
    with pytest.raises(CheckpointError, match=r"stored in groups of 128"):
        scheme.cut(part, "in", 64, columns)


def test_a_zero_point_that_is_not_a_whole_number_of_scales_is_refused() -> None:
    tensors = halves_tensors(STEM, quantized(4, 24, 128, 64))
    for wrong in (0.5 * tensors[f"{STEM}.scales"][0, 0], 17 * tensors[f"{STEM}.scales"][0, 0], float("nan")):
        zeros = tensors[f"{STEM}.qzeros"].clone()
        zeros[0, 0] = wrong
        scheme, part = read(GPTQ, {**tensors, f"{STEM}.qzeros": zeros})
        with pytest.raises(CheckpointError, match=r"not everywhere a whole number from 0 to 15"):
            scheme.arrange(part)


def test_a_group_without_a_scale_is_zero_and_a_product_without_one_is_refused() -> None:
    made = quantized(4, 24, 128, 64)
    made.scales[1] = 0
    tensors = halves_tensors(STEM, made)
    scheme, part = read(GPTQ, tensors)
    assert torch.equal(scheme.dequantize(part, "float32"), made.values)
    tensors[f"{STEM}.qzeros"][1, 3] = 1
    scheme, part = read(GPTQ, tensors)
    with pytest.raises(CheckpointError, match=r"whole number"):
        scheme.arrange(part)


def test_zero_points_of_symmetric_weights_are_checked() -> None:
    symmetric = quantized(4, 24, 128, 64, symmetric=True)
    scheme, part = read({**GPTQ, "sym": True}, halves_tensors(STEM, symmetric))
    assert part.format.zero is None and torch.equal(scheme.dequantize(part, "float32"), symmetric.values)
    scheme, part = read({**GPTQ, "sym": True}, halves_tensors(STEM, quantized(4, 24, 128, 64)))
    with pytest.raises(CheckpointError, match=r'set "sym": false'):
        scheme.arrange(part)


@pytest.mark.parametrize(
    "change",
    [
        {"qweight": torch.zeros(24, 100, dtype=torch.uint8)}, {"qweight": torch.zeros(24, 64, dtype=torch.int32)},
        {"scales": torch.ones(3, 24).half()}, {"qzeros": torch.zeros(2, 24, dtype=torch.int32)},
        {"qweight": torch.zeros(2, 24, 64, dtype=torch.uint8)}, {"scales": torch.ones(2, 24)},
    ],
)  # fmt: skip
def test_other_tensors_are_refused(change: dict[str, torch.Tensor]) -> None:
    tensors = halves_tensors(STEM, quantized(4, 24, 128, 64)) | {f"{STEM}.{role}": t for role, t in change.items()}
    with pytest.raises(CheckpointError, match=r"use the config.json that was published"):
        read(GPTQ, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"desc_act": True}, "only groups of neighbouring"), ({"quant_method": "fp8"}, "gptq, awq, w8a16"),
     ({"group_size": "64"}, "positive group_size"), ({"sym": 3}, "reads true or false")],
)  # fmt: skip
def test_a_config_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        HalvesScheme().configured({"quantization_config": {**GPTQ, **change}})


def folder(settings: Mapping[str, Any], headers: Headers) -> HalvesFolder | None:
    held = HeldCheckpoint({"quantization_config": dict(settings)}, headers, {})
    held.path = Path("there")
    return HalvesFolder.of(ViewRequest(cast(Checkpoint, held), cast(Any, None)))


def test_a_folder_whose_config_does_not_say_so_is_found_by_its_tensors() -> None:
    made: Quantized = quantized(4, 24, 128, 64)
    plain = {key: value for key, value in GPTQ.items() if key != "layout"}
    found = folder(plain, headers_of(halves_tensors(STEM, made)))
    assert found is not None and HalvesScheme().detect(found.config) and not GptqScheme().detect(found.config)
    assert folder({"quant_method": "w8a16"}, headers_of(halves_bytes(STEM, made))) is not None
    assert folder(plain, {f"{STEM}.qweight": ("int32", (16, 24))}) is None
    assert folder({"quant_method": "fp8"}, headers_of(halves_tensors(STEM, made))) is None
    assert folder(plain, {}) is None
