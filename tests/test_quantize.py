"""``evener quantize``: what it writes is read by the engine and, by the published rule, by transformers; it is
closer to the model than rounding to nearest; it works one layer at a time, and goes on where it was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evener_convert.source import open_source
from evener_quantize.chosen import choose
from evener_quantize.command import read_arguments, settings_of
from evener_quantize.driver import quantize
from evener_quantize.folded import fold_scales
from evener_quantize.layer import LayerMaker
from evener_quantize.observed import Inputs, Observer
from evener_quantize.rounding import Grid, nearest
from evener_quantize.settings import Settings
from evener_quantize.stage import Stage, stage_config
from evener_quantize.written import tensors_of
from family_oracles import logits_of, make_transformers
from safetensors.torch import load_file, save_file
from source_tree import ROOT

from evener.backend_search import BackendSearch
from evener.cli.main import main
from evener.config import from_overrides
from evener.errors import ConfigError, EvenerError
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from evener_formats.plugin import evener_quant_schemes

TEXT = (ROOT / "LICENSE").read_text()[:3000]
SIZES: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 3, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
#: What differs in a family.
MORE: Mapping[str, Mapping[str, Any]] = {
    "Gemma3": {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
                 "mlp_only_layers": []},
    "Qwen2Moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [],
                 "shared_expert_intermediate_size": 128, "num_key_value_heads": 4},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "DeepseekV3": {"num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 32, "q_lora_rank": 32,
                   "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4,
                   "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}  # fmt: skip
GPTQ = Settings("gptq", 4, 32, tokens=1200, window=128)
AWQ = Settings("awq", 4, 32, symmetric=False, order="none", tokens=1200, window=128)
#: Rows of AWQ's words, as AutoAWQ's unpacking orders them.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def model(folder: Path, family: str = "Qwen2", **more: Any) -> Path:
    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES, **MORE.get(family, {}), **more}
    make_transformers(config, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "norm" in name and len(tensor) == 64:
            tensor[::9] += 5  # channels that are larger than the others, as real models have them
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return write_tiny_tokenizer(folder)


def made(source: Path, result: Path, settings: Settings, **keys: Any) -> Path:
    quantize(from_overrides(str(source), {"backend": "cpu", **keys}), result, settings, TEXT)
    return result


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers [rows, n] of int32 words [rows, n * bits / 32]: a stream of bits, the lowest first."""
    stream = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
    return torch.tensor(stream.reshape(len(words), -1, bits) @ (1 << np.arange(bits)))


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Its tensors with plain weights, by the rules of the published formats."""
    tensors = stored(folder)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    bits = settings["bits"]
    for name in [name for name in tensors if name.endswith(".qweight")]:
        words, zeros, scales = (tensors.pop(name.replace("qweight", role)) for role in ("qweight", "qzeros", "scales"))
        zeros = unpacked(zeros, bits)
        if settings["quant_method"] == "gptq":
            index = tensors.pop(name.replace("qweight", "g_idx")).long()
            numbers, zeros = unpacked(words.T, bits).T, zeros + 1
        else:
            numbers, zeros = (each.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)
                              for each in (unpacked(words, bits), zeros))  # fmt: skip
            index = torch.arange(len(numbers)) // settings["group_size"]
        weight = (numbers - zeros[index]).float() * scales.float()[index]
        tensors[name.replace("qweight", "weight")] = weight.T.contiguous()
    return tensors


def plain_folder(folder: Path, to: Path) -> Path:
    """The same model with plain weights, for transformers."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (to / "config.json").write_text(json.dumps(config))
    save_file(dequantized(folder), to / "model.safetensors", {"format": "pt"})
    return to


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    return NaiveModel(folder, schemes=tuple(evener_quant_schemes())).logits(ids)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("Qwen2", GPTQ),
                ("Qwen2", AWQ),
                ("Qwen3", AWQ),
                ("Qwen3Moe", GPTQ),
                ("Gemma3", AWQ),
                ("Qwen2Moe", AWQ),
                ("Mixtral", AWQ),
                ("DeepseekV3", AWQ),
            )
        ),
        ("Qwen3Moe", AWQ),
        ("Qwen3", Settings("gptq", 3, 32, symmetric=False, order="groups", tokens=1200, window=128)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.method}{value.bits}",
)
def test_the_engine_and_transformers_read_it_and_it_is_closer_than_rounding_to_nearest(
    family: str, settings: Settings, tmp_path: Path, one_thread: None
) -> None:
    from transformers import AutoModelForCausalLM

    source, ids = model(tmp_path / "source", family), list(TEXT.encode())[200:328]
    result = made(source, tmp_path / "made", settings)
    theirs = AutoModelForCausalLM.from_pretrained(plain_folder(result, tmp_path / "plain"), dtype=torch.float32).eval()
    theirs.config._attn_implementation = "eager"
    found = logits(result, ids)
    torch.testing.assert_close(found, logits_of(theirs)(ids), atol=2e-3, rtol=1e-3)
    kind = {"symmetric": settings.symmetric, "order": "none"}
    near = Settings(settings.method, settings.bits, 32, nearest=True, **kind)  # type: ignore[arg-type]
    rounded = made(source, tmp_path / "near", near)
    true = logits(source, ids)
    most = 1.0 if family == "DeepseekV3" else 0.9  # latent attention gets no scales
    assert (found - true).square().mean() < most * (logits(rounded, ids) - true).square().mean()


@pytest.mark.parametrize("family", [pytest.param("Qwen2", marks=pytest.mark.slow), "Gemma3"])
def test_folded_scales_change_no_result(family: str, tmp_path: Path, one_thread: None) -> None:
    source = model(tmp_path / "source", family)
    config = from_overrides(str(source), {"backend": "cpu"})
    chosen, observer = choose(open_source(config), AWQ), Observer()
    stage = Stage(stage_config(config, 3, 128), BackendSearch("cpu"), 1, 3, observer)
    ids = list(TEXT.encode())[:100]
    stream = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    seen = {(w.name, -1): Inputs.none(w.columns, torch.device("cpu")) for w in stage.linear}
    observer.watched = dict(seen)
    before, observer.watched = stage.run(ids, stream), {}
    old = {w.name: w.value.data.clone() for w in stage.linear if w.value is not None}
    changed = fold_scales(stage, seen, Grid(4, False), chosen)
    # Every matrix was scaled, and of what is no matrix the two norms, and the bias of the values.
    assert all(not torch.equal(old[w.name], w.value.data) for w in stage.linear if w.value is not None)
    names = ["input_layernorm.weight", "pre_feedforward_layernorm.weight" if family == "Gemma3" else
             "post_attention_layernorm.weight", *(["self_attn.v_proj.bias"] if family == "Qwen2" else [])]  # fmt: skip
    moved = {n for n, t in changed.items() if not torch.equal(t, stored(source)[n])}
    assert moved == {f"model.layers.1.{name}" for name in names}
    torch.testing.assert_close(stage.run(ids, stream), before, atol=1e-3, rtol=1e-3)
    # The remembered statistics are those of the scaled inputs.
    again = {key: Inputs.none(len(each.magnitudes), torch.device("cpu")) for key, each in seen.items()}
    observer.watched = dict(again)
    stage.run(ids, stream)
    for key in seen:
        torch.testing.assert_close(again[key].gram, seen[key].gram, atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(again[key].magnitudes, seen[key].magnitudes, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("family", ["Qwen3Moe", *(pytest.param(family, marks=pytest.mark.slow)
                                                   for family in ("Qwen2Moe", "Mixtral", "DeepseekV3"))])  # fmt: skip
def test_folded_scales_of_experts_change_no_result_and_reach_the_router(
    family: str, tmp_path: Path, one_thread: None
) -> None:
    source, ids = model(tmp_path / "source", family), list(TEXT.encode())[:100]
    config = from_overrides(str(source), {"backend": "cpu"})
    chosen, observer = choose(open_source(config), AWQ), Observer()
    stage, maker = Stage(stage_config(config, 3, 128), BackendSearch("cpu"), 1, 3, observer), LayerMaker(AWQ, chosen)
    stream = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    before, changed = stage.run(ids, stream), {}
    old = {w.name: w.value.data.clone() for w in stage.linear if w.value is not None}
    counts = []
    for keys in maker.batches(stage, 1):
        counts.append(len({expert for _, expert in keys}))
        observer.watched = {key: Inputs.none(n, torch.device("cpu")) for key, n in keys.items()}
        stage.run(ids, stream)
        seen, observer.watched = observer.watched, {}
        changed |= maker.fold(stage, seen)
        torch.testing.assert_close(stage.run(ids, stream), before, atol=1e-3, rtol=1e-3)
    # First all but experts, of which only rows are counted; then an expert at a time.
    assert counts == [5, 1, 1, 1, 1]
    moved = {w.name.removeprefix("model.layers.1.") for w in stage.linear
             if w.value is not None and not torch.equal(old[w.name], w.value.data)}  # fmt: skip
    prefix = "block_sparse_moe" if family == "Mixtral" else "mlp"
    assert {f"{prefix}.gate", f"{prefix}.experts.gate_up", f"{prefix}.experts.down"} <= moved
    assert any("shared" in name for name in moved) == (family in ("Qwen2Moe", "DeepseekV3"))
    kept = {name for name in changed if "norm" not in name and "bias" not in name}
    router = {f"model.layers.1.{prefix}.gate.weight"}
    assert kept == router | ({"model.layers.1.mlp.shared_expert_gate.weight"} if family == "Qwen2Moe" else set())
    scales = {float(each) for each in (stored(source)[min(router)] / changed[min(router)])[0]}
    assert len(scales) > 32 and "model.layers.1.post_attention_layernorm.weight" in changed


def test_experts_that_a_rule_keeps_are_stored_scaled_and_the_model_is_the_same(
    tmp_path: Path, one_thread: None
) -> None:
    source, ids = model(tmp_path / "source", "Qwen2Moe"), list(TEXT.encode())[200:328]
    keys = {"formats.quant_rules": '{"re:.*(experts[.][0-9]|self_attn|shared_expert[.]down).*": "none"}'}
    result = made(source, tmp_path / "made", AWQ, **keys)
    names, true = stored(result), logits(source, ids)
    assert {name.split(".mlp.")[1] for name in names if name.endswith("qweight")} == {
        "shared_expert.gate_proj.qweight", "shared_expert.up_proj.qweight"
    }  # fmt: skip
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert not torch.equal(names[name], stored(source)[name])
    assert (logits(result, ids) - true).square().mean() < 0.2 * true.square().mean()


def test_experts_that_the_text_never_reaches_are_rounded_to_nearest_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    source, text = model(tmp_path / "source", "Mixtral", num_local_experts=12), tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ["quantize", str(source), str(tmp_path / "made"), "--method", "awq", "--data", str(text), "--group", "32",
             "--tokens", "3", "backend=cpu"]  # fmt: skip
    assert main([*words, "--quiet"]) == 0
    said = capsys.readouterr().out
    count = int(said.split(" matrices of experts that no token reached are rounded to nearest")[0].split()[-1])
    # Of 12 experts three tokens reach at most 6; each has a matrix in the stack of gate and up, and in that of down.
    assert count >= 3 * 6 * 2 and "give a longer text" in said
    assert torch.isfinite(logits(tmp_path / "made", [1, 2, 3])).all()
    down, found = {}, stored(tmp_path / "made")
    for expert in range(12):
        whole = stored(source)[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
        near = tensors_of("a.weight", nearest(whole, Grid(4, False), 32), AWQ)
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.qweight"
        down[expert] = torch.equal(found[name], near["a.qweight"])
    assert 6 <= sum(down.values()) < 12


def test_an_interrupted_awq_of_experts_goes_on_and_counts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    source = model(tmp_path / "source", "Qwen3Moe", num_experts=8)
    settings = Settings("awq", 4, 32, symmetric=False, order="none", tokens=4, window=4)
    config = from_overrides(str(source), {"backend": "cpu"})
    whole = quantize(config, tmp_path / "whole", settings, TEXT)
    init = Stage.__init__

    def begun(self: Stage, config: Any, search: Any, index: int, *more: Any) -> None:
        if index == 2:
            raise KeyboardInterrupt
        init(self, config, search, index, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Stage, "__init__", begun)
        with pytest.raises(KeyboardInterrupt):
            quantize(config, tmp_path / "made", settings, TEXT)
    again = quantize(config, tmp_path / "made", settings, TEXT)
    assert again["without_input"] == whole["without_input"] > 0
    assert all(torch.equal(each, stored(tmp_path / "whole")[name]) for name, each in stored(tmp_path / "made").items())


def test_stages_of_one_layer_compute_what_the_model_computes(tmp_path: Path, one_thread: None) -> None:
    source, ids = model(tmp_path / "source"), list(TEXT.encode())[:90]
    config = stage_config(from_overrides(str(source), {"backend": "cpu"}), 3, 128)
    observer, stream, layers = Observer(), torch.empty(0), []
    for index in range(3):
        stage = Stage(config, BackendSearch("cpu"), index, 3, observer)
        layers.append({name.split(".")[2] for w in stage.linear for name in [w.name] if ".layers." in name})
        stage.run(ids[:40], stream[:40])  # a window before leaves nothing behind
        stream = stage.run(ids, stream)
    assert layers == [{"0"}, {"1"}, {"2"}]
    head = stored(source)["lm_head.weight"]
    found = stage.assembly.model.normed(stream) @ head.T
    torch.testing.assert_close(found, logits(source, ids), atol=1e-3, rtol=1e-4)


def test_a_rule_keeps_a_matrix_and_the_config_says_so(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    keys = {"formats.quant_rules": '{"re:.*layers.1.self_attn.[qkv]_proj": "none"}'}
    for settings in (GPTQ, AWQ):
        result = made(source, tmp_path / settings.method, settings, **keys)
        names = set(stored(result))
        kept = {f"model.layers.1.self_attn.{each}_proj" for each in "qkv"}
        assert {f"{name}.weight" for name in kept} <= names and "model.layers.0.self_attn.q_proj.qweight" in names
        assert sum(name.endswith(".qweight") for name in names) == 3 * 7 - 3
        said = json.loads((result / "config.json").read_text())["quantization_config"]
        if settings is AWQ:
            assert set(said["modules_to_not_convert"]) == kept | {"lm_head"}
        else:
            assert {rule.replace("\\", "") for rule in said["dynamic"]} == {f"-:^{name}$" for name in kept}
        assert torch.isfinite(logits(result, [1, 2, 3])).all()


def test_config_tokenizer_and_source_come_along_and_the_command_says_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = model(tmp_path / "source"), tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ["quantize", str(source), str(tmp_path / "made"), "--data", str(text), "--tokens", "300", "--window", "100"]
    assert main([*words, "--json", "backend=cpu"]) == 0
    said = json.loads(capsys.readouterr().out)
    files = {path.name for path in (tmp_path / "made").iterdir()}
    assert {"config.json", "tokenizer.json", "evener_quantize.json", "model.safetensors.index.json"} <= files
    assert said["tokens"] == 300 and said["matrices"] == 21 and said["group"] == 64
    assert said["files"] == sum(name.endswith(".safetensors") for name in files) == 4
    index = json.loads((tmp_path / "made/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == stored(tmp_path / "made").keys()
    config = json.loads((tmp_path / "made/config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq", "desc_act": False,
        "sym": True, "lm_head": False,
    }  # fmt: skip
    facts = json.loads((tmp_path / "made/evener_quantize.json").read_text())
    assert facts["quantize"]["count"] == 300 and len(facts["fingerprint"]) == 64
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "made").glob("*.safetensors")} == {
        oct((tmp_path / "made/config.json").stat().st_mode & 0o777)
    }


# In the first layer; in the last one; in the second one, which is written, before its stream is.
@pytest.mark.parametrize("at", [*(pytest.param(("run", i), marks=pytest.mark.slow) for i in (4, 17)), ("replace", 10)])
def test_interrupted_it_goes_on_behind_the_last_written_layer_and_the_result_is_the_same(
    at: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    source = model(tmp_path / "source")
    settings = Settings("gptq", 4, 32, tokens=500, window=100)
    expected = stored(made(source, tmp_path / "whole", settings))
    called, built, (method, last), init = [0], [], at, Stage.__init__
    real = getattr(Stage, method)

    def counted(self: Stage, *arguments: Any) -> Any:
        called[0] += 1
        if called[0] == last:
            raise KeyboardInterrupt
        return real(self, *arguments)

    def begun(self: Stage, config: Any, search: Any, index: int, *more: Any) -> None:
        built.append(index)
        init(self, config, search, index, *more)

    monkeypatch.setattr(Stage, method, counted)
    monkeypatch.setattr(Stage, "__init__", begun)
    with pytest.raises(KeyboardInterrupt):
        made(source, tmp_path / "made", settings)
    assert not (tmp_path / "made").exists()
    found = stored(made(source, tmp_path / "made", settings))
    assert len(built) == 4 and set(built) == {0, 1, 2}, "only the layer that was interrupted is made again"
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def test_files_of_other_settings_or_another_text_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, built, init = model(tmp_path / "source"), [], Stage.__init__

    def begun(self: Stage, config: Any, search: Any, index: int, *more: Any) -> None:
        built.append(index)
        if len(built) == 3:
            raise KeyboardInterrupt
        init(self, config, search, index, *more)

    monkeypatch.setattr(Stage, "__init__", begun)
    with pytest.raises(KeyboardInterrupt):
        made(source, tmp_path / "made", Settings(group=32, tokens=100, window=50))
    made(source, tmp_path / "made", Settings(group=32, tokens=200, window=50))
    assert built == [0, 1, 2, 0, 1, 2]


def test_it_takes_no_more_memory_for_inputs_at_a_time_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    source = model(tmp_path / "source", "Qwen3Moe")
    most: list[int] = []
    run = Stage.run

    def counted(self: Stage, *arguments: Any) -> torch.Tensor:
        observer = self.observer
        most.append(sum(each.gram.nbytes for each in observer.watched.values()))
        return run(self, *arguments)

    monkeypatch.setattr(Stage, "run", counted)
    monkeypatch.setattr("evener_quantize.driver.REMEMBERED", 70_000)
    result = made(source, tmp_path / "made", GPTQ)
    assert 0 < max(most) <= 70_000
    assert torch.isfinite(logits(result, [1, 2, 3])).all()


def test_scales_of_awq_reach_into_matrices_whose_inputs_would_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "model")
    whole = stored(made(source, tmp_path / "whole", AWQ))
    monkeypatch.setattr("evener_quantize.driver.REMEMBERED", 4 * 64 * 64 * 3)  # all but those of down_proj
    found = stored(made(source, tmp_path / "found", AWQ))
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["SRC"], "needs two paths"), (["SRC", "new"], "needs a text: add --data FILE"),
        (["SRC", "new", "--data", "none.txt"], "cannot read --data"), (["SRC", "THERE", "--nearest"], "exists"),
        (["SRC", "new", "--nearest", "infer.max_reqs=3"], "changes nothing in a quantization"),
        (["SRC", "new", "--nearest", "--group", "96"], "does not divide 64 columns; what fits: 64, 32"),
        (["SRC", "new", "--method", "awq", "--order", "static"], "leave it out"),
        (["SRC", "new", "--method", "awq", "--asymmetric"], "always has zero points"),
        (["SRC", "new.gguf", "--nearest"], "writes a folder"), (["MADE", "new", "--nearest"], "is quantized already"),
        (["STACKED", "new", "--nearest"], "in one tensor, for which GPTQ and AWQ checkpoints have no"),
        (["SRC", "new", "--nearest", 'formats.quant_rules={"nothing": "none"}'], "matches no matrix"),
    ],
)  # fmt: skip
def test_an_impossible_quantization_is_refused_and_leaves_nothing(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "SRC")
    (tmp_path / "THERE").mkdir()
    if "MADE" in words:
        made(tmp_path / "SRC", tmp_path / "MADE", Settings(nearest=True))
    if "STACKED" in words:
        config = find_architecture("GptOssForCausalLM").tiny_config()
        make_transformers({**config, "num_attention_heads": 4, "intermediate_size": 64}, tmp_path / "STACKED")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["quantize", *words]) == 2
    assert why in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_weight_that_is_not_finite_ends_it_without_a_result(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.inf
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(EvenerError, match=r"NaN or infinite somewhere.*model.layers.1.mlp.down_proj"):
        made(source, tmp_path / "made", GPTQ)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_options_become_settings() -> None:
    arguments, _, result = read_arguments(
        ["a", "b", "--method", "gptq", "--bits", "3", "--group", "-1", "--asymmetric", "--order", "groups"]
    )
    assert settings_of(arguments) == Settings("gptq", 3, 0, False, "groups") and result.name == "b"
    assert settings_of(read_arguments(["a", "b", "--method", "awq"])[0]) == Settings("awq", 4, None, False, "none")
    with pytest.raises(ConfigError, match="48: write a multiple of 32"):
        settings_of(read_arguments(["a", "b", "--group", "48"])[0])


@pytest.mark.slow
def test_a_killed_process_leaves_no_result_and_another_goes_on(tmp_path: Path) -> None:
    source, text = model(tmp_path / "source", num_hidden_layers=12), tmp_path / "text.txt"
    text.write_text(TEXT)
    words = [sys.executable, "-m", "evener", "quantize", str(source), str(tmp_path / "made"), "--data", str(text),
             "backend=cpu", "--tokens", "2000", "--window", "100"]  # fmt: skip
    child = subprocess.Popen(words, env=os.environ)
    while child.poll() is None and not list(tmp_path.glob(".made.converting/model-layer-0003.*")):
        pass
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL and not (tmp_path / "made").exists()
    first = (tmp_path / ".made.converting/model-layer-0000.safetensors").stat().st_mtime_ns
    subprocess.run(words, check=True, env=os.environ)
    assert (tmp_path / "made/model-layer-0000.safetensors").stat().st_mtime_ns == first
    assert open_checkpoint(tmp_path / "made").headers
