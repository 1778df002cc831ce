"""Models with experts as GGUF files: ``evener convert MODEL NEW.gguf`` writes what llama.cpp's converter would, and the
file gives the tensors and tokens of its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from evener_convert.command import convert
from family_oracles import make_transformers
from family_runner import prompt_of
from gguf_gpt_oss import file_tensors as oss_tensors
from gguf_gpt_oss import gpt_oss_folder
from llamacpp_answers import llamacpp
from safetensors.torch import load_file, save_file
from test_convert import greedy
from test_convert_gguf import BESIDE, VOCAB, byte_level

from evener.config import from_overrides
from evener.errors import ConfigError, EvenerError
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_formats.gguf.scheme import GgufScheme

WIDTH, INNER, EXPERTS = 256, 256, 5
COMMON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "max_position_embeddings": 256,
          "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512, "kv_lora_rank": 256,
          "q_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
          "moe_intermediate_size": INNER}  # fmt: skip
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
#: What differs from the families' own tiny configs.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**HEADS, "num_experts": EXPERTS, "moe_intermediate_size": INNER},
    "Qwen2Moe": {**HEADS, "num_experts": EXPERTS, "moe_intermediate_size": INNER, "mlp_only_layers": [],
                 "shared_expert_intermediate_size": 512, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "Mixtral": {**HEADS, "num_local_experts": EXPERTS, "sliding_window": None},
    "DeepseekV2": {**LATENT, "n_routed_experts": 8},
    "DeepseekV3": {**LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
}  # fmt: skip
FAMILIES = {"Qwen3Moe": "qwen3moe", "Qwen2Moe": "qwen2moe", "Mixtral": "llama", "DeepseekV2": "deepseek2",
            "DeepseekV3": "deepseek2"}  # fmt: skip


def tiny(family: str) -> dict[str, Any]:
    own = find_architecture(f"{family}ForCausalLM").tiny_config()
    return {**own, **COMMON, **MODELS[family]}


def beside(folder: Path) -> Path:
    """A tokenizer for a folder."""
    for name, value in {"tokenizer.json": byte_level("Qwen3"), **BESIDE}.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def write_model(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    folder.mkdir()
    make_transformers(tiny(family), folder)
    tensors = {name: each if name.endswith("correction_bias") else each.to(dtype)
               for name, each in load_file(folder / "model.safetensors").items()}  # fmt: skip
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return beside(folder)


def written(source: Path, result: Path, **keys: Any) -> Path:
    convert(from_overrides(str(source), keys), result)
    return result


def keys_of(path: Path, family: str, names: Mapping[str, Any]) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    return {name: fields[f"{family}.{name}"].contents() for name in names}


@pytest.mark.parametrize("family", MODELS)
def test_an_unquantized_file_gives_the_tensors_and_tokens_of_its_source(
    family: str, tmp_path: Path, one_thread: None
) -> None:
    source = write_model(tmp_path / "source", family)
    made = written(source, tmp_path / "made.gguf")
    ours, theirs = open_checkpoint(source), open_checkpoint(made)
    assert theirs.headers.keys() == ours.headers.keys() and theirs.architecture == f"{family}ForCausalLM"
    for name in ours.headers:
        assert torch.equal(theirs.tensor(name).float(), ours.tensor(name).float()), name
    assert greedy(made) == greedy(source)


@pytest.mark.parametrize(("family", "quant"), [
    ("Qwen3Moe", "q4_k_m"), ("Qwen2Moe", "q8_0"), ("DeepseekV3", "q4_k"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("Mixtral", "q4_k_m"), ("DeepseekV2", "q8_0"))),
])  # fmt: skip
def test_a_quantized_file_has_the_blocks_of_the_same_quantization_while_loading(
    family: str, quant: str, tmp_path: Path, one_thread: None
) -> None:
    source = write_model(tmp_path / "source", family)
    made, folder = written(source, tmp_path / "made.gguf", quant=quant), written(source, tmp_path / "new", quant=quant)
    stored, theirs = open_checkpoint(folder), open_checkpoint(made)
    blocks = [name for name, (dtype, _) in stored.headers.items() if dtype == "uint8"]
    assert sum(".experts." in name for name in blocks) >= 3 * EXPERTS
    for name in blocks:
        stem, _, form = name.rpartition(".")
        assert theirs.headers[stem][0] == form and torch.equal(theirs.tensor(stem), stored.tensor(name)), name
    assert greedy(made) == greedy(source, quant=quant)


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("DeepseekV3", marks=pytest.mark.slow)])
def test_a_file_is_written_anew_from_a_file_and_from_the_folder_of_its_blocks(family: str, tmp_path: Path) -> None:
    first = written(write_model(tmp_path / "source", family), tmp_path / "first.gguf", quant="q8_0")
    folder = written(first, tmp_path / "folder")
    ours = open_checkpoint(first)
    for theirs in (open_checkpoint(written(each, tmp_path / f"{each.name}-again.gguf")) for each in (first, folder)):
        assert ours.headers == theirs.headers
        assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.headers)


@pytest.mark.parametrize("family", MODELS)
def test_the_library_of_such_files_finds_stacks_of_experts_and_the_keys_of_llama_cpp(
    family: str, tmp_path: Path
) -> None:
    source, name = write_model(tmp_path / "source", family, torch.float32), FAMILIES[family]
    made, count = written(source, tmp_path / "made.gguf"), 8 if family.startswith("Deepseek") else EXPERTS
    config, wanted = tiny(family), {"expert_count": count, "expert_used_count": tiny(family)["num_experts_per_tok"]}
    if family != "Mixtral":
        wanted["expert_feed_forward_length"] = INNER
    if family == "Qwen2Moe":
        wanted["expert_shared_feed_forward_length"] = 512
    if family.startswith("Deepseek"):
        third = family == "DeepseekV3"
        wanted |= {
            "attention.head_count_kv": 1, "attention.key_length": 288, "attention.value_length": 256,
            "attention.key_length_mla": 96, "attention.value_length_mla": 64, "attention.kv_lora_rank": 256,
            "attention.q_lora_rank": 256, "rope.dimension_count": 32, "leading_dense_block_count": 1,
            "expert_shared_count": 2, "expert_gating_func": 1 + third, "expert_group_count": 4,
            "expert_group_used_count": 2, **({"expert_weights_norm": True} if third else {}),
        }  # fmt: skip
    assert keys_of(made, name, wanted) == wanted
    found, stored = {each.name: each for each in gguf.GGUFReader(made).tensors}, load_file(source / "model.safetensors")
    known = gguf.get_tensor_name_map(
        next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name), config["num_hidden_layers"]
    )
    assert {each.rpartition(".")[0] for each in found} <= {short for _, short in known.mapping.values()}
    words = {"gate": "w1", "up": "w3", "down": "w2"} if family == "Mixtral" else {}
    prefix = "block_sparse_moe" if words else "mlp"
    for part in ("gate", "up", "down"):
        stack = found[f"blk.1.ffn_{part}_exps.weight"]
        assert len(stack.data) == count
        for expert in range(count):
            one = stored[f"model.layers.1.{prefix}.experts.{expert}.{words.get(part, f'{part}_proj')}.weight"]
            assert np.array_equal(stack.data[expert], one.numpy())
    router = found["blk.1.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32 and list(router.shape) == [WIDTH, count]
    if family == "Qwen2Moe":
        assert list(found["blk.1.ffn_gate_inp_shexp.weight"].shape) == [WIDTH]
    if family.startswith("Deepseek"):
        whole = stored["model.layers.0.self_attn.kv_b_proj.weight"].unflatten(0, (4, -1)).numpy()
        assert np.array_equal(found["blk.0.attn_k_b.weight"].data, whole[:, :64].swapaxes(1, 2))
        assert np.array_equal(found["blk.0.attn_v_b.weight"].data, whole[:, 64:])


@pytest.mark.parametrize(("width", "form"), [(64, "Q8_0"), (48, "BF16")])
def test_blocks_of_keys_and_values_are_divided_and_those_of_keys_made_anew(
    width: int, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are multiplied from the other side. Those too narrow for blocks are written as numbers."""
    monkeypatch.setitem(MODELS["DeepseekV3"], "qk_nope_head_dim", width)
    source = write_model(tmp_path / "source", "DeepseekV3")
    rules = {"formats.quant_rules": json.dumps({"re:.*kv_b_proj": "q8_0"})}
    made = written(source, tmp_path / "made.gguf", quant="q8_0", **rules)
    found = {each.name: each for each in gguf.GGUFReader(made).tensors}
    assert found["blk.0.attn_k_b.weight"].tensor_type == gguf.GGMLQuantizationType[form]
    assert found["blk.0.attn_v_b.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    ours, theirs = open_checkpoint(source).tensor(name).float(), open_checkpoint(made).tensor(name)
    assert 0 < (ours - theirs).abs().max() < 0.02 * ours.abs().max()


def oss(folder: Path, **more: Any) -> Path:
    return beside(gpt_oss_folder(folder, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, intermediate_size=256,
                                 hidden_size=256, **more))  # fmt: skip


def test_experts_of_gpt_oss_keep_their_four_bits_and_give_the_tokens_of_their_folder(
    tmp_path: Path, one_thread: None
) -> None:
    source = oss(tmp_path / "source")
    made = written(source, tmp_path / "made.gguf")
    ours, theirs, config = open_checkpoint(source), open_checkpoint(made), open_checkpoint(source).config
    assert theirs.headers.keys() == ours.headers.keys()
    assert all(torch.equal(theirs.tensor(name), ours.tensor(name)) for name in ours.headers)
    found, wanted = {each.name: each for each in gguf.GGUFReader(made).tensors}, oss_tensors(source)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(found[name].data, tensor.numpy().reshape(found[name].data.shape)), name
    keys = {"expert_count": 5, "expert_used_count": config["num_experts_per_tok"], "expert_feed_forward_length": 256,
            "attention.sliding_window": config["sliding_window"], "rope.scaling.type": "yarn",
            "rope.scaling.yarn_beta_fast": 32.0}  # fmt: skip
    assert keys_of(made, "gpt-oss", keys) == keys
    assert gguf.GGUFReader(made).fields["general.file_type"].contents() == 38
    assert greedy(made) == greedy(source)


@pytest.mark.parametrize("quant", ["auto", "q8_0"])
def test_gpt_oss_with_plain_experts_is_written_too(quant: str, tmp_path: Path, one_thread: None) -> None:
    source = tmp_path / "source"
    own = find_architecture("GptOssForCausalLM").tiny_config()
    config = {**own, **COMMON, "num_attention_heads": 4, "intermediate_size": 64,
              "layer_types": own["layer_types"][:2]}  # fmt: skip
    source.mkdir()
    make_transformers(config, source)
    made = written(beside(source), tmp_path / "made.gguf", quant=quant)
    ours, theirs = open_checkpoint(source), open_checkpoint(made)
    if quant == "auto":
        assert theirs.headers == ours.headers
        assert all(torch.equal(theirs.tensor(name), ours.tensor(name)) for name in ours.headers)
    else:
        assert theirs.headers["model.layers.0.mlp.experts.gate_up_proj"] == ("q8_0", (5, 128, WIDTH))
    assert greedy(made) == greedy(source, quant=quant)


@pytest.mark.parametrize(("family", "change", "message"), [
    ("Qwen3Moe", {"norm_topk_prob": False}, r"renormalize of this model is False; it would be read as True"),
    ("Qwen2Moe", {"norm_topk_prob": True}, r"renormalize of this model is True; it would be read as False"),
    ("DeepseekV3", {"rope_interleave": False}, r"interleaved of this model is False; it would be read as True"),
    ("DeepseekV3", {"rope_parameters": {**YARN, "mscale_all_dim": 0.5}}, r"a GGUF file cannot say that"),
])  # fmt: skip
def test_a_choice_of_experts_that_gguf_cannot_say_is_refused_before_anything_is_written(
    family: str, change: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "source", family)
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | change))
    with pytest.raises(EvenerError, match=message):
        written(source, tmp_path / "made.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_experts_of_a_layer_in_several_formats_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "Qwen3Moe")
    rules = {"formats.quant_rules": json.dumps({"re:.*experts.3.up_proj": "q8_0"})}
    with pytest.raises(ConfigError, match=r"experts of blk.0.ffn_up_exps.weight would be stored as q4_k .* and q8_0"):
        written(source, tmp_path / "made.gguf", quant="q4_k", **rules)


def test_stacks_of_experts_are_made_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "source", "Qwen3Moe")
    stacked: list[int] = []
    real = torch.stack

    def stack(tensors: Any, *more: Any) -> torch.Tensor:
        stacked.append(sum(each.nbytes for each in tensors))
        return real(tensors, *more)

    monkeypatch.setattr(torch, "stack", stack)
    written(source, tmp_path / "made.gguf")
    assert stacked == [EXPERTS * WIDTH * INNER * 2] * 6


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("quant", ["auto", "q8_0"])
def test_llama_cpp_reads_the_file_and_gives_the_same_tokens(
    family: str, quant: str, tmp_path: Path, one_thread: None
) -> None:
    """It rounds the activations of blocks to 8 bits, and keys and values to 16, so now and then another expert is
    chosen; then only the log-probabilities of most tokens are near."""
    source = write_model(tmp_path / "source", family, torch.float32)
    made, ids = written(source, tmp_path / "made.gguf", quant=quant), prompt_of(VOCAB)
    assert away_from_llama_cpp(made, ids) < (0.06 if quant == "auto" else 0.25)
    if quant == "auto":
        assert llamacpp({"model": str(made), "ids": ids, "count": 10}) == greedy(made)


@pytest.mark.slow
def test_llama_cpp_reads_the_gpt_oss_that_we_wrote(tmp_path: Path, one_thread: None) -> None:
    """Without the scaling of angles, whose bounds it rounds, other than the published config."""
    source = oss(tmp_path / "source", rope_parameters={"rope_theta": 150000.0, "rope_type": "default"})
    assert away_from_llama_cpp(written(source, tmp_path / "made.gguf"), prompt_of(VOCAB)) < 0.06


def away_from_llama_cpp(path: Path, ids: list[int]) -> float:
    """How far our log-probabilities are from those of llama.cpp in the mean."""
    theirs = torch.tensor(llamacpp({"model": str(path), "ids": ids, "threads": 1}))
    logits = NaiveModel(path, schemes=(GgufScheme(),)).logits(ids)[:-1]
    ours = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    away = (ours - theirs).abs()
    print(f"\n{path.name}: log-probabilities within {away.max():.2g} of llama.cpp, {away.mean():.2g} in the mean")
    assert theirs.std() > 1
    return float(away.mean())
