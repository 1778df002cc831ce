"""W4A8 and W4AFP8 checkpoints, from their files to log-probabilities on the CPU: those of transformers with the
dequantized weights and with activations that are rounded by the formulas in this file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_oracles import make_transformers
from family_runner import SMALL
from integer_files import Quantized, compressed_tensors, quantized
from safetensors.torch import load_file, save_file
from stored_models import KEPT, SIZES, greedy, prompt

from evener import LLM, SamplingParams
from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_formats.plugin import evener_quant_schemes
from evener_inspection.explanation import explain

GROUP = 32
LARGEST = {"int": 127.0, "float": 448.0}
#: How llm-compressor stores W4A8 and W4AFP8 (one number a byte), and how others do (eight in a word).
LAYOUTS = ("int-quantized", "pack-quantized")
#: Experts as SGLang's method stores them: two signed numbers a byte, the even column low; other matrices in FP8.
SGLANG = "w4afp8"


def one_a_byte(name: str, made: Quantized, symmetric: bool) -> dict[str, torch.Tensor]:
    """Tensors of the weight ``name`` in "int-quantized": signed numbers."""
    tensors = {name: (made.codes - 8).to(torch.int8), f"{name}_scale": made.scales.T.contiguous()}
    return tensors if symmetric else {**tensors, f"{name}_zero_point": (made.zeros - 8).T.contiguous().to(torch.int8)}


def two_a_byte(name: str, made: Quantized) -> dict[str, torch.Tensor]:
    """Tensors of an expert in "w4afp8"; the fixed scale of activations is of no use."""
    signed = (made.codes - 8) % 16
    pairs = (signed[:, ::2] + 16 * signed[:, 1::2]).to(torch.uint8).view(torch.int8)
    scales = {f"{name}_scale_inv": made.scales.T.float().contiguous()}
    return {name: pairs, **scales, f"{name.removesuffix('weight')}input_scale": torch.tensor([0.02]).bfloat16()}


def in_float8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of another matrix, which has one block, and its numbers."""
    scale = weight.abs().amax() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale_inv": scale.view(1, 1)}, stored.float() * scale


def checkpoint(folder: Path, family: str, layout: str, kind: str, symmetric: bool) -> tuple[Any, Path]:
    """transformers' model with the dequantized weights, and the folder with the quantized ones."""
    from transformers import AutoModelForCausalLM

    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family], "num_hidden_layers": 2}
    make_transformers(config, folder / "plain")
    stored, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "plain/model.safetensors").items():
        stored[name] = numbers[name] = weight
        if weight.dim() == 2 and not any(kept in name for kept in KEPT):
            rows, columns = weight.shape
            made = quantized(4, rows, columns, GROUP, symmetric=symmetric, scale=torch.bfloat16, seed=len(name))
            numbers[name] = made.values
            del stored[name]
            if layout == SGLANG and ".experts." not in name:
                tensors, numbers[name] = in_float8(name, weight)
                stored |= tensors
                continue
            if layout == SGLANG:
                stored |= two_a_byte(name, made)
                continue
            one = layout == LAYOUTS[0]
            stored |= one_a_byte(name, made, symmetric) if one else compressed_tensors(name, made, 4, symmetric, False)
    shutil.copytree(folder / "plain", folder / "stored")
    save_file(stored, folder / "stored/model.safetensors")
    weights = {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP,
        "actorder": None,
    }  # fmt: skip
    how = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": how}}
    settings = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "config_groups": groups}
    if layout == SGLANG:
        settings = {"quant_method": SGLANG, "group_size": GROUP}
    saved = json.loads((folder / "plain/config.json").read_text())
    (folder / "stored/config.json").write_text(json.dumps(saved | {"quantization_config": settings}))
    save_file(numbers, folder / "plain/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    return model, folder / "stored"


@contextmanager
def rounding(model: Any, kind: str, of: str = "proj") -> Iterator[None]:
    """Every product with a quantized weight of the model is of activations rounded with a scale a token."""
    linear, quantized_ones = F.linear, set[int]()
    for name, each in model.named_parameters():
        if of in name:
            quantized_ones.add(each.untyped_storage().data_ptr())

    def near_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.untyped_storage().data_ptr() not in quantized_ones or not x.numel():
            return linear(x, weight, bias)
        scale = x.abs().amax(-1, keepdim=True) / LARGEST[kind]
        codes = (x / scale).round() if kind == "int" else (x / scale).to(torch.float8_e4m3fn).float()
        return linear(codes * scale, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", near_linear)
        yield


def found_by_us(folder: Path, ids: list[int], vocab: int, **keys: Any) -> tuple[torch.Tensor, list[str]]:
    """Log-probabilities after the prompt, and what the manifest says about activations."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=0, logprob_ids=list(range(0, vocab, 3)), detokenize=False
    )
    with LLM(folder, **{**SMALL, **keys}) as llm:
        (output,) = llm.generate([ids], params)
        (found,) = output.outputs[0].logprobs or ()
        return torch.tensor([found[i] for i in range(0, vocab, 3)]), llm.info.manifest.activations


@pytest.mark.parametrize(
    ("family", "layout", "kind", "symmetric"),
    [("Qwen3", "int-quantized", "int", False), ("Qwen3Moe", SGLANG, "float", True),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (
         ("Qwen3Moe", "pack-quantized", "float", True),
         ("Qwen3", "int-quantized", "int", True), ("Qwen3", "pack-quantized", "float", True),
         ("Qwen3Moe", "int-quantized", "float", True)))],
)  # fmt: skip
def test_weights_stay_packed_and_activations_are_rounded_as_the_checkpoint_says(
    family: str, layout: str, kind: str, symmetric: bool, tmp_path: Path, one_thread: None
) -> None:
    model, folder = checkpoint(tmp_path, family, layout, kind, symmetric)
    ids, vocab = prompt(family), model.config.vocab_size

    def wanted() -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    exact = wanted()
    # Rounding takes longer than reading eight bits: such weights' activations stay as they are on the CPU.
    with rounding(model, kind, of="experts" if layout == SGLANG else "proj"):
        want = wanted()
    # Without rounding, the numbers are the dequantized weights'.
    torch.testing.assert_close(
        NaiveModel(folder, schemes=tuple(evener_quant_schemes())).logits(ids), exact, atol=1e-4, rtol=1e-4
    )
    got, told = found_by_us(folder, ids, vocab)
    want, exact = (each[-1].log_softmax(-1)[::3] for each in (want, exact))
    # A sum that another order rounds otherwise may move one element to its neighbour.
    off, effect = float((got - want).abs().max()), float((exact - want).abs().max())
    assert off < 0.05 and effect > 4 * off, (off, effect)
    storage = {"int": "int8", "float": "float8_e4m3fn"}[kind]
    told = [line for line in told if "uint4" in line]
    assert told and all(f"activations {storage}, a scale a token at 1.." in line for line in told)
    found = explain(from_overrides(str(folder), SMALL))
    assert found["packings"]["cpu.blocks"] == (4 if layout == SGLANG else 8) and not found["dequantized"]
    _, ready = build_controller(from_overrides(str(folder), SMALL))
    assert ready.info.memory.weights == found["memory"]["weights"]

    kept, told = found_by_us(folder, ids, vocab, **{"infer.quant_activations": "keep"})
    torch.testing.assert_close(kept, exact, atol=1e-4, rtol=1e-4)
    assert [line for line in told if "as they are" not in line] == []


@pytest.mark.parametrize(
    ("family", "layout", "kind"),
    [("Qwen3", "int-quantized", "int"),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (
         ("Qwen3", "pack-quantized", "float"), ("Qwen3Moe", "pack-quantized", "float"),
         ("Qwen3Moe", "int-quantized", "int"), ("Qwen3Moe", SGLANG, "float"), ("Mixtral", SGLANG, "float")))],
)  # fmt: skip
def test_two_ranks_cut_the_weights_and_give_the_tokens_of_one(
    family: str, layout: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    """With rounded activations, too: a rank finds the scale of a token from its own columns of it, which is finer than
    one rank's, so the logits are near, and the tokens the same."""
    _, folder = checkpoint(tmp_path, family, layout, kind, symmetric=True)
    request = NewRequest(id="a", prompt=prompt(family), max_tokens=12, sampling=Sampling(temperature=0.0))
    for keys in ({"infer.quant_activations": "keep"}, {}):
        config = from_overrides(str(folder), {**SMALL, **keys, "infer.tp_size": 2})
        want = greedy(folder, prompt(family), 12, **keys)
        with rank_threads(config) as (controller, executor):
            assert play(controller, [request]).tokens["a"] == want
            ranks = [rank.memory.weights for rank in executor.facts.info.ranks]
        whole = explain(from_overrides(str(folder), SMALL))["memory"]["weights"]
        assert max(ranks) < 0.8 * whole
        assert not explain(config)["dequantized"]
