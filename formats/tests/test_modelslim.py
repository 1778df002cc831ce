"""ModelSlim's layers: the numbers that independent code wrote, in every variant; what does not fit is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_convert.modelslim import ModelSlimCheckpoint
from safetensors.torch import save_file
from slim_files import description, layer

from evener.contracts.conversion.views import ViewRequest
from evener.contracts.quant import QuantScheme, Rounding, WeightPart
from evener.errors import CheckpointError
from evener.layers.causal_lm import CausalLM
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.kit.cases.blocks import reference_dequantize
from evener_conformance.kit.formats import HeldCheckpoint, scheme_results
from evener_conformance.kit.outcome import Check
from evener_conformance.kit.views import view_problems
from evener_formats.modelslim import ModelSlimScheme
from evener_formats.modelslim_description import FILE, description_name

STEM, NAME = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def read(kind: str, tensors: Tensors, packed: bool = True, **about: Any) -> tuple[QuantScheme, WeightPart]:
    headers = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    told = {**description(tensors, {NAME: kind}, packed), **about}
    held = HeldCheckpoint({"quantization_config": {"quant_method": "modelslim"}, FILE: told}, headers, tensors)
    scheme = ModelSlimScheme().configured(held.config, held)
    part, roles = scheme.part(NAME, headers), scheme.tensors(NAME, headers)
    assert part is not None and set(roles.values()) == {each for each in tensors if each.startswith(STEM)}
    return scheme, replace(part, tensors={role: tensors[stored] for role, stored in roles.items()})


#: Kind, how it is stored, and the format that packings get.
CASES: tuple[tuple[str, Mapping[str, Any], tuple[str, int, str | None]], ...] = (
    ("W8A8_DYNAMIC", {}, ("int8", 0, None)), ("W8A8", {}, ("int8", 0, None)),
    ("W8A8", {"input_offset": 0.0}, ("int8", 0, None)),
    ("W8A8", {"input_offset": 0.0, "product": "bits"}, ("int8", 0, None)),
    ("W8A8", {"product": "float32"}, ("int8", 0, None)), ("W8A8", {"product": "bits"}, ("int8", 0, None)),
    ("W8A8_MIX", {"dtype": torch.bfloat16}, ("int8", 0, None)), ("W8A16", {"groups": 4}, ("int8", 32, None)),
    ("W8A16", {"groups": 2, "shifted": True}, ("int8", 64, "int8")), ("W8A16", {"shifted": True}, ("int8", 0, "int8")),
    ("WFP8AFP8_DYNAMIC", {}, ("float8_e4m3fn", 0, None)), ("W4A8_DYNAMIC", {}, ("int8", 0, None)),
    ("W4A8_DYNAMIC", {"dtype": torch.bfloat16}, ("uint4", 0, None)),
    ("W4A8_DYNAMIC", {"packed": False, "second": 4}, ("int8", 32, None)),
    ("W4A16", {"dtype": torch.float16}, ("uint4", 0, None)), ("W4A16", {"packed": False}, ("int8", 0, None)),
    ("W4A16", {"groups": 4, "shifted": True, "dtype": torch.float16}, ("uint4", 32, "uint8")),
    ("W4A16", {"groups": 2, "shifted": True, "packed": False}, ("uint4", 64, "uint8")),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "how", "form"), CASES, ids=lambda each: str(each).replace(" ", ""))
def test_a_layer_has_the_numbers_that_were_written(
    kind: str, how: Mapping[str, Any], form: tuple[str, int, str | None]
) -> None:
    tensors, values = layer(kind, NAME, 48, 128, **how)
    scheme, part = read(kind, tensors, how.get("packed", True))
    assert (part.format.storage, part.format.group, part.format.zero) == form
    integers = dict.fromkeys(("W8A8_DYNAMIC", "W4A8_DYNAMIC"), Rounding("int8"))
    # A fixed scale, if activations have no offset.
    fixed = {"W8A8": Rounding("int8", -1)} if how.get("input_offset") == 0 else {}
    rounded = {**integers, **fixed, "WFP8AFP8_DYNAMIC": Rounding("float8_e4m3fn")}
    assert part.format.activation == (None if part.format.zero == "int8" else rounded.get(kind))
    held = scheme.dequantize(part, "float32")
    # With two scales, or one from a product, the order of the factors rounds differently.
    assert torch.allclose(held, values, rtol=1e-6, atol=0)
    assert torch.equal(held.bfloat16(), scheme.dequantize(part, "bfloat16"))
    arranged = scheme.arrange(part)
    assert torch.equal(reference_dequantize(arranged), held)
    if fixed:
        assert torch.equal(arranged.tensors["activation_scale"], torch.tensor(0.015625))
    assert sum(t.nbytes for t in arranged.tensors.values()) == part.format.nbytes(48, 128)


def test_the_kit_passes_the_scheme_with_its_examples_and_their_cuts() -> None:
    results = list(scheme_results(Check("formats", "linear", "mine", lambda: ()), ModelSlimScheme(), 5))
    assert [r.detail for r in results if r.outcome != "passed"] == [] and len(results) > 50


def spoilt(tensors: Tensors, ending: str, value: torch.Tensor | None) -> Tensors:
    found = {name: value if name.endswith(ending) else tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize(
    ("kind", "how", "ending", "value", "message"),
    [
        ("W8A8_DYNAMIC", {}, "weight_scale", None, "not the tensors of W8A8_DYNAMIC"),
        ("W8A8_DYNAMIC", {}, "weight_scale", torch.ones(47, 1), r"weight_scale float32 \[47, 1\]"),
        ("W8A8_DYNAMIC", {}, "weight_scale", torch.ones(48, 3), "not the tensors"),
        ("W8A8_DYNAMIC", {}, "weight_offset", torch.ones(48), "not the tensors"),
        ("W8A8_DYNAMIC", {}, "proj.weight", torch.ones(48, 128), "stored as float32"),
        ("W8A8_DYNAMIC", {}, "proj.weight", torch.ones(2, 48, 128, dtype=torch.int8), "not the tensors"),
        ("W8A8", {"product": "bits"}, "input_scale", None, "not the tensors of W8A8"),
        ("W8A8", {"product": "bits"}, "input_scale", torch.zeros(1), "NaN or infinite"),
        ("W8A8", {"product": "bits"}, "deq_scale", torch.full((48,), 2**40), "numbers that are no scales"),
        ("W8A8", {"input_offset": 0.0}, "input_scale", torch.zeros(1), "input_scale of .* is 0, and a scale is more"),
        ("W8A8", {"input_offset": 0.0}, "input_scale", torch.ones(2), r"input_scale float32 \[2\]"),
        ("W8A8", {}, "quant_bias", torch.full((48,), 10**6, dtype=torch.int32), f"no {STEM}.bias"),
        ("W8A16", {"shifted": True}, "weight_offset", torch.full((48, 1), 0.5), "whole numbers from -128 to 127"),
        ("W4A16", {"shifted": True}, "weight_offset", torch.full((48, 1), 8.0), "whole numbers from -8 to 7"),
        ("W4A16", {"packed": False}, "proj.weight", torch.full((48, 128), 9, dtype=torch.int8), "do not fit four bits"),
        ("W4A8_DYNAMIC", {"packed": False, "second": 4}, "offset_second", torch.ones(48, 4), "two scales"),
        ("WFP8AFP8_DYNAMIC", {}, "weight_offset", torch.ones(48, 1), "no offsets"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    kind: str, how: Mapping[str, Any], ending: str, value: torch.Tensor | None, message: str
) -> None:
    tensors = spoilt(layer(kind, NAME, 48, 128, **how)[0], ending, value)
    with pytest.raises(CheckpointError, match=message):
        scheme, part = read(kind, tensors, how.get("packed", True))
        scheme.dequantize(part, "float32")


def test_a_bias_that_is_stored_may_be_in_quant_bias_too() -> None:
    tensors, values = layer("W8A8", NAME, 48, 128)
    tensors |= {f"{STEM}.quant_bias": tensors[f"{STEM}.quant_bias"] + 10**6, f"{STEM}.bias": torch.ones(48)}
    bias = {n: t for n, t in tensors.items() if n != f"{STEM}.bias"}
    headers = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    held = HeldCheckpoint({FILE: description(tensors, {NAME: "W8A8"})}, headers, tensors)
    scheme = ModelSlimScheme().configured({}, held)
    part, roles = scheme.part(NAME, headers), scheme.tensors(NAME, headers)
    assert part is not None and set(roles.values()) == set(bias)
    part = replace(part, tensors={role: tensors[stored] for role, stored in roles.items()})
    assert torch.allclose(scheme.dequantize(part, "float32"), values)


def test_mutated_descriptions_are_read_or_refused() -> None:
    draw, tensors = random.Random(3), layer("W4A16", NAME, 48, 128, groups=4, dtype=torch.float16)[0]
    odd: tuple[Any, ...] = (0, None, [], {}, "W4A4", "", "W8A8", "FLOAT", {"quarot": {"a": {"layers": [1]}}}, "x" * 999)
    refused = 0
    for _ in range(150):
        told = {draw.choice([NAME, "version", "metadata", f"{NAME}_scale", "group_size"]): draw.choice(odd)}
        try:
            scheme, part = read("W4A16", tensors, **told)
            assert scheme.dequantize(part, "float32").shape == (48, 128)
        except CheckpointError as error:
            assert len(str(error)) > 60
            refused += 1
        except AssertionError:
            assert told.get(NAME, 1) in ("FLOAT", None, "", 0, [], {})
    assert 20 < refused < 130


def test_the_view_of_a_folder_is_sound_and_a_plain_folder_has_none(tmp_path: Path) -> None:
    tensors, _ = layer("W8A8_DYNAMIC", NAME, 48, 128)
    (tmp_path / "config.json").write_text('{"architectures": ["ExampleForCausalLM"], "model_type": "example"}')
    save_file(tensors, tmp_path / "quant_model_weights.safetensors")

    def view() -> ModelSlimCheckpoint | None:
        return ModelSlimCheckpoint.of(ViewRequest(open_checkpoint(tmp_path), CausalLM))  # type: ignore[type-abstract]

    assert view() is None
    (tmp_path / "quant_model_description_w8a8_dynamic.json").write_text("{}")
    made = view()
    assert made is not None and set(made.headers) == set(tensors) and view_problems(made) == []
    assert made.config["quantization_config"] == {"quant_method": "modelslim"}
    (tmp_path / "quant_model_description_w8a8.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"2 descriptions .* keep the one"):
        description_name(made)
    (tmp_path / "quant_model_description_w8a8.json").unlink()
    save_file(tensors, tmp_path / "quant_model_weights-2.safetensors")
    with pytest.raises(CheckpointError, match=r"is both in .*quant_model_weights-2.safetensors"):
        view()
