"""Keys and values in eight bits through the real engine: the CPU's kernels, ranks, a device that replaces the element
type, and a real model's perplexity with scales that `evener calibrate` made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_calibrate.observer import Observer
from evener_calibrate.windows import Windows
from safetensors.torch import save_file
from source_tree import ROOT

from evener.backend_search import BackendSearch
from evener.cli.main import main
from evener.config import from_overrides
from evener.config.schema import Config
from evener.contracts.declared import LinearWeight, Weight
from evener.engine.facts.manifest_report import ManifestReport
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.worker.worker import Worker
from evener.errors import CheckpointError, ConfigError
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import RunResult, play
from evener_conformance.simulated import install_simulated_backend
from evener_formats.kv_cache.scale_file import read_scale_file

SMALL = {"backend": "cpu", "dtype": "float32", "infer.max_seq_len": 160, "infer.max_reqs": 4,
         "infer.step_tokens": 24, "infer.threads": 1, "infer.kv_memory": 2**24, "infer.block_size": 16}  # fmt: skip
SIZES = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 100}
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every quick test here runs on one thread a rank."""


def configured(folder: Path, family: str = "Llama", **more: Any) -> Config:
    folder.mkdir(exist_ok=True)
    shape = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES, "initializer_range": 1.0}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "scales.json").write_text(scales(shape["num_hidden_layers"], 4))
    save_file(lively(shape), folder / "model.safetensors", {"format": "pt"})
    return from_overrides(str(folder), {**SMALL, **more})


def lively(shape: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights so large that whatever a token reads shows in the next one."""
    noise, found = torch.Generator().manual_seed(3), dict[str, torch.Tensor]()
    for weight in NaiveModel(shape, max_positions=160).build.weights:
        if isinstance(weight, LinearWeight):
            for part in weight.parts:
                found[part.name] = 0.25 * torch.randn(part.rows, part.columns, generator=noise)
        elif isinstance(weight, Weight):
            middle, size = {"ones": 1.0}.get(weight.dummy, 0.0), 0.2 if len(weight.shape) == 1 else 0.25
            found[weight.name] = middle + size * torch.randn(weight.shape, generator=noise)
    return found


def scales(layers: int, heads: int) -> str:
    """Another scale for each head of each layer, and for keys and values; so small that the largest are cut off, which
    shows in the tokens."""
    keys = {str(n): [(2 + n + head) / 448 for head in range(heads)] for n in range(layers)}
    values = {str(n): [(0.5 + n / 4 + head / 8) / 448 for head in range(heads)] for n in range(layers)}
    return json.dumps({"kv_cache": {"key_scaling_factor": {"0": keys}, "value_scaling_factor": {"0": values}}})


def stored(folder: Path, dtype: str) -> dict[str, Any]:
    return {"infer.kv_dtype": dtype, "infer.kv_scales": str(folder / "scales.json")}


def traffic() -> dict[str, Any]:
    """A long prompt in chunks, company, a prefix hit, a fork, and noise."""
    ids = [5 + 7 * i % 150 for i in range(60)]
    asked = {"long": (ids, GREEDY), "short": (ids[7:12], GREEDY), "again": (ids, GREEDY),
             "warm": (ids[:20], Sampling(temperature=0.8, seed=3))}  # fmt: skip
    messages = [NewRequest(id=k, prompt=prompt, max_tokens=16, sampling=s) for k, (prompt, s) in asked.items()]
    messages.append(NewRequest(id="fork", prompt=ids, max_tokens=16, sampling=GREEDY, fork_of="long"))
    return {"messages": messages, "arrivals": {"again": 40}}


def answers(config: Config) -> tuple[RunResult, ManifestReport]:
    controller, ready = build_controller(config)
    try:
        return play(controller, **traffic()), ready.info.manifest
    finally:
        controller.executor.close()


@pytest.mark.parametrize(("family", "dtype"), [("Llama", "int8"), ("Gemma3", "fp8_e5m2"),
                         pytest.param("Llama", "fp8_e4m3", marks=pytest.mark.slow)])  # fmt: skip
def test_the_cpu_s_kernels_give_the_reference_s_tokens(family: str, dtype: str, tmp_path: Path) -> None:
    asked = stored(tmp_path, dtype)
    ours, manifest = answers(configured(tmp_path, family, **asked))
    attention = next(row for row in manifest.ops if row.op == "attention")
    assert attention.provider == "cpu/cpu.paged"
    assert any(row.op in ("decoder_layer", "attention_block") and "/" in row.provider for row in manifest.ops)
    theirs, _ = answers(configured(tmp_path, family, **asked, **{"infer.attn_type": "ref"}))
    assert ours.tokens == theirs.tokens and ours.cached == theirs.cached and ours.cached["again"] > 0
    plain, _ = answers(configured(tmp_path, family))
    assert plain.tokens != ours.tokens, "too dull to show a difference"


def test_two_ranks_have_the_scales_of_their_heads(tmp_path: Path) -> None:
    asked = stored(tmp_path, "int8")
    one, _ = answers(configured(tmp_path, **asked))
    with rank_threads(configured(tmp_path, **asked, **{"infer.tp_size": 2})) as (controller, executor):
        more = play(controller, **traffic())
        found = [worker.assembly.build.slots[1].scales for worker in executor.workers]
    assert more.tokens == one.tokens and more.cached == one.cached
    whole = Worker(configured(tmp_path, **asked), BackendSearch("cpu")).assembly.build.slots[1].scales
    assert [first + second for first, second in zip(*found, strict=True)] == list(whole)


def test_the_pool_of_a_16_bit_model_holds_twice_as_many_blocks(tmp_path: Path) -> None:
    little = {"dtype": "bfloat16", "infer.kv_memory": 2**20, "infer.max_reqs": 100}
    plain, narrow = (
        Worker(configured(tmp_path, **little, **more), BackendSearch("cpu"))
        for more in ({}, stored(tmp_path, "fp8_e4m3"))
    )
    assert narrow.facts.info.memory.block_bytes * 2 == plain.facts.info.memory.block_bytes
    assert narrow.facts.slabs // plain.facts.slabs == 2
    # What is in memory, not only in the plan.
    pools = [worker.pool for worker in (plain, narrow)]
    assert abs(pools[0].nbytes - pools[1].nbytes) <= plain.facts.info.memory.block_bytes


def test_a_device_without_float8_stores_int8_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed = tmp_path / "installed"
    install_simulated_backend(installed)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]))
    folder = tmp_path / "model"
    asked = {"backend": "simulated", "infer.max_seq_len": 256, "infer.block_size": "auto", **stored(folder, "fp8_e4m3")}
    got, manifest = answers(configured(folder, **asked))
    said = "the KV cache is stored as int8 instead of fp8_e4m3 (infer.kv_dtype=fp8_e4m3), which simulated"
    assert f"{said}.paged does not store" in manifest.notes and said in caplog.text
    assert "simulated/simulated.paged" in {row.provider for row in manifest.ops if row.op == "attention"}
    same = {"infer.max_seq_len": 256, "infer.block_size": 128}
    want, _ = answers(configured(folder, **stored(folder, "int8"), **same))
    assert got.tokens == want.tokens


def test_a_provider_that_cannot_is_refused_and_the_manifest_says_why(tmp_path: Path) -> None:
    # Heads of 20 are not for the CPU's kernels, so the reference serves them.
    asked = stored(tmp_path, "int8")
    config = configured(tmp_path, load="dummy", **asked)
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "head_dim": 20}))
    _, manifest = answers(config)
    row = next(row for row in manifest.ops if row.op == "attention")
    assert row.provider == "reference" and any("not a multiple of 16" in each.reason for each in row.refused)


PAGES = ("docs/architecture.md", "docs/operator.md")


def calibrated(model: Path, out: Path, *more: str) -> Path:
    text = out.with_suffix(".txt")
    text.write_text("\n".join((ROOT / page).read_text() for page in PAGES))
    assert main(["calibrate", str(model), "--text", str(text), "--out", str(out), *more]) == 0
    return out


@pytest.mark.slow
def test_calibrated_scales_load_back_and_state_their_model(tmp_path: Path, smollm2_dir: Path) -> None:
    quick = ("--tokens", "40", "--window", "24", "infer.max_seq_len=64", "infer.max_reqs=1", "infer.step_tokens=16",
             "infer.kv_memory=64MiB", "dtype=bfloat16")  # fmt: skip
    by_layer = read_scale_file(calibrated(smollm2_dir, tmp_path / "layers.json", *quick))
    by_head = read_scale_file(calibrated(smollm2_dir, tmp_path / "heads.json", "--heads", *quick))
    cut = read_scale_file(calibrated(smollm2_dir, tmp_path / "cut.json", "--percentile", "99", *quick))
    assert list(by_layer.layers) == list(range(30)) and by_layer.fingerprint
    for number, (key, value) in by_layer.layers.items():
        assert key.values != value.values
        assert [max(part.values) for part in by_head.layers[number]] == [key.values[0], value.values[0]]
        assert len(by_head.layers[number][0].values) == 3
        assert cut.layers[number][0].values[0] < key.values[0]
    config = json.loads((smollm2_dir / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    named = {**SMALL, "infer.kv_dtype": "int8", "infer.kv_scales": str(tmp_path / "layers.json"), "load": "dummy"}
    with pytest.raises(CheckpointError, match="has scales of 30 layers, among them layer 2"):
        Worker(from_overrides(str(other), named), BackendSearch("cpu"))


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_calibration_sees_every_key_and_value_of_every_layer_once(family: str, tmp_path: Path) -> None:
    worker = Worker(configured(tmp_path, family, **{"infer.kv_memory": 2**25}), BackendSearch("cpu"))
    windows, ids = Windows(worker, 100), [5 + 7 * i % 150 for i in range(77)]
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    windows.run(ids[:50], lambda slot, key, value: None)  # another text before
    windows.run(ids, lambda slot, key, value: seen.update({slot.name: (key, value)}))
    alone = NaiveModel(tmp_path, max_positions=160)
    alone.feed(ids)
    assert seen.keys() == {slot.name for slot in alone.build.slots}
    for slot in alone.build.slots:
        for got, want in zip(seen[slot.name], slot.views.tensors, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_an_observer_gives_the_largest_numbers_and_percentiles_of_each_head() -> None:
    noise, observer = torch.Generator().manual_seed(0), Observer(2)
    values = torch.randn(4000, 2, 8, generator=noise) * torch.tensor([1.0, 30.0])[:, None]
    for piece in values.split(700):
        observer.see(piece)
    sizes = values.abs().transpose(0, 1).flatten(1)
    assert observer.limits(None) == pytest.approx(sizes.amax(1).tolist())
    for percentile in (50, 99.9):
        exact = sizes.quantile(percentile / 100, dim=1).tolist()
        assert observer.limits(percentile) == pytest.approx(exact, rel=0.02)
    assert observer.limits(100) == pytest.approx(observer.limits(None), rel=0.012)
    with pytest.raises(ValueError, match="NaN or infinite"):
        observer.see(torch.full((1, 2, 8), torch.nan))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "needs a text"), (["--text", "none.txt"], "cannot read --text"), (["--text", "."], "not a regular file"),
        (["--text", "LICENSE", "infer.tp_size=2"], "runs on one device"),
        (["--text", "LICENSE", "--percentile", "0"], "is not over 0"),
        (["--text", "LICENSE", "--tokens", "0"], "at least 1"),
    ],
)  # fmt: skip
def test_calibrate_refuses_what_it_cannot_use(words: list[str], why: str, tmp_path: Path, capsys: Any) -> None:
    configured(tmp_path)
    assert main(["calibrate", str(tmp_path), "load=dummy", *words]) == 2
    assert why in capsys.readouterr().err


def test_calibrate_refuses_a_model_without_keys_and_values(tmp_path: Path) -> None:
    shape = find_architecture("DeepseekV3ForCausalLM").tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(shape))
    worker = Worker(from_overrides(str(tmp_path), {**SMALL, "load": "dummy"}), BackendSearch("cpu"))
    with pytest.raises(ConfigError, match="keeps no keys and values"):
        Windows(worker, 16)


@pytest.mark.slow
def test_perplexity_with_calibrated_scales_is_close_to_that_of_16_bits(tmp_path: Path, smollm2_dir: Path) -> None:
    from tokenizers import Tokenizer

    from evener_conformance.oracle import teacher_forced

    text = (ROOT / "LICENSE").read_text()  # another text than the one of the calibration
    ids = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(text).ids[:385]
    limits = {"backend": "cpu", "dtype": "bfloat16", "infer.max_seq_len": 512, "infer.max_reqs": 2,
              "infer.kv_memory": 2**27, "infer.threads": 1}  # fmt: skip
    tensor = calibrated(smollm2_dir, tmp_path / "layers.json", "--tokens", "1024", "--window", "512",
                        *(f"{key}={value}" for key, value in limits.items()))  # fmt: skip

    def perplexity(**more: Any) -> float:
        worker = Worker(from_overrides(str(smollm2_dir), {**limits, **more}), BackendSearch("cpu"))
        logits = teacher_forced(worker, ids[:-1]).float().cpu()
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).exp())

    plain = perplexity()
    found = {
        dtype: perplexity(**{"infer.kv_dtype": dtype, "infer.kv_scales": str(tensor)}) / plain - 1
        for dtype in ("fp8_e4m3", "fp8_e5m2", "int8")
    }
    print(f"\nperplexity {plain:.3f} in 16 bits; " + ", ".join(f"{name} {drift:+.2%}" for name, drift in found.items()))
    # Over 384 tokens these have standard errors of 1.4, 0.5 and 2 percentage points; on a processor with AMX the last
    # one is 0.081. A wrong scale changes far more.
    assert abs(found["fp8_e4m3"]) < 0.05 and abs(found["int8"]) < 0.02 and abs(found["fp8_e5m2"]) < 0.12
