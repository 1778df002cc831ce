"""Quantized checkpoints on an accelerator: the log-probabilities of the dequantized weights, eager and captured, with
every weight packed. Marked ``gpu``; skipped with the reason if there is no accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_fp8_end_to_end as eight_bits
import test_integers_end_to_end as integers
import test_quantize_on_load as on_load
import test_w4a8_end_to_end as four_by_eight
import torch
from family_runner import prompt_of
from test_accelerator import accelerator  # the fixture

from evener import LLM, SamplingParams
from evener.config import from_overrides
from evener_conformance.kit.subject import Subject
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_formats.plugin import evener_quant_schemes
from evener_inspection.explanation import explain

__all__ = ["accelerator"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COMMON: dict[str, Any] = {"dtype": "bfloat16", "infer.max_seq_len": 128, "infer.max_reqs": 4, "infer.kv_memory": 2**26}
TOKENS = 12
#: How far the logits of a token may be off, as a part of their spread: the median of all tokens, as a router may choose
#: another expert for one of them. FP8 activations have three bits behind the first.
MOST, MOST_ROUNDED = 0.05, 0.25
#: Sizes of which a block of 128 is a part, as in published checkpoints.
LARGE: dict[str, dict[str, Any]] = {
    "Qwen3": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
              "head_dim": 128},
    "Qwen3Moe": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
                 "moe_intermediate_size": 256},
    "DeepseekV3": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8,
                   "kv_lora_rank": 256, "q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                   "v_head_dim": 128, "moe_intermediate_size": 256},
}  # fmt: skip

#: The folder to load and the keys to load it with, and the folder whose numbers it has.
Made = tuple[Path, dict[str, Any], Path]


def stored(checkpoint: Callable[[Path, str, str], tuple[Any, Path]], kind: str) -> Callable[[Path, str], Made]:
    """A folder that one of the other tests' functions makes."""

    def made(folder: Path, family: str) -> Made:
        path = checkpoint(folder, family, kind)[1]
        return path, {}, path

    return made


def of_large_blocks(folder: Path, family: str) -> Made:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eight_bits, "BLOCK", 128)
        patch.setitem(eight_bits.SIZES, family, LARGE[family])
        patch.setitem(eight_bits.KINDS, "large", (eight_bits.KINDS["blocks"][0], settings))
        return stored(eight_bits.checkpoint, "large")(folder, family)


def of_four_by_eight(layout: str, kind: str) -> Callable[[Path, str], Made]:
    def made(folder: Path, family: str) -> Made:
        path = four_by_eight.checkpoint(folder, family, layout, kind, symmetric=True)[1]
        return path, {}, path

    return made


def quantized_on_load(quant: str) -> Callable[[Path, str], Made]:
    def made(folder: Path, family: str) -> Made:
        plain, rounded = on_load.folders(folder, family, quant)
        return plain, {"quant": quant}, rounded

    return made


KINDS: dict[str, Callable[[Path, str], Made]] = {
    **{kind: stored(eight_bits.checkpoint, kind) for kind in eight_bits.KINDS},
    **{kind: stored(integers.checkpoint, kind) for kind in integers.KINDS},
    **{f"W4A8 {kind}, {layout}": of_four_by_eight(layout, kind)
       for layout, kind in (("int-quantized", "int"), ("pack-quantized", "float"), (four_by_eight.SGLANG, "float"))},
    **{f"quant={quant}": quantized_on_load(quant) for quant in on_load.ROUNDED},
    "blocks of 128": of_large_blocks,
}  # fmt: skip
#: SGLang's layout is of experts.
CASES = [
    *((family, kind) for kind in KINDS for family in ("Qwen3", "Qwen3Moe")
      if family == "Qwen3Moe" or four_by_eight.SGLANG not in kind),
    *(("DeepseekV3", kind) for kind in ("blocks", "rows", "int8", "gptq 4", "awq", "nvfp4", "blocks of 128")),
]  # fmt: skip


def said(folder: Path, ids: list[int], vocab: int, **keys: Any) -> tuple[torch.Tensor, list[int], Any]:
    """Log-probabilities [TOKENS, vocab] after the prompt, the greedy tokens, and what the worker says about itself."""
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, logprobs=0, logprob_ids=list(range(vocab)), detokenize=False,
        ignore_eos=True,
    )  # fmt: skip
    with LLM(folder, **{**COMMON, **keys}) as llm:
        (output,) = llm.generate([ids], params)
        first = output.outputs[0]
        table = torch.tensor([[each[i] for i in range(vocab)] for each in first.logprobs or ()])
        return table, list(first.token_ids), llm.info


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_log_probabilities_are_those_of_the_dequantized_weights_eager_and_captured(
    accelerator: Subject, family: str, kind: str, tmp_path: Path
) -> None:
    folder, keys, numbers = KINDS[kind](tmp_path, family)
    keys = {"backend": accelerator.name, **keys}
    vocab = find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"]
    ids, naive = prompt_of(vocab), NaiveModel(numbers, schemes=tuple(evener_quant_schemes()))

    def off(found: torch.Tensor, tokens: list[int]) -> float:
        logits = naive.logits([*ids, *tokens[:-1]])[-TOKENS:].float()
        errors = (found - logits.log_softmax(-1)).square().mean(-1).sqrt() / logits.std(-1)
        return float(errors.median())

    kept = off(*said(folder, ids, vocab, **keys, **{"infer.quant_activations": "keep"})[:2])
    eager, tokens, info = said(folder, ids, vocab, **keys, **{"infer.use_cuda_graph": False})
    captured, again, _ = said(folder, ids, vocab, **keys, **{"infer.use_cuda_graph": True})
    rounded = off(eager, tokens)
    print(f"{family} {kind}: off by {kept:.4f} of the logits' spread, {rounded:.4f} with rounded activations")
    assert kept < MOST and rounded < MOST_ROUNDED
    assert again == tokens and torch.allclose(captured, eager, atol=1e-5)
    assert not explain(from_overrides(str(folder), {**COMMON, **keys}))["dequantized"]
    memory = info.memory
    assert memory.measured_weights == memory.weights
