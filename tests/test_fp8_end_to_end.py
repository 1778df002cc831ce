"""Checkpoints of eight bits with scales, from their files to greedy tokens: those of transformers with the dequantized
weights, on one rank and on two."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import Logits, logits_of, make_transformers
from family_runner import ANSWER, SMALL, assert_naive_logits, prompt_of
from safetensors.torch import load_file, save_file
from stored_models import greedy

from evener.config import from_overrides
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.oracle import Comparison, compare_greedy
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_formats.compressed import CompressedTensors
from evener_formats.scaled import Fp8Scheme
from evener_inspection.explanation import explain

BLOCK = 16
SIZES: dict[str, dict[str, Any]] = {
    "Qwen3": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16},
    "Qwen3Moe": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                 "moe_intermediate_size": 32},
    "DeepseekV3": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
                   "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                   "v_head_dim": 16, "moe_intermediate_size": 32},
}  # fmt: skip
#: Weights that such checkpoints leave as they are.
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")


def in_blocks(weight: torch.Tensor, power_of_two: bool) -> dict[str, torch.Tensor]:
    """The weight as DeepSeek's own conversion stores it: e4m3, and what to multiply each block with."""
    rows, columns = weight.shape
    high, wide = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-9) / 448
    scale = torch.exp2(torch.log2(scale).ceil()) if power_of_two else scale
    stored = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    kept = scale.to(torch.float8_e8m0fnu) if power_of_two else scale
    return {"": stored.contiguous().to(torch.float8_e4m3fn), "_scale_inv": kept}


def by_rows(weight: torch.Tensor, int8: bool) -> dict[str, torch.Tensor]:
    """The weight as llm-compressor stores it: one scale for each row."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / (127 if int8 else 448)
    stored = (weight / scale).round().to(torch.int8) if int8 else (weight / scale).to(torch.float8_e4m3fn)
    return {"": stored, "_scale": scale}


def as_a_whole(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight with one scale, and the scale with which activations were rounded when it was made."""
    scale = weight.abs().max() / 448
    return {"": (weight / scale).to(torch.float8_e4m3fn), "_scale": scale, "/input_scale": torch.tensor(0.1)}


def plain(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The numbers of a stored weight, by the formats' descriptions."""
    stored = tensors[name].float()
    if f"{name}_scale" in tensors:
        return stored * tensors[f"{name}_scale"]
    scale = tensors[f"{name}_scale_inv"].float()
    whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return stored * whole[: stored.shape[0], : stored.shape[1]]


KINDS: dict[str, Any] = {
    "whole, static": (as_a_whole, {"quant_method": "fp8", "activation_scheme": "static"}),
    "blocks": (lambda w: in_blocks(w, False), {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "powers of two": (lambda w: in_blocks(w, True), {"quant_method": "fp8", "scale_fmt": "ue8m0"}),
    "rows": (lambda w: by_rows(w, False), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "int8": (lambda w: by_rows(w, True), {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}


def checkpoint(folder: Path, family: str, kind: str) -> tuple[Logits, Path]:
    """What transformers computes with the dequantized weights, and the folder with the quantized ones."""
    from transformers import AutoModelForCausalLM

    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family]}
    config["num_hidden_layers"] = 2
    make_transformers(config, folder / "plain")
    tensors = load_file(folder / "plain/model.safetensors")
    store, settings = KINDS[kind]
    stored = {}
    for name, weight in tensors.items():
        if weight.dim() != 2 or any(kept in name for kept in KEPT):
            stored[name] = weight
        else:
            stored |= {
                name.removesuffix("weight") + role[1:] if role.startswith("/") else name + role: tensor
                for role, tensor in store(weight).items()
            }
    shutil.copytree(folder / "plain", folder / "stored")
    save_file(stored, folder / "stored/model.safetensors")
    saved = json.loads((folder / "plain/config.json").read_text())
    (folder / "stored/config.json").write_text(json.dumps(saved | {"quantization_config": settings}))
    numbers = {n: plain(stored, n) if stored[n].itemsize == 1 else stored[n] for n in tensors}
    save_file(numbers, folder / "plain/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()
    return logits_of(model), folder / "stored"


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("Qwen3", kind) for kind in KINDS), ("Qwen3Moe", "blocks"), ("DeepseekV3", "blocks"),
     pytest.param("DeepseekV3", "rows", marks=pytest.mark.slow)],
)  # fmt: skip
def test_logits_and_tokens_are_those_of_the_dequantized_weights(
    family: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    oracle, folder = checkpoint(tmp_path, family, kind)
    ids = prompt_of(find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"])
    naive = NaiveModel(folder, schemes=(Fp8Scheme(), CompressedTensors()))
    assert_naive_logits(naive, oracle(ids), ids)
    result = Comparison()
    answer = greedy(folder, ids, ANSWER)
    compare_greedy(oracle, [ids], [answer], lambda tokens, n: greedy(folder, list(tokens), n), result)
    result.check()


@pytest.mark.parametrize(
    "kind", [kind if kind == "blocks" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_cpu_keeps_eight_bits_a_weight(kind: str, tmp_path: Path) -> None:
    # Matrices of two layers. Qwen: QKV, output, gate and up, down. DeepSeek: four of attention, two of the MLP; one
    # layer has shared experts as well. Routers, the embedding and the head are not quantized.
    for family, count in (("Qwen3", 8), ("Qwen3Moe", 8), ("DeepseekV3", 14)):
        _, folder = checkpoint(tmp_path / family, family, kind)
        found = explain(from_overrides(str(folder), SMALL))
        assert found["packings"]["cpu.stored"] == count and not found["dequantized"]


@pytest.mark.parametrize(
    "family", ["DeepseekV3", *(pytest.param(family, marks=pytest.mark.slow) for family in ("Qwen3", "Qwen3Moe"))]
)
def test_two_ranks_cut_the_blocks_and_give_the_same_tokens(family: str, tmp_path: Path, one_thread: None) -> None:
    _, folder = checkpoint(tmp_path, family, "blocks")
    ids = prompt_of(find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"])
    request = NewRequest(id="a", prompt=ids, max_tokens=12, sampling=Sampling(temperature=0.0))
    with rank_threads(from_overrides(str(folder), {**SMALL, "infer.tp_size": 2})) as (controller, _):
        assert play(controller, [request]).tokens["a"] == greedy(folder, ids, 12)
