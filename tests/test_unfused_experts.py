"""Llama 4 and gpt-oss store the experts of a layer in one tensor. Quantized checkpoints have them one by one: from such
files to greedy tokens, those of transformers with the dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_convert.command import convert
from family_oracles import Logits, logits_of, make_transformers
from family_runner import ANSWER, SMALL, assert_naive_logits
from safetensors.torch import load_file, save_file
from stored_models import greedy, prompt
from test_integers_end_to_end import KINDS, Stored

from evener.config import from_overrides
from evener.contracts.checkpoint import Checkpoint
from evener.contracts.conversion.views import ViewRequest
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.kit.views import view_problems
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.oracle import Comparison, compare_greedy
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_formats.plugin import evener_quant_schemes
from evener_models.gpt_oss import GptOssForCausalLM
from evener_models.gpt_oss_experts import GptOssExperts
from evener_models.llama4 import Llama4ForCausalLM
from evener_models.llama4_experts import Llama4Experts

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_hidden_layers": 2}  # fmt: skip


def fp8(name: str, shape: Any) -> Stored:
    """As llm-compressor stores FP8 with dynamic activations: a scale for each row."""
    random = torch.Generator().manual_seed(len(name))
    weight = (torch.randn(*shape, generator=random) * 50).to(torch.float8_e4m3fn)
    scale = (torch.rand(shape[0], 1, generator=random) / 200 + 1 / 800).bfloat16()
    return {name: weight, f"{name}_scale": scale}, weight.float() * scale.float()


#: Activations are not rounded where the config does not say so; these tests are about the weights.
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
LLAMA_KINDS: dict[str, tuple[Callable[[str, Any], Stored], dict[str, Any]]] = {
    **{kind: KINDS[kind] for kind in ("packed 4", "gptq 4", "awq", "nf4", "nvfp4 packed")},
    "fp8": (fp8, {"quant_method": "compressed-tensors", "format": "float-quantized",
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8}}}),
}  # fmt: skip


def fp8_whole(name: str, shape: Any) -> Stored:
    """As ModelOpt stores FP8: a scale for the matrix."""
    tensors, _ = fp8(name, shape)
    scale = torch.tensor(1 / 400)
    return {name: tensors[name], f"{name}_scale": scale}, tensors[name].float() * scale


def unlike(store: Callable[[str, Any], Stored], name: str, shape: Any, seed: int) -> Stored:
    """What ``store`` makes for ``name``, with numbers of their own for each ``seed``: it draws by a name's length."""
    alias = "x" * (40 + seed)
    tensors, values = store(f"{alias}.weight", shape)
    return {name.removesuffix(".weight") + key.removeprefix(alias): each for key, each in tensors.items()}, values


def check(oracle: Logits, folder: Path, family: str) -> None:
    """The tokens of the engine are those of ``oracle``."""
    result, ids = Comparison(), prompt(family)
    answer = greedy(folder, ids, ANSWER)
    compare_greedy(oracle, [ids], [answer], lambda tokens, n: greedy(folder, list(tokens), n), result)
    result.check()


def dequantized(folder: Path) -> Any:
    """What the engine widened when it loaded the folder."""
    return build_controller(from_overrides(str(folder), SMALL))[1].info.manifest.dequantized


def write(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"quantization_config": settings}))


def llama4(folder: Path, kind: str) -> Logits:
    """A checkpoint with ``experts.3.gate_proj.*`` in place of ``experts.gate_up_proj``, as llm-compressor and GPTQModel
    write it; attention and the shared expert are quantized too."""
    config = {**find_architecture("Llama4ForCausalLM").tiny_config(), **SIZES, "intermediate_size_mlp": 128}
    model, (store, settings) = make_transformers(config, folder), LLAMA_KINDS[kind]
    stored = dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            whole = list[torch.Tensor]()
            for number, one in enumerate(weight.mT):
                words = {"gate_proj": 0, "up_proj": 1} if "gate_up" in name else {"down_proj": 2}
                rows = one.shape[0] // len(words)
                made = [
                    unlike(store, f"{stem}.{number}.{word}.weight", (rows, one.shape[1]), 3 * number + at)
                    for word, at in words.items()
                ]
                stored |= {key: tensor for tensors, _ in made for key, tensor in tensors.items()}
                whole.append(torch.cat([values for _, values in made]))
            model.get_parameter(name).data.copy_(torch.stack(whole).mT)
        elif weight.dim() == 2 and not any(kept in name for kept in ("embed_tokens", "lm_head", "router")):
            tensors, values = store(name, weight.shape)
            stored |= tensors
            model.get_parameter(name).data.copy_(values)
        else:
            stored[name] = weight
    write(folder, stored, settings)
    return logits_of(model)


@pytest.mark.parametrize("kind", LLAMA_KINDS)
def test_llama_4_with_experts_one_by_one_gives_the_tokens_of_the_dequantized_weights_and_stays_packed(
    kind: str, tmp_path: Path, one_thread: None
) -> None:
    oracle, ids = llama4(tmp_path, kind), prompt("Llama4")
    assert_naive_logits(NaiveModel(tmp_path, schemes=tuple(evener_quant_schemes())), oracle(ids), ids)
    check(oracle, tmp_path, "Llama4")
    assert dequantized(tmp_path) == []


def in_one_tensor(tensors: dict[str, torch.Tensor], stem: str) -> dict[str, torch.Tensor]:
    """Tensors of experts one by one as ModelOpt stores them, all of a layer in one: columns first, gate before up, and
    scales of whole matrices once."""
    for word, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for end in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            found = [[tensors.pop(f"{stem}.{number}.{part}.{end}", None) for part in parts] for number in range(5)]
            if (first := found[0][0]) is None:
                continue
            name = f"{stem}.{word}" + ("" if end == "weight" else f"_{end}")
            stacked = [torch.cat([p for p in pair if p is not None]) for pair in found] if first.dim() else []
            tensors[name] = torch.stack(stacked).mT.contiguous() if stacked else first
    return tensors


MODELOPT = {
    "nvfp4": KINDS["nvfp4"], "fp8": (fp8_whole, {"quant_method": "modelopt", "quant_algo": "FP8"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELOPT)
def test_llama_4_of_modelopt_with_all_experts_in_one_tensor_gives_the_tokens_of_the_dequantized_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setitem(LLAMA_KINDS, kind, MODELOPT[kind])
    oracle = llama4(tmp_path, kind)
    tensors = in_one_tensor(load_file(tmp_path / "model.safetensors"), "model.layers.1.feed_forward.experts")
    assert not any(".experts.0." in name for name in tensors)
    assert tensors["model.layers.1.feed_forward.experts.gate_up_proj_weight_scale"].dim() == (
        3 if kind == "nvfp4" else 0
    )
    save_file(tensors, tmp_path / "model.safetensors")
    view = Llama4Experts.of(ViewRequest(open_checkpoint(tmp_path), Llama4ForCausalLM))
    assert view is not None and list(view_problems(view)) == []
    check(oracle, tmp_path, "Llama4")
    assert dequantized(tmp_path) == []


def gpt_oss(folder: Path, plain: bool = False) -> tuple[Logits, dict[str, torch.Tensor]]:
    """A checkpoint with ``experts.gate_up_projs.3.*``, as Unsloth writes it, and its tensors. With ``plain`` only the
    attention is in NF4."""
    # Two ranks can cut blocks of 64 columns.
    config = {**find_architecture("GptOssForCausalLM").tiny_config(), **SIZES, "head_dim": 32, "intermediate_size": 128}
    config["layer_types"] = config["layer_types"][:2]
    model, (store, settings) = make_transformers(config, folder), KINDS["nf4"]
    for name, parameter in model.named_parameters():
        if "bias" in name:  # random ones, so that their order matters
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    stored = dict[str, torch.Tensor]()
    for name, weight in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        if stem.endswith("experts"):
            word, bias = end.removesuffix("_bias"), end.endswith("_bias")
            whole = list[torch.Tensor]()
            for number, one in enumerate(weight):
                key = f"{stem}.{word}s.{number}.{'bias' if bias else 'weight'}"
                made = (
                    ({key: one}, one)
                    if bias
                    else ({key: one.T}, one.T)
                    if plain
                    else unlike(store, key, one.T.shape, number)
                )
                stored |= made[0]
                whole.append(made[1] if bias else made[1].T)
            weight.copy_(torch.stack(whole))
        elif "self_attn" in name and weight.dim() == 2:
            made = store(name, weight.shape)
            stored |= made[0]
            weight.copy_(made[1])
        else:
            stored[name.replace(".router.", ".router.linear.")] = weight.clone()
    write(folder, stored, settings)
    return logits_of(model), stored


@pytest.mark.parametrize("plain", [False, True])
def test_gpt_oss_as_unsloth_stores_it_gives_the_tokens_of_the_dequantized_weights_and_stays_packed(
    plain: bool, tmp_path: Path, one_thread: None
) -> None:
    oracle, _ = gpt_oss(tmp_path, plain)
    view = GptOssExperts.of(ViewRequest(open_checkpoint(tmp_path), GptOssForCausalLM))
    assert view is not None and list(view_problems(view)) == []
    check(oracle, tmp_path, "GptOss")
    assert dequantized(tmp_path) == []


def test_two_ranks_and_converted_files_give_the_same_tokens(tmp_path: Path, one_thread: None) -> None:
    gpt_oss(tmp_path)
    (tmp_path / "llama").mkdir()
    llama4(tmp_path / "llama", "packed 4")
    for folder, family in ((tmp_path, "GptOss"), (tmp_path / "llama", "Llama4")):
        expected = greedy(folder, prompt(family), 12)
        convert(from_overrides(str(folder), {}), folder / "made")
        assert greedy(folder / "made", prompt(family), 12) == expected
        request = NewRequest(id="a", prompt=prompt(family), max_tokens=12, sampling=Sampling(temperature=0.0))
        with rank_threads(from_overrides(str(folder), {**SMALL, "infer.tp_size": 2})) as (controller, _):
            assert play(controller, [request]).tokens["a"] == expected


def test_a_missing_expert_and_a_missing_bias_of_gpt_oss_are_named(tmp_path: Path) -> None:
    _, stored = gpt_oss(tmp_path, plain=True)
    for lost, named in (
        ("gate_up_projs.2.weight", "experts.2.gate_up_proj.weight"), ("down_projs.1.bias", "experts.down_proj_bias"),
    ):  # fmt: skip
        tensors = {name: each for name, each in stored.items() if not name.endswith(f"0.mlp.experts.{lost}")}
        save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"missing: model.layers.0.mlp.{named}"):
            greedy(tmp_path, [1, 2], 1)


def test_gpt_oss_with_gate_and_up_apart_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    _, stored = gpt_oss(tmp_path, plain=True)
    stored["model.layers.0.mlp.experts.0.gate_proj.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
    save_file({name: each.contiguous() for name, each in stored.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"two weights, and evener reads gpt-oss only with .* MXFP4"):
        greedy(tmp_path, [1, 2], 1)


def test_more_experts_than_a_model_has_are_refused_before_their_names_are_made(tmp_path: Path) -> None:
    class Huge(Checkpoint):
        path, config = tmp_path, {}  # type: ignore[assignment]
        headers = {  # noqa: RUF012
            "a.feed_forward.experts.down_proj": ("uint8", (1 << 40, 1, 1)),
            "a.feed_forward.experts.down_proj_weight_scale": ("float32", ()),
        }  # fmt: skip

        def text(self, name: str) -> None:
            return None

        def tensor(self, name: str) -> torch.Tensor:
            raise AssertionError(name)

    view = Llama4Experts.of(ViewRequest(Huge(), Llama4ForCausalLM))
    assert view is not None
    with pytest.raises(CheckpointError, match="more experts than a Llama 4 has; fetch the files again"):
        _ = view.headers
