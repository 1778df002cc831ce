"""Tiny models of every family, written as converters write them, against what they were written from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import dequantized

from evener.errors import ArchitectureError, CheckpointError
from evener.loading.checkpoint import open_checkpoint

Write = Callable[..., Path]
HEADS, KV_HEADS, DIM, WIDTH, INNER, VOCAB = 4, 2, 16, 64, 96, 259
KEYS = {
    "context_length": 128, "embedding_length": WIDTH, "block_count": 1, "feed_forward_length": INNER,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": DIM, "attention.value_length": DIM, "rope.freq_base": 50000.0,
}  # fmt: skip
#: Folder names by the names in the file.
TENSORS = {
    "token_embd": ("model.embed_tokens", (VOCAB, WIDTH)), "output_norm": ("model.norm", (WIDTH,)),
    "blk.0.attn_norm": ("model.layers.0.input_layernorm", (WIDTH,)),
    "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", (HEADS * DIM, WIDTH)),
    "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", (KV_HEADS * DIM, WIDTH)),
    "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (KV_HEADS * DIM, WIDTH)),
    "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (WIDTH, HEADS * DIM)),
    "blk.0.ffn_norm": ("model.layers.0.post_attention_layernorm", (WIDTH,)),
    "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (INNER, WIDTH)),
    "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (INNER, WIDTH)),
    "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (WIDTH, INNER)),
}  # fmt: skip
GEMMA = {
    "blk.0.post_attention_norm": ("model.layers.0.post_attention_layernorm", (WIDTH,)),
    "blk.0.ffn_norm": ("model.layers.0.pre_feedforward_layernorm", (WIDTH,)),
    "blk.0.post_ffw_norm": ("model.layers.0.post_feedforward_layernorm", (WIDTH,)),
}
HEAD_NORMS = {f"blk.0.attn_{x}_norm": (f"model.layers.0.self_attn.{x}_norm", (DIM,)) for x in "qk"}
MODELS = {
    "llama": ("LlamaForCausalLM", TENSORS, {}),
    "qwen2": ("Qwen2ForCausalLM", TENSORS, {}),
    "qwen3": ("Qwen3ForCausalLM", TENSORS | HEAD_NORMS, {}),
    "gemma3": ("Gemma3ForCausalLM", TENSORS | HEAD_NORMS | GEMMA, {"attention.sliding_window": 8}),
}


def drawn(table: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """The model's own tensors, by their names in a folder."""
    return {f"{name}.weight": torch.randn(shape) for name, shape in table.values()}


def converted(family: str, own: Mapping[str, torch.Tensor], table: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors as a converter writes them."""
    found = {}
    for name, (folder, _) in table.items():
        tensor = own[f"{folder}.weight"]
        if family == "llama" and name in ("blk.0.attn_q", "blk.0.attn_k"):
            heads = HEADS if name.endswith("q") else KV_HEADS
            tensor = tensor.view(heads, 2, DIM // 2, WIDTH).transpose(1, 2).reshape(tensor.shape)
        found[f"{name}.weight"] = tensor + 1 if family == "gemma3" and name.endswith("norm") else tensor
    return found


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("family", MODELS)
def test_a_file_gives_the_tensors_that_it_was_made_from(family: str, kind: str, write_gguf: Write) -> None:
    from evener_formats.gguf.scheme import GgufScheme

    architecture, table, keys = MODELS[family]
    own = drawn(table)
    path = write_gguf(family, KEYS | keys, converted(family, own, table), kind)
    checkpoint = open_checkpoint(path)
    assert checkpoint.architecture == architecture
    assert {name: shape for name, (_, shape) in checkpoint.headers.items()} == {n: t.shape for n, t in own.items()}
    scheme = GgufScheme()
    for name, tensor in own.items():
        part = scheme.part(name, checkpoint.headers)
        assert part is not None
        if tensor.ndim == 1:
            torch.testing.assert_close(checkpoint.tensor(name), tensor, atol=1e-6, rtol=0)
            continue
        stored = type(part)(part.name, part.rows, part.columns, part.format, {"weight": checkpoint.tensor(name)})
        expected = tensor if kind == "F32" else dequantized(tensor, kind)
        assert torch.equal(scheme.dequantize(stored, "float32"), expected), name


@pytest.mark.parametrize("family", MODELS)
def test_the_config_follows_from_the_files_keys(family: str, write_gguf: Write) -> None:
    _, table, keys = MODELS[family]
    config = open_checkpoint(write_gguf(family, KEYS | keys, converted(family, drawn(table), table))).config
    expected = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "rope_theta": 50000.0, "tie_word_embeddings": True, "dtype": "float32",
        "bos_token_id": 0, "eos_token_id": [1],
    }  # fmt: skip
    assert {key: config.get(key) for key in expected} == expected
    assert "quantization_config" not in config


def test_a_file_with_a_head_of_its_own_is_untied(write_gguf: Write) -> None:
    own = drawn(TENSORS)
    tensors = {**converted("qwen2", own, TENSORS), "output.weight": torch.ones(VOCAB, WIDTH)}
    checkpoint = open_checkpoint(write_gguf("qwen2", KEYS, tensors, "Q8_0"))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.headers["lm_head.weight"] == ("q8_0", (VOCAB, WIDTH))
    assert checkpoint.config["quantization_config"] == {"quant_method": "gguf"}


def test_permuted_rows_keep_their_blocks_and_are_copied(write_gguf: Write) -> None:
    own = drawn(TENSORS)
    checkpoint = open_checkpoint(write_gguf("llama", KEYS, converted("llama", own, TENSORS), "Q4_0"))
    q = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    assert (q.dtype, tuple(q.shape)) == (torch.uint8, (HEADS * DIM, WIDTH // 32 * 18))
    assert checkpoint.copied == {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk"}


def test_llama_3_scaling_is_recognised_by_its_divisors(write_gguf: Write) -> None:
    from evener_formats.gguf.families import llama3_divisor

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    divisors = torch.tensor([llama3_divisor(50000.0, i / 8, scaling) for i in range(8)])
    own = drawn(TENSORS)
    tensors = {**converted("llama", own, TENSORS), "rope_freqs.weight": divisors}
    checkpoint = open_checkpoint(write_gguf("llama", KEYS, tensors))
    assert checkpoint.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in checkpoint.headers
    tensors["rope_freqs.weight"] = divisors * 2
    with pytest.raises(ArchitectureError, match="not Llama 3's scaling"):
        _ = open_checkpoint(write_gguf("llama", KEYS, tensors)).config


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none"}, None),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 64},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scaling_of_angles_is_passed_on(keys: Any, scaling: Any, write_gguf: Write) -> None:
    own = drawn(TENSORS)
    config = open_checkpoint(write_gguf("qwen2", KEYS | keys, converted("qwen2", own, TENSORS))).config
    assert config.get("rope_scaling") == scaling


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"attention.head_count": 0}, CheckpointError, "has 0 for llama.attention.head_count"),
        ({"embedding_length": 3.5}, CheckpointError, "has 3.5 for llama.embedding_length"),
        ({"expert_count": 8}, CheckpointError, "lacks llama.expert_used_count"),
        ({"feed_forward_length": [96, 80]}, ArchitectureError, "differs between layers"),
        ({"rope.dimension_count": 8}, ArchitectureError, "rope.dimension_count = 8 for heads of 16"),
    ],
)
def test_a_key_that_a_family_does_not_support_is_named(keys: Any, error: Any, words: str, write_gguf: Write) -> None:
    path = write_gguf("llama", KEYS | keys, converted("llama", drawn(TENSORS), TENSORS))
    with pytest.raises(error, match=words):
        _ = open_checkpoint(path).config


def test_an_unknown_family_is_named_with_the_nearest_supported_one(write_gguf: Write) -> None:
    with pytest.raises(CheckpointError, match=r"architecture 'qwen9', which is not supported .*; did you mean 'qwen"):
        open_checkpoint(write_gguf("qwen9", {}, {}))


def test_a_file_in_several_parts_is_opened_by_the_first(write_gguf: Write) -> None:
    tensors = converted("qwen2", drawn(TENSORS), TENSORS)
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in half} for half in (names[4:], names[:4])]
    parts = [
        write_gguf("qwen2", KEYS, half, name=f"m-{i:05}-of-00002.gguf", **{"split.count": 2})
        for i, half in enumerate(halves, 1)
    ]
    assert set(open_checkpoint(parts[0]).headers) == {f"{folder}.weight" for folder, _ in TENSORS.values()}
    with pytest.raises(CheckpointError, match=r"one of 2 files; open the first"):
        open_checkpoint(parts[1])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is missing"):
        open_checkpoint(parts[0])


def test_the_tokenizer_template_and_ends_come_from_the_file(write_gguf: Write) -> None:
    from evener.frontend.chat import open_chat
    from evener.frontend.defaults import GenerationDefaults
    from evener.frontend.tokenizer import Tokenizer

    checkpoint = open_checkpoint(write_gguf("qwen2", KEYS, converted("qwen2", drawn(TENSORS), TENSORS)))
    tokenizer = Tokenizer.of(checkpoint)
    assert tokenizer is not None
    assert tokenizer.encode("at t<eos>") == [0, 66, 85, 258, 1]
    assert tokenizer.decode(tokenizer.encode("é at tea")) == "é at tea"
    assert (tokenizer.eos_id, tokenizer.special_tokens["bos_token"]) == (1, "<bos>")
    assert GenerationDefaults.of(checkpoint).eos_ids == (1,)
    chat = open_chat(checkpoint, tokenizer)
    assert chat.render([{"role": "user", "content": "hi"}]) == "hi"
    chat.close()
