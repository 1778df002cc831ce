"""Pipeline stages, tensor parallel ranks, and both together: the same tokens as on one rank."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from evener.config.schema import Config
from evener.contracts.media import make_item
from evener.contracts.outputs import PromptOutputs
from evener.engine.batching.micro_batches import MicroBatches
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.worker.stages import PipelineChannel
from evener.errors import ArchitectureError, ConfigError
from evener_conformance.rank_threads import rank_threads
from evener_inspection.thread_communicator import ThreadCommunicator

GREEDY = Sampling(temperature=0.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "Qwen3Moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3},
    "DeepseekV3": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "Gemma3": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "Qwen3Next": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_steps() -> Iterator[None]:
    """Ranks are threads that wait for each other after every few small ops."""
    before = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    yield
    torch.set_num_threads(before[0])
    sys.setswitchinterval(before[1])


def requests(count: int = 5, **fields: Any) -> list[NewRequest]:
    """Prompts of different lengths, some longer than a step; every second one begins alike."""
    alike = [7 * i % 150 + 1 for i in range(33)]
    return [
        NewRequest(
            id=f"r{i}", prompt=[*(alike if i % 2 else []), *range(3 + i, 14 + 3 * i)], max_tokens=5 + 2 * i,
            sampling=GREEDY, **fields,
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def ranked() -> Iterator[Callable[[Config], Controller]]:
    with ExitStack() as running:
        yield lambda config: running.enter_context(rank_threads(config))[0]


def same_model(config: Config, **infer: Any) -> Config:
    from evener.config import from_overrides, to_flat

    flat = {**to_flat(config), **{f"infer.{key}": value for key, value in infer.items()}}
    return from_overrides(flat.pop("model"), flat)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_ranks_give_the_rows_of_prompts_of_one_rank(tp: int, pp: int, make_lively: Any, play: Any, ranked: Any) -> None:
    config = make_lively("Llama", FAMILIES["Llama"])
    messages = [
        NewRequest(
            id=kind, prompt=[*range(3, 70)], max_tokens=2,
            sampling=Sampling(temperature=0.0, prompt_outputs=PromptOutputs(kind, [(0, 9), (30, 67)])),
        )
        for kind in ("hidden", "normed", "logits")
    ]  # fmt: skip
    alone = play(build_controller(config)[0], messages).pooled
    found = play(ranked(same_model(config, tp_size=tp, pp_size=pp)), messages).pooled
    for kind, rows in alone.items():
        assert len(rows) > 0
        numbers = [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (found[kind], rows)]
        torch.testing.assert_close(*numbers, rtol=1e-3, atol=1e-3)


#: Two stages of two ranks show what stages alone do, and families whose state or experts are divided what others do.
CASES = [
    ("Qwen3Next", 2, 2),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("Llama", 1, 3), ("DeepseekV3", 2, 2), ("Llama", 2, 2), ("Qwen3Moe", 2, 2), ("Gemma3", 2, 2), ("Llama", 2, 1),
    )),
    *(pytest.param(family, 1, 2, marks=pytest.mark.slow) for family in FAMILIES),
]  # fmt: skip


@pytest.mark.parametrize(("family", "tp", "pp"), CASES)
def test_ranks_give_the_tokens_of_one_rank(
    family: str, tp: int, pp: int, make_lively: Any, play: Any, ranked: Any
) -> None:
    config = make_lively(family, FAMILIES[family])
    messages = requests()
    arrivals = {m.id: 3 * i for i, m in enumerate(messages)}
    controller, _ = build_controller(config)
    expected = play(controller, messages, arrivals=arrivals)
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) == len(messages)
    several = ranked(same_model(config, tp_size=tp, pp_size=pp))
    assert several.depth == pp + 1
    got = play(several, messages, arrivals=arrivals)
    assert got.tokens == expected.tokens and several.scheduler.state.pool.used == 0
    # A recurrent row is kept for a prefix only every infer.snapshot_every tokens.
    assert several.scheduler.stats.prefix_hits or family == "Qwen3Next"


@pytest.mark.parametrize(("tp", "pp"), [*(pytest.param(*e, marks=pytest.mark.slow) for e in ((1, 2), (2, 1))), (2, 2)])
def test_media_rows_are_used_by_every_rank_of_the_first_stage(
    tp: int, pp: int, make_lively: Any, play: Any, ranked: Any
) -> None:
    config = make_lively("Llama", {**FAMILIES["Llama"], "tie_word_embeddings": False})
    pictures = 2 * torch.randn(2, 19, 60, generator=torch.Generator().manual_seed(1)).numpy()
    messages = [
        NewRequest(
            id=f"r{i}", prompt=[*range(9), *[5] * 19, 3], max_tokens=8, sampling=GREEDY,
            media=[] if i == 2 else [make_item(9, pictures[i])],
        )
        for i in range(3)
    ]  # fmt: skip
    expected = play(build_controller(config)[0], messages)
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) == 3
    several = ranked(same_model(config, tp_size=tp, pp_size=pp))
    assert play(several, messages).tokens == expected.tokens


@pytest.mark.parametrize("depth", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_stages_give_the_tokens_of_one_rank_under_preemption_and_aborts(
    depth: int, make_lively: Any, play: Any, ranked: Any, shrink_pool: Any
) -> None:
    config = make_lively("Llama", FAMILIES["Llama"], **{"infer.step_tokens": 16})
    messages = [NewRequest(id=f"r{i}", prompt=[i + 5, *range(13)], max_tokens=14, sampling=GREEDY) for i in range(6)]
    expected = play(build_controller(config)[0], messages)
    several = ranked(same_model(config, pp_size=2, depth=depth))
    shrink_pool(several, 5)
    got = play(several, messages, aborts={"r1": 2, "r4": 6})
    assert several.scheduler.stats.preemptions and several.scheduler.state.pool.used == 0
    assert got.reasons() == {m.id: "abort" if m.id in ("r1", "r4") else "length" for m in messages}
    for name, tokens in got.tokens.items():
        assert tokens == expected.tokens[name][: len(tokens)] and len(tokens) >= {"r1": 2, "r4": 6}.get(name, 1)


def test_consecutive_plans_of_stages_name_different_requests(make_config: Any, play: Any, ranked: Any) -> None:
    several = ranked(
        make_config("Llama", {"num_hidden_layers": 3}, **{"infer.pp_size": 2, "infer.pp_layer_partition": "1,2"})
    )
    plans: list[Any] = []
    submit = several.executor.submit
    several.executor.submit = lambda plan: (plans.append(plan), submit(plan))
    assert [len(worker.assembly.build.slots) for worker in several.executor.workers] == [1, 2]
    messages = [NewRequest(id=f"r{i}", prompt=[i + 1] * 9, max_tokens=12, sampling=GREEDY) for i in range(4)]
    play(several, messages)
    middle = [set(plan.slots) for plan in plans if not plan.admissions][2:-6]
    assert len(middle) > 8 and all(len(slots) == 2 for slots in middle)
    assert all(not (one & other) for one, other in itertools.pairwise(middle))


def test_one_request_alone_keeps_plans_in_flight(make_config: Any, play: Any, ranked: Any) -> None:
    several = ranked(make_config("Llama", **{"infer.pp_size": 2}))
    most, submit = 0, several.executor.submit

    def watched(plan: Any) -> None:
        nonlocal most
        submit(plan)
        most = max(most, several.scheduler.in_flight)

    several.executor.submit = watched
    play(several, [NewRequest(id="r", prompt=[5], max_tokens=9, sampling=GREEDY)])
    assert most == 3


def test_irecv_is_started_by_the_plan_that_sends(
    make_config: Any, play: Any, ranked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = ranked(make_config("Llama", **{"infer.pp_size": 2}))
    first, waiting, expected = several.executor.workers[0].runner.stages, 0, 0
    irecv, send_stream = ThreadCommunicator.irecv, PipelineChannel.send_stream

    def expecting(self: ThreadCommunicator, tensor: torch.Tensor, source: int) -> Callable[[], torch.Tensor]:
        nonlocal expected
        expected += self is first._ids
        return irecv(self, tensor, source)

    def passing(self: PipelineChannel, stream: torch.Tensor, plan: Any, *where: Any) -> None:
        nonlocal waiting
        send_stream(self, stream, plan, *where)
        waiting += bool(plan.samples)
        assert expected == waiting, "else the last stage's device waits for a plan that may wait for it"

    monkeypatch.setattr(ThreadCommunicator, "irecv", expecting)
    monkeypatch.setattr(PipelineChannel, "send_stream", passing)
    play(several, [NewRequest(id=f"r{i}", prompt=[i + 1] * 9, max_tokens=5, sampling=GREEDY) for i in range(3)])
    assert waiting > 4


def test_old_send_handles_are_released_without_waiting(make_config: Any, play: Any, ranked: Any) -> None:
    several = ranked(make_config("Llama", **{"infer.pp_size": 2}))
    play(several, [NewRequest(id="r", prompt=[5], max_tokens=20, sampling=GREEDY)])
    assert [len(worker.runner.stages._sending) for worker in several.executor.workers] == [3, 3]


def test_requests_per_micro_batch_can_be_configured() -> None:
    assert MicroBatches(2).quota(5, 1) == {True: 3, False: 1}
    assert MicroBatches(2, prefill=4, decode=1).quota(5, 1) == {True: 1, False: 4}


@pytest.mark.parametrize(
    ("infer", "words"),
    [
        ({"pp_size": 4}, "3 layers cannot be divided into 4 stages of 1, 1, 1, 0"),
        ({"pp_size": 2, "pp_layer_partition": "1,1"}, "3 layers cannot be divided into 2 stages of 1, 1"),
        ({"pp_size": 2, "pp_layer_partition": "1,two"}, "infer.pp_layer_partition=1,two is not a list of numbers"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(
    make_config: Any, ranked: Any, infer: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ranked(
            make_config("Llama", {"num_hidden_layers": 3}, **{f"infer.{key}": value for key, value in infer.items()})
        )


def test_a_model_without_pipeline_support_is_rejected(
    make_config: Any, ranked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.layers.builder.Builder.layers", lambda self, count: range(count))
    with pytest.raises(ArchitectureError, match="LlamaForCausalLM does not divide its layers"):
        ranked(make_config("Llama", **{"infer.pp_size": 2}))
