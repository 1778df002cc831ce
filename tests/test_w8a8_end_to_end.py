"""W8A8 checkpoints in int8, static and dynamic, from their files to log-probabilities on the CPU: those of transformers
with the dequantized weights, and with activations that are rounded by the formulas in this file."""

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
from safetensors.torch import load_file, save_file
from stored_models import KEPT, SIZES

from evener import LLM, SamplingParams
from evener_backend_cpu.device import CpuDevice
from evener_conformance.naive.model import find_architecture

#: Each has more tokens than the CPU multiplies with activations as they are.
PROMPTS = [[step * number % 89 + 1 for number in range(40)] for step in (7, 11, 17, 23)]
#: The numbers at which activations are cut off, by the end of a weight's name. Parts of a merged layer differ, and the
#: largest is theirs.
FIXED = {
    "q_proj": 0.4,
    "k_proj": 0.6,
    "v_proj": 0.5,
    "o_proj": 0.5,
    "gate_proj": 0.8,
    "up_proj": 0.6,
    "down_proj": 2.0,
}
#: What multiplies one activation of each token, which no weight reads: the others have few elements.
OUTLIER = 8.0
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def largest(end: str) -> float:
    """The number at which the activations of a weight are cut off: the largest of its layer's parts."""
    parts = next((each for each in MERGED if end in each), (end,))
    return max(FIXED[part] for part in parts)


def checkpoint(folder: Path, static: bool) -> tuple[Any, Path]:
    """transformers' model with the dequantized weights, and the folder with those that llm-compressor would store."""
    from transformers import AutoModelForCausalLM

    config = {**find_architecture("Qwen3ForCausalLM").tiny_config(), **SIZES["Qwen3"], "num_hidden_layers": 2}
    make_transformers(config, folder / "plain")
    stored, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "plain/model.safetensors").items():
        if name.endswith("layernorm.weight"):
            weight[0] *= OUTLIER
        if any(name.endswith(f"{end}.weight") for ends in MERGED for end in ends):
            weight[:, 0] = 0
        stored[name] = numbers[name] = weight
        if weight.dim() == 2 and not any(kept in name for kept in KEPT):
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            stored[name] = (weight / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            numbers[name] = stored[name].float() * scale
            if static:
                end = name.split(".")[-2]
                stored[f"{name.removesuffix('weight')}input_scale"] = torch.tensor([FIXED[end] / 127])
    shutil.copytree(folder / "plain", folder / "stored")
    save_file(stored, folder / "stored/model.safetensors")
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "tensor" if static else "token", "dynamic": not static},
    }  # fmt: skip
    settings = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    saved = json.loads((folder / "plain/config.json").read_text())
    (folder / "stored/config.json").write_text(json.dumps(saved | {"quantization_config": settings}))
    save_file(numbers, folder / "plain/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32, attn_implementation="eager")
    return model.eval(), folder / "stored"


@contextmanager
def rounding(model: Any, static: bool) -> Iterator[None]:
    """Every product with a quantized weight of the model is of rounded activations, but for the last layer's MLP: the
    engine computes that of the last token alone, a small step, in which activations are kept."""
    linear = F.linear
    ends = {
        each.untyped_storage().data_ptr(): name.split(".")[-2]
        for name, each in model.named_parameters() if "proj" in name and "layers.1.mlp" not in name
    }  # fmt: skip

    def near_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        end = ends.get(weight.untyped_storage().data_ptr())
        if end is None:
            return linear(x, weight, bias)
        scale = torch.tensor(largest(end) / 127) if static else x.abs().amax(-1, keepdim=True) / 127
        return linear((x / scale).round().clamp(-127, 127) * scale, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", near_linear)
        yield


def found_by_us(folder: Path, vocab: int, **keys: Any) -> tuple[torch.Tensor, list[str]]:
    """Log-probabilities after each prompt, and what the manifest says about activations."""
    ids = list(range(0, vocab, 3))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_ids=ids, detokenize=False)
    with LLM(folder, **{**SMALL, "dtype": "bfloat16", **keys}) as llm:
        rows = [llm.generate([prompt], params)[0].outputs[0].logprobs for prompt in PROMPTS]
        return torch.tensor([[row[0][i] for i in ids] for row in rows if row]), llm.info.manifest.activations


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Their mean difference."""
    return float((one - other).abs().mean())


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_a_prompt_is_computed_with_int8_activations_as_the_checkpoint_says(
    static: bool, tmp_path: Path, one_thread: None
) -> None:
    model, folder = checkpoint(tmp_path, static)

    def wanted() -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor(PROMPTS)).logits[:, -1].log_softmax(-1)[:, ::3]  # type: ignore[no-any-return]

    exact = wanted()
    with rounding(model, static):
        near = wanted()
    got, told = found_by_us(folder, model.config.vocab_size)
    kept, told_kept = found_by_us(folder, model.config.vocab_size, **{"infer.quant_activations": "keep"})
    assert 2 * apart(kept, exact) < apart(kept, near)
    assert [line for line in told_kept if "as they are" not in line] == []
    if {"amx_int8", "avx512_vnni"} & CpuDevice(0, {}).capabilities.features:
        # bfloat16 moves an element to its neighbour now and then. What fixed scales cut off, it does not change.
        assert (10 if static else 1) * apart(got, near) < apart(got, exact)
        scale = "a fixed scale" if static else "a scale a token"
        assert told and all(f"activations int8, {scale} at 17.." in line for line in told), told
    else:  # without instructions for int8, rounding would save nothing
        assert torch.equal(got, kept) and all("as they are" in line for line in told)
