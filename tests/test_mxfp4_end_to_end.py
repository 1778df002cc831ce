"""A checkpoint with MXFP4 experts, from its files to greedy tokens: transformers' numbers, once it has dequantized
them; kept as stored where a kernel reads that; counted and explained as what it takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import Logits, logits_of, make_transformers
from family_runner import ANSWER, SMALL, assert_naive_logits, prompt_of
from safetensors.torch import load_file, save_file

from evener.config import from_overrides
from evener.contracts.checkpoint import Headers
from evener.contracts.quant import WeightPart
from evener.engine.facts.engine_info import EngineInfo
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.oracle import Comparison, compare_greedy
from evener_conformance.reference.engine import play
from evener_formats.mxfp4 import Mxfp4Scheme
from evener_inspection.explanation import explain
from evener_inspection.explanation_text import render

CONFIG = {**find_architecture("GptOssForCausalLM").tiny_config(), "num_hidden_layers": 2}
CONFIG["layer_types"] = CONFIG["layer_types"][:2]
EXPERTS, HIDDEN, INNER = (CONFIG[k] for k in ("num_local_experts", "hidden_size", "intermediate_size"))
NUMBERS = CONFIG["num_hidden_layers"] * EXPERTS * 3 * HIDDEN * INNER
#: Keys without which the CPU backend keeps experts packed.
WIDER = {"ops.grouped_linear": "reference", "ops.moe_block": "reference"}
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Logits, Path]:
    """What transformers computes with dequantized experts, and the folder that has them in blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, noise = make_transformers(CONFIG, tmp_path), torch.Generator().manual_seed(5)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            whole = f"model.layers.{layer}.mlp.experts.{name}"
            size = (EXPERTS, rows, columns // 32)
            blocks = torch.randint(0, 256, (*size, 16), generator=noise, dtype=torch.uint8)
            scales = torch.randint(122, 126, size, generator=noise, dtype=torch.uint8)
            made = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(whole).data.copy_(made)
            del tensors[whole]
            tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"quantization_config": QUANTIZED}))
    return logits_of(model), tmp_path


def greedy(folder: Path, ids: Sequence[int], count: int, **keys: Any) -> tuple[list[int], EngineInfo]:
    """Tokens of the engine on the CPU backend, and what it said of itself."""
    controller, ready = build_controller(from_overrides(str(folder), {**SMALL, **keys}))
    request = NewRequest(id="a", prompt=list(ids), max_tokens=count, sampling=Sampling(temperature=0.0))
    return play(controller, [request]).tokens["a"], ready.info


def test_logits_and_greedy_tokens_are_those_of_transformers_with_dequantized_experts(
    packed: tuple[Logits, Path], one_thread: None
) -> None:
    oracle, folder = packed
    ids = prompt_of(CONFIG["vocab_size"])
    naive = NaiveModel(folder, schemes=(Mxfp4Scheme(),))
    assert_naive_logits(naive, oracle(ids), ids)
    result = Comparison()
    answer, _ = greedy(folder, ids, ANSWER, **WIDER)
    compare_greedy(oracle, [ids], [answer], lambda tokens, n: greedy(folder, tokens, n, **WIDER)[0], result)
    result.check()


def test_a_scheme_that_does_not_say_that_it_reads_stacks_is_read(
    packed: tuple[Logits, Path], monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    _, folder = packed
    ids = prompt_of(CONFIG["vocab_size"])
    answer, part_of = greedy(folder, ids, 4, **WIDER)[0], Mxfp4Scheme.part

    def silent(self: Mxfp4Scheme, name: str, headers: Headers) -> WeightPart | None:
        found = part_of(self, name, headers)
        return found and replace(found, format=replace(found.format, stack=False))

    monkeypatch.setattr(Mxfp4Scheme, "part", silent)
    assert greedy(folder, ids, 4, **WIDER)[0] == answer


def test_a_backend_that_reads_the_blocks_keeps_them_and_counts_what_they_take(
    packed: tuple[Logits, Path], one_thread: None
) -> None:
    _, folder = packed
    ids = prompt_of(CONFIG["vocab_size"])
    (kept, info), (_, wider) = greedy(folder, ids, ANSWER), greedy(folder, ids, 1, **WIDER)
    assert info.manifest.dequantized == []
    found = explain(from_overrides(str(folder), SMALL))
    assert found["packings"]["cpu.blocks"] == 2 * CONFIG["num_hidden_layers"]
    assert found["memory"]["weights"] == info.memory.weights
    saved = NUMBERS * (4 - 17 / 32)  # less what fills up tiles of so few columns
    assert 0.97 * saved < wider.memory.weights - info.memory.weights < saved
    # Activations have 16 bits beside blocks, so the tokens are nearly those of transformers.
    rows = NaiveModel(folder, schemes=(Mxfp4Scheme(),)).greedy_gaps(ids, kept)
    assert max(rows) < 5e-3


def test_unpacked_weights_are_dequantized_and_explain_reports_their_bytes(
    packed: tuple[Logits, Path], one_thread: None
) -> None:
    _, folder = packed
    keys = {"dtype": "bfloat16", **WIDER}
    found = explain(from_overrides(str(folder), {**SMALL, **keys}))
    (line,) = found["dequantized"]
    count = 2 * EXPERTS * CONFIG["num_hidden_layers"]
    more = NUMBERS * 2 - NUMBERS * 17 // 32
    assert line.startswith(f"{count} tensors are dequantized from float4_e2m1 to bfloat16, {more:,} bytes more (")
    assert line in render(found, 400)
    _, info = greedy(folder, [3, 4, 5], 2, **keys)
    assert info.manifest.dequantized == [line]
    assert info.memory.weights == found["memory"]["weights"] > NUMBERS * 2
