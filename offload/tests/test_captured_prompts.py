"""Prompts that are captured but for their experts on the host: the tokens of one device that holds all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_families import FAMILIES, FEW_BLOCKS, Configured, capture_prompts, on_the_cpu, worker_of
from harsh_traffic import GREEDY, assert_same, shrink, some, traffic
from test_prompt_share import share_of

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Ready
from evener.errors import EngineError
from evener_conformance.reference.engine import play
from evener_conformance.simulated.device import PieceCapture
from evener_offload import captured_prompts
from evener_offload.captured_prompts import CapturedPrompts
from evener_offload.host_experts import HostExperts

pytestmark = pytest.mark.usefixtures("few_slots")
#: ``captured("Qwen3Moe", **keys)``: an engine of the family.
Started = Callable[..., tuple[Controller, Ready]]
KEYS: dict[str, Any] = {"infer.cpu_layer_num": 2, "offload.stream_prompts": "8"}


def placed(controller: Controller) -> HostExperts:
    found = worker_of(controller).assembly.placement
    assert isinstance(found, HostExperts)
    return found


def prompts_of(controller: Controller) -> CapturedPrompts:
    found = placed(controller)._prompts
    assert found is not None
    return found


@pytest.fixture
def captured(configured: Configured) -> Started:
    def start(family: str = "Qwen3Moe", **more: Any) -> tuple[Controller, Ready]:
        controller, ready = build_controller(configured(family, **{**KEYS, **more}))
        capture_prompts(controller)
        return controller, ready

    return start


def ask(controller: Controller, *lengths: int, first: int = 5) -> list[list[int]]:
    """The answers to prompts of so many tokens, one after another."""
    found = []
    for number, length in enumerate(lengths):
        ids = [first + 7 * i * i % 89 for i in range(length)]
        asked = NewRequest(id=f"{first}-{number}", prompt=ids, max_tokens=4, sampling=GREEDY)
        found.append(play(controller, [asked]).tokens[asked.id])
    return found


@pytest.mark.parametrize(
    "family", [f if f == "Qwen3Moe" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_prompts_captured_but_for_experts_give_the_tokens_of_one_device(captured: Started, family: str) -> None:
    """With chunks, preemption, prefix hits and aborts together."""
    controller, ready = captured(family, **{"infer.cpu_layer_num": FAMILIES[family][1]})
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), on_the_cpu(family))
    counters = controller.scheduler.stats.counters
    # Latent attention computes requests that add one token in another way, and a capture's padding may be one.
    assert (counters["host_expert_captured_prompts"] > 3) == (family != "DeepseekV3")
    assert counters["host_expert_streamed_tokens"] > 100
    note = "single prompts of up to 24 tokens are captured but for experts, where state allows it"
    assert note in "\n".join(ready.info.manifest.notes)


def test_the_host_computes_its_part_of_captured_prompts(captured: Started) -> None:
    controller, _ = captured(**{"offload.stream_prompts": "auto"})
    ask(controller, 20)  # the first eager step measures
    share = share_of(placed(controller))
    before = share.computed
    shrink(controller, FEW_BLOCKS["Qwen3Moe"])
    assert_same(play(controller, **traffic()), on_the_cpu())
    assert share.computed > before and prompts_of(controller).steps > 3


def test_prompts_of_all_lengths_of_a_size_share_its_capture(captured: Started) -> None:
    """What a longer prompt left behind the rows of a shorter one changes nothing."""
    replayed, eager = (captured(**{"infer.step_tokens": 64, "infer.use_cuda_graph": on})[0] for on in (True, False))
    lengths = (32, 26, 25, 31, 9, 16, 10, 60, 33)
    assert ask(replayed, *lengths) == ask(eager, *lengths)
    assert prompts_of(replayed).steps == len(lengths)
    assert {size for size, made in prompts_of(replayed)._captured.items() if made} == {16, 32, 48, 64}
    assert placed(eager)._prompts is None


def test_a_prompt_behind_a_cached_prefix_is_captured(captured: Started) -> None:
    controller, _ = captured()
    long = traffic()["messages"][-2:]
    got = play(controller, long[:1]).tokens, play(controller, long[1:])
    assert prompts_of(controller).steps and got[1].cached["once more"] == 128
    assert got[1].tokens["once more"] == got[0]["again"]


def test_prompts_run_eagerly_where_state_cannot_be_captured_in_them(configured: Configured) -> None:
    controller, _ = build_controller(configured(**KEYS))
    ask(controller, 20)
    assert prompts_of(controller).steps == 0


def test_steps_of_several_requests_and_short_prompts_run_eagerly(captured: Started) -> None:
    controller, _ = captured()
    ask(controller, 7)
    assert prompts_of(controller).steps == 0, "the host computes all experts of so few tokens"
    assert not play(controller, [NewRequest(id=str(n), prompt=[5 + n] * 10, max_tokens=1, sampling=GREEDY)
                                 for n in range(2)]).dead  # fmt: skip
    assert prompts_of(controller).steps == 0
    ask(controller, 8)
    assert prompts_of(controller).steps == 1


def test_a_size_that_cannot_be_captured_runs_eagerly_and_the_log_says_so(
    captured: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(capture: PieceCapture, segment: Callable[[], None]) -> None:
        raise EngineError("no memory is left")

    monkeypatch.setattr(PieceCapture, "capture", refuse)
    controller, _ = captured()
    assert_same(play(controller, **traffic()), on_the_cpu())
    assert prompts_of(controller).steps == 0
    warned = [r.getMessage() for r in caplog.records if "no memory is left" in r.getMessage()]
    assert len(warned) == len(set(warned)) > 0 and "runs eagerly, which is slower" in warned[0]


def test_an_error_between_two_pieces_ends_the_engine(captured: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, _ = captured()
    (answer,) = ask(controller, 20)
    assert answer and prompts_of(controller).steps
    (slots,) = placed(controller).streamed.groups

    def fail(*_: Any) -> None:
        raise RuntimeError("the copies failed")

    monkeypatch.setattr(slots, "waves", fail)
    with pytest.raises(RuntimeError, match="the copies failed"):
        ask(controller, 20, first=6)


def test_a_device_that_does_not_capture_pieces_runs_prompts_eagerly(
    captured: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_prompts, "CapturesPieces", type("Another", (), {}))
    controller, ready = captured()
    assert not play(controller, **some()).dead
    assert placed(controller)._prompts is None and "captured but for" not in "\n".join(ready.info.manifest.notes)


def test_rows_of_padding_are_zeros(captured: Started) -> None:
    controller, _ = captured()
    prompts, works = prompts_of(controller), list[Callable[[], None]]()
    prompts._capturing, prompts._tokens = True, 3
    prompts._capture = type("Capture", (), {"leave_out": lambda _, work: works.append(work)})()
    x, ids, weights = torch.ones(5, 4), torch.zeros(5, 2), torch.ones(5, 2)
    seen = []

    def start(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Any) -> Callable[[], torch.Tensor]:
        seen.append((len(x), len(ids), len(weights)))
        return lambda: x * 2

    wait = prompts.start(start, x, ids, weights, None)
    works[0]()
    assert wait().tolist() == [[2.0] * 4] * 3 + [[0.0] * 4] * 2 and seen == [(3, 3, 3)]
