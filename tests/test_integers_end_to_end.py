"""GPTQ, AWQ, packed compressed-tensors and NVFP4 checkpoints, from their files to greedy tokens: those of transformers
with the dequantized weights, on one rank and on two, held as packed as they are stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import Logits, logits_of, make_transformers
from family_runner import ANSWER, SMALL, assert_naive_logits
from integer_files import awq_tensors, compressed_tensors, gptq_tensors, quantized
from safetensors.torch import load_file, save_file
from stored_models import KEPT, SIZES, greedy, prompt

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.oracle import Comparison, compare_greedy
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_formats.plugin import evener_quant_schemes
from evener_inspection.explanation import explain

GROUP = 32
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def gptq(bits: int, symmetric: bool, act_order: bool, form: str) -> tuple[Callable[[str, Any], Stored], dict[str, Any]]:
    def store(name: str, shape: Any) -> Stored:
        made = quantized(bits, *shape, GROUP, symmetric=symmetric, act_order=act_order, seed=len(name))
        return gptq_tensors(name.removesuffix(".weight"), made, bits, int(form == "gptq")), made.values

    settings = {"bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order, "checkpoint_format": form}
    return store, {"quant_method": "gptq", **settings}


def awq(name: str, shape: Any) -> Stored:
    made = quantized(4, *shape, GROUP, seed=len(name))
    return awq_tensors(name.removesuffix(".weight"), made), made.values


def packed(bits: int, symmetric: bool, act_order: bool) -> tuple[Callable[[str, Any], Stored], dict[str, Any]]:
    def store(name: str, shape: Any) -> Stored:
        made = quantized(bits, *shape, GROUP, symmetric=symmetric, act_order=act_order, scale=torch.bfloat16)
        return compressed_tensors(name, made, bits, symmetric, act_order), made.values

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP,
        "actorder": "group" if act_order else None,
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return store, {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def nvfp4(name: str, shape: Any) -> Stored:
    """As ModelOpt stores it: two floats of four bits a byte, a float8 scale for 16 columns, and one for all."""
    random, (rows, columns) = torch.Generator().manual_seed(len(name)), shape
    codes = torch.randint(0, 16, (rows, columns), generator=random)
    scale = (torch.rand(rows, columns // 16, generator=random) * 200 + 50).to(torch.float8_e4m3fn)
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    whole = torch.tensor(1 / (500 * columns**0.5))
    numbers = torch.where(codes < 8, half[codes % 8], -half[codes % 8])
    values = numbers * (scale.float() * whole).repeat_interleave(16, 1)
    bytes_ = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    more = {f"{name.removesuffix('weight')}input_scale": torch.tensor(0.1)}
    return {name: bytes_, f"{name}_scale": scale, f"{name}_scale_2": whole, **more}, values


KINDS: dict[str, tuple[Callable[[str, Any], Stored], dict[str, Any]]] = {
    "gptq 4": gptq(4, True, False, "gptq"), "gptq 4 act": gptq(4, False, True, "gptq"),
    "gptq 3 act": gptq(3, True, True, "gptq_v2"), "gptq 8": gptq(8, False, False, "gptq"),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "packed 4": packed(4, True, False), "packed 4 act": packed(4, False, True), "packed 8": packed(8, False, False),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}  # fmt: skip
#: Kinds that the CPU backend has kernels for.
KERNELS = [kind for kind in KINDS if kind != "nvfp4"]


def checkpoint(folder: Path, family: str, kind: str) -> tuple[Logits, Path]:
    """What transformers computes with the dequantized weights, and the folder with the quantized ones."""
    from transformers import AutoModelForCausalLM

    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family], "num_hidden_layers": 2}
    make_transformers(config, folder / "plain")
    tensors = load_file(folder / "plain/model.safetensors")
    store, settings = KINDS[kind]
    stored, numbers = {}, {}
    for name, weight in tensors.items():
        if weight.dim() != 2 or any(kept in name for kept in KEPT):
            stored[name] = numbers[name] = weight
        else:
            made, numbers[name] = store(name, weight.shape)
            stored |= made
    shutil.copytree(folder / "plain", folder / "stored")
    save_file(stored, folder / "stored/model.safetensors")
    saved = json.loads((folder / "plain/config.json").read_text())
    (folder / "stored/config.json").write_text(json.dumps(saved | {"quantization_config": settings}))
    save_file(numbers, folder / "plain/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()
    return logits_of(model), folder / "stored"


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("Qwen3", kind) for kind in KINDS), ("Qwen3Moe", "gptq 4 act"), ("DeepseekV3", "awq"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("Qwen3Moe", "packed 4"), ("DeepseekV3", "gptq 4"), ("DeepseekV3", "packed 4"),
         *(("Mixtral", kind) for kind in ("gptq 4", "awq", "packed 4"))))],
)  # fmt: skip
def test_logits_and_tokens_are_those_of_the_dequantized_weights(
    family: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    oracle, folder = checkpoint(tmp_path, family, kind)
    ids = prompt(family)
    naive = NaiveModel(folder, schemes=tuple(evener_quant_schemes()))
    assert_naive_logits(naive, oracle(ids), ids)
    result = Comparison()
    answer = greedy(folder, ids, ANSWER)
    compare_greedy(oracle, [ids], [answer], lambda tokens, n: greedy(folder, list(tokens), n), result)
    result.check()


@pytest.mark.parametrize(
    "kind", [kind if kind in ("gptq 3 act", "awq") else pytest.param(kind, marks=pytest.mark.slow) for kind in KERNELS]
)
def test_the_cpu_keeps_the_integers_packed(kind: str, tmp_path: Path) -> None:
    for family in ("Qwen3", "Qwen3Moe"):
        _, folder = checkpoint(tmp_path / family, family, kind)
        found = explain(from_overrides(str(folder), SMALL))
        # QKV, output, gate and up, and down of two layers.
        assert found["packings"]["cpu.blocks"] == 8 and not found["dequantized"]
        _, ready = build_controller(from_overrides(str(folder), SMALL))
        assert ready.info.memory["weights"] == found["memory"]["weights"]


@pytest.mark.parametrize(
    "kind",
    ["gptq 3 act", "awq",
     *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gptq 4", "gptq 4 act", "packed 4 act", "nvfp4"))],
)  # fmt: skip
@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_two_ranks_cut_the_groups_and_give_the_same_tokens(
    family: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    _, folder = checkpoint(tmp_path, family, kind)
    request = NewRequest(id="a", prompt=prompt(family), max_tokens=12, sampling=Sampling(temperature=0.0))
    config = from_overrides(str(folder), {**SMALL, "infer.tp_size": 2})
    with rank_threads(config) as (controller, _):
        assert play(controller, [request]).tokens["a"] == greedy(folder, prompt(family), 12)
    assert bool(explain(config)["dequantized"]) == (kind not in KERNELS)
