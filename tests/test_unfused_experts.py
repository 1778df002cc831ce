"""Llama 4 and gpt-oss store the experts of a layer in one tensor. Quantized checkpoints have them one by one: from such
files to greedy tokens, those of transformers with the dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import Logits, logits_of, make_transformers
from family_runner import ANSWER, SMALL, assert_naive_logits
from safetensors.torch import load_file, save_file
from stored_models import greedy, prompt
from test_integers_end_to_end import KINDS, Stored

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.errors import CheckpointError
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.oracle import Comparison, compare_greedy
from evener_formats.plugin import evener_quant_schemes

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 2}  # fmt: skip


def fp8(name: str, shape: Any) -> Stored:
    """As llm-compressor stores FP8 with dynamic activations: a scale for each row."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(len(name))) * 50
    weight, scale = made.to(torch.float8_e4m3fn), torch.rand(shape[0], 1) / 200 + 1 / 800
    scale = scale.bfloat16()
    return {name: weight, f"{name}_scale": scale}, weight.float() * scale.float()


#: Activations are not rounded where the config does not say so; these tests are about the weights.
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
LLAMA_KINDS: dict[str, tuple[Callable[[str, Any], Stored], dict[str, Any]]] = {
    **{kind: KINDS[kind] for kind in ("packed 4", "gptq 4", "awq", "nf4", "nvfp4 packed")},
    "fp8": (fp8, {"quant_method": "compressed-tensors", "format": "float-quantized",
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8}}}),
}  # fmt: skip


def check(oracle: Logits, folder: Path, family: str) -> None:
    """The tokens of the engine are those of ``oracle``."""
    result, ids = Comparison(), prompt(family)
    answer = greedy(folder, ids, ANSWER)
    compare_greedy(oracle, [ids], [answer], lambda tokens, n: greedy(folder, list(tokens), n), result)
    result.check()


def dequantized(folder: Path) -> Any:
    """What the engine widened when it loaded the folder."""
    return build_controller(from_overrides(str(folder), SMALL))[1].info.manifest.dequantized


def write(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"quantization_config": settings}))


def llama4(folder: Path, kind: str) -> Logits:
    """A checkpoint with ``experts.3.gate_proj.*`` in place of ``experts.gate_up_proj``, as llm-compressor and GPTQModel
    write it; attention and the shared expert are quantized too."""
    config = {**find_architecture("Llama4ForCausalLM").tiny_config(), **SIZES, "intermediate_size_mlp": 128}
    model, (store, settings) = make_transformers(config, folder), LLAMA_KINDS[kind]
    stored = dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            whole = list[torch.Tensor]()
            for number, one in enumerate(weight.mT):
                words = {"gate_proj": 0, "up_proj": 1} if "gate_up" in name else {"down_proj": 0}
                rows = one.shape[0] // len(words)
                made = [store(f"{stem}.{number}.{word}.weight", (rows, one.shape[1])) for word in words]
                stored |= {key: tensor for tensors, _ in made for key, tensor in tensors.items()}
                whole.append(torch.cat([values for _, values in made]))
            model.get_parameter(name).data.copy_(torch.stack(whole).mT)
        elif weight.dim() == 2 and not any(kept in name for kept in ("embed_tokens", "lm_head", "router")):
            tensors, values = store(name, weight.shape)
            stored |= tensors
            model.get_parameter(name).data.copy_(values)
        else:
            stored[name] = weight
    write(folder, stored, settings)
    return logits_of(model)


@pytest.mark.parametrize("kind", LLAMA_KINDS)
def test_llama_4_with_experts_one_by_one_gives_the_tokens_of_the_dequantized_weights_and_stays_packed(
    kind: str, tmp_path: Path, one_thread: None
) -> None:
    oracle, ids = llama4(tmp_path, kind), prompt("Llama4")
    assert_naive_logits(NaiveModel(tmp_path, schemes=tuple(evener_quant_schemes())), oracle(ids), ids)
    check(oracle, tmp_path, "Llama4")
    assert dequantized(tmp_path) == []


def gpt_oss(folder: Path, plain: bool = False) -> tuple[Logits, dict[str, torch.Tensor]]:
    """A checkpoint with ``experts.gate_up_projs.3.*``, as Unsloth writes it, and its tensors. With ``plain`` only the
    attention is in NF4."""
    config = {**find_architecture("GptOssForCausalLM").tiny_config(), **SIZES}
    config["layer_types"] = config["layer_types"][:2]
    model, (store, settings) = make_transformers(config, folder), KINDS["nf4"]
    for name, parameter in model.named_parameters():
        if "bias" in name:  # random ones, so that their order matters
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    stored = dict[str, torch.Tensor]()
    for name, weight in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        if stem.endswith("experts"):
            word, bias = end.removesuffix("_bias"), end.endswith("_bias")
            whole = list[torch.Tensor]()
            for number, one in enumerate(weight):
                key = f"{stem}.{word}s.{number}.{'bias' if bias else 'weight'}"
                made = ({key: one}, one) if bias else ({key: one.T}, one.T) if plain else store(key, one.T.shape)
                stored |= made[0]
                whole.append(made[1] if bias else made[1].T)
            weight.copy_(torch.stack(whole))
        elif "self_attn" in name and weight.dim() == 2:
            made = store(name, weight.shape)
            stored |= made[0]
            weight.copy_(made[1])
        else:
            stored[name.replace(".router.", ".router.linear.")] = weight.clone()
    write(folder, stored, settings)
    return logits_of(model), stored


@pytest.mark.parametrize("plain", [False, True])
def test_gpt_oss_as_unsloth_stores_it_gives_the_tokens_of_the_dequantized_weights_and_stays_packed(
    plain: bool, tmp_path: Path, one_thread: None
) -> None:
    oracle, _ = gpt_oss(tmp_path, plain)
    check(oracle, tmp_path, "GptOss")
    assert dequantized(tmp_path) == []


def test_a_missing_expert_and_a_missing_bias_of_gpt_oss_are_named(tmp_path: Path) -> None:
    _, stored = gpt_oss(tmp_path, plain=True)
    for lost, named in (
        ("gate_up_projs.2.weight", "experts.2.gate_up_proj.weight"), ("down_projs.1.bias", "experts.down_proj_bias"),
    ):  # fmt: skip
        tensors = {name: each for name, each in stored.items() if not name.endswith(f"0.mlp.experts.{lost}")}
        save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"missing: model.layers.0.mlp.{named}"):
            greedy(tmp_path, [1, 2], 1)


def test_gpt_oss_with_gate_and_up_apart_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    _, stored = gpt_oss(tmp_path, plain=True)
    stored["model.layers.0.mlp.experts.0.gate_proj.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
    save_file({name: each.contiguous() for name, each in stored.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="two weights, and evener reads gpt-oss only with .* MXFP4"):
        greedy(tmp_path, [1, 2], 1)
