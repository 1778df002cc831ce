"""ModelSlim's folders, from their files to greedy tokens: those of transformers with the dequantized weights, on one
rank and on two, with the weights as they are stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_convert.command import convert
from family_oracles import Logits, logits_of, make_transformers
from family_runner import ANSWER, SMALL
from safetensors.torch import save_file
from slim_files import Stored, description, layer, plain_tensors, write_folder
from stored_models import KEPT, SIZES, greedy, prompt

from evener.config import from_overrides
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import CheckpointError, ConfigError
from evener_conformance.naive.model import find_architecture
from evener_conformance.oracle import Comparison, compare_greedy
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain

Store = Callable[[str, int, int], tuple[str, Stored]]


def one(kind: str, **how: Any) -> Store:
    return lambda name, rows, columns: (kind, layer(kind, name, rows, columns, **how))


def mixed(name: str, rows: int, columns: int) -> tuple[str, Stored]:
    """The parts of merged layers differ: eight bits with and without offsets, four bits, and plain."""
    if "k_proj" in name:
        return "W8A16", layer("W8A16", name, rows, columns, groups=2, shifted=True, dtype=torch.bfloat16)
    if "v_proj" in name:
        values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5
        return "FLOAT", ({name: values}, values)
    kind = "W4A8_DYNAMIC" if "up_proj" in name else "W8A8_DYNAMIC"
    return kind, layer(kind, name, rows, columns)


KINDS: dict[str, Store] = {
    "w8a8": one("W8A8", product="float32"), "w8a8 bits": one("W8A8", product="bits"),
    "w8a8_dynamic": one("W8A8_DYNAMIC"), "w8a16 groups": one("W8A16", groups=2, shifted=True, dtype=torch.float16),
    "w4a8": one("W4A8_DYNAMIC"), "w4a16": one("W4A16", groups=2, shifted=True, dtype=torch.bfloat16), "mixed": mixed,
}  # fmt: skip


def checkpoint(folder: Path, family: str, kind: str, files: int = 1) -> tuple[Logits, Path]:
    """What transformers computes with the dequantized weights, and the folder with the quantized ones."""
    from transformers import AutoModelForCausalLM

    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family], "num_hidden_layers": 2}
    make_transformers(config, folder / "plain")
    stored, numbers, kinds = {}, {}, {}
    for name, weight in plain_tensors(folder / "plain").items():
        if weight.dim() != 2 or any(kept in name for kept in KEPT):
            stored[name] = numbers[name] = weight
        else:
            kinds[name], (made, numbers[name]) = KINDS[kind](name, *weight.shape)
            stored |= made
    shutil.copytree(folder / "plain", folder / "stored")
    write_folder(folder / "stored", stored, description(stored, kinds), files)
    save_file(numbers, folder / "plain/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()
    return logits_of(model), folder / "stored"


@pytest.mark.parametrize(
    ("family", "kind"), [("Qwen3", kind) for kind in KINDS] + [("Qwen3Moe", "w4a8"), ("Qwen3Moe", "mixed")]
)
def test_tokens_are_those_of_the_dequantized_weights(family: str, kind: str, tmp_path: Path, one_thread: None) -> None:
    oracle, folder = checkpoint(tmp_path, family, kind, files=2 if kind == "mixed" else 1)
    ids, result = prompt(family), Comparison()
    answer = greedy(folder, ids, ANSWER)
    compare_greedy(oracle, [ids], [answer], lambda tokens, n: greedy(folder, list(tokens), n), result)
    result.check()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("w8a8", "cpu.stored"), ("w8a8_dynamic", "cpu.stored"), ("w4a8", "cpu.stored"), ("w8a16 groups", "cpu.blocks"),
     ("w4a16", "cpu.blocks")],
)  # fmt: skip
@pytest.mark.parametrize("family", [pytest.param("Qwen3", marks=pytest.mark.slow), "Qwen3Moe"])
def test_the_cpu_keeps_the_weights_quantized(family: str, kind: str, layout: str, tmp_path: Path) -> None:
    _, folder = checkpoint(tmp_path, family, kind)
    found = explain(from_overrides(str(folder), SMALL))
    # QKV, output, gate and up, and down of two layers.
    assert found["packings"][layout] == 8 and not found["dequantized"]


@pytest.mark.parametrize(("family", "kind"), [("Qwen3", "mixed"), ("Qwen3", "w8a8 bits"), ("Qwen3Moe", "w4a8")])
def test_two_ranks_cut_the_weights_and_give_the_same_tokens(
    family: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    _, folder = checkpoint(tmp_path, family, kind)
    request = NewRequest(id="a", prompt=prompt(family), max_tokens=12, sampling=Sampling(temperature=0.0))
    with rank_threads(from_overrides(str(folder), {**SMALL, "infer.tp_size": 2})) as (controller, _):
        assert play(controller, [request]).tokens["a"] == greedy(folder, prompt(family), 12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_converted_folder_gives_the_same_tokens(ranks: int, tmp_path: Path, one_thread: None) -> None:
    _, folder = checkpoint(tmp_path, "Qwen3", "w8a8 bits", files=2)
    keys = {"infer.tp_size": ranks}
    convert(from_overrides(str(folder), keys), tmp_path / "made")
    request = NewRequest(id="a", prompt=prompt("Qwen3"), max_tokens=6, sampling=Sampling(temperature=0.0))
    with rank_threads(from_overrides(str(tmp_path / "made"), {**SMALL, **keys})) as (controller, _):
        assert play(controller, [request]).tokens["a"] == greedy(folder, prompt("Qwen3"), 6)


def edited(folder: Path, tensors: dict[str, torch.Tensor], **about: Any) -> Path:
    """The folder with more tensors, in a file of their own, and more in its description."""
    if tensors:
        save_file(tensors, folder / "quant_model_weights-more.safetensors")
    file = folder / "quant_model_description.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **about, **dict.fromkeys(tensors, "FLOAT")}))
    return folder


def test_norms_may_have_biases_of_zero_and_no_others(tmp_path: Path, one_thread: None) -> None:
    _, folder = checkpoint(tmp_path, "Qwen3", "w8a8_dynamic")
    before, stem = greedy(folder, prompt("Qwen3"), 4), "model.layers.0.input_layernorm"
    weight = plain_tensors(tmp_path / "plain")[f"{stem}.weight"]
    more = {f"{stem}.bias": torch.zeros(64), f"{stem}.module.bias": torch.zeros(64), f"{stem}.module.weight": weight}
    assert greedy(edited(folder, more), prompt("Qwen3"), 4) == before
    for name, problem in ((f"{stem}.bias", "is not zero"), (f"{stem}.module.weight", "differs")):
        edited(folder, {**more, name: more[name] + 1})
        with pytest.raises(CheckpointError, match=f"{name} in .* {problem}.* quantize the original model again"):
            greedy(folder, prompt("Qwen3"), 1)


def test_unsupported_tensors_are_refused_with_name_and_fix(tmp_path: Path) -> None:
    _, folder = checkpoint(tmp_path, "Qwen3", "w8a8_dynamic")
    config = from_overrides(str(folder), SMALL)
    weight, scale = "model.layers.1.self_attn.o_proj.weight", "model.layers.0.self_attn.k_proj.kv_cache_scale"
    usual = json.loads((folder / "quant_model_description.json").read_text())[weight]
    for about, message in (
        ({scale: "W8A8"}, f"{scale}.*C8.*infer.kv_dtype=int8"), ({weight: "W4A4_DYNAMIC"}, f"{weight}.*quant=int8"),
        ({weight: "W8A8S"}, f"{weight} is of the kind 'W8A8S'"), ({weight: "FLOAT"}, f"{weight} is stored as int8"),
        ({"metadata": {"quarot": {"heads_rotation": {"layers": ["layers.3.o_proj"]}}}}, "layers.3.o_proj.*QuaRot"),
    ):  # fmt: skip
        shutil.copytree(folder, tmp_path / "edited", dirs_exist_ok=True)
        with pytest.raises(CheckpointError, match=message):
            explain(from_overrides(str(edited(tmp_path / "edited", {}, **about)), SMALL))
    assert usual == "W8A8_DYNAMIC"
    with pytest.raises(ConfigError, match="quantized already"):
        explain(from_overrides(str(folder), {**SMALL, "quant": "q8_0"}))
    assert explain(config)["model"]["problem"] is None


def test_missing_weight_files_are_named(tmp_path: Path) -> None:
    _, folder = checkpoint(tmp_path, "Qwen3", "w8a8_dynamic", files=2)
    (folder / "quant_model_weight_w8a8-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 files that .*00002-of-00002"):
        explain(from_overrides(str(folder), SMALL))
