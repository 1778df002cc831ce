"""Experts that the device computes although it does not hold all: the tokens of one that does."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from expert_families import (
    FAMILIES,
    FEW_BLOCKS,
    HEADS,
    Configured,
    blocks_of,
    draw_biases,
    on_the_cpu,
    results_of,
    worker_of,
)
from harsh_traffic import LIMITS, assert_same, assert_some, shrink, some, traffic
from msgspec.structs import replace

from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import GetStats
from evener.errors import ConfigError, MemoryPlanError
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play, small_config
from evener_inspection.explanation import explain
from evener_offload.expert_slots import ExpertSlots
from evener_offload.resident_experts import ResidentExperts
from evener_offload.resident_layer import ResidentLayer, _runs
from evener_offload.residents import Wave


def placement_of(controller: Any) -> ResidentExperts:
    found = worker_of(controller).assembly.placement
    assert isinstance(found, ResidentExperts)
    return found


@pytest.mark.parametrize(
    "family", [f if f == "DeepseekV3" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_few_slots_for_experts_give_the_tokens_of_a_device_that_holds_all(configured: Configured, family: str) -> None:
    """With chunks, preemption, prefix hits and aborts together; steps of prompts need several waves."""
    gc.collect()
    want, every = on_the_cpu(family), explain(configured(family))["memory"]
    few = explain(configured(family, **{"infer.resident_experts": 8}))["memory"]
    taken = 2**30 - every["free"]  # by what earlier tests of this process left
    small = {"simulated.memory": taken + (every["total"] + few["total"]) // 2}
    with pytest.raises(MemoryPlanError, match="does not fit"):
        build_controller(configured(family, **small))
    gc.collect()  # the refused engine's memory
    controller, ready = build_controller(configured(family, **small, **{"infer.resident_experts": 8}))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    assert controller.scheduler.stats.preemptions and controller.scheduler.state.pool.used == 0
    memory = ready.info.memory
    assert memory.measured_weights == memory.weights == few["weights"]
    assert memory.measured_host == memory.host > 0.5 * every["weights"]
    layers = placement_of(controller).layer.values()
    assert len(layers) == FAMILIES[family][1] and all(layer.residents.hits for layer in layers)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [pytest.param({"infer.cpu_layer_num": 1}, (2,), marks=pytest.mark.slow), ({"infer.host_experts": "0-1"}, (0, 1))],
)
def test_only_the_layers_that_are_named_leave_the_device(
    configured: Configured, keys: dict[str, Any], layers: tuple[int, ...]
) -> None:
    want = on_the_cpu()
    controller, ready = build_controller(configured(**{"infer.resident_experts": 12, **keys}))
    assert_some(play(controller, **some()), want)
    assert placement_of(controller).layers == layers
    shown = ",".join(map(str, layers)).replace(",", "-")
    assert f"12 experts of each of {len(layers)} layers are on the device, the others in host memory: {shown}" in (
        ready.info.manifest.notes
    )


@pytest.mark.slow
def test_two_ranks_have_slots_for_their_parts_of_experts(configured: Configured) -> None:
    want = on_the_cpu()
    with rank_threads(configured(**{"infer.tp_size": 2, "infer.resident_experts": 8})) as (controller, ranks):
        assert_same(play(controller, **traffic()), want)
        for worker in ranks.workers:
            assert worker.facts.info.memory.measured_weights == worker.facts.info.memory.weights


def test_auto_keeps_as_many_experts_on_the_device_as_fit(configured: Configured) -> None:
    roomy = {"infer.max_reqs": 16}  # random weights need 4 MiB while they are loaded; state is allocated after them
    gc.collect()
    every = explain(configured(**roomy))["memory"]
    each = 3 * 3 * 64 * 50 * 4  # bytes of one expert of all three layers
    taken = 2**30 - every["free"]  # by engines of earlier tests
    for lacking, residents in ((0, 0), (10 * each, 86), (40 * each, 56)):
        memory = int((every["total"] - lacking) / 0.95) + 2 + taken
        config = configured(**roomy, **{"infer.resident_experts": "auto", "simulated.memory": memory})
        found = explain(config)
        value, reason = found["config"]["infer.resident_experts"].values()
        assert abs(value - residents) <= 1 and reason == "what fits into the device's memory"
        assert found["memory"]["problem"] is None
    controller, _ = build_controller(config)
    assert not play(controller, traffic()["messages"][:2]).dead


def test_the_statistics_count_needed_copied_and_guessed_experts(configured: Configured) -> None:
    controller, _ = build_controller(configured(**{"infer.resident_experts": 24}))
    assert not play(controller, **traffic()).dead
    (report,) = controller.handle([GetStats()])
    held = [layer.residents for layer in placement_of(controller).layer.values()]
    bytes_of_one = 3 * 64 * 50 * 4
    assert report.counters == {
        "expert_hits": sum(each.hits for each in held), "expert_misses": sum(each.misses for each in held),
        "expert_host_computed": 0,
        "expert_copied_bytes": sum(each.copied for each in held) * bytes_of_one,
        "expert_guesses": sum(each.guesses for each in held), "expert_guess_hits": sum(each.right for each in held),
        "expert_wasted_bytes": sum(each.wasted for each in held) * bytes_of_one,
    }  # fmt: skip
    assert min(count for name, count in report.counters.items() if name != "expert_host_computed") > 100
    # Each copy was asked for by a step or a guess, and nothing is guessed for the first layer.
    assert report.counters["expert_copied_bytes"] > report.counters["expert_misses"] * bytes_of_one
    assert held[0].guesses == 0 and all(0 < each.right <= each.guesses for each in held[1:])


def test_guesses_of_the_next_layer_can_be_switched_off(configured: Configured) -> None:
    want = on_the_cpu()
    controller, _ = build_controller(configured(**{"infer.resident_experts": 24, "offload.prefetch_experts": False}))
    assert_some(play(controller, **some()), want)
    held = [layer.residents for layer in placement_of(controller).layer.values()]
    assert all(each.guesses == 0 and each.copied == each.misses for each in held)


@pytest.mark.slow
def test_a_layer_that_has_all_it_needs_is_not_guessed_for(configured: Configured) -> None:
    controller, _ = build_controller(configured(**{"infer.resident_experts": 94}))
    layers, message = list(placement_of(controller).layer.values()), traffic()["messages"][0]
    for number in range(3):  # afterwards all experts that these tokens need are there, for more than 16 steps
        assert not play(controller, [replace(message, id=f"r{number}")]).dead
    guesses = [layer.residents.guesses for layer in layers]
    assert guesses[1] > 0 and all(layer.quiet > 16 for layer in layers)
    assert not play(controller, [replace(message, id="again")]).dead
    assert [layer.residents.guesses for layer in layers] == guesses


@pytest.mark.slow
def test_a_small_step_whose_experts_have_slots_is_one_run(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, waves = on_the_cpu(), ResidentLayer.waves
    controller, _ = build_controller(configured(**{"infer.resident_experts": 12}))
    steps = list[tuple[bool, int]]()

    def planned(layer: ResidentLayer, needed: Any, elsewhere: Any, together: bool) -> Sequence[Wave]:
        found = waves(layer, needed, elsewhere, together)
        assert all(together <= (set(needed) == set(wave.slots)) for wave in found)
        steps.append((together, len(found)))
        return found

    monkeypatch.setattr(ResidentLayer, "waves", planned)
    assert_same(play(controller, **traffic()), want)
    assert sum(together for together, _ in steps) > 50 and all(count == 1 for together, count in steps if together)
    assert any(count > 1 for _, count in steps), "prompts"


def test_a_layer_is_guessed_for_only_if_its_experts_and_those_before_are_in_host_memory(configured: Configured) -> None:
    keys = {"infer.resident_experts": 24, "infer.host_experts": "0,2"}
    controller, _ = build_controller(configured(**keys))
    assert not play(controller, traffic()["messages"][:1]).dead
    assert all(not layer.residents.guesses for layer in placement_of(controller).layer.values())


@pytest.mark.parametrize(
    "family", ["GptOss", *(pytest.param(f, marks=pytest.mark.slow) for f in ("Qwen3Moe", "DeepseekV3"))]
)
def test_a_block_gives_the_same_bits_whatever_is_on_the_device(configured: Configured, family: str) -> None:
    """Biases too: random weights have none, so they are set here."""
    draw = torch.Generator().manual_seed(5)
    keys = {}, {"infer.resident_experts": 6}
    every, few = (worker_of(build_controller(configured(family, **each))[0]).assembly for each in keys)
    for both in zip(blocks_of(every.build), blocks_of(few.build), strict=True):
        draw_biases(both, draw)
        for tokens in (1, 3, 1, 24, 2):
            first, second = results_of(both, tokens, draw, every.device)
            assert torch.equal(first, second) and first.abs().max() > 0


def test_neighbours_that_go_to_neighbouring_slots_are_copied_together() -> None:
    wave = Wave({1: 9, 3: 0, 4: 1, 5: 2, 7: 3, 8: 5, 9: 6}, (3, 4, 5, 7, 8, 9))
    assert [each.tolist() for each in _runs(wave)] == [[3, 7, 8], [0, 3, 5], [3, 1, 2]]
    assert [each.tolist() for each in _runs(Wave.of_copies({2: 4}))] == [[2], [4], [1]]


class Order:
    """What happens before what on the steps' stream and that of copies, by vector clocks (Mattern 1988)."""

    def __init__(self) -> None:
        self.current, self.seen = "steps", {name: Counter[str]() for name in ("steps", "copies")}

    def work(self) -> tuple[str, int]:
        """Submit something."""
        self.seen[self.current][self.current] += 1
        return self.current, self.seen[self.current][self.current]

    def follows(self, stamp: tuple[str, int] | None) -> bool:
        """Whether what is submitted now runs after that."""
        return stamp is None or self.seen[self.current][stamp[0]] >= stamp[1]

    def __enter__(self) -> None:
        self.current = "copies"

    def __exit__(self, *_: object) -> None:
        self.current = "steps"


class OrderedEvent:
    """An event of ``order``, whose work is over only once somebody has waited for it."""

    def __init__(self, order: Order) -> None:
        self._order, self._when, self._over = order, Counter[str](), False

    def record(self, stream: Order | None = None) -> None:
        self._when = self._order.seen[self._of(stream)].copy()

    def wait(self, stream: Order | None = None) -> None:
        self._order.seen[self._of(stream)] |= self._when
        self._over = True

    def _of(self, stream: Order | None) -> str:
        """The only stream that is named is that of copies."""
        return self._order.current if stream is None else "copies"

    def query(self) -> bool:
        return self._over


@pytest.mark.parametrize(
    "keys",
    [
        {"infer.resident_experts": 8},
        pytest.param({"infer.cpu_layer_num": 3, "offload.stream_prompts": "1"}, marks=pytest.mark.slow),
    ],
)
def test_copies_and_products_wait_for_each_other_on_the_device(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """A product waits for the copies to its slots, and a copy for the last product with what it overwrites."""
    want = on_the_cpu()
    controller, _ = build_controller(configured(**keys))
    order, device = Order(), worker_of(controller).assembly.device
    monkeypatch.setattr(device, "new_event", lambda: OrderedEvent(order))
    read, written = dict[tuple[int, int], Any](), dict[tuple[int, int], Any]()
    unread, beside = set[Any](), 0

    def copy(slots: ExpertSlots, expert: int, slot: int, count: int = 1) -> None:
        nonlocal beside
        for place in ((id(slots), each) for each in range(slot, slot + count)):
            assert order.current == "copies" and order.follows(read.get(place))
            beside += any(not order.follows(stamp) for stamp in read.values())
            written[place] = order.work()
        copied(slots, expert, slot, count)

    def filled(layer: ResidentLayer, *given: Any) -> Iterator[Wave]:
        for wave in waves(layer, *given):
            places = [(id(slots), slot) for slots in (layer.gate_up, layer.down) for slot in wave.slots.values()]
            assert all(order.follows(written[place]) for place in places)
            yield wave
            unread.update(stamp for stamp in written.values() if not order.follows(stamp))
            read.update(dict.fromkeys(places, order.work()))

    copied, waves = ExpertSlots.copy, ResidentLayer.filled
    monkeypatch.setattr(ExpertSlots, "copy", copy)
    monkeypatch.setattr(ResidentLayer, "filled", filled)
    placement: Any = worker_of(controller).assembly.placement
    for layer in placement.streamed.groups if "infer.cpu_layer_num" in keys else placement.layer.values():
        monkeypatch.setattr(layer, "_stream", order)
        layer.residents._slot.clear()
        layer._used = [None] * len(layer._used)  # their events are the chip's
    assert_same(play(controller, **traffic()), want)
    assert len(unread) > 100, "products run while experts are copied"
    assert beside > 100, "experts are copied while products run"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"infer.resident_experts": 96}, "infer.resident_experts=96: a layer has 96 experts, so all fit; leave it out"),
        ({"infer.resident_experts": -2}, "infer.resident_experts"),
        ({"infer.resident_experts": 8, "infer.cpu_layer_num": "auto"}, "cannot be used with infer.resident_experts"),
        ({"infer.resident_experts": "auto", "infer.pp_size": 2, "executor": "inline"}, r"for several stages .* set a"),
    ],
)
def test_wrong_values_are_refused_with_what_to_type(configured: Configured, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_controller(configured(**keys))


def test_models_that_it_cannot_serve_are_refused(tmp_path: Any) -> None:
    keys = {**LIMITS, "backend": "simulated", "infer.resident_experts": 1}
    with pytest.raises(ConfigError, match=r"infer.resident_experts=1: the model has no experts; leave it out"):
        build_controller(small_config(tmp_path / "dense", "Llama", HEADS, **keys))
    with pytest.raises(ConfigError, match=r"weight the experts' inputs; use infer.cpu_layer_num alone"):
        build_controller(small_config(tmp_path / "llama4", "Llama4", {}, **keys))


def test_without_the_package_the_key_names_it(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENER_DISABLE_PLUGINS", "evener-offload")
    with pytest.raises(ConfigError, match=r"infer.resident_experts needs .*; type: pip install evener-offload"):
        build_controller(configured(**{"infer.resident_experts": 1}))
