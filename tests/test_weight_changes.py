"""Sleep and wake, and weights that are replaced while the engine runs: one rank and two, in threads and processes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from served import PATIENCE

from evener import LLM, SamplingParams
from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.contracts.declared import LinearWeight, Weight
from evener.errors import CheckpointError, EngineDeadError, EngineError
from evener.plugins.catalog import Catalog
from evener_conformance.naive.model import NaiveModel, find_architecture

KEYS: dict[str, Any] = {
    "backend": "cpu", "dtype": "float32", "infer.max_seq_len": 128, "infer.max_reqs": 4, "infer.threads": 1,
    "infer.kv_memory": 2**22, "infer.block_size": 16,
}  # fmt: skip
PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
RANKS = [{}, {"infer.tp_size": 2, "executor": "inline"}, {"infer.pp_size": 2, "executor": "inline"}]


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread a rank."""


def write(folder: Path, seed: int, **changes: Any) -> Path:
    folder.mkdir()
    shape = {**find_architecture("LlamaForCausalLM").tiny_config(), **SHAPE, **changes}
    (folder / "config.json").write_text(json.dumps(shape))
    noise, found = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for weight in NaiveModel(shape, max_positions=128).build.weights:
        if isinstance(weight, LinearWeight):
            for part in weight.parts:
                found[part.name] = 0.25 * torch.randn(part.rows, part.columns, generator=noise)
        elif isinstance(weight, Weight):
            found[weight.name] = 0.25 * torch.randn(weight.shape, generator=noise) + (weight.dummy == "ones")
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "old", 1)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write(tmp_path / "new", 2)


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def fresh(folder: Path) -> list[int]:
    with LLM(folder, **KEYS) as llm:
        return tokens(llm)


@pytest.mark.parametrize(
    "ranks", [RANKS[0], pytest.param(RANKS[1], marks=pytest.mark.slow), RANKS[2]], ids=["one", "tp", "pp"]
)
def test_new_weights_give_the_tokens_of_an_engine_that_started_with_them(
    ranks: dict[str, Any], old: Path, new: Path
) -> None:
    want = fresh(old), fresh(new)
    assert want[0] != want[1]
    with LLM(old, **KEYS, **ranks) as llm:
        # Twice: the second time the prompt's prefix is cached, which new weights must not find.
        assert tokens(llm) == tokens(llm) == want[0]
        assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens > 0
        llm.update_weights(new)
        assert llm.weights_version == "2"
        (output,) = llm.generate(PROMPT, GREEDY)
        assert output.outputs[0].token_ids == want[1] and output.num_cached_tokens == 0
        llm.sleep()
        with pytest.raises(EngineError, match="asleep"):
            tokens(llm)
        llm.wake_up()
        assert tokens(llm) == want[1], "the weights of the last update are taken back"
        llm.update_weights(old, version="step-7")
        assert (tokens(llm), llm.weights_version) == (want[0], "step-7")


def missing_tensor(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held.popitem()
    save_file(held, folder / "model.safetensors")


def other_shape(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"] = torch.ones(63)
    save_file(held, folder / "model.safetensors")


def other_dtype(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in held.items()}, folder / "model.safetensors")


def not_a_number(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"][5] = float("nan")  # found after other weights were replaced
    save_file(held, folder / "model.safetensors")


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def wild_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))


def other_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"]}))


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


BROKEN: dict[Callable[[Path], None], str] = {
    missing_tensor: "missing", other_shape: "model.norm.weight", other_dtype: "float32", not_a_number: "NaN",
    cut_off: "model.safetensors", wild_header: "model.safetensors", other_config: "rms_norm_eps",
    other_architecture: "architectures", gone: "new",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [RANKS[0], pytest.param(RANKS[1], marks=pytest.mark.slow)], ids=["one", "tp"])
def test_a_folder_that_does_not_fit_is_refused_and_the_old_weights_serve(
    ranks: dict[str, Any], old: Path, new: Path, tmp_path: Path
) -> None:
    want = fresh(old)
    with LLM(old, **KEYS, **ranks) as llm:
        for number, (spoil, message) in enumerate(BROKEN.items()):
            folder = Path(shutil.copytree(new, tmp_path / f"new{number}"))
            spoil(folder)
            with pytest.raises(CheckpointError, match=message):
                llm.update_weights(folder)
            assert (tokens(llm), llm.weights_version) == (want, "1"), spoil.__name__
        llm.sleep()
        with pytest.raises(CheckpointError, match="NaN"):
            llm.update_weights(tmp_path / f"new{list(BROKEN).index(not_a_number)}")
        with pytest.raises(EngineError, match="asleep"):
            tokens(llm)
        llm.wake_up()
        assert tokens(llm) == want


def own_memory() -> int:
    """Bytes of this process's own memory, without pages of files."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024


def test_an_engine_that_sleeps_gives_the_memory_of_its_weights_and_cache_back(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    shape = find_architecture("LlamaForCausalLM").tiny_config()
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 64}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**shape, **size}))
    with LLM(folder, **{**KEYS, "infer.kv_memory": 2**25}, load="dummy") as llm:
        want, weights = tokens(llm), llm.info.memory.measured_weights
        awake = own_memory()
        assert weights > 2**27
        llm.sleep()
        asleep = own_memory()
        assert awake - asleep > 0.95 * weights
        llm.wake_up()
        assert own_memory() - asleep > 0.9 * weights
        assert tokens(llm) == want


def test_processes_replace_weights_while_others_wait_and_end_what_is_too_long(
    old: Path, new: Path, warm_children: None
) -> None:
    want = fresh(old), fresh(new)

    async def run() -> None:
        config = from_overrides(str(old), {**KEYS, "infer.tp_size": 2})
        llm = await AsyncLLM.start(config, "process")
        try:

            async def ask() -> list[int]:
                return [o async for o in llm.generate(PROMPT, GREEDY)][-1].outputs[0].token_ids

            assert await ask() == want[0]
            # One that runs ends with the weights that it began with.
            running = asyncio.ensure_future(ask())
            while llm.num_open == 0:
                await asyncio.sleep(0.001)
            await llm.update_weights(new)
            assert await running == want[0] and await ask() == want[1]
            long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
            stream = await llm.submit(PROMPT, long)
            await llm.update_weights(old, "back", timeout=0)
            last = [delta async for delta in stream][-1]
            assert last.finish_reason == "error" and last.status == 503 and "weights were changed" in (last.error or "")
            assert await ask() == want[0] and llm.weights_version == "back"
            await llm.sleep()
            assert llm.asleep and not llm.ready
            with pytest.raises(EngineDeadError, match="asleep"):
                await ask()
            with pytest.raises(CheckpointError, match="nowhere"):
                await llm.update_weights(old.with_name("nowhere"))
            assert llm.asleep
            await llm.update_weights(new)
            assert await ask() == want[1]
        finally:
            await llm.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_model_cache_of_the_old_weights_is_not_taken_for_the_new_ones(old: Path, new: Path, tmp_path: Path) -> None:
    with LLM(old, **KEYS, model_cache=str(tmp_path / "cache")) as llm:
        llm.update_weights(new)
        assert tokens(llm) == fresh(new)
        llm.update_weights(old)
        assert tokens(llm) == fresh(old)


@pytest.mark.parametrize(("keys", "why"), [({"infer.draft_model": "new"}, "a model proposes tokens"),
                                           ({"infer.kv_host_memory": 2**22}, "kv_host_memory or offload")])  # fmt: skip
def test_an_engine_that_cannot_change_its_weights_refuses_before_anything_changes(
    keys: dict[str, Any], why: str, old: Path, new: Path
) -> None:
    keys = {name: str(new) if value == "new" else value for name, value in keys.items()}
    with LLM(old, **KEYS, **keys) as llm:
        want = tokens(llm)
        for change in (llm.sleep, llm.wake_up, lambda: llm.update_weights(new)):
            with pytest.raises(CheckpointError, match=why):
                change()
        assert tokens(llm) == want and llm.weights_version == "1"


def test_requests_that_an_interrupted_call_left_open_end_when_weights_change(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with LLM(old, **KEYS) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm, "_collect", interrupt)
            with pytest.raises(KeyboardInterrupt):
                tokens(llm)
        assert llm._frontend.num_open == 1
        llm.sleep()
        assert llm._frontend.num_open == 0
        llm.wake_up()
        assert tokens(llm) == fresh(old)


def test_without_the_package_that_changes_weights_the_call_names_it_and_requests_go_on(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = r"changing weights .* type: pip install evener-offload"

    async def run() -> None:
        llm = await AsyncLLM.start(from_overrides(str(old), KEYS), "thread")
        try:
            stream = await llm.submit(PROMPT, GREEDY)
            for change in (llm.sleep(0), llm.wake_up(), llm.update_weights(old, timeout=0)):
                with pytest.raises(CheckpointError, match=needs):
                    await change
            assert llm.ready and [delta async for delta in stream][-1].finish_reason == "length"
        finally:
            await llm.close()

    monkeypatch.setattr("evener.engine.wire.installed.installed_catalog", Catalog)
    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    with LLM(old, **KEYS) as llm:
        for change in (llm.sleep, llm.wake_up, lambda: llm.update_weights(old)):
            with pytest.raises(CheckpointError, match=needs):
                change()
        assert tokens(llm) and llm.weights_version == "1"
