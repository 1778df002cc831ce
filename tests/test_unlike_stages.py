"""Pipeline stages on unlike devices: the CPU beside a simulated chip, with block tables, memory and kernels of each."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evener_convert.command import convert
from harsh_traffic import GREEDY, LIMITS, assert_same, shrink, traffic
from lora_files import write_model

from evener.backend_search import BackendSearch
from evener.config import from_overrides
from evener.config.schema import Config
from evener.contracts.device import Device
from evener.engine.processes.process_executor import ProcessExecutor
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Abort, NewRequest
from evener.engine.worker.assembly import assemble
from evener.errors import ConfigError
from evener.plugins.catalog import Catalog, LazyImport
from evener_backend_cpu.device import CpuDevice
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play, small_config
from evener_conformance.simulated import install_simulated_backend
from evener_conformance.simulated.device import SimulatedDevice
from evener_inspection.explanation import explain
from evener_inspection.explanation_text import render
from evener_inspection.layer_costs import _declared_layers
from evener_inspection.rank_threads import RankThreads

ORDERS = ["cpu,simulated", "simulated,cpu"]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread a rank."""


@pytest.fixture(autouse=True)
def kept_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where starts keep the times of layers: a folder for each test."""
    monkeypatch.setattr("evener_inspection.layer_costs.cache_folder", lambda part: tmp_path / "kept" / part)
    return tmp_path / "kept" / "layer-times"


@pytest.fixture(scope="module", autouse=True)
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the simulated backend for this process and its children."""
    folder = tmp_path_factory.mktemp("installed")
    install_simulated_backend(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield


Configured = Callable[..., Config]


@pytest.fixture
def configured(tmp_path: Path) -> Configured:
    """``configured("Llama", stages="cpu,simulated")``, or all on the CPU backend without ``stages``."""
    numbers = itertools.count()
    return lambda family="Llama", stages=None, **more: make(tmp_path / f"model{next(numbers)}", family, stages, **more)


def make(
    folder: Path, family: str, stages: str | None, changes: Mapping[str, Any] | None = None, **more: Any
) -> Config:
    several = {"backend": None, "infer.stages": stages, "infer.pp_layer_partition": "equal"}
    where = several if stages else {"backend": "cpu", "infer.block_size": 128}
    return small_config(folder, family, {**HEADS, **(changes or {})}, **{**LIMITS, **where, **more})


#: Rows of recurrent state take other bytes on the chip; all stages cut the pool alike.
ROWS = ("Qwen3Next", "cpu,simulated")


@pytest.mark.parametrize(
    ("family", "stages"),
    [ROWS,
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (*(("Llama", order) for order in ORDERS), *(("DeepseekV3", order) for order in ORDERS),
                    *(("Qwen3Moe", order) for order in ORDERS)))],
)  # fmt: skip
def test_unlike_stages_give_the_tokens_of_one_device_under_chunks_preemption_prefix_hits_and_aborts(
    configured: Configured, family: str, stages: str
) -> None:
    want = play(build_controller(configured(family))[0], **traffic())
    with rank_threads(configured(family, stages)) as (controller, ranks):
        shrink(controller, 4)
        got = play(controller, **traffic())
        assert [worker.facts.info.backend for worker in ranks.workers] == stages.split(",")
        chip = ranks.workers[stages.split(",").index("simulated")]
        assert chip.assembly.geometry.block_size == ranks.facts.block_size == 128
        assert {group.provider.name.partition(".")[0] for group in chip.assembly.geometry.groups} == {"simulated"}
        captured = family in ("Llama", "Qwen3Moe")  # the chip's layout of latents and rows is not captured
        assert any(replay.runs for replay in chip.assembly.device.capture.replays) == captured
    assert_same(got, want)
    assert controller.scheduler.stats.preemptions and controller.scheduler.state.pool.used == 0
    assert got.cached["once more"] == 128 or family == "Qwen3Next"  # whose snapshots are rarer


def test_parts_of_unlike_stages_have_a_device_each(configured: Configured) -> None:
    want = play(build_controller(configured())[0], **traffic())
    with rank_threads(configured(stages="simulated:1,cpu", **{"infer.tp_size": 2})) as (controller, ranks):
        got = play(controller, **traffic())
        assert [(w.facts.info.backend, w.assembly.device.index) for w in ranks.workers] == [
            ("simulated", 1), ("simulated", 2), ("cpu", 0), ("cpu", 0)
        ]  # fmt: skip
    assert_same(got, want)


@pytest.mark.parametrize("slow", [ORDERS[0], pytest.param(ORDERS[1], marks=pytest.mark.slow)])
@pytest.mark.slow
def test_layers_are_divided_by_the_measured_time_of_one_on_each_device(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, kept_times: Path, slow: str
) -> None:
    """The device that is named first takes three times as long. A later start does not measure again."""

    def measure(self: Device, work: Callable[[], None]) -> float:
        work()
        return 3e-3 if self.torch_device.type == slow.partition(",")[0] else 1e-3

    for device in (CpuDevice, SimulatedDevice):
        monkeypatch.setattr(device, "measure", measure)
    want = play(build_controller(configured(changes={"num_hidden_layers": 5}))[0], **traffic())
    config = configured(stages="cpu,simulated", changes={"num_hidden_layers": 5}, **{"infer.pp_layer_partition": ()})
    with rank_threads(config) as (controller, ranks):
        held = [tuple(worker.assembly.build.held) for worker in ranks.workers]
        assert_same(play(controller, **traffic()), want)
        shown = ranks.facts.info.config["infer.pp_layer_partition"]
        assert shown.value == [str(len(layers)) for layers in held] and "time of a layer" in shown.reason
    # The head, on the simulated chip, takes as long as a layer.
    assert [len(layers) for layers in held] == ([1, 4] if slow == "cpu,simulated" else [4, 1])
    assert [*held[0], *held[1]] == list(range(5))

    def again(*_: Any) -> float:
        raise AssertionError("layers are timed again")

    for device in (CpuDevice, SimulatedDevice):
        monkeypatch.setattr(device, "measure", again)
    found = explain(config)
    assert [row["layers"] for row in found["stages"]] == [[layers[0], layers[-1] + 1] for layers in held]
    assert any(note.startswith("layers are divided by the time of a layer") for note in found["notes"])
    with pytest.raises(Exception, match="layers are timed again"):
        build_controller(replace(config, infer=replace(config.infer, max_seq_len=128), executor="inline"))
    for file in kept_times.iterdir():
        file.write_text("[1.0, NaN]")
    assert "at the first start, layers are divided" in explain(config)["notes"][-1]


@pytest.mark.slow
def test_layers_of_a_model_in_bfloat16_are_measured_too(configured: Configured, kept_times: Path) -> None:
    keys = {"infer.pp_layer_partition": (), "dtype": "bfloat16"}
    config = configured(stages="simulated,cpu", changes={"num_hidden_layers": 4}, **keys)
    with rank_threads(config) as (controller, ranks):
        assert ranks.facts.info.dtype == "bfloat16" and sum(len(w.assembly.build.held) for w in ranks.workers) == 4
        assert set(play(controller, **traffic()).reasons().values()) == {"length", "abort"}


@pytest.mark.parametrize(
    ("family", "changes", "kinds", "states"),
    [
        ("Llama", {"num_hidden_layers": 4}, [0, 0, 0, 0], [0, 0, 0, 0]),
        ("DeepseekV3", {"num_hidden_layers": 4, "first_k_dense_replace": 2}, [0, 0, 1, 1], [0, 0, 0, 0]),
        # Attention in every fourth layer, recurrent state in the others; layer 2 has no experts.
        ("Qwen3Next", {"num_hidden_layers": 8}, [0, 0, 1, 2, 0, 0, 0, 2], [0, 0, 0, 1, 0, 0, 0, 1]),
    ],
)
def test_layers_of_one_kind_are_timed_once(
    tmp_path: Path, family: str, changes: dict[str, Any], kinds: list[int], states: list[int]
) -> None:
    model = _declared_layers(assemble(make(tmp_path / "model", family, None, changes), BackendSearch("cpu")))
    assert (list(model.layers.kinds), list(model.layers.states)) == (kinds, states)
    assert [kinds[layer] for layer in model.examples] == list(range(len(model.signatures)))


def test_a_device_whose_memory_holds_few_layers_gets_few(configured: Configured) -> None:
    shape = {"num_hidden_layers": 9, "hidden_size": 256, "intermediate_size": 2048}
    config = configured(stages="simulated,cpu", changes=shape, **{"infer.pp_layer_partition": (),
                        "simulated.memory": 24 << 20, "infer.kv_memory": "auto"})  # fmt: skip
    with rank_threads(config) as (controller, ranks):
        few, many = (len(worker.assembly.build.held) for worker in ranks.workers)
        assert few <= 3 and few + many == 9
        assert not play(controller, **traffic()).dead


def test_explain_shows_each_stage_with_its_layers_and_what_all_agree_on(configured: Configured) -> None:
    found = explain(configured(stages="cpu,simulated:1", dtype="auto", **{"simulated.chip": "older"}))
    first, second = found["stages"]
    assert [(row["backend"], row["layers"]) for row in found["stages"]] == [("cpu", [0, 2]), ("simulated", [2, 3])]
    assert first["block_size"] == second["block_size"] == 128 and first["dtype"] == second["dtype"] == "float32"
    assert "chip 1" in second["device"] and "captured by simulated" in second["graphs"]
    assert "stage 1:      layers 2 to 2 on simulated, simulated chip 1" in render(found, 200)
    assert found["memory"]["problem"] is None and not any("divided" in note for note in found["notes"])
    tight = explain(configured(stages="cpu,simulated", **{"simulated.memory": 1 << 20}))
    assert tight["memory"]["problem"].startswith("stage 1: the model does not fit")
    measured = explain(configured(stages="cpu,simulated", **{"infer.pp_layer_partition": ()}))
    assert "at the first start, layers are divided by the time of one on each device" in measured["notes"][-1]


def test_one_dtype_and_the_smallest_limits_hold_for_all_stages(configured: Configured, tmp_path: Path) -> None:
    auto = dict.fromkeys(("dtype", "infer.max_reqs", "infer.step_tokens"), "auto")
    config = configured(stages="cpu,simulated", **auto, **{"simulated.chip": "older"})
    text = (Path(config.model) / "config.json").read_text()
    (Path(config.model) / "config.json").write_text(text.replace("{", '{"torch_dtype": "bfloat16",', 1))
    with rank_threads(config) as (controller, ranks):
        for worker in ranks.workers:
            resolved = worker.assembly.config
            assert (resolved.dtype, resolved.max_reqs, resolved.step_tokens) == ("float32", 64, 2048)
        reasons = ranks.workers[0].assembly.config.reasons
        assert reasons["dtype"] == "the device of another stage does not have bfloat16"
        assert not play(controller, **traffic()).dead


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"dtype": "bfloat16", "simulated.chip": "older"}, r"dtype=bfloat16 is not supported on simulated chip 0"),
        ({"infer.block_size": 16}, r"infer.block_size=16 is not offered by .*; they offer \[128\]"),
        ({"infer.use_cuda_graph": True}, "infer.use_cuda_graph=true, but .* cannot capture steps"),
    ],
)
def test_unsupported_settings_of_a_stage_are_refused_before_weights_are_loaded(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], words: str
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("weights are loaded")

    for module in ("evener.engine.worker.worker", "evener_inspection.layer_costs"):
        monkeypatch.setattr(f"{module}.load_stage", load)
    with pytest.raises(Exception, match=words):
        build_controller(configured(**{"stages": "cpu,simulated", "executor": "inline", **more}))


def test_a_backend_that_is_not_installed_is_refused_with_those_that_are(configured: Configured) -> None:
    with pytest.raises(ConfigError, match=r"infer.stages=cpu,simulatd: no backend 'simulatd' is installed; did you"):
        build_controller(configured(stages="cpu,simulatd"))


def test_processes_of_unlike_stages_match_one_device_and_the_death_of_one_is_reported_by_its_stage(
    configured: Configured, warm_children: None
) -> None:
    want = play(build_controller(configured())[0], **traffic())
    # The chip measures the memory left for state, and the CPU does not.
    controller, ready = build_controller(configured(stages="cpu,simulated:2", **{"infer.kv_memory": "auto"}))
    executor = controller.executor
    assert isinstance(executor, ProcessExecutor)
    try:
        assert [(r.backend, r.layers) for r in ready.info.ranks] == [("cpu", (0, 2)), ("simulated", (2, 3))]
        assert ready.info.ranks[1].device.startswith("simulated chip 2")
        assert ready.info.ranks[0].memory.blocks == ready.info.ranks[1].memory.blocks > 8
        assert_same(play(controller, **traffic()), want)
        os.kill(executor.children[1].process.pid, signal.SIGKILL)
        (dead,) = play(controller, traffic()["messages"]).dead
        assert "worker of rank 1 (stage 1 of 2)" in dead and "SIGKILL" in dead
    finally:
        executor.close()


@pytest.mark.slow
def test_a_stage_is_killed_in_the_midst_of_chunks_preemption_prefix_hits_and_aborts(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes, dense layers and layers of experts, divided by measurement. Until a stage is killed, tokens are those
    of one device; then each request that is left fails once, with the reason."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"num_hidden_layers": 5, "first_k_dense_replace": 2}
    asked, ids = traffic(), [3 + 11 * i * i % 83 for i in range(140)]
    asked["messages"].append(NewRequest(id="late", prompt=ids, max_tokens=40, sampling=GREEDY))
    asked["arrivals"]["late"] = 160
    want = play(build_controller(configured("DeepseekV3", changes=shape))[0], **asked)
    divided = configured("DeepseekV3", "simulated,cpu", changes=shape, **{"infer.pp_layer_partition": ()})
    controller, ready = build_controller(divided)
    executor = controller.executor
    assert isinstance(executor, ProcessExecutor)

    def end(name: str) -> Abort:
        if name == "late":
            os.kill(executor.children[1].process.pid, signal.SIGKILL)
        return Abort(name if name != "late" else "nobody")

    try:
        first, second = (rank.layers for rank in ready.info.ranks)
        assert first[1] == second[0] and second[1] == 5
        assert len(list((tmp_path / "cache" / "evener" / "layer-times").iterdir())) == 2
        shrink(controller, 4)
        got = play(controller, **{**asked, "aborts": {**asked["aborts"], "late": 6}}, how=end)
    finally:
        executor.close()
    assert controller.scheduler.stats.preemptions and got.cached["once more"] == 128
    (dead,) = got.dead
    assert "worker of rank 1 (stage 1 of 2)" in dead and "SIGKILL" in dead
    reasons = got.reasons()
    assert reasons.keys() == want.reasons().keys() and reasons["late"] == "error"
    for name, tokens in want.tokens.items():
        whole = reasons[name] == want.reasons()[name] != "abort"
        assert got.tokens[name] == tokens[: None if whole else len(got.tokens[name])], name
    assert sum(reason == "length" for reason in reasons.values()) >= 5


def test_ranks_of_one_process_take_their_stages_backends(configured: Configured) -> None:
    controller, ready = build_controller(configured(stages="simulated,cpu", executor="inline"))
    try:
        assert isinstance(controller.executor, RankThreads)
        assert [rank.backend for rank in ready.info.ranks] == ["simulated", "cpu"]
    finally:
        controller.executor.close()


@pytest.mark.parametrize("partition", ["2,1", pytest.param("equal", marks=pytest.mark.slow)])
def test_unlike_stages_of_a_split_model_have_the_layers_that_it_was_split_for(
    configured: Configured, tmp_path: Path, partition: str
) -> None:
    whole = configured(**{"load": "auto"})
    write_model(Path(whole.model), changes={**HEADS, "num_hidden_layers": 3})
    want = play(build_controller(whole)[0], **traffic())
    split = from_overrides(whole.model, {"infer.pp_size": 2, "infer.pp_layer_partition": partition, "dtype": "float32"})
    convert(split, tmp_path / "split")
    asked = {"executor": "inline", "infer.pp_layer_partition": (), "load": "auto"}
    config = replace(configured(stages="cpu,simulated", **asked), model=str(tmp_path / "split"))
    controller, ready = build_controller(config)
    try:
        assert [rank.layers for rank in ready.info.ranks] == [(0, 2), (2, 3)]
        assert_same(play(controller, **traffic()), want)
    finally:
        controller.executor.close()


def test_without_the_package_that_places_stages_they_are_refused_and_other_runs_need_none(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy_imports = Catalog.lazy_imports
    monkeypatch.setattr(
        Catalog, "lazy_imports", lambda self, kind: {} if kind == "part of stages" else lazy_imports(self, kind)
    )
    with pytest.raises(ConfigError, match=r"infer.stages needs a package .*: pip install evener-offload"):
        build_controller(configured(stages="cpu,simulated", executor="inline"))
    controller, ready = build_controller(configured(executor="inline", **{"infer.pp_size": 2}))
    controller.executor.close()
    assert [rank.backend for rank in ready.info.ranks] == ["cpu", "cpu"]


def test_without_a_package_that_measures_layers_their_division_must_be_given(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Catalog.lazy_imports

    def without_split(self: Catalog, kind: str) -> dict[str, LazyImport]:
        return {name: each for name, each in found(self, kind).items() if (kind, name) != ("part of stages", "split")}

    monkeypatch.setattr(Catalog, "lazy_imports", without_split)
    asked = {"stages": "cpu,simulated", "executor": "inline", "infer.pp_layer_partition": ()}
    with pytest.raises(ConfigError, match=r"pip install evener-inspection, or set infer.pp_layer_partition=equal"):
        build_controller(configured(**asked))
