"""Quantized checkpoints in another layout: the same numbers, so the same tokens, and back again the same bytes; while
loading, converted, and split for ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from evener_convert.command import convert
from evener_quantize.layouts import LAYOUTS
from evener_quantize.relaid import RelaidCheckpoint
from family_oracles import make_transformers
from family_runner import SMALL
from integer_files import awq_tensors, compressed_tensors, gptq_tensors, halves_bytes, halves_tensors, quantized
from safetensors.torch import load_file, save_file
from stored_models import KEPT, SIZES, greedy, prompt

from evener.config import from_overrides
from evener.contracts.checkpoint import Checkpoint
from evener.contracts.conversion.views import ViewRequest
from evener.contracts.quant import QuantFormat, WeightPart
from evener.errors import ConfigError
from evener_conformance.kit.formats import HeldCheckpoint
from evener_conformance.naive.model import find_architecture
from evener_inspection.explanation import explain

GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {**GPTQ, "sym": True},
    "gptq zeros": {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq act": {**GPTQ, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq 8": {**GPTQ, "sym": True, "bits": 8},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "packed": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}}},
    },
    # As the vendor's script leaves them: nothing says the layout.
    "script gptq": {**GPTQ, "sym": False}, "script w8a16": {"quant_method": "w8a16", "bits": 8, "group_size": GROUP},
}  # fmt: skip


@contextmanager
def change_json(path: Path) -> Iterator[dict[str, Any]]:
    """The object in a JSON file, to be changed."""
    found = json.loads(path.read_text())
    yield found
    path.write_text(json.dumps(found))


def tensors_of(kind: str, stem: str, shape: Any) -> Mapping[str, torch.Tensor]:
    bits = 8 if "8" in kind else 4
    symmetric = kind in ("gptq", "gptq 8", "packed", "script w8a16")
    made = quantized(bits, *shape, GROUP, symmetric=symmetric, act_order="act" in kind, seed=len(stem))
    if kind == "awq":
        return awq_tensors(stem, made)
    if kind == "packed":
        return compressed_tensors(f"{stem}.weight", made, 4, True, False)
    if kind == "script gptq":
        return halves_tensors(stem, made)
    if kind == "script w8a16":
        return halves_bytes(stem, made)
    return gptq_tensors(stem, made, bits, less=int(kind in ("gptq", "gptq 8")))


def model(folder: Path, kind: str, family: str = "Qwen3", **sizes: int) -> Path:
    """A small model whose matrices are random integers, stored as ``kind``."""
    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family], "num_hidden_layers": 1}
    make_transformers({**config, "intermediate_size": 192, **sizes}, folder)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() != 2 or any(kept in name for kept in KEPT):
            stored[name] = weight
        else:
            stored |= tensors_of(kind, name.removesuffix(".weight"), weight.shape)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with change_json(folder / "config.json") as changed:
        changed["quantization_config"] = CONFIGS[kind]
    return folder


def converted(source: Path, result: Path, **keys: Any) -> Path:
    convert(from_overrides(str(source), keys), result)
    return result


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize(
    ("kind", "family"),
    [("gptq", "Qwen3"), ("awq", "Qwen3Moe"),
     *(pytest.param(kind, family, marks=pytest.mark.slow) for kind, family in (
         ("gptq zeros", "Qwen3"), ("gptq 8", "Qwen3"), ("awq", "Qwen3"), ("gptq", "Qwen3Moe"), ("gptq", "Mixtral"),
         ("awq", "DeepseekV3"), ("gptq 8", "DeepseekV3")))],
)  # fmt: skip
def test_there_and_back_the_bytes_are_the_same_and_so_are_the_tokens_in_between(
    kind: str, family: str, tmp_path: Path, one_thread: None
) -> None:
    source = model(tmp_path / "source", kind, family)
    method = settings(source)["quant_method"]
    made = converted(source, tmp_path / "made", quant="halves")
    told = settings(made)
    assert told["layout"] == "halves" and told["quant_method"] == ("w8a16" if kind == "gptq 8" else method)
    kinds = {str(t.dtype) for name, t in weights(made).items() if name.endswith(".qweight")}
    assert kinds == {"torch.int8" if kind == "gptq 8" else "torch.uint8"}
    assert greedy(made, prompt(family), 10) == greedy(source, prompt(family), 10)
    assert (
        explain(from_overrides(str(made), SMALL))["packings"] == explain(from_overrides(str(source), SMALL))["packings"]
    )
    back = converted(made, tmp_path / "back", quant=method)
    before, after = weights(source), weights(back)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert {key: settings(back)[key] for key in ("bits", "group_size")} == {"bits": told["bits"], "group_size": GROUP}
    if (kind, family) == ("awq", "Qwen3Moe"):
        assert settings(back)["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize(
    ("kind", "quant"),
    [("packed", "awq"), ("script gptq", "gptq"),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (
         ("awq", "gptq"), ("gptq", "awq"), ("packed", "gptq"), ("packed", "halves"), ("script gptq", "awq"),
         ("script w8a16", "gptq"), ("gptq zeros", "awq")))],
)  # fmt: skip
def test_while_loading_and_converted_the_tokens_are_those_of_the_stored_numbers(
    kind: str, quant: str, tmp_path: Path, one_thread: None
) -> None:
    source = model(tmp_path / "source", kind)
    expected = greedy(source, prompt("Qwen3"), 10)
    assert greedy(source, prompt("Qwen3"), 10, quant=quant) == expected
    made = converted(source, tmp_path / "made", quant=quant)
    assert settings(made)["quant_method"] == (quant if quant != "halves" else "gptq")
    assert greedy(made, prompt("Qwen3"), 10) == expected


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["halves", "gptq"])
def test_a_split_result_has_the_tokens_of_the_whole_one(quant: str, tmp_path: Path, one_thread: None) -> None:
    from test_convert import greedy as on_ranks

    # Ranks cut this layout at runs of 128 columns.
    source = model(tmp_path / "source", "awq", "Mixtral", hidden_size=128, head_dim=64, intermediate_size=256)
    made = converted(source, tmp_path / "made", quant=quant, **{"infer.tp_size": 2})
    assert on_ranks(made, **{"infer.tp_size": 2}) == on_ranks(source)


def test_an_interrupted_conversion_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(tmp_path / "source", "gptq zeros")
    expected = (converted(source, tmp_path / "whole", quant="halves") / "model.safetensors").read_bytes()
    monkeypatch.setattr("evener_convert.writer._DURABLE", 1)
    read, real = [], RelaidCheckpoint.tensor

    def tensor(self: RelaidCheckpoint, name: str) -> torch.Tensor:
        read.append(name)
        if len(read) == 9:
            raise KeyboardInterrupt
        return real(self, name)

    monkeypatch.setattr(RelaidCheckpoint, "tensor", tensor)
    with pytest.raises(KeyboardInterrupt):
        converted(source, tmp_path / "made", quant="halves")
    begun = list(read)
    made = converted(source, tmp_path / "made", quant="halves")
    assert read[len(begun)] == begun[-1] and len(set(read)) == len(read) - 1
    assert (made / "model.safetensors").read_bytes() == expected


def test_tensors_of_one_matrix_may_be_in_any_file(tmp_path: Path) -> None:
    source = model(tmp_path / "source", "gptq")
    whole = converted(source, tmp_path / "whole", quant="halves")
    stored = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    where = {name: f"{'a' if name.endswith(('scales', 'qzeros')) else 'b'}.safetensors" for name in stored}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({n: t for n, t in stored.items() if where[n] == file}, source / file, {"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    made = weights(converted(source, tmp_path / "made", quant="halves"))
    expected = weights(whole)
    assert made.keys() == expected.keys() and all(torch.equal(made[name], each) for name, each in expected.items())


@pytest.mark.parametrize(
    ("kind", "quant", "message"),
    [("gptq act", "halves", r"act-order, which this layout"), ("gptq act", "awq", r"neighbouring columns"),
     ("gptq 8", "awq", r"AWQ has four bits")],
)  # fmt: skip
def test_a_matrix_that_the_layout_cannot_store_is_refused_by_name(
    kind: str, quant: str, message: str, tmp_path: Path
) -> None:
    source = model(tmp_path / "source", kind)
    with pytest.raises(ConfigError, match=rf"model.layers.0.*{message}"):
        converted(source, tmp_path / "made", quant=quant)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("quantized_head", [True, False])
def test_the_config_says_whether_the_head_is_quantized(quantized_head: bool) -> None:
    """Other readers ask it, and look for tensors afterwards."""
    names = ["model.layers.0.mlp.up_proj.weight", *(["lm_head.weight"] if quantized_head else [])]
    parts = [WeightPart(name, 64, 64, QuantFormat("uint4", 32, scale="float16")) for name in names]
    assert LAYOUTS["gptq"].settings(parts, [], "awq")["lm_head"] is quantized_head
    kept = LAYOUTS["awq"].settings(parts, ["model.layers.0.mlp.gate.weight"], "gptq")["modules_to_not_convert"]
    assert kept == [*([] if quantized_head else ["lm_head"]), "model.layers.0.mlp.gate"]


@pytest.mark.parametrize(("quant", "method"), [("gptq", "gptq"), ("awq", "awq"), ("halves", "gptq")])
def test_of_a_model_that_is_not_quantized_the_command_that_does_it_is_named(quant: str, method: str) -> None:
    plain = HeldCheckpoint({"model_type": "qwen3"}, {}, {})
    plain.path = Path("there")
    with pytest.raises(ConfigError, match=f"type evener quantize there DST --method {method}, or leave quant=auto"):
        RelaidCheckpoint.of(ViewRequest(cast(Checkpoint, plain), cast(Any, None), quant=quant))


def test_groups_of_two_sizes_have_a_rule_each_in_gptq_and_no_place_in_the_others(
    tmp_path: Path, one_thread: None
) -> None:
    source = model(tmp_path / "source", "packed")
    stored = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    stored |= compressed_tensors(name, quantized(4, 192, 64, 16, symmetric=True), 4, True, False)
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    with change_json(source / "config.json") as config:
        groups = config["quantization_config"]["config_groups"]
        narrow = {**groups["group_0"]["weights"], "group_size": 16}
        groups["group_1"] = {"targets": [name.removesuffix(".weight")], "weights": narrow}
    made = converted(source, tmp_path / "made", quant="gptq")
    (rule,) = [each for key, each in settings(made)["dynamic"].items() if "up_proj" in key]
    assert rule["group_size"] == 16 and settings(made)["group_size"] == GROUP
    assert greedy(made, prompt("Qwen3"), 10) == greedy(source, prompt("Qwen3"), 10)
    for quant in ("awq", "halves"):
        with pytest.raises(ConfigError, match=r"has groups of \d+ columns and others of"):
            converted(source, tmp_path / quant, quant=quant)
