"""Stacks of experts in a GGUF file: each matrix is a tensor by its name in a model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import dequantized

from evener.errors import ArchitectureError, CheckpointError, ConfigError
from evener.loading.checkpoint import open_checkpoint
from evener_formats.gguf.scheme import GgufScheme
from evener_formats.gguf.written import family_of

Write = Callable[..., Path]
EXPERTS, WIDTH, INNER, VOCAB = 5, 256, 512, 259
KEYS = {
    "context_length": 128, "embedding_length": WIDTH, "block_count": 1, "feed_forward_length": 768,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6, "expert_count": EXPERTS,
    "expert_used_count": 2, "expert_feed_forward_length": INNER,
}  # fmt: skip
SHAPES = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
#: Family, its architecture, and names in a folder of the router and of an expert's matrices.
FAMILIES = [
    ("qwen3moe", "Qwen3MoeForCausalLM", "mlp.gate", "mlp.experts.{}.{}_proj", {}),
    ("llama", "MixtralForCausalLM", "block_sparse_moe.gate", "block_sparse_moe.experts.{}.{}",
     {"gate": "w1", "up": "w3", "down": "w2"}),
]  # fmt: skip


def drawn(experts: int = EXPERTS) -> dict[str, torch.Tensor]:
    tensors = {f"blk.0.ffn_{part}_exps.weight": torch.randn(experts, *shape) for part, shape in SHAPES.items()}
    router = {"blk.0.ffn_gate_inp.weight": torch.randn(experts, WIDTH)}
    return {"token_embd.weight": torch.randn(VOCAB, WIDTH), **router, **tensors}


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(("family", "architecture", "router", "name", "words"), FAMILIES)
def test_every_expert_is_a_tensor_with_its_part_of_the_stack(
    family: str, architecture: str, router: str, name: str, words: dict[str, str], kind: str, write_gguf: Write
) -> None:
    own = drawn()
    path = write_gguf(family, KEYS, own, lambda stored: "F32" if "gate_inp" in stored else kind)
    checkpoint, scheme = open_checkpoint(path), GgufScheme()
    assert checkpoint.architecture == architecture
    assert len(checkpoint.headers) == 2 + 3 * EXPERTS
    assert torch.equal(checkpoint.tensor(f"model.layers.0.{router}.weight"), own["blk.0.ffn_gate_inp.weight"])
    for part in SHAPES:
        stack = own[f"blk.0.ffn_{part}_exps.weight"]
        for expert in range(EXPERTS):
            stored = f"model.layers.0.{name.format(expert, words.get(part, part))}.weight"
            found = scheme.part(stored, checkpoint.headers)
            assert found is not None and (found.rows, found.columns) == SHAPES[part]
            filled = type(found)(stored, *SHAPES[part], found.format, {"weight": checkpoint.tensor(stored)})
            want = stack[expert] if kind == "F32" else dequantized(stack[expert], kind)
            assert torch.equal(scheme.dequantize(filled, "float32"), want)


def test_the_config_says_how_many_experts_there_are_and_how_they_are_chosen(write_gguf: Write) -> None:
    qwen = open_checkpoint(write_gguf("qwen3moe", KEYS, drawn(), "Q8_0")).config
    expected = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
                "norm_topk_prob": True, "intermediate_size": 768, "model_type": "qwen3_moe"}  # fmt: skip
    assert {key: qwen[key] for key in expected} == expected
    mixtral = open_checkpoint(write_gguf("llama", KEYS, drawn(), "Q8_0")).config
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (EXPERTS, 2)
    assert mixtral["sliding_window"] is None and mixtral["model_type"] == "mixtral"


@pytest.mark.parametrize(
    ("keys", "experts", "words"),
    [
        ({"expert_count": 6}, EXPERTS, r"\[5, 512, 256\], and the file says that a layer has 6 experts"),
        ({"expert_count": 2**31}, EXPERTS, "a layer has 2147483648 experts"),
        ({"expert_count": 0}, EXPERTS, "has 0 for qwen3moe.expert_count"),
    ],
)
def test_a_stack_of_another_number_of_experts_is_refused(
    keys: dict[str, Any], experts: int, words: str, write_gguf: Write
) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(write_gguf("qwen3moe", KEYS | keys, drawn(experts)))


def test_a_matrix_in_the_place_of_a_stack_is_refused(write_gguf: Write) -> None:
    tensors = {**drawn(), "blk.0.ffn_up_exps.weight": torch.randn(EXPERTS, WIDTH)}
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight is float32 \[5, 256\], and the file says"):
        open_checkpoint(write_gguf("qwen3moe", KEYS, tensors))


def test_too_many_experts_are_refused_before_they_are_listed(
    write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener_formats.gguf.checkpoint._MOST_TENSORS", 12)
    with pytest.raises(CheckpointError, match="a layer has 5 experts; fetch the file again"):
        open_checkpoint(write_gguf("qwen3moe", KEYS, drawn()))


def test_experts_of_another_family_are_refused_and_files_with_experts_are_not_written(write_gguf: Write) -> None:
    with pytest.raises(ArchitectureError, match="a qwen2 with 5 experts, which is not implemented for GGUF"):
        _ = open_checkpoint(write_gguf("qwen2", KEYS, drawn())).config
    with pytest.raises((ArchitectureError, ConfigError), match="a Qwen3MoeForCausalLM cannot be written as GGUF"):
        family_of("Qwen3MoeForCausalLM")
