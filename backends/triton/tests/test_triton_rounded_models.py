"""Checkpoints that say how activations are rounded, from their files to log-probabilities: those of transformers with
the dequantized weights, and activations that are rounded by the formulas in this file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import interpreted  # noqa: F401  (repairs the interpreter)
import pytest
import torch
import torch.nn.functional as F
import triton_host
from family_oracles import make_transformers
from safetensors.torch import load_file, save_file

from evener import LLM, SamplingParams
from evener_conformance.naive.model import find_architecture
from evener_conformance.reference.device import HostDevice

SIZES: dict[str, dict[str, Any]] = {
    "Qwen3": {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 32},
    "Qwen3Moe": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                 "moe_intermediate_size": 128},
}  # fmt: skip
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
FIXED = {"q_proj": 0.03, "k_proj": 0.02, "v_proj": 0.01, "gate_proj": 0.015, "up_proj": 0.025, "o_proj": 0.02,
         "down_proj": 0.04}  # fmt: skip
#: The scale with which rows are rounded before a merged weight: the largest of its parts'.
LARGEST = {"q_proj": 0.03, "k_proj": 0.03, "v_proj": 0.03, "gate_proj": 0.025, "up_proj": 0.025}
COUNT = 24


def compressed(kind: str, bits: str, **activations: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": bits, "strategy": "channel", "symmetric": True, "dynamic": False}
    how = {"num_bits": 8, "type": bits, "symmetric": True, **activations}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": how}
    return {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "config_groups": {"a": group}}


def four_bits(kind: str) -> dict[str, Any]:
    """The config of W4A8, or with "float" of W4AFP8, as llm-compressor writes it."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True, "dynamic": False}
    how = {"num_bits": 8, "type": kind, "symmetric": True, **TOKEN}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": how}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
            "config_groups": {"a": group}}  # fmt: skip


TOKEN, TENSOR = {"dynamic": True, "strategy": "token"}, {"dynamic": False, "strategy": "tensor"}
#: (how weights are stored, columns of a token that share a scale, the config).
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fp8 blocks": ("blocks", 128, {"quant_method": "fp8", "activation_scheme": "dynamic",
                                   "weight_block_size": [128, 128]}),
    "fp8 static": ("tensor", -1, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 rows": ("rows", 0, compressed("float-quantized", "float", **TOKEN)),
    "fp8 rows, static": ("rows", -1, compressed("float-quantized", "float", **TENSOR)),
    "int8 rows": ("int8", 0, compressed("int-quantized", "int", **TOKEN)),
    "int8 rows, static": ("int8", -1, compressed("int-quantized", "int", **TENSOR)),
    "modelslim": ("int8", 0, {}),
    "w4a8": ("int4 int8", 0, four_bits("int")), "w4afp8": ("int4 e4m3", 0, four_bits("float")),
}  # fmt: skip


def stored(weight: torch.Tensor, how: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(the tensors by what follows the weight's name, its numbers)."""
    if how == "blocks":
        rows, columns = weight.shape
        padded = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
        scale = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        return {"": codes, "_scale_inv": scale}, codes.float() * spread
    if how.startswith("int4"):
        groups = weight.unflatten(1, (-1, 64))
        scale = (groups.abs().amax(-1) / 7.5).bfloat16()
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8)
        return {"": codes.flatten(1), "_scale": scale}, (codes.float() * scale.float()[..., None]).flatten(1)
    scale = weight.abs().max() if how == "tensor" else weight.abs().amax(1, keepdim=True)
    scale = scale / (127 if how == "int8" else 448)
    codes = (weight / scale).round().to(torch.int8) if how == "int8" else (weight / scale).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale}, codes.float() * scale


def near(x: torch.Tensor, kind: str, fixed: float) -> torch.Tensor:
    """Activations [..., columns] as the formats' descriptions say."""
    how, group, _ = KINDS[kind]
    integers = how.endswith("int8")
    largest = 127.0 if integers else 448.0
    if group < 0:
        scale = torch.full_like(x, fixed)
    elif group == 0:
        scale = (x.abs().amax(-1, keepdim=True) / largest).expand_as(x)
    else:
        pieces = [piece.abs().amax(-1, keepdim=True).expand_as(piece) for piece in x.split(group, -1)]
        scale = torch.cat(pieces, -1) / largest
    codes = (x / scale).clamp(-largest, largest)
    return (codes.round() if integers else codes.to(torch.float8_e4m3fn).float()) * scale


def checkpoint(folder: Path, family: str, kind: str, layers: int = 1) -> tuple[Any, Mapping[str, str]]:
    """Write it; transformers' model with the dequantized weights, and the names of those that are quantized."""
    from transformers import AutoModelForCausalLM

    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family], "num_hidden_layers": layers}
    make_transformers(config, folder / "plain")
    tensors, (how, group, settings) = load_file(folder / "plain/model.safetensors"), KINDS[kind]
    written, numbers, description = dict[str, torch.Tensor](), dict[str, torch.Tensor](), {"model_quant_type": "W8A8"}
    for name, weight in tensors.items():
        written[name] = numbers[name] = weight
        description[name] = "FLOAT"
        if weight.dim() == 2 and not any(kept in name for kept in KEPT):
            made, numbers[name] = stored(weight, how)
            if kind == "modelslim":
                scale = made["_scale"]
                made = {"": made[""], "_scale": scale, "_offset": torch.zeros_like(scale)}
                description |= {name + end: "W8A8_DYNAMIC" for end in made}
            written |= {name + end: tensor for end, tensor in made.items()}
            if group < 0:
                written[name.replace(".weight", ".input_scale")] = torch.tensor(FIXED[name.split(".")[-2]])
    shutil.copytree(folder / "plain", folder / "stored")
    save_file(written, folder / "stored/model.safetensors")
    saved = json.loads((folder / "plain/config.json").read_text())
    saved |= {"quantization_config": settings} if settings else {}
    (folder / "stored/config.json").write_text(json.dumps(saved))
    if kind == "modelslim":
        (folder / "stored/quant_model_description.json").write_text(json.dumps(description))
    save_file(numbers, folder / "plain/model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval(), {name: name.split(".")[-2] for name in written if name.endswith("proj.weight")}


@contextmanager
def rounding(model: Any, kind: str) -> Iterator[list[int]]:
    """Every product with a quantized weight of the model is of rounded activations; counts them."""
    linear, counted, owners = F.linear, [0], dict[int, float]()
    for name, each in model.named_parameters():
        if "proj" in name:  # experts are one tensor for each projection, or for two of them
            module = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
            module = "gate_proj" if module == "gate_up_proj" else module
            owners[each.untyped_storage().data_ptr()] = LARGEST.get(module, FIXED[module])

    def near_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        fixed = owners.get(weight.untyped_storage().data_ptr())
        if fixed is None or not x.numel():
            return linear(x, weight, bias)
        counted[0] += 1
        return linear(near(x, kind, fixed), weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", near_linear)
        yield counted


def able(index: int) -> HostDevice:
    device = HostDevice(index)
    device.capabilities = replace(device.capabilities, features=frozenset({"fp8", "int8"}))
    return device


def found_by_us(folder: Path, ids: list[int], vocab: int, **keys: Any) -> tuple[torch.Tensor, list[str]]:
    """Log-probabilities of the first tokens after the prompt, and what the manifest says about activations."""
    some = list(range(0, vocab, 1 + vocab // COUNT))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_ids=some, detokenize=False)
    common: dict[str, Any] = {
        "dtype": "float32", "infer.max_seq_len": 64, "infer.max_reqs": 2, "infer.step_tokens": 32,
        "infer.kv_memory": 1 << 20, "backend": "interpreted",
    }  # fmt: skip
    with LLM(folder, **common, **keys) as llm:
        (output,) = llm.generate([ids], params)
        (found,) = output.outputs[0].logprobs or ()
        return torch.tensor([found[i] for i in some]), llm.info.manifest.activations


@pytest.fixture
def rounding_backend(interpreted_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, on a device that multiplies in FP8 and int8."""
    monkeypatch.setattr(triton_host, "HostDevice", able)


@pytest.mark.parametrize(
    ("family", "kind", "layers"),
    [("Qwen3Moe", "fp8 blocks", 1),
     *(pytest.param(*case, 1, marks=pytest.mark.slow)
       for case in (("Qwen3", "modelslim"), ("Qwen3", "w4afp8"), ("Qwen3Moe", "w4a8"))),
     *(pytest.param("Qwen3", kind, 2, marks=pytest.mark.slow) for kind in KINDS),
     *(pytest.param("Qwen3Moe", kind, 2, marks=pytest.mark.slow) for kind in ("fp8 blocks", "w4a8"))],
)  # fmt: skip
def test_a_prompt_has_the_log_probabilities_of_rounded_activations(
    family: str, kind: str, layers: int, tmp_path: Path, rounding_backend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Products of few rows, to which those of the last layer would belong, are not rounded.
    monkeypatch.setattr("evener.engine.worker.last_rows.last_call", lambda model: None)
    model, _ = checkpoint(tmp_path, family, kind, layers)
    vocab = model.config.vocab_size
    ids = [(7 * i * i + 3 * i + 1) % vocab for i in range(20)]
    some = list(range(0, vocab, 1 + vocab // COUNT))

    def wanted() -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[some]

    exact = wanted()
    with rounding(model, kind) as counted:
        want = wanted()
    assert counted[0] >= 7 * layers, "every product"
    got, told = found_by_us(tmp_path / "stored", ids, vocab)
    # A sum that another order rounds otherwise may move one element to its neighbour, a step of 6 %; the second layer
    # spreads it.
    off, effect = float((got - want).abs().max()), float((exact - want).abs().max())
    assert off < 0.05 and effect > (8 if layers == 1 else 4) * off, (off, effect)
    # Experts are rounded in smaller steps than dense layers, and with four bits all are at any size.
    wanted_rows = ["at 17..32 tokens", *(["at 5..32 tokens"] if family == "Qwen3Moe" else [])]
    wanted_rows = ["at 1..32 tokens"] if kind.startswith("w4") else wanted_rows
    assert [row[row.index("at ") :] for row in told] == wanted_rows


@pytest.mark.slow
def test_activations_are_kept_where_the_operator_asks(tmp_path: Path, rounding_backend: None) -> None:
    model, _ = checkpoint(tmp_path, "Qwen3", "fp8 blocks")
    vocab = model.config.vocab_size
    ids = [(7 * i * i + 3 * i + 1) % vocab for i in range(20)]
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[:: 1 + vocab // COUNT]
    got, told = found_by_us(tmp_path / "stored", ids, vocab, **{"infer.quant_activations": "keep"})
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert told == []
