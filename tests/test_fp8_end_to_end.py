"""Checkpoints of eight bits with scales, from their files to greedy tokens: those of transformers with the dequantized
weights, on one rank, on two and on four, whose weights stay as they are stored."""

from __future__ import annotations

import json
import math
import re
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
from evener.contracts.declared import LinearWeight, Table
from evener.contracts.quant import PackedWeight
from evener.engine.facts.manifest_report import ManifestReport
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.worker.worker import Worker
from evener.errors import CheckpointError, ConfigError
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
                   "v_head_dim": 16, "moe_intermediate_size": 64},
}  # fmt: skip
#: What Kimi K2 has in DeepSeek V3's class: no groups of experts, many of them, half the heads, one shared expert.
SIZES["KimiK2"] = SIZES["DeepseekV3"] | {
    "n_group": 1, "topk_group": 1, "n_routed_experts": 48, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_theta": 50000.0, "rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0,
                        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
#: What its files say, which transformers does not know.
SAVED: dict[str, dict[str, Any]] = {"KimiK2": {"model_type": "kimi_k2"}}
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


#: As DeepSeek's and Moonshot's configs have it.
DYNAMIC = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
KINDS: dict[str, Any] = {
    "whole, static": (as_a_whole, {"quant_method": "fp8", "activation_scheme": "static"}),
    "blocks": (lambda w: in_blocks(w, False), DYNAMIC),
    "powers of two": (lambda w: in_blocks(w, True), {**DYNAMIC, "scale_fmt": "ue8m0"}),
    "rows": (lambda w: by_rows(w, False), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "int8": (lambda w: by_rows(w, True), {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}


def shape_of(family: str, **more: Any) -> dict[str, Any]:
    """The config of a small model of two layers."""
    architecture = "DeepseekV3" if family == "KimiK2" else family
    tiny = find_architecture(f"{architecture}ForCausalLM").tiny_config()
    return {**tiny, **SIZES[family], "num_hidden_layers": 2, **more}


def checkpoint(folder: Path, family: str, kind: str, **more: Any) -> tuple[Logits, Path]:
    """What transformers computes with the dequantized weights, and the folder with the quantized ones; ``more``: of
    its config."""
    from transformers import AutoModelForCausalLM

    config = shape_of(family, **more)
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
    saved = json.loads((folder / "plain/config.json").read_text()) | SAVED.get(family, {})
    (folder / "stored/config.json").write_text(json.dumps(saved | {"quantization_config": settings}))
    numbers = {n: plain(stored, n) if stored[n].itemsize == 1 else stored[n] for n in tensors}
    save_file(numbers, folder / "plain/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()
    return logits_of(model), folder / "stored"


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("Qwen3", kind) for kind in KINDS), ("Qwen3Moe", "blocks"), ("DeepseekV3", "blocks"),
     ("KimiK2", "blocks"),
     *(pytest.param("DeepseekV3", kind, marks=pytest.mark.slow) for kind in ("rows", "powers of two"))],
)  # fmt: skip
def test_logits_and_tokens_are_those_of_the_dequantized_weights(
    family: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    oracle, folder = checkpoint(tmp_path, family, kind)
    ids = prompt_of(shape_of(family)["vocab_size"])
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
    for family, count in (("Qwen3", 8), ("Qwen3Moe", 8), ("DeepseekV3", 14), ("KimiK2", 14)):
        _, folder = checkpoint(tmp_path / family, family, kind)
        found = explain(from_overrides(str(folder), SMALL))
        assert found["packings"]["cpu.stored"] == count and not found["dequantized"]


def ranks(tp: int, ep: int = 1) -> dict[str, int]:
    return {"infer.tp_size": tp, "infer.ep_size": ep}


def assert_stored_bytes(worker: Worker) -> None:
    """This rank holds its share of the quantized weights as they are stored: one byte a number, and the scales; and
    that is what the plan said."""
    report, memory = ManifestReport.of(worker.assembly.resolver.manifest), worker.facts.info.memory
    assert not report.dequantized
    expected = held = 0
    for item in worker.assembly.build.weights:
        nbytes = item.nbytes if isinstance(item, Table) else bytes_of(item.value)
        held += nbytes
        if not isinstance(item, LinearWeight) or item.parts[0].format.plain:
            expected += nbytes
            continue
        assert item.layout == "cpu.stored"
        blocks = sum(math.ceil(part.rows / BLOCK) * math.ceil(part.columns / BLOCK) for part in item.parts)
        expected += (item.rows * item.columns + blocks * 4) * max(1, item.experts)
    assert held == expected == memory.measured_weights + memory.measured_mapped
    assert memory.measured_weights == memory.weights and memory.measured_mapped == memory.mapped


def bytes_of(loaded: Any) -> int:
    """Bytes of the tensors in what a declared weight became: a tensor, or a packed weight, of one matrix or many."""
    if isinstance(loaded, torch.Tensor):
        return loaded.nbytes
    if isinstance(loaded, PackedWeight):
        return bytes_of(loaded.data)
    return sum(map(bytes_of, loaded if isinstance(loaded, (tuple, list)) else loaded.tensors))


@pytest.mark.parametrize(
    ("family", "tp", "ep"),
    [("DeepseekV3", 4, 1), ("KimiK2", 4, 2),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("DeepseekV3", 2, 1), ("DeepseekV3", 2, 2), ("DeepseekV3", 4, 2), ("DeepseekV3", 4, 4),
         ("KimiK2", 2, 1), ("KimiK2", 2, 2), ("KimiK2", 4, 1), ("KimiK2", 4, 4),
         ("Qwen3", 2, 1), ("Qwen3Moe", 2, 1), ("Qwen3Moe", 2, 2)))],
)  # fmt: skip
def test_ranks_cut_the_blocks_keep_them_as_stored_and_give_the_same_tokens(
    family: str, tp: int, ep: int, tmp_path: Path, one_thread: None
) -> None:
    _, folder = checkpoint(tmp_path, family, "blocks")
    ids = prompt_of(shape_of(family)["vocab_size"])
    request = NewRequest(id="a", prompt=ids, max_tokens=12, sampling=Sampling(temperature=0.0))
    with rank_threads(from_overrides(str(folder), {**SMALL, **ranks(tp, ep)})) as (controller, executor):
        assert len(executor.workers) == tp
        for worker in executor.workers:
            assert_stored_bytes(worker)
        assert play(controller, [request]).tokens["a"] == greedy(folder, ids, 12)


@pytest.mark.parametrize(
    ("more", "tp", "ep"),
    [({"intermediate_size": 104, "moe_intermediate_size": 40}, 2, 1),
     # Two ranks share each expert.
     pytest.param({"n_routed_experts": 49, "n_shared_experts": 2, "moe_intermediate_size": 40}, 4, 2,
                  marks=pytest.mark.slow)],
)  # fmt: skip
def test_blocks_that_do_not_divide_evenly_are_shared_unevenly(
    more: dict[str, int], tp: int, ep: int, tmp_path: Path, one_thread: None
) -> None:
    # 104 features are six blocks and a half, 40 are two and a half.
    _, folder = checkpoint(tmp_path, "KimiK2", "blocks", **more)
    ids = prompt_of(shape_of("KimiK2")["vocab_size"])
    request = NewRequest(id="a", prompt=ids, max_tokens=12, sampling=Sampling(temperature=0.0))
    with rank_threads(from_overrides(str(folder), {**SMALL, **ranks(tp, ep)})) as (controller, executor):
        for worker in executor.workers:
            assert_stored_bytes(worker)
        sizes = [worker.facts.info.memory.weights for worker in executor.workers]
        assert sizes[0] > sizes[1]
        assert play(controller, [request]).tokens["a"] == greedy(folder, ids, 12)


@pytest.mark.parametrize(
    ("more", "asked", "message", "typed"),
    [
        ({"moe_intermediate_size": 32, "n_shared_experts": 2}, (4, 1), r"infer.tp_size=4: 32 features in an expert "
         r"\(see infer.ep_size\) in units of 16 are too few for so many ranks; sizes that fit: 1, 2$", (4, 2)),
        ({"moe_intermediate_size": 16, "n_shared_experts": 4}, (4, 2), "infer.tp_size=4 infer.ep_size=2: 16 features "
         "in an expert .* values of infer.tp_size that fit: 2; or raise infer.ep_size$", (4, 4)),
        # As with Kimi K2's 192 features a head in blocks of 128, one head's 24 are no blocks of 16.
        ({"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}, (4, 1), r"infer.tp_size=4: .*q_b_proj.weight is stored in "
         "units of 16 and cannot be cut; sizes that fit: 1, 2$", (2, 1)),
    ],
    ids=["few blocks for the ranks", "few blocks for a group", "parts of blocks in a head"],
)  # fmt: skip
def test_ranks_that_would_cut_blocks_are_refused_with_what_fits(
    more: dict[str, int], asked: tuple[int, int], message: str, typed: tuple[int, int], tmp_path: Path,
    one_thread: None,
) -> None:  # fmt: skip
    _, folder = checkpoint(tmp_path, "KimiK2", "blocks", **more)
    with pytest.raises(ConfigError, match=message):
        explain(from_overrides(str(folder), {**SMALL, **ranks(*asked)}))
    found = explain(from_overrides(str(folder), {**SMALL, **ranks(*typed)}))
    assert not found["dequantized"] and found["model"]["problem"] is None


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "blocks"])
def test_a_stack_of_matrices_in_place_of_one_is_refused(kind: str, count: int, tmp_path: Path) -> None:
    _, folder = checkpoint(tmp_path, "Qwen3", "blocks")
    folder = tmp_path / "plain" if kind == "plain" else folder
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    for each in [each for each in tensors if each.startswith(name)]:
        tensors[each] = torch.stack([tensors[each]] * count)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = rf"{name} is \[{count}, 64, 96\].*, not \[64, 96\]"
    assert re.search(message, explain(from_overrides(str(folder), SMALL))["model"]["problem"])
    with pytest.raises(CheckpointError, match=message):
        greedy(folder, [3], 1)
