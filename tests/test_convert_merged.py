"""``evener convert --merge``: the parts of a weight are one tensor where their format allows it, and the folder gives
the tensors and tokens of its source, on one rank and several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_convert.command import convert
from evener_convert.merged import INDEX, MergedCheckpoint
from evener_convert.merging import merged_stem
from evener_quantize.driver import quantize
from evener_quantize.settings import Settings
from family_oracles import make_transformers
from safetensors import safe_open
from safetensors.torch import save_file
from test_convert import greedy, model
from test_fp8_end_to_end import SIZES, checkpoint
from test_quantize import model as text_model

from evener.cli.main import main
from evener.config import from_overrides
from evener.contracts.conversion.views import ViewRequest
from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint
from evener.loading.views import view_checkpoint
from evener_conformance.naive.model import find_architecture
from evener_formats.plugin import evener_quant_schemes
from evener_models.qwen3 import Qwen3ForCausalLM


def merged(source: Path, result: Path, **keys: Any) -> Path:
    convert(from_overrides(str(source), keys), result, merge=True)
    return result


def stored(folder: Path) -> set[str]:
    """Names of the tensors of all files of a folder."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


def view_of(folder: Path, **more: Any) -> MergedCheckpoint:
    request = ViewRequest(open_checkpoint(folder), Qwen3ForCausalLM, list(evener_quant_schemes()), **more)
    found, _ = view_checkpoint(request)
    assert isinstance(found, MergedCheckpoint)
    return found


@pytest.mark.parametrize(
    ("family", "quant", "names"),
    [
        ("Qwen3", "auto", ["self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"]),
        ("Qwen3", "q8_0", ["self_attn.qkv_proj.weight.q8_0", "mlp.gate_up_proj.weight.q8_0"]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("Qwen3", "int8", ["self_attn.qkv_proj.weight"]),
            ("Qwen3Moe", "auto", ["mlp.experts.3.gate_up_proj.weight"]),
            ("DeepseekV3", "auto", ["self_attn.q_a_proj_kv_a_proj_with_mqa.weight"]))),
    ],
)  # fmt: skip
def test_parts_are_stored_together_and_read_as_parts_with_the_same_bytes_and_tokens(
    family: str, quant: str, names: Sequence[str], tmp_path: Path, one_thread: None
) -> None:
    source = model(tmp_path / "source", family)
    made, apart = merged(source, tmp_path / "made", quant=quant), tmp_path / "apart"
    convert(from_overrides(str(source), {"quant": quant}), apart)
    assert {f"model.layers.1.{name}" for name in names} <= stored(made)
    assert not any(name.endswith(("q_proj.weight", "gate_proj.weight")) for name in stored(made))
    assert greedy(made) == greedy(apart)
    convert(from_overrides(str(made), {}), tmp_path / "again")
    ours, theirs = open_checkpoint(tmp_path / "again"), open_checkpoint(apart)
    assert ours.headers == theirs.headers
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.headers)


@pytest.mark.parametrize("ranks", [{}, {"infer.tp_size": 2}], ids=["whole", "split"])
@pytest.mark.parametrize("quant", ["auto", "int8"])
def test_biases_of_merged_weights_are_merged_too(
    quant: str, ranks: dict[str, int], tmp_path: Path, one_thread: None
) -> None:
    """Rank by rank: the tokens are those of the source, and what is converted again is what was stored apart."""
    source = with_biases(tmp_path / "source")
    made, apart = merged(source, tmp_path / "made", quant=quant, **ranks), tmp_path / "apart"
    convert(from_overrides(str(source), {"quant": quant, **ranks}), apart)
    assert {f"model.layers.{layer}.self_attn.qkv_proj.bias" for layer in (0, 1)} <= stored(made)
    assert not any(name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias")) for name in stored(made))
    assert greedy(made, **ranks) == greedy(apart, **ranks)
    if quant == "auto":
        assert greedy(made, **ranks) == greedy(source, **ranks)
    if not ranks:
        convert(from_overrides(str(made), {}), tmp_path / "again")
        ours, theirs = open_checkpoint(tmp_path / "again"), open_checkpoint(apart)
        assert ours.headers == theirs.headers
        assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.headers)
        assert greedy(made, **{"infer.tp_size": 2}) == greedy(apart, **{"infer.tp_size": 2})


def test_biases_stay_apart_beside_weights_that_do_and_if_their_dtypes_differ(tmp_path: Path, one_thread: None) -> None:
    source = with_biases(tmp_path / "source")
    tensors = tensors_of(source)
    # Weights of two dtypes cannot be one tensor, nor can biases.
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].bfloat16()
    tensors["model.layers.1.self_attn.v_proj.bias"] = tensors["model.layers.1.self_attn.v_proj.bias"].bfloat16()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    made = merged(source, tmp_path / "made")
    assert {"model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_proj.bias"} <= stored(made)
    assert "model.layers.1.self_attn.qkv_proj.weight" in stored(made)
    assert not any(f"model.layers.{layer}.self_attn.qkv_proj.bias" in stored(made) for layer in (0, 1))
    assert greedy(made) == greedy(source)


def with_biases(folder: Path) -> Path:
    """Queries, keys and values with random biases: new models have zeros."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_transformers({**find_architecture("Qwen2ForCausalLM").tiny_config(), **sizes}, folder)
    tensors, draw = tensors_of(folder), torch.Generator().manual_seed(6)
    biases = [name for name in tensors if name.endswith(".bias")]
    assert biases
    tensors |= {name: torch.randn(tensors[name].shape, generator=draw).to(tensors[name].dtype) for name in biases}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.tensor(name).clone() for name in checkpoint.headers}


@pytest.mark.parametrize(
    ("family", "quant", "ranks"),
    [("Qwen3", "q8_0", {"infer.tp_size": 2}),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("Qwen3", "auto", {"infer.tp_size": 2, "infer.pp_size": 2}), ("Qwen3Moe", "fp8", {"infer.tp_size": 2}),
         ("Qwen3Moe", "auto", {"infer.tp_size": 2, "infer.ep_size": 2})))],
)  # fmt: skip
def test_a_split_folder_has_the_merged_parts_of_each_rank(
    family: str, quant: str, ranks: dict[str, int], tmp_path: Path, one_thread: None
) -> None:
    source = model(tmp_path / "source", family)
    made = merged(source, tmp_path / "made", quant=quant, **ranks)
    assert any("qkv_proj" in name for name in stored(made)) and (made / "evener_split.json").exists()
    assert greedy(made, **ranks) == greedy(source, quant=quant, **ranks)


def test_a_merged_folder_is_read_by_any_number_of_ranks(tmp_path: Path, one_thread: None) -> None:
    source = model(tmp_path / "source")
    made, ranks = merged(source, tmp_path / "made"), {"infer.tp_size": 2}
    assert greedy(made, **ranks) == greedy(source, **ranks)


@pytest.mark.parametrize("order", ["static", pytest.param("groups", marks=pytest.mark.slow)])
def test_integers_of_gptq_are_merged_if_their_groups_are_the_same(order: Any, tmp_path: Path, one_thread: None) -> None:
    """In "groups" each matrix could have an order of its own; with the same inputs it is the same."""
    source = text_model(tmp_path / "source")
    settings = Settings("gptq", 4, 32, order=order, tokens=300, window=100)
    quantize(from_overrides(str(source), {"backend": "cpu"}), tmp_path / "four", settings, "abc " * 200)
    made = merged(tmp_path / "four", tmp_path / "made")
    names = {f"model.layers.1.self_attn.qkv_proj.{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
    assert names <= stored(made) and "model.layers.1.self_attn.q_proj.qweight" not in stored(made)
    found, four = view_of(made), open_checkpoint(tmp_path / "four")
    assert found.headers == four.headers
    assert all(torch.equal(found.tensor(name), four.tensor(name)) for name in four.headers)
    assert greedy(made) == greedy(tmp_path / "four")


@pytest.mark.parametrize(
    ("kind", "inner", "merges"),
    [("blocks", 96, {"qkv_proj", "gate_up_proj"}), ("blocks", 104, {"qkv_proj"}),
     ("rows", 104, {"qkv_proj", "gate_up_proj"}), ("whole, static", 96, set())],
)  # fmt: skip
def test_parts_with_one_scale_each_and_blocks_that_would_reach_into_the_next_part_stay_apart(
    kind: str, inner: int, merges: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Blocks have 16 rows."""
    monkeypatch.setitem(SIZES["Qwen3"], "intermediate_size", inner)
    _, source = checkpoint(tmp_path, "Qwen3", kind)
    made = merged(source, tmp_path / "made")
    found = {name.split(".")[-2] for name in stored(made)} & {"qkv_proj", "gate_up_proj"}
    assert found == merges
    ours, theirs = view_of(made), open_checkpoint(source)
    assert ours.headers == theirs.headers
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in theirs.headers)
    assert greedy(made) == greedy(source)
    if kind == "blocks" and inner == 96:
        assert greedy(made, **{"infer.tp_size": 2}) == greedy(source)
        split = merged(source, tmp_path / "split", **{"infer.tp_size": 2})
        assert greedy(split, **{"infer.tp_size": 2}) == greedy(source)
        assert "model.layers.1.self_attn.qkv_proj.weight_scale_inv" in stored(split)


def test_spans_of_a_merged_tensor_are_mapped_and_their_place_in_the_file_is_known(tmp_path: Path) -> None:
    made = merged(model(tmp_path / "source"), tmp_path / "made")
    view = view_of(made)
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        extent, tensor = view.extent(name), view.tensor(name)
        assert extent is not None and name not in view.copied
        data = extent.file.read_bytes()[extent.offset : extent.offset + tensor.nbytes]
        assert data == tensor.numpy().tobytes()


def test_the_command_merges_and_refuses_it_for_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(model(tmp_path / "source"))
    assert main(["convert", source, str(tmp_path / "made"), "--merge", "--quiet"]) == 0
    assert json.loads((tmp_path / "made/evener_convert.json").read_text())["options"]["merge"] is True
    assert len(stored(tmp_path / "made")) == len(stored(tmp_path / "source")) - 2 * 3
    assert main(["convert", source, str(tmp_path / "made.gguf"), "--merge"]) == 2
    assert "stores the parts of weights apart; leave --merge out" in capsys.readouterr().err


QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"version": 2}, "has version 2, not 1"), ({"version": 1, "files": []}, "has version 1, not 1"),
        ({"version": 1, "files": [[]]}, "is damaged"),
        ({"version": 1, "files": [{QKV: {"axis": 7, "parts": [["a", 1]]}}]}, "is damaged"),
        ({"version": 1, "files": [{QKV: {"axis": 0, "parts": [["a", -1]]}}]}, "is damaged"),
        ({"version": 1, "files": [{QKV: {"axis": 0, "parts": [["a", 64]]}}]}, "are not those of the weight files"),
        ({"version": 1, "files": [{"b": {"axis": 0, "parts": [["a", 64]]}}]}, "are not those of the weight files"),
        ({"version": 1, "files": [{QKV: {"axis": 0, "parts": [["model.norm.weight", 128]]}}]}, "are not those of the"),
    ],
)  # fmt: skip
def test_a_damaged_index_is_refused(entry: Any, message: str, tmp_path: Path) -> None:
    made = merged(model(tmp_path / "source"), tmp_path / "made")
    (made / INDEX).write_text(json.dumps(entry))
    with pytest.raises(CheckpointError, match=message):
        view_of(made)


def test_names_of_merged_weights() -> None:
    assert merged_stem([f"m.self_attn.{each}_proj" for each in "qkv"]) == "m.self_attn.qkv_proj"
    assert merged_stem(["m.mlp.gate_proj", "m.mlp.up_proj"]) == "m.mlp.gate_up_proj"
    assert merged_stem(["m.experts.3.w1", "m.experts.3.w3"]) == "m.experts.3.w1_w3"
    assert not merged_stem(["m.mlp.gate_proj", "m.other.up_proj"])
