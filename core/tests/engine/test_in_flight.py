"""Plans in flight on a device that delays its results: same tokens for every depth, nothing read early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from evener.contracts.device import Readback
from evener.engine.controller.controller import Controller
from evener.engine.sampling.pending import Draw, PendingStep
from evener.engine.wire.messages import Finish, NewRequest, Sampling
from evener.engine.wire.plan import Plan, StepResult
from evener.engine.worker.runner import ForwardStep, Runner
from evener.errors import ConfigError, EngineError
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.reference.device import DelayedDevice
from evener_conformance.reference.executor import StrictExecutor, strict_controller

DELAYED = {"reference.delay": True}
ONE_LAYER = {"num_hidden_layers": 1}
GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=1.0, top_p=0.9, seed=5, logprobs=2)


def requests(count: int = 4, sampling: Sampling = GREEDY, **fields: Any) -> list[NewRequest]:
    """Prompts of different lengths; half of them begin alike."""
    shared = [7 * i % 200 + 1 for i in range(33)]
    return [
        NewRequest(
            id=f"r{i}",
            prompt=[*(shared if i % 2 else []), *range(3 + i, 12 + 2 * i)],
            max_tokens=6 + 3 * i,
            sampling=sampling,
            **fields,
        )
        for i in range(count)
    ]


def arriving(messages: list[NewRequest]) -> dict[str, int]:
    return {m.id: 4 * i for i, m in enumerate(messages)}


@pytest.mark.parametrize("depth", [2, 3])
def test_plan_n_plus_one_is_submitted_before_result_n_is_read(make_config: Any, play: Any, depth: int) -> None:
    controller, executor = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
    message = requests(1)[0]
    play(controller, [message])
    log = executor.log
    plans = [plan for kind, plan in log if kind == "submit"]
    assert [plan for kind, plan in log if kind == "read"] == plans == sorted(plans)
    read_at = {plan: at for at, (kind, plan) in enumerate(log) if kind == "read"}
    submitted_at = {plan: at for at, (kind, plan) in enumerate(log) if kind == "submit"}
    for plan in plans[: 1 - depth]:
        assert submitted_at[plan + depth - 1] < read_at[plan], (
            f"plan {plan} was read with fewer than {depth} plans in flight"
        )
    # Length limits are planned: the prompt, then a plan for each token but the last, and no surplus.
    assert len(plans) == message.max_tokens


def test_depth_one_reads_every_result_before_the_next_plan(make_config: Any, play: Any) -> None:
    controller, executor = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": 1}))
    play(controller, requests(3))
    assert [kind for kind, _ in executor.log] == ["submit", "read"] * (len(executor.log) // 2)


@pytest.fixture
def depths(make_config: Any, play: Any, shrink_pool: Any) -> Callable[..., tuple[list[Any], list[Controller]]]:
    """Play the same requests at several depths."""

    def run(
        messages: list[NewRequest], blocks: int | None = None, depths: tuple[int, ...] = (1, 2, 3), **options: Any
    ) -> tuple[list[Any], list[Controller]]:
        played, controllers = [], []
        for depth in depths:
            controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
            if blocks is not None:
                shrink_pool(controller, blocks)
            played.append(play(controller, messages, **options))
            assert controller.scheduler.state.pool.used == 0
            assert played[-1].reasons().keys() == {m.id for m in messages}
            controllers.append(controller)
        return played, controllers

    return run


def test_depths_agree_with_the_naive_engine_on_mixed_steps_and_prefix_hits(make_config: Any, depths: Any) -> None:
    messages = requests(6)
    played, controllers = depths(messages, arrivals=arriving(messages))
    assert played[0].tokens == played[1].tokens == played[2].tokens
    for controller in controllers:
        assert controller.scheduler.stats.mixed_steps > 0 and controller.scheduler.stats.prefix_hits >= 2
    naive = NaiveModel({**find_architecture("LlamaForCausalLM").tiny_config(), **ONE_LAYER}, max_positions=128)
    assert played[0].tokens == {m.id: naive.greedy(m.prompt, m.max_tokens) for m in messages}


def test_depths_agree_on_random_requests_and_their_log_probabilities(depths: Any) -> None:
    messages = requests(sampling=WARM)
    played, _ = depths(messages, arrivals=arriving(messages))
    assert played[0].tokens == played[1].tokens == played[2].tokens
    for name, rows in played[0].logprobs.items():
        for other in played[1:]:
            assert [row.ids for row in rows] == [row.ids for row in other.logprobs[name]]
            # Company differs between depths, and with it the last bits of a matrix product.
            ours, theirs = ([v for row in r for v in row.values] for r in (rows, other.logprobs[name]))
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_depths_agree_under_preemption(depths: Any) -> None:
    prompts = {name: [ord(name), *range(13)] for name in "abcd"}
    messages = [NewRequest(id=name, prompt=prompt, max_tokens=24, sampling=WARM) for name, prompt in prompts.items()]
    played, controllers = depths(messages, blocks=6)
    assert played[0].tokens == played[1].tokens == played[2].tokens
    assert all(c.scheduler.stats.preemptions > 0 for c in controllers)
    roomy, _ = depths(messages, depths=(1,))
    assert roomy[0].tokens == played[0].tokens


def test_depths_agree_on_where_a_stop_token_ends_an_answer(depths: Any) -> None:
    free, _ = depths(requests(), depths=(1,))
    stops = sorted({tokens[4] for tokens in free[0].tokens.values()})
    messages = requests(stop_token_ids=stops)
    played, _ = depths(messages)
    assert played[0].tokens == played[1].tokens == played[2].tokens
    assert set(played[0].reasons().values()) == {"stop"}
    for name, tokens in played[0].tokens.items():
        assert (
            tokens == free[0].tokens[name][: len(tokens)] and tokens[-1] in stops and not set(tokens[:-1]) & set(stops)
        )


@pytest.mark.parametrize("index", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_depths_agree_up_to_the_token_at_which_a_request_is_aborted(depths: Any, index: int) -> None:
    messages = requests()
    free, _ = depths(messages, depths=(1,))
    played, _ = depths(messages, aborts={"r2": index, "r3": index}, depths=(1, 2))
    for one in played:
        assert one.reasons()["r2"] == one.reasons()["r3"] == "abort"
        for name, tokens in one.tokens.items():
            if name in ("r2", "r3"):
                assert index <= len(tokens) and tokens == free[0].tokens[name][: len(tokens)]
            else:
                assert tokens == free[0].tokens[name] and one.reasons()[name] == "length"


class _Reading(Runner):
    """Breaks the rule in one way: ``how`` reads the ids inside the step."""

    how: Callable[[torch.Tensor], object]

    def _sample(
        self, plan: Plan, parts: dict[str, torch.Tensor], rows: torch.Tensor, step: ForwardStep,
        scores: Sequence[Readback], outputs: Sequence[Sequence[Readback]],
    ) -> PendingStep | Draw:  # fmt: skip
        type(self).how(rows.argmax(-1))
        return super()._sample(plan, parts, rows, step, scores, outputs)


HOST_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda ids: ids.tolist(),
    "numpy": lambda ids: ids.numpy(),
    "array": lambda ids: __import__("numpy").asarray(ids),
    "item": lambda ids: ids[0].item(),
    "int": lambda ids: int(ids[0]),
    "index": lambda ids: [0] * 1000 and list(range(1000))[ids[0]],
    "if": lambda ids: 1 if ids[0] > 3 else 0,
    "any": lambda ids: bool((ids > 3).any()),
    "slice": lambda ids: ids[: ids[0]],
    "mask": lambda ids: ids[ids > 3],
    "masked_select": lambda ids: ids.masked_select(ids > 3),
    "nonzero": lambda ids: ids.nonzero(),
    "unique": lambda ids: ids.unique(),
    "where": lambda ids: torch.where(ids > 3),
    "equal": lambda ids: torch.equal(ids, ids + 1),
    "repeat": lambda ids: torch.repeat_interleave(ids, ids),
    "print": lambda ids: f"{ids}",
}


@pytest.mark.parametrize("how", HOST_READS)
def test_a_read_is_caught_in_every_step_of_a_device_that_delays_its_results(how: str) -> None:
    """Also in those whose ops are not all looked at."""
    device, ids = DelayedDevice(0), torch.arange(6)
    for _ in range(10):
        with torch.inference_mode(), device.step(), pytest.raises(EngineError, match="on the host during a step"):
            HOST_READS[how](ids)
        with torch.inference_mode(), device.step():
            kept = torch.where(ids > 3, ids, ids.repeat_interleave(1))
            kept[1:3] = kept[[0, 2]] + ids[ids[:2]]


@pytest.mark.parametrize("how", ["array", "slice", "nonzero"])
def test_a_runner_that_reads_a_value_on_the_host_during_a_step_is_caught(make_config: Any, play: Any, how: str) -> None:
    controller, executor = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    executor.worker.runner.__class__ = type("Broken", (_Reading,), {"how": staticmethod(HOST_READS[how])})
    with pytest.raises(EngineError, match="on the host during a step"):
        _step_without_rescue(controller, executor)


def _step_without_rescue(controller: Controller, executor: StrictExecutor) -> None:
    """The controller would end the requests with the reason; the test wants the error itself."""
    controller.handle(requests(1))
    plan = controller.scheduler.schedule()
    assert plan is not None
    executor.submit(plan)


class _Impatient(PendingStep):
    """Looks at the device's tensor instead of waiting for its copy."""

    def __init__(self, plan: Plan, ids: torch.Tensor) -> None:
        self._plan, self.tensor = plan, ids

    def wait(self) -> StepResult:
        return StepResult(plan=self._plan.id, ids=self.tensor.tolist())


class _EarlyRunner(Runner):
    def _sample(
        self, plan: Plan, parts: dict[str, torch.Tensor], rows: torch.Tensor, step: ForwardStep,
        scores: Sequence[Readback], outputs: Sequence[Sequence[Readback]],
    ) -> PendingStep:  # fmt: skip
        copied: list[torch.Tensor] = []
        inner, self.results = self.results, _Spy(self.results, copied)  # type: ignore[assignment]
        try:
            super()._sample(plan, parts, rows, step, scores, outputs)
        finally:
            self.results = inner
        return _Impatient(plan, copied[-1])


class _Spy:
    def __init__(self, results: Any, copied: list[torch.Tensor]) -> None:
        self._results, self._copied = results, copied

    def read(self, tensor: torch.Tensor) -> Any:
        self._copied.append(tensor)
        return self._results.read(tensor)


def test_reading_a_result_before_it_has_arrived_gives_poison_values(make_config: Any, play: Any) -> None:
    controller, executor = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    executor.worker.runner.__class__ = _EarlyRunner
    played = play(controller, requests(2))
    assert all(token < 0 for tokens in played.tokens.values() for token in tokens)


def test_a_result_is_not_ready_before_more_was_submitted_and_cannot_be_waited_for_inside_a_step(
    make_config: Any,
) -> None:
    _, executor = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    device = executor.worker.assembly.device
    value = torch.arange(3)
    copy = device.readback(value)
    assert not copy.ready() and (value < 0).all()
    device.upload(torch.arange(2).numpy())
    assert copy.ready()
    with pytest.raises(EngineError, match="while a step was being submitted"), device.step():
        copy.wait()
    assert copy.wait().tolist() == [0, 1, 2]


def test_the_strict_executor_requires_the_delayed_device(make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"set backend=reference and reference\.delay=true"):
        strict_controller(make_config())


@pytest.mark.parametrize("index", [pytest.param(2, marks=pytest.mark.slow), 6])
def test_depths_agree_up_to_the_token_at_which_the_front_end_found_a_stop_string(depths: Any, index: int) -> None:
    messages = requests()
    free, _ = depths(messages, depths=(1,))
    played, _ = depths(messages, aborts={"r1": index}, how=Finish)
    for one in played:
        assert one.reasons()["r1"] == "stop"
        assert index <= len(one.tokens["r1"]) and one.tokens["r1"] == free[0].tokens["r1"][: len(one.tokens["r1"])]
        assert all(one.tokens[name] == free[0].tokens[name] for name in ("r0", "r2", "r3"))


def test_the_youngest_request_is_preempted_with_plans_in_flight(make_config: Any, play: Any, shrink_pool: Any) -> None:
    """Not: waits with all who came later until the oldest has ended."""
    lengths = {"old": 110, "middle": 60, "young": 60}
    messages = [NewRequest(id=name, prompt=[3 + n] * 9, max_tokens=lengths[name], sampling=GREEDY)
                for n, name in enumerate(lengths)]  # fmt: skip
    for depth in (1, 2, 3):
        controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
        shrink_pool(controller, 10)
        played = play(controller, messages)
        ended = list(played.reasons())
        assert controller.scheduler.stats.preemptions > 0
        assert ended.index("middle") < ended.index("old"), (depth, ended)
