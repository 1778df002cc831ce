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

COMMON: dict[str, Any] = {"infer.max_seq_len": 128, "infer.max_reqs": 4, "infer.kv_memory": 2**26}
#: The dtype of a family, and how far the logits may be off, as a part of their spread. In bfloat16 a router may choose
#: another expert.
DTYPES = {"Qwen3": ("bfloat16", 0.03), "Qwen3Moe": ("float32", 0.002)}
#: The same with rounded activations, which have three bits behind the first.
ROUNDED = 0.25

#: The folder to load and the keys to load it with, and the folder whose numbers it has.
Made = tuple[Path, dict[str, Any], Path]


def of_eight_bits(kind: str) -> Callable[[Path, str], Made]:
    def made(folder: Path, family: str) -> Made:
        stored = eight_bits.checkpoint(folder, family, kind)[1]
        return stored, {}, stored

    return made


def of_integers(kind: str) -> Callable[[Path, str], Made]:
    def made(folder: Path, family: str) -> Made:
        stored = integers.checkpoint(folder, family, kind)[1]
        return stored, {}, stored

    return made


def of_four_by_eight(layout: str, kind: str) -> Callable[[Path, str], Made]:
    def made(folder: Path, family: str) -> Made:
        stored = four_by_eight.checkpoint(folder, family, layout, kind, symmetric=True)[1]
        return stored, {}, stored

    return made


def quantized_on_load(quant: str) -> Callable[[Path, str], Made]:
    def made(folder: Path, family: str) -> Made:
        plain, rounded = on_load.folders(folder, family, quant)
        return plain, {"quant": quant}, rounded

    return made


KINDS: dict[str, Callable[[Path, str], Made]] = {
    **{kind: of_eight_bits(kind) for kind in eight_bits.KINDS},
    **{kind: of_integers(kind) for kind in integers.KINDS},
    **{f"W4A8 {kind}, {layout}": of_four_by_eight(layout, kind)
       for layout, kind in (("int-quantized", "int"), ("pack-quantized", "float"), (four_by_eight.SGLANG, "float"))},
    **{f"quant={quant}": quantized_on_load(quant) for quant in on_load.ROUNDED},
}  # fmt: skip
#: SGLang's layout is of experts.
CASES = [(family, kind) for kind in KINDS for family in ("Qwen3", "Qwen3Moe")
         if family == "Qwen3Moe" or four_by_eight.SGLANG not in kind]  # fmt: skip


def said(folder: Path, ids: list[int], vocab: int, **keys: Any) -> tuple[torch.Tensor, list[int], Any]:
    """Log-probabilities of all ids after the prompt, 12 greedy tokens, and what the worker says about itself."""
    params = SamplingParams(
        temperature=0.0, max_tokens=12, logprobs=0, logprob_ids=list(range(vocab)), detokenize=False
    )
    with LLM(folder, **{**COMMON, **keys}) as llm:
        (output,) = llm.generate([ids], params)
        first = (output.outputs[0].logprobs or ())[0]
        return torch.tensor([first[i] for i in range(vocab)]), list(output.outputs[0].token_ids), llm.info


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_log_probabilities_are_those_of_the_dequantized_weights_eager_and_captured(
    accelerator: Subject, family: str, kind: str, tmp_path: Path
) -> None:
    folder, keys, numbers = KINDS[kind](tmp_path, family)
    dtype, most = DTYPES[family]
    keys = {"backend": accelerator.name, "dtype": dtype, **keys}
    vocab = find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"]
    ids = prompt_of(vocab)
    logits = NaiveModel(numbers, schemes=tuple(evener_quant_schemes())).logits(ids)[-1].float()
    want, spread = logits.log_softmax(-1), float(logits.std())
    kept, _, _ = said(folder, ids, vocab, **keys, **{"infer.quant_activations": "keep"})
    rounded, eager, info = said(folder, ids, vocab, **keys, **{"infer.use_cuda_graph": False})
    again, captured, _ = said(folder, ids, vocab, **keys, **{"infer.use_cuda_graph": True})
    off, moved = (float((each - want).square().mean().sqrt()) / spread for each in (kept, rounded))
    print(f"{family} {kind}: off by {off:.4f} of the logits' spread, {moved:.4f} with rounded activations")
    assert off < most and moved < ROUNDED
    assert captured == eager and torch.allclose(again, rounded, atol=1e-5)
    assert not explain(from_overrides(str(folder), {**COMMON, **keys}))["dequantized"]
    memory = info.memory
    assert memory.measured_weights == memory.weights
