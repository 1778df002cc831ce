"""GPTQ and AWQ layers: the numbers that independent code wrote, in every variant; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from integer_files import Quantized, awq_tensors, gptq_tensors, headers_of, quantized, words_of

from evener.contracts.quant import QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener_conformance.kit.cases.blocks import reference_dequantize
from evener_conformance.kit.formats import scheme_results
from evener_conformance.kit.outcome import Check
from evener_formats.awq import AwqScheme
from evener_formats.gptq import GptqScheme
from evener_formats.words import unpack_planes

STEM, NAME = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj.weight"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def scheme_for(settings: Mapping[str, Any]) -> QuantScheme:
    config = {"quantization_config": dict(settings)}
    (found,) = [each for each in (GptqScheme(), AwqScheme()) if each.detect(config)]
    return found.configured(config)


def read(settings: Mapping[str, Any], tensors: dict[str, torch.Tensor], name: str = NAME) -> tuple[Any, WeightPart]:
    scheme, headers = scheme_for(settings), headers_of(tensors)
    part = scheme.part(name, headers)
    assert part is not None
    roles = scheme.tensors(name, headers)
    return scheme, replace(part, tensors={role: tensors[stored] for role, stored in roles.items()})


def check(settings: Mapping[str, Any], tensors: dict[str, torch.Tensor], made: Quantized) -> WeightPart:
    """The values of a layer, dequantized and as packings get them; the part as packings get it."""
    scheme, part = read(settings, tensors)
    assert torch.equal(scheme.dequantize(part, "float32"), made.values)
    assert torch.equal(scheme.dequantize(part, "bfloat16"), made.values.bfloat16())
    arranged: WeightPart = scheme.arrange(part)
    assert torch.equal(reference_dequantize(arranged), made.values)
    assert sum(t.nbytes for t in arranged.tensors.values()) == part.format.nbytes(part.rows, part.columns)
    return arranged


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 32), (4, 32), (4, 128), (4, 0), (8, 64)])
def test_a_gptq_layer_has_the_numbers_that_were_written(
    bits: int, group: int, act_order: bool, symmetric: bool, form: str
) -> None:
    made = quantized(bits, 64, 256, group, symmetric=symmetric, act_order=act_order)
    settings = {**GPTQ, "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": act_order}
    tensors = gptq_tensors(STEM, made, bits, less=1 if form == "gptq" else 0)
    form_of = check({**settings, "checkpoint_format": form}, tensors, made).format
    assert (form_of.storage, form_of.zero is None) == ("int8" if bits == 8 else "uint4", symmetric)
    assert form_of.order == ("act" if act_order and group else "row")


@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128, 0])
def test_an_awq_layer_has_the_numbers_that_were_written(group: int, scale: torch.dtype) -> None:
    made = quantized(4, 64, 256, group, scale=scale)
    check({**AWQ, "group_size": group or -1}, awq_tensors(STEM, made), made)


@pytest.mark.parametrize("scheme", [GptqScheme(), AwqScheme()], ids=lambda each: str(each.name))
def test_the_kit_passes_the_schemes_with_their_examples_and_their_cuts(scheme: QuantScheme) -> None:
    results = list(scheme_results(Check("formats", "linear", "mine", lambda: ()), scheme, 5))
    assert [r.detail for r in results if r.outcome != "passed"] == [] and len(results) > 12


def test_a_layer_without_packed_weights_is_unquantized_and_a_missing_layer_gives_none() -> None:
    for settings in (GPTQ, AWQ):
        scheme = scheme_for(settings)
        part = scheme.part("lm_head.weight", {"lm_head.weight": ("bfloat16", (6, 10))})
        assert part is not None and part.format.plain and (part.rows, part.columns) == (6, 10)
        assert scheme.part("no.weight", {}) is None
        with pytest.raises(CheckpointError, match="no dtype of unquantized weights"):
            scheme.part("a.weight", {"a.weight": ("int32", (6, 10))})


def test_rules_by_layer_name_give_layers_their_own_settings() -> None:
    rules = {r"+:.*\.up_proj$": {"bits": 8, "group_size": 64}, r"-:.*\.down_proj$": {}}
    made = quantized(8, 64, 256, 64)
    check({**GPTQ, "dynamic": rules}, gptq_tensors(STEM, made, 8, less=1), made)
    down = "model.layers.0.mlp.down_proj"
    with pytest.raises(CheckpointError, match="is quantized, and"):
        read({**GPTQ, "dynamic": rules}, gptq_tensors(down, quantized(4, 64, 256, 32), 4, 1), f"{down}.weight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bits": 5}, "bits: 5"), ({"bits": "4"}, "bits: 4"), ({"bits": True}, "bits: True"),
        ({"group_size": 0}, "group_size: 0"), ({"group_size": -3}, "group_size: -3"), ({"sym": "no"}, "sym: no"),
        ({"checkpoint_format": "marlin"}, "'marlin'"), ({"is_marlin_format": True}, "is_marlin_format"),
        ({"pack_dtype": "int16"}, "int16"), ({"dynamic": {"+:(a+)+$": {}}}, "a repeated group"),
        ({"dynamic": {"+:[": {}}}, "an error in it"), ({"dynamic": {"a": 3}}, "not a map of settings"),
        ({"dynamic": [1]}, "no map of rules"),
    ],
)  # fmt: skip
def test_a_config_of_another_kind_is_refused(change: Mapping[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says.replace("+", r"\+")):
        scheme_for({**GPTQ, **change})


@pytest.mark.parametrize("change", [{"bits": 8}, {"version": "gemv"}, {"version": "marlin"}, {"group_size": 0}])
def test_awq_in_another_version_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="awq"):
        scheme_for({**AWQ, **change})


@pytest.mark.parametrize("role", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("how", ["short", "other dtype", "one axis", "absent", "empty"])
def test_tensors_that_do_not_fit_are_refused_before_they_are_read(role: str, how: str) -> None:
    tensors = gptq_tensors(STEM, quantized(4, 64, 256, 32), 4, 1)
    one = tensors[f"{STEM}.{role}"]
    changes = {
        "short": one[:-1], "other dtype": one.to(torch.float64), "one axis": one[None], "empty": one[:0],
    }  # fmt: skip
    if how == "absent":
        del tensors[f"{STEM}.{role}"]
    else:
        tensors[f"{STEM}.{role}"] = changes[how]
    scheme, headers = scheme_for({**GPTQ, "desc_act": True}), headers_of(tensors)
    if (role, how) == ("qweight", "absent"):
        assert scheme.part(NAME, headers) is None
        return
    with pytest.raises(CheckpointError, match=f"{STEM}.*(fetch the files again|published with these weights)"):
        scheme.part(NAME, headers)


def test_other_bits_than_those_of_the_config_are_refused() -> None:
    for bits in (2, 3, 8):
        with pytest.raises(CheckpointError, match="which are not those of 4 bits"):
            read(GPTQ, gptq_tensors(STEM, quantized(bits, 64, 256, 32), bits, 1))


@pytest.mark.parametrize(
    ("act_order", "change", "says"),
    [
        (True, {3: 8}, "0 to 8"), (True, {3: -1}, "-1 to 7"), (True, {3: 2**31 - 1}, "to 2147483647"),
        (True, {0: 7}, "not 8 groups of 32"), (False, {0: 7}, '"desc_act": true'),
    ],
)  # fmt: skip
def test_groups_of_columns_that_do_not_exist_are_refused(act_order: bool, change: dict[int, int], says: str) -> None:
    made = quantized(4, 64, 256, 32)
    for at, group in change.items():
        made.index[at] = group
    scheme, part = read({**GPTQ, "desc_act": act_order}, gptq_tensors(STEM, made, 4, 1))
    with pytest.raises(CheckpointError, match=says):
        scheme.arrange(part)
    with pytest.raises(CheckpointError, match=says):
        scheme.dequantize(part, "float32")


def test_zero_points_beside_the_middle_are_refused_if_the_config_says_symmetric() -> None:
    made = quantized(4, 64, 256, 32, symmetric=True)
    made.zeros[3, 5] = 9
    scheme, part = read({**GPTQ, "sym": True}, gptq_tensors(STEM, made, 4, 1))
    with pytest.raises(CheckpointError, match='"sym": false'):
        scheme.arrange(part)


def test_a_piece_of_an_act_ordered_layer_keeps_the_scales_of_all_groups() -> None:
    made = quantized(4, 64, 256, 32, act_order=True)
    scheme, part = read({**GPTQ, "desc_act": True}, gptq_tensors(STEM, made, 4, 1))
    piece = scheme.arrange(scheme.cut(part, "in", 64, 160))
    assert torch.equal(reference_dequantize(piece), made.values[:, 64:160])
    assert piece.format.groups == 8 > piece.columns // piece.format.group
    assert sum(t.nbytes for t in piece.tensors.values()) == piece.format.nbytes(64, 96)
    with pytest.raises(CheckpointError, match="groups of 32"):
        scheme.cut(part, "in", 16, 256)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_planes_have_the_lowest_bits_of_32_numbers_then_the_next(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    rows = []
    for row in numbers.tolist():
        words: list[int] = []
        for run in (row[:32], row[32:]):
            low = 0
            for width in {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}.get(bits, (bits,)):
                words += words_of([number >> low & ((1 << width) - 1) for number in run], width)
                low += width
        rows.append(words)
    stored = torch.tensor(rows, dtype=torch.int32)
    assert torch.equal(unpack_planes(stored, bits).long(), numbers)
