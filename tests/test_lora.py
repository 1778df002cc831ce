"""LoRA adapters of requests: tokens and log-probabilities are those of a model into whose weights the adapter was
merged, whatever else is in the step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from evener_adapters.loaded import LoadedAdapters
from lora_files import PROJECTIONS, merge, write_adapter, write_model
from msgspec.structs import replace

from evener import LLM, SamplingParams
from evener.config import from_overrides
from evener.contracts.adapters import AdapterLimits
from evener.engine.controller.controller import Controller
from evener.engine.facts.engine_info import EngineInfo
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import LoadAdapter, NewRequest, Sampling, ToController, UnloadAdapter
from evener.engine.wire.plan import Plan
from evener.engine.worker.inline_executor import InlineExecutor
from evener.errors import CheckpointError, ConfigError, RequestError
from evener.plugins.catalog import Catalog
from evener_conformance.naive.model import find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import RunResult, play
from evener_inspection.explanation import explain

SMALL = {"backend": "cpu", "dtype": "float32", "infer.max_seq_len": 128, "infer.max_reqs": 8, "infer.step_tokens": 16,
         "infer.threads": 1, "infer.kv_memory": 2**22, "infer.block_size": 16}  # fmt: skip
SCORED = Sampling(temperature=0.0, logprobs=0, prompt_logprobs=0)
GREEDY = Sampling(temperature=0.0, logprobs=0)
ANSWER = 12
#: Sizes for which the CPU backend has kernels, and two ranks have heads.
LARGE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

#: Three adapters of different ranks.
RANKS: dict[str, dict[str, Any]] = {
    "small": {"rank": 2, "targets": ("q_proj", "v_proj"), "seed": 1},
    "large": {"rank": 8, "seed": 2, "use_rslora": True},
    "mixed": {"rank": 5, "seed": 3, "ranks": {"v_proj": 3, "down_proj": 7}, "alpha_pattern": {"q_proj": 4}},
}


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@dataclass
class Zoo:
    """A model, adapters for it, and the model with each of them merged."""

    model: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]

    def names(self) -> list[str]:
        """ "" for the model itself, then its adapters."""
        return ["", *self.adapters]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return make_zoo(tmp_path_factory.mktemp("zoo"), "Llama", LARGE, RANKS)


def make_zoo(folder: Path, family: str, changes: Mapping[str, Any], adapters: Mapping[str, Mapping[str, Any]]) -> Zoo:
    model = write_model(folder / "model", family, changes)
    made = {name: write_adapter(folder / name, model, **how) for name, how in adapters.items()}
    return Zoo(model, made, {"": model} | {n: merge(folder / f"{n}-merged", model, made[n]) for n in made})


def prompt(seed: int, length: int = 20) -> list[int]:
    return torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name: str, adapter: str = "", ids: list[int] | None = None, sampling: Sampling = SCORED) -> NewRequest:
    return NewRequest(id=name, prompt=ids or prompt(len(name)), max_tokens=ANSWER, sampling=sampling, adapter=adapter,
                      cache_salt=adapter)  # fmt: skip


def loads(zoo: Zoo, limits: AdapterLimits | None) -> list[ToController]:
    """Messages that load every adapter; its name is its id."""
    messages: list[Any] = []
    assert limits is not None
    known = LoadedAdapters(limits, (), messages.append)
    for name, path in zoo.adapters.items():
        known.load(name, path)
    return [replace(message, id=name) for name, message in zip(zoo.adapters, messages, strict=True)]


def start(folder: Path, slots: int = 3, **more: Any) -> tuple[Controller, EngineInfo]:
    controller, ready = build_controller(from_overrides(str(folder), {**SMALL, "infer.max_loras": slots, **more}))
    return controller, ready.info


def merged_answers(zoo: Zoo, requests: Iterable[NewRequest], **more: Any) -> RunResult:
    """What the models with merged adapters answer, each request alone in an engine without adapters."""
    found, controllers = RunResult(), {}
    for each in requests:
        if each.adapter not in controllers:
            config = from_overrides(str(zoo.merged[each.adapter]), {**SMALL, **more})
            controllers[each.adapter] = build_controller(config)[0]
        alone = NewRequest(id=each.id, prompt=each.prompt, max_tokens=each.max_tokens, sampling=each.sampling)
        played = play(controllers[each.adapter], [alone])
        found.tokens |= played.tokens
        found.logprobs |= played.logprobs
        found.prompt_logprobs |= played.prompt_logprobs
    return found


def assert_equal(ours: RunResult, theirs: RunResult, tolerance: float = 1e-4) -> None:
    """Tokens are equal, and log-probabilities of prompts and answers within the tolerance."""
    assert ours.tokens == theirs.tokens
    for name in theirs.tokens:
        for mine, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
            a, b = ([entry.values[0] for entry in found[name]] for found in (mine, other))
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=tolerance, rtol=tolerance)
    assert len({tuple(tokens) for tokens in theirs.tokens.values()}) > len(theirs.tokens) / 2, "too dull to differ"


def mixed_steps(controller: Controller) -> list[set[int]]:
    """Slots of adapters in each plan that is submitted from now on; -1 is a row without one."""
    seen: list[set[int]] = []
    submit, slots = controller.executor.submit, dict[int, int]()

    def watched(order: Any) -> None:
        if isinstance(order, Plan):
            slots.update({a.slot: a.adapter for a in order.admissions})
            seen.append({slots[slot] for slot in order.slots})
            assert order.adapted == any(slots[slot] >= 0 for slot in order.slots)
        submit(order)

    controller.executor.submit = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("impl", ["auto", pytest.param("ref", marks=pytest.mark.slow)])
def test_three_adapters_of_different_ranks_share_a_step_with_rows_without_one(zoo: Zoo, impl: str) -> None:
    controller, info = start(zoo.model, **{"infer.op_impl": impl})
    steps = mixed_steps(controller)
    requests = [request(f"{name}-{i}", name, prompt(7 * i + len(name))) for name in zoo.names() for i in range(2)]
    played = play(controller, [*loads(zoo, info.adapters), *requests])
    assert {-1, 0, 1, 2} in steps
    assert_equal(played, merged_answers(zoo, requests))


def written_places(controller: Controller) -> list[int]:
    """The places that adapters are written to from now on; more than there are adapters, if one was evicted."""
    written: list[int] = []
    write = controller.scheduler.adapters.writes
    controller.scheduler.adapters.writes = lambda: [written.append(w.slot) or w for w in write()]  # type: ignore
    return written


def test_more_adapters_than_places_take_turns(zoo: Zoo) -> None:
    controller, info = start(zoo.model, slots=2)
    names = [*zoo.adapters, *zoo.adapters, "", *zoo.adapters]
    requests = [request(f"{i}-{name}", name, prompt(i)) for i, name in enumerate(names)]
    steps, written = mixed_steps(controller), written_places(controller)
    played = play(controller, [*loads(zoo, info.adapters), *requests], arrivals={"3-small": 30, "7-small": 70})
    assert max(map(max, steps)) == 1 and len(written) > 3, "an adapter was evicted and came back"
    assert_equal(played, merged_answers(zoo, requests))


def test_a_request_that_waits_for_a_place_is_not_passed_by_others_with_adapters_for_ever(zoo: Zoo) -> None:
    controller, info = start(zoo.model, slots=1, **{"infer.max_reqs": 2})
    ids = itertools.count()
    stream = [request(f"{next(ids)}", "small", prompt(1), GREEDY) for _ in range(8)]
    requests = [stream[0], request("waits", "large", prompt(2), GREEDY), *stream[1:]]
    controller.handle([*loads(zoo, info.adapters), *requests])
    ended = RunResult()
    order: list[str] = []
    while not controller.idle:
        order += ended.see(controller.step())
    assert order[:2] == ["0", "waits"]


def test_prefixes_are_shared_within_an_adapter_only(zoo: Zoo) -> None:
    controller, info = start(zoo.model)
    ids = prompt(3, 50)
    first = [request(f"{name or 'base'}", name, ids, GREEDY) for name in zoo.names()]
    again = [request(f"{name or 'base'} again", name, ids, GREEDY) for name in zoo.names()]
    arrivals = {each.id: 100 for each in again}
    played = play(controller, [*loads(zoo, info.adapters), *first, *again], arrivals=arrivals)
    assert {played.cached[each.id] for each in first} == {0}
    assert {played.cached[each.id] for each in again} == {48}
    theirs = merged_answers(zoo, first)
    for name in theirs.tokens:
        assert played.tokens[name] == played.tokens[f"{name} again"] == theirs.tokens[name]


def test_a_preempted_request_gets_its_adapter_back(zoo: Zoo) -> None:
    requests = [replace(request(f"{i}{name}", name, prompt(i, 80)), max_tokens=40) for i in range(4)
                for name in zoo.names()]  # fmt: skip
    controller, info = start(zoo.model, **{"infer.kv_memory": 2**20, "infer.step_tokens": 320, "infer.max_reqs": 16})
    played = play(controller, [*loads(zoo, info.adapters), *requests])
    assert controller.scheduler.stats.preemptions > 0
    assert_equal(played, merged_answers(zoo, requests))


def kept(controller: Controller) -> set[str]:
    """The adapters that the only rank keeps."""
    executor = controller.executor
    assert isinstance(executor, InlineExecutor)
    return set(executor.worker.runner.adapters._kept)


def test_an_adapter_is_sent_once_in_pieces_between_which_steps_run(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it gets a place again, a plan has only its name."""
    controller, info = start(zoo.model, slots=1)
    orders: list[Any] = []
    submit = controller.executor.submit
    controller.executor.submit = lambda order: (orders.append(order), submit(order))[1]  # type: ignore
    monkeypatch.setattr("evener_adapters.loaded._MESSAGE_BYTES", 1000)
    messages: list[ToController] = []
    assert info.adapters is not None
    registry = LoadedAdapters(info.adapters, (), messages.append)
    for name in ("small", "large"):
        registry.load(name, zoo.adapters[name])
    ids = {name: registry.find(name) for name in ("small", "large")}
    requests = [replace(request(f"{i}{name}", name, prompt(i)), adapter=ids[name]) for i in range(2) for name in ids]
    plain = request("plain", "", prompt(9))
    controller.handle([plain])
    played = RunResult()
    for message in messages:
        played.see(controller.handle([message]))
        played.see(controller.step())
    played.see(controller.handle(requests))
    while not controller.idle:
        played.see(controller.step())
    parts = [i for i, order in enumerate(orders) if isinstance(order, LoadAdapter)]
    steps = [i for i, order in enumerate(orders) if isinstance(order, Plan)]
    assert len(parts) > 4 and parts[0] < steps[3] < parts[-1], "steps run between the pieces"
    assert max(len(msgspec.msgpack.encode(order)) for order in orders if isinstance(order, Plan)) < 2000
    named = [request(each.id, each.id[1:], each.prompt) for each in requests]
    theirs = merged_answers(zoo, [*named, plain])
    assert {name: played.tokens[name] for name in theirs.tokens} == theirs.tokens


def test_ranks_keep_only_their_parts_of_an_adapter(zoo: Zoo) -> None:
    keys = {**SMALL, "infer.max_loras": 1, "infer.tp_size": 2, "infer.pp_size": 2}
    with rank_threads(from_overrides(str(zoo.model), keys)) as (controller, executor):
        limits = executor.facts.info.adapters
        message, other = (each for each in loads(zoo, limits) if each.id in ("small", "large"))  # type: ignore[union-attr]
        play(controller, [message, other, request("r", "small", prompt(1))])
        whole = sum(len(tensor.down) + len(tensor.up) for tensor in message.tensors)  # type: ignore[union-attr]
        own = [
            sum(each.down.nbytes + each.up.nbytes for each in worker.runner.adapters._kept[message.id].values())  # type: ignore[union-attr]
            for worker in executor.workers
        ]
        shares = [len(worker.assembly.build.held) / 3 for worker in executor.workers]  # of the layers
        assert all(size < 0.8 * share * whole for size, share in zip(own, shares, strict=True))
        play(controller, [UnloadAdapter("small"), UnloadAdapter("large"), request("r2", "", prompt(1))])
        assert all(worker.runner.adapters._kept == {} for worker in executor.workers)


@pytest.mark.parametrize("impl", ["auto", pytest.param("ref", marks=pytest.mark.slow)])
def test_two_ranks_give_the_tokens_of_merged_weights(zoo: Zoo, impl: str) -> None:
    requests = [request(f"{i}{name}", name, prompt(i + len(name))) for i in range(2) for name in zoo.names()]
    keys = {**SMALL, "infer.max_loras": 2, "infer.tp_size": 2, "infer.op_impl": impl}
    with rank_threads(from_overrides(str(zoo.model), keys)) as (controller, executor):
        limits, written = executor.facts.info.adapters, written_places(controller)
        played = play(controller, [*loads(zoo, limits), *requests])
    assert len(zoo.adapters) == 3 and len(written) > 3, "an adapter was evicted and came back"
    assert limits == start(zoo.model)[1].adapters, "sizes are those of whole weights"
    assert_equal(played, merged_answers(zoo, requests))


def test_pipeline_stages_give_the_tokens_of_merged_weights(zoo: Zoo) -> None:
    requests = [request(f"{i}{name}", name, prompt(i + len(name)), GREEDY) for i in range(2) for name in zoo.names()]
    keys = {**SMALL, "infer.max_loras": 2, "infer.pp_size": 2}
    with rank_threads(from_overrides(str(zoo.model), keys)) as (controller, executor):
        played = play(controller, [*loads(zoo, executor.facts.info.adapters), *requests])
    assert_equal(played, merged_answers(zoo, requests))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Phi3", {}), ("Qwen3Next", {"mlp_only_layers": [0, 1, 2, 3], "vocab_size": 211}),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 60}), ("Gemma3", {})))],
)  # fmt: skip
def test_models_with_merged_projections_biases_and_norms_take_adapters(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    targets = (*PROJECTIONS, "qkv_proj", "gate_up_proj")
    how = {"a": {"rank": 3, "targets": targets}, "b": {"rank": 4, "seed": 9, "targets": targets}}
    zoo = make_zoo(tmp_path, family, changes, how)
    controller, info = start(zoo.model)
    requests = [request(f"{i}{name}", name, prompt(i + len(name), 33)) for i in range(2) for name in zoo.names()]
    played = play(controller, [*loads(zoo, info.adapters), *requests])
    assert_equal(played, merged_answers(zoo, requests))


def test_a_quantized_model_takes_adapters(zoo: Zoo) -> None:
    """The adapter is added to products of the quantized weights, so it is not that of merged weights: the reference
    kernels over the same quantized weights give the same."""
    requests = [request(f"{i}{name}", name, prompt(i + len(name))) for i in range(2) for name in zoo.names()]
    found = []
    for impl in ("auto", "ref"):
        controller, info = start(zoo.model, **{"quant": "q8_0", "infer.op_impl": impl})
        found.append(play(controller, [*loads(zoo, info.adapters), *requests]))
    assert_equal(*found, tolerance=2e-3)
    merged = merged_answers(zoo, requests)
    assert found[0].tokens != merged.tokens, "q8_0 was not used"
    near = sum(a[:3] == merged.tokens[n][:3] for n, a in found[0].tokens.items())
    assert near >= 6, "far from the merged weights"


def test_an_unloaded_adapter_stays_for_requests_that_were_accepted_and_fails_others(zoo: Zoo) -> None:
    controller, info = start(zoo.model, slots=1)
    messages = {message.id: message for message in loads(zoo, info.adapters)}  # type: ignore[union-attr]
    runs, waits = request("runs", "small", prompt(1)), request("waits", "large", prompt(2))
    played = play(controller, [messages["small"], messages["large"], runs, waits, UnloadAdapter("small"),
                               UnloadAdapter("large"), request("late", "small")])  # fmt: skip
    assert played.reasons() == {"runs": "length", "waits": "length", "late": "error"}
    assert "unloaded" in str(played.ends["late"][0].error)
    theirs = merged_answers(zoo, [runs, waits])
    assert {name: played.tokens[name] for name in theirs.tokens} == theirs.tokens
    # Nothing of it is left, and the place is free for the next.
    mixed = play(controller, [messages["mixed"], again := request("mixed", "mixed", prompt(3))])
    assert mixed.tokens == merged_answers(zoo, [again]).tokens
    assert controller.scheduler.adapters._loaded == {"mixed"}
    assert kept(controller) == {"mixed"}


def test_a_place_that_was_given_and_never_written_is_forgotten_with_its_adapter(zoo: Zoo) -> None:
    controller, info = start(zoo.model)
    adapters = controller.scheduler.adapters
    controller.handle(loads(zoo, info.adapters))
    assert adapters.open("small") and adapters.start("small") == 0
    adapters.stop("small")
    adapters.unload("small")
    adapters.close("small")
    assert adapters.writes() == [] and not adapters.open("small")


def test_random_traffic_with_loads_and_unloads_gives_the_tokens_of_merged_weights(zoo: Zoo) -> None:
    draw = torch.Generator().manual_seed(11)

    def pick(count: int) -> int:
        return int(torch.randint(0, count, (1,), generator=draw))

    controller, info = start(zoo.model, slots=2, **{"infer.kv_memory": 2**20, "infer.max_reqs": 5})
    by_name = {message.id: message for message in loads(zoo, info.adapters)}  # type: ignore[union-attr]
    played, requests, refused, loaded = RunResult(), [], set(), set()
    for number in range(300):
        name = zoo.names()[pick(4)]
        if number % 3 == 0 and len(requests) < 40:
            requests.append(request(f"{number}", name, prompt(pick(6), 10 + pick(30)), GREEDY))
            refused |= {f"{number}"} if name and name not in loaded else set()
            played.see(controller.handle([requests[-1]]))
        elif name and pick(2):
            played.see(controller.handle([UnloadAdapter(name) if name in loaded else by_name[name]]))
            loaded ^= {name}
        played.see(controller.step())
    while not controller.idle:
        played.see(controller.step())
    assert {name for name, reason in played.reasons().items() if reason == "error"} == refused
    assert 0 < len(refused) < 20
    answered = [each for each in requests if each.id not in refused]
    theirs = merged_answers(zoo, answered)
    assert {each.id: played.tokens[each.id] for each in answered} == theirs.tokens


def test_fused_kernels_that_hide_the_products_are_refused_with_a_reason(zoo: Zoo) -> None:
    keys = {**SMALL, "infer.max_loras": 2}
    plain, ops = (explain(from_overrides(str(zoo.model), k))["ops"] for k in ({**SMALL}, keys))
    assert any(row["op"] == "decoder_layer" and row["provider"].startswith("cpu/") for row in plain)
    assert not any(row["op"].startswith("adapt") for row in plain)
    layers = [row for row in ops if row["op"] == "decoder_layer"]
    assert {row["provider"] for row in layers} == {"expanded"}
    reasons = {refused["reason"] for row in layers for refused in row["refused"]}
    assert "does not add adapters (infer.max_loras, infer.lora_modules)" in reasons
    assert {row["provider"] for row in ops if row["op"] == "linear"} == {"cpu/native_linear"}


def test_the_memory_plan_has_the_places_of_adapters(zoo: Zoo) -> None:
    keys = {**SMALL, "infer.max_loras": 4, "infer.max_lora_rank": 8}
    without, planned = (explain(from_overrides(str(zoo.model), k))["memory"]["weights"] for k in ({**SMALL}, keys))
    _, info = start(zoo.model, slots=4, **{"infer.max_lora_rank": 8})
    assert info.adapters is not None
    # Merged projections read the same input, each with matrices of its own.
    numbers = sum(rows + columns for rows, columns in info.adapters.targets.values())
    assert planned - without == 4 * 4 * 8 * numbers
    memory = info.memory
    assert memory.measured_weights == memory.weights == planned


def test_a_model_without_such_projections_says_so(tmp_path: Path) -> None:
    config = {**find_architecture("DeepseekV3ForCausalLM").tiny_config(), "first_k_dense_replace": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no projections that can have adapters"):
        start(tmp_path, load="dummy")


@pytest.fixture
def llm(zoo: Zoo) -> Callable[..., LLM]:
    keys = {"infer.kv_memory": 2**22, "infer.max_seq_len": 128, "infer.max_reqs": 4, "dtype": "float32"}
    return lambda **more: LLM(zoo.model, **{**keys, **more})


PARAMS = SamplingParams(temperature=0, max_tokens=ANSWER, detokenize=False)


def test_llm_generates_with_an_adapter_of_the_configuration(zoo: Zoo, llm: Callable[..., LLM]) -> None:
    modules = ",".join(f"{name}={path}" for name, path in zoo.adapters.items())
    ids = prompt(1)
    with llm(**{"infer.lora_modules": modules}) as ours:
        assert ours.adapters.folders == {name: str(path) for name, path in zoo.adapters.items()}
        params = [SamplingParams(temperature=0, max_tokens=ANSWER, detokenize=False, lora=name)
                  for name in (None, *zoo.adapters)]  # fmt: skip
        together = [output.outputs[0].token_ids for output in ours.generate([ids] * 4, params)]
        alone = [ours.generate(ids, PARAMS, lora=name)[0].outputs[0].token_ids for name in (None, *zoo.adapters)]
    theirs = merged_answers(zoo, [request(name, name, ids, GREEDY) for name in zoo.names()])
    assert together == alone == [theirs.tokens[name] for name in zoo.names()]


def test_llm_loads_and_unloads_adapters_while_it_runs(zoo: Zoo, llm: Callable[..., LLM]) -> None:
    with llm(**{"infer.max_loras": 1, "infer.max_cpu_loras": 2}) as ours:
        with pytest.raises(RequestError, match="no adapter 'small' is loaded"):
            ours.generate(prompt(1), PARAMS, lora="small")
        for name in ("small", "large"):
            ours.adapters.load(name, zoo.adapters[name])
        with pytest.raises(RequestError, match=r"infer\.max_cpu_loras"):
            ours.adapters.load("mixed", zoo.adapters["mixed"])
        with pytest.raises(RequestError, match="already loaded"):
            ours.adapters.load("small", zoo.adapters["mixed"])
        answer = ours.generate(prompt(1), PARAMS, lora="small")[0].outputs[0].token_ids
        ours.adapters.unload("small")
        with pytest.raises(RequestError, match="no adapter 'small'"):
            ours.generate(prompt(1), PARAMS, lora="small")
        # Another adapter under the name of the first: nothing of that is reused.
        ours.adapters.load("small", zoo.adapters["mixed"])
        other = ours.generate(prompt(1), PARAMS, lora="small")[0].outputs[0].token_ids
    theirs = merged_answers(zoo, [request(name, name, prompt(1), GREEDY) for name in ("small", "mixed")])
    assert [answer, other] == [theirs.tokens["small"], theirs.tokens["mixed"]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"infer.lora_modules": "nowhere"}, "NAME=FOLDER"), ({"infer.lora_modules": "a=/nowhere"}, "no folder with an"),
     ({"infer.lora_modules": "=/nowhere"}, "cannot be called ''")],
)  # fmt: skip
def test_an_adapter_of_the_configuration_that_cannot_be_used_stops_the_start(
    keys: dict[str, str], message: str, llm: Callable[..., LLM]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        llm(**keys)


def test_an_engine_without_places_takes_no_adapter(zoo: Zoo, llm: Callable[..., LLM]) -> None:
    with llm() as ours, pytest.raises(RequestError, match=r"infer\.max_loras=1"):
        ours.adapters.load("small", zoo.adapters["small"])


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package that computes with adapters were not installed."""
    found = Catalog.lazy_imports
    monkeypatch.setattr(
        Catalog, "lazy_imports", lambda self, kind: {} if kind == "maker of adapters" else found(self, kind)
    )


@pytest.mark.parametrize("keys", [{"infer.max_loras": 1}, {"infer.lora_modules": "small=/nowhere"}])
def test_without_the_package_of_adapters_the_start_says_what_to_install(
    keys: dict[str, Any], zoo: Zoo, without_package: None
) -> None:
    config = from_overrides(str(zoo.model), {**SMALL, **keys})
    for begin in (build_controller, explain):
        with pytest.raises(ConfigError, match=r"infer\.max_loras .*: pip install evener-generation"):
            begin(config)  # type: ignore[operator]


def test_an_engine_without_places_needs_no_package_and_knows_no_adapter(
    zoo: Zoo, llm: Callable[..., LLM], without_package: None
) -> None:
    with llm() as ours:
        assert ours.adapters.folders == {}
        with pytest.raises(RequestError, match=r"infer\.max_loras=1"):
            ours.adapters.load("small", zoo.adapters["small"])
        for use in (ours.adapters.unload, lambda name: ours.generate(prompt(1), PARAMS, lora=name)):
            with pytest.raises(RequestError, match="no adapter 'small' is loaded"):
                use("small")
        ids = ours.generate(prompt(1), PARAMS)[0].outputs[0].token_ids
    assert ids == merged_answers(zoo, [request("plain", "", prompt(1), GREEDY)]).tokens["plain"]


def test_a_rank_above_the_limit_says_what_to_set(zoo: Zoo, llm: Callable[..., LLM]) -> None:
    with llm(**{"infer.max_loras": 1, "infer.max_lora_rank": 7}) as ours:
        with pytest.raises(CheckpointError, match=r"infer\.max_lora_rank=8"):
            ours.adapters.load("large", zoo.adapters["large"])
        ours.adapters.load("mixed", zoo.adapters["mixed"])
