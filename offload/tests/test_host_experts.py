"""Experts on the host beside a simulated chip whose memory does not hold them: the tokens of one device that does."""

from __future__ import annotations

import gc
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import FAMILIES, FEW_BLOCKS, HEADS, Configured, on_the_cpu, worker_of
from family_oracles import make_transformers
from harsh_traffic import LIMITS, assert_same, assert_some, shrink, some, traffic

from evener.config import from_overrides
from evener.contracts.device import Readback
from evener.engine.processes.start import build_controller, start_engine
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError, MemoryPlanError
from evener.llm import LLM
from evener.sampling_params import SamplingParams
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import NativeRoutedExperts
from evener_conformance.naive.model import find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play, small_config
from evener_conformance.simulated.device import SimulatedDevice
from evener_inspection.explanation import explain
from evener_inspection.explanation_text import render
from evener_offload.host_experts import HostExperts


@pytest.mark.parametrize(
    "family", [f if f == "DeepseekV3" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_a_chip_too_small_for_the_experts_gives_the_tokens_of_one_that_holds_them(
    configured: Configured, family: str
) -> None:
    """With chunks, preemption, prefix hits and aborts together."""
    gc.collect()
    want, every = on_the_cpu(family), explain(configured(family))["memory"]
    layers = FAMILIES[family][1]
    few = explain(configured(family, **{"infer.cpu_layer_num": layers}))["memory"]
    assert every["weights"] - few["weights"] > 0.5 * every["weights"], "most of the model are experts"
    taken = 2**30 - every["free"]  # by what earlier tests of this process left
    small = {"simulated.memory": taken + (every["total"] + few["total"]) // 2}
    with pytest.raises(MemoryPlanError, match=r"does not fit: .* MiB .*infer.cpu_layer_num=\d keeps the experts of"):
        build_controller(configured(family, **small))
    controller, ready = build_controller(configured(family, **small, **{"infer.cpu_layer_num": layers}))
    shrink(controller, FEW_BLOCKS[family])
    got = play(controller, **traffic())
    assert_same(got, want)
    assert controller.scheduler.stats.preemptions and controller.scheduler.state.pool.used == 0
    assert got.cached["once more"] == 128
    memory = ready.info.memory
    assert memory.measured_host == memory.host == few["host"] > 0.5 * every["weights"]
    assert memory.host_layers == layers and memory.measured_weights == memory.weights


@pytest.mark.slow  # in halves is harder
def test_two_ranks_each_compute_their_part_of_every_expert(configured: Configured) -> None:
    want = on_the_cpu()
    with rank_threads(configured(**{"infer.tp_size": 2, "infer.cpu_layer_num": 2})) as (controller, ranks):
        assert_same(play(controller, **traffic()), want)
        whole = explain(configured(**{"infer.cpu_layer_num": 2}))["memory"]["host"]
        for worker in ranks.workers:
            memory = worker.facts.info.memory
            assert memory.measured_host == memory.host < 0.52 * whole


@pytest.mark.slow
def test_two_stages_have_the_last_layers_of_the_whole_model_on_the_host(configured: Configured) -> None:
    want = on_the_cpu()
    with rank_threads(configured(**{"infer.pp_size": 2, "infer.cpu_layer_num": 2})) as (controller, ranks):
        assert_same(play(controller, **traffic()), want)
        placed = [worker.assembly.placement for worker in ranks.workers]
        assert [place and place.layers for place in placed] == [(1,), (2,)]


def test_named_layers_go_to_the_host_and_the_others_stay(configured: Configured) -> None:
    want = on_the_cpu()
    controller, ready = build_controller(configured(**{"infer.host_experts": "0,2"}))
    assert_some(play(controller, **some()), want)
    assembly = worker_of(controller).assembly
    where = {w.name: w.value.data[0].device.type for w in assembly.build.weights if getattr(w, "experts", 0)}
    assert where == {f"model.layers.{n}.mlp.experts.{part}": "simulated" if n == 1 else "cpu"
                     for n in range(3) for part in ("gate_up", "down")}  # fmt: skip
    assert "computes the experts of 2 layers: 0,2" in "\n".join(ready.info.manifest.notes)


def test_auto_moves_as_few_layers_as_the_memory_asks_for(configured: Configured) -> None:
    # Random weights need 4 MiB of the device while they are loaded; state is allocated after them.
    roomy = {"infer.max_reqs": 16}
    gc.collect()
    every = explain(configured(**roomy))["memory"]
    each = (every["weights"] - explain(configured(**roomy, **{"infer.cpu_layer_num": 3}))["memory"]["weights"]) // 3
    taken = 2**30 - every["free"]  # by engines of earlier tests
    for lacking, layers in ((0, 0), (each // 2, 1), (3 * each // 2, 2)):
        memory = int((every["total"] - lacking) / 0.94) + taken
        config = configured(**roomy, **{"infer.cpu_layer_num": "auto", "simulated.memory": memory})
        found = explain(config)
        assert found["memory"]["host_layers"] == layers and found["memory"]["problem"] is None
        assert found["config"]["infer.cpu_layer_num"] == {
            "value": layers, "reason": "what fits into the device's memory",
        }  # fmt: skip
    controller, ready = build_controller(config)
    assert not play(controller, traffic()["messages"][:2]).dead and ready.info.memory.host_layers == layers


def test_auto_is_explained_for_ranks_that_are_not_here(configured: Configured) -> None:
    gc.collect()
    every = explain(configured(**{"infer.tp_size": 2}))["memory"]
    memory = every["total"] * 3 // 4 + 2**30 - every["free"]
    for key in ("cpu_layer_num", "resident_experts"):
        found = explain(configured(**{"infer.tp_size": 2, f"infer.{key}": "auto", "simulated.memory": memory}))
        assert found["config"][f"infer.{key}"]["value"] > 0 and found["memory"]["problem"] is None


def test_explain_shows_what_the_host_holds_and_computes(configured: Configured) -> None:
    found = explain(configured(**{"infer.cpu_layer_num": 2}))
    text = render(found, 200)
    assert re.search(r"experts on the host: 2 layers, +\d+\.\d MiB", text)
    assert "note: the host (" in text and "computes the experts of 2 layers: 1-2" in text
    assert "decode steps of up to 4 rows are captured by simulated" in found["graphs"]["reason"]
    providers = {(row["op"], row["provider"].partition("/")[0]) for row in found["ops"]}
    assert ("routed_experts", "cpu") in providers and ("rms_norm", "simulated") in providers


def test_the_device_computes_shared_experts_while_rows_are_on_their_way(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the host are started before the shared experts are launched, and waited for after."""
    controller, _ = build_controller(configured("DeepseekV3", **{"infer.cpu_layer_num": 2}))
    device = worker_of(controller).assembly.device
    assert isinstance(device, SimulatedDevice)
    log: list[str] = []

    class Logged(Readback):
        def __init__(self, inner: Readback) -> None:
            self._inner = inner

        def ready(self) -> bool:
            return self._inner.ready()

        def wait(self) -> torch.Tensor:
            log.append("wait")
            return self._inner.wait()

    readback, upload = device.readback, device.upload

    def logged(tensor: torch.Tensor) -> Readback:
        log.append("start")
        return Logged(readback(tensor))

    def uploaded(array: Any) -> torch.Tensor:
        log.append("upload")
        return upload(array)

    class Launched(dict[str, int]):
        def __setitem__(self, kernel: str, count: int) -> None:
            log.append("launch")
            super().__setitem__(kernel, count)

    monkeypatch.setattr(device, "readback", logged)
    monkeypatch.setattr(device, "upload", uploaded)
    monkeypatch.setattr(device.launch, "launches", Launched())
    assert not play(controller, traffic()["messages"][:1]).dead
    steps = "".join({"start": "s", "wait": "w", "upload": "u", "launch": "l"}[each] for each in log)
    assert len(re.findall(r"sssl+wwwu", steps)) == steps.count("wwwu") > 10, steps[:200]


HALVED = {"offload.halves": "on"}


@pytest.mark.parametrize("family", [f if f == "GptOss" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_steps_in_two_halves_give_the_same_tokens(configured: Configured, family: str) -> None:
    """With chunks, preemption, prefix hits and aborts together."""
    want = on_the_cpu(family)
    controller, ready = build_controller(configured(family, **HALVED, **{"infer.cpu_layer_num": FAMILIES[family][1]}))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    stats = controller.scheduler.stats
    assert stats.preemptions and 10 < stats.counters["host_expert_halved_steps"] < stats.steps
    assert "steps are halved: always" in "\n".join(ready.info.manifest.notes)


@pytest.mark.parametrize("groups", ["infer.tp_size", pytest.param("infer.pp_size", marks=pytest.mark.slow)])
def test_ranks_and_stages_compute_their_parts_in_halves(configured: Configured, groups: str) -> None:
    want = on_the_cpu()
    with rank_threads(configured(**{groups: 2}, **HALVED, **{"infer.cpu_layer_num": 2})) as (controller, ranks):
        assert_some(play(controller, **some()), want)
        placed = [worker.assembly.placement for worker in ranks.workers]
        assert min(place.counters()["host_expert_halved_steps"] for place in placed if place) > 5


def test_without_the_key_sizes_are_timed_in_both_ways(configured: Configured) -> None:
    keys = {"infer.cpu_layer_num": 3, "infer.use_cuda_graph": False}
    controller, ready = build_controller(configured(**keys))
    assert_same(play(controller, **traffic()), on_the_cpu())
    stats = controller.scheduler.stats
    assert stats.counters["host_expert_halved_steps"] >= 4
    assert "steps are halved: where that is measured to be faster" in "\n".join(ready.info.manifest.notes)


def test_the_device_computes_one_half_while_the_host_computes_experts_of_the_other(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host finishes the experts of a first half only when the device has got work of the second one."""
    controller, _ = build_controller(configured(**HALVED, **{"infer.cpu_layer_num": 3}))
    assembly = worker_of(controller).assembly
    device, place = assembly.device, assembly.placement
    assert isinstance(device, SimulatedDevice) and isinstance(place, HostExperts)
    launched = threading.Condition()
    count, asked, met = 0, 0, 0

    class Launched(dict[str, int]):
        def __setitem__(self, kernel: str, number: int) -> None:
            nonlocal count
            with launched:
                count += 1
                launched.notify_all()
            super().__setitem__(kernel, number)

    compute = place._halves.compute

    def computed(work: Callable[[], Any]) -> Callable[[], Any]:
        nonlocal asked
        asked += 1
        first, before = asked % 2 == 1, count

        def slowed() -> Any:
            nonlocal met
            with launched:
                if first:
                    assert launched.wait_for(lambda: count > before, 20), "the device waits for the host"
                    met += 1
            return work()

        return compute(slowed)

    monkeypatch.setattr(place._halves, "compute", computed)
    monkeypatch.setattr(device.launch, "launches", Launched())
    two = traffic()["messages"][:2]
    assert not play(controller, two).dead
    assert met == asked / 2 > 20


def test_one_thread_submits_work_to_the_device_while_the_others_compute(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, _ = build_controller(configured(**HALVED, **{"infer.cpu_layer_num": 3, "infer.threads": 4}))
    place = worker_of(controller).assembly.placement
    assert isinstance(place, HostExperts) and isinstance(place._host, CpuDevice)
    host, compute, seen = place._host, place._halves.compute, set[int]()

    def watched(work: Callable[[], Any]) -> Callable[[], Any]:
        seen.add(host.threads)
        return compute(work)

    monkeypatch.setattr(place._halves, "compute", watched)
    assert not play(controller, traffic()["messages"][:2]).dead
    assert seen == {3} and host.threads == 4


def test_steps_that_a_drafter_follows_are_said_not_to_be_halved(tmp_path: Path) -> None:
    shape = {**FAMILIES["DeepseekV3"][0], "num_nextn_predict_layers": 1}
    keys = {**LIMITS, "backend": "simulated", "infer.cpu_layer_num": 2, "infer.drafter": "mtp", **HALVED}
    controller, ready = build_controller(small_config(tmp_path / "model", "DeepseekV3", shape, **keys))
    assert not play(controller, traffic()["messages"][3:5]).dead
    assert controller.scheduler.stats.counters["host_expert_halved_steps"] == 0
    assert "steps are halved: never, because a drafter follows them" in "\n".join(ready.info.manifest.notes)


def test_halves_have_three_settings(configured: Configured) -> None:
    with pytest.raises(ConfigError, match=r"offload.halves=sometimes is not a value .* auto, on or off"):
        build_controller(configured(**{"infer.cpu_layer_num": 1, "offload.halves": "sometimes"}))


def test_the_hosts_reads_and_computations_are_counted(configured: Configured) -> None:
    controller, _ = build_controller(configured(**{"infer.cpu_layer_num": 3, "offload.halves": "off"}))
    start = dict(worker_of(controller).assembly.placement.counters())  # type: ignore[union-attr]  # a warm-up's
    message = traffic()["messages"][3]
    assert not play(controller, [message]).dead
    found = {name: value - start[name] for name, value in controller.scheduler.stats.counters.items()}
    (steps, layers, top, bytes_of_one) = (message.max_tokens - 1, 3, 2, 3 * 64 * 50 * 4)
    prompt = found["host_expert_read_bytes"] - steps * layers * top * bytes_of_one
    assert layers * top * bytes_of_one <= prompt <= layers * top * len(message.prompt) * bytes_of_one
    assert prompt % bytes_of_one == 0 and found["host_expert_microseconds"] > 0
    assert found["host_expert_halved_steps"] == 0


def test_a_host_kernel_that_fails_is_named(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(self: NativeRoutedExperts, call: Any) -> Any:
        def run(*inputs: Any) -> torch.Tensor:
            raise RuntimeError("out of threads")

        return run

    monkeypatch.setattr(NativeRoutedExperts, "build", build)
    with pytest.raises(Exception, match=r"kernel cpu/\S*routed_experts\S* .* raised RuntimeError: out of threads"):
        build_controller(configured(**{"infer.cpu_layer_num": 1}))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"infer.cpu_layer_num": 4}, r"infer.cpu_layer_num=4: the model has experts in 3 layers; set at most 3"),
        ({"infer.cpu_layer_num": -1}, "infer.cpu_layer_num"),
        ({"infer.host_experts": "1-x"}, r"infer.host_experts=1-x: '1-x' is no layer and .* write them as in 3-20,40"),
        ({"infer.host_experts": "2-1"}, "'2-1' is no layer and no range"),
        ({"infer.host_experts": "1-9"}, "layer 3 has no experts; layers with experts: 0-2"),
        ({"infer.host_experts": "1", "infer.cpu_layer_num": 1}, "so leave out infer.cpu_layer_num=1"),
        ({"infer.cpu_layer_num": "auto", "infer.pp_size": 2, "executor": "inline"}, r"for several stages .* set a"),
        ({"infer.cpu_layer_num": 1, "offload.numa": "yes"}, "offload.numa is 'yes'; type one of auto, off"),
        ({"infer.resident_experts": 4, "offload.numa": "yes"}, "offload.numa is 'yes'; type one of auto, off"),
    ],
)
def test_wrong_values_are_refused_with_what_to_type(configured: Configured, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_controller(configured(**keys))


def test_a_model_without_experts_and_stages_on_several_backends_are_refused(
    tmp_path: Path, configured: Configured
) -> None:
    dense = small_config(tmp_path / "dense", "Llama", HEADS, backend="simulated", **{"infer.cpu_layer_num": 1})
    with pytest.raises(ConfigError, match=r"infer.cpu_layer_num=1: the model has no experts; leave it out"):
        build_controller(dense)
    unlike = {"backend": None, "infer.stages": "simulated,cpu", "infer.cpu_layer_num": 1, "executor": "inline"}
    with pytest.raises(ConfigError, match=r"infer.stages names several; leave one of them out"):
        build_controller(configured(**unlike))


def test_without_the_package_the_key_names_it(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENER_DISABLE_PLUGINS", "evener-offload")
    with pytest.raises(ConfigError, match=r"infer.cpu_layer_num needs .*; type: pip install evener-offload"):
        build_controller(configured(**{"infer.cpu_layer_num": 1}))
    with pytest.raises(ConfigError, match=r"infer.host_experts needs .*; type: pip install evener-offload"):
        build_controller(configured(**{"infer.host_experts": "1"}))


def test_on_the_cpu_backend_the_experts_are_on_the_host_already(configured: Configured) -> None:
    config = configured(backend="cpu", **{"infer.block_size": 128, "infer.cpu_layer_num": 2})
    controller, ready = build_controller(config)
    assert ready.info.memory.host_layers == 0
    assert_some(play(controller, **some()), on_the_cpu())


#: Only experts are quantized: everything else has the same numbers on either device.
RULES = json.dumps({"re:.*self_attn.*": "none", "re:lm_head.*": "none"})
#: Bytes of a number as it is packed, with its share of scales.
PACKED = {"q4_k": 144 / 256, "q8_0": 34 / 32, "fp8": 1.0}


@pytest.mark.parametrize("quant", [q if q == "q4_k" else pytest.param(q, marks=pytest.mark.slow) for q in PACKED])
def test_experts_quantized_while_loading_stay_packed_on_the_host(tmp_path: Path, quant: str) -> None:
    """The chip reads no quantized weights: on it they would be dequantized."""
    config = {**find_architecture("Qwen3MoeForCausalLM").tiny_config(), **HEADS, "head_dim": 16, "hidden_size": 256,
              "moe_intermediate_size": 256, "num_hidden_layers": 2, "num_experts": 8}  # fmt: skip
    make_transformers(config, tmp_path)
    keys = {**LIMITS, "dtype": "float32", "infer.threads": 1, "quant": quant, "formats.quant_rules": RULES}
    want = play(build_controller(from_overrides(tmp_path, {**keys, "backend": "cpu", "infer.block_size": 128}))[0],
                **traffic())  # fmt: skip
    chip = {**keys, "backend": "simulated", "infer.cpu_layer_num": 2}
    controller, ready = build_controller(from_overrides(tmp_path, chip))
    assert_same(play(controller, **traffic()), want)
    numbers = 2 * 8 * 3 * 256 * 256
    assert ready.info.memory.measured_host == ready.info.memory.host
    assert PACKED[quant] * numbers <= ready.info.memory.host < 1.05 * PACKED[quant] * numbers
    assert not ready.info.manifest.dequantized
    every = explain(from_overrides(tmp_path, {**chip, "infer.cpu_layer_num": 0}))
    assert every["memory"]["weights"] > 4 * numbers and every["dequantized"]


@pytest.mark.parametrize(
    "placed", [{"infer.cpu_layer_num": 1}, pytest.param({"infer.resident_experts": 6}, marks=pytest.mark.slow)]
)
def test_a_model_cache_keeps_the_weights_of_the_host_and_of_the_device(
    tmp_path: Path, placed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = {**find_architecture("Qwen3MoeForCausalLM").tiny_config(), **HEADS, "head_dim": 16,
              "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 8}  # fmt: skip
    make_transformers(config, tmp_path / "model")
    keys = {**LIMITS, "backend": "simulated", "dtype": "float32", "quant": "q8_0", **placed}
    cached = {**keys, "model_cache": str(tmp_path / "cache")}
    caplog.set_level("INFO", "evener.model_cache")
    build_controller(from_overrides(tmp_path / "model", cached))
    want = play(build_controller(from_overrides(tmp_path / "model", keys))[0], **traffic())
    caplog.clear()
    controller, ready = build_controller(from_overrides(tmp_path / "model", cached))
    assert_same(play(controller, **traffic()), want)
    assert ready.info.memory.measured_host == ready.info.memory.host > 0
    assert sum("weights from" in each.getMessage() for each in caplog.records) == 2
    assert len([path for path in (tmp_path / "cache").iterdir() if "-host-" in path.name]) == 1


def test_no_thread_is_left_after_close_however_often_an_engine_starts(configured: Configured) -> None:
    keys = {**HALVED, "infer.cpu_layer_num": 3}
    before = set(threading.enumerate())
    for _ in range(2):
        with LLM.from_client(start_engine(configured(**keys), "inline")) as llm:
            llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=3, detokenize=False))
            names = {thread.name for thread in set(threading.enumerate()) - before}
            assert any("second-half" in name for name in names) and any("host-experts" in name for name in names)
        assert set(threading.enumerate()) <= before


def test_halves_give_the_same_samples_of_forks_penalties_and_log_probabilities(configured: Configured) -> None:
    ids = [5 + 7 * i * i % 89 for i in range(200)]
    drawn = [Sampling(temperature=0.9, seed=seed, prompt_logprobs=2, logprobs=3) for seed in (1, 2)]
    asked = [NewRequest(id="one", prompt=ids[:140], max_tokens=9, sampling=drawn[0]),
             NewRequest(id="two", prompt=ids[:140], max_tokens=9, sampling=drawn[1], fork_of="one"),
             NewRequest(id="other", prompt=ids[30:60], max_tokens=9,
                        sampling=Sampling(temperature=0.7, seed=5, repetition_penalty=1.3, logprobs=2))]  # fmt: skip
    keys = {"infer.cpu_layer_num": 3}
    whole, halved = (play(build_controller(configured(**keys, **{"offload.halves": mode}))[0], asked)
                     for mode in ("off", "on"))  # fmt: skip
    assert not halved.dead and halved.tokens == whole.tokens
    for kind in ("logprobs", "prompt_logprobs"):
        for name, rows in getattr(whole, kind).items():
            values = [[v for row in each if row for v in row.values] for each in (rows, getattr(halved, kind)[name])]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert whole.prompt_logprobs["one"] and whole.logprobs["other"]
