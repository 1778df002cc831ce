"""State groups, block sizes and windows: how the pool is cut, and what a long context holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from evener.contracts.declared import StateSlot
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.distributed.agreement import Agreement
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.worker.geometry import plan_geometry
from evener.errors import ConfigError, ResolveError
from evener.ops.reference.state import ReferenceState
from evener_conformance.reference.device import HostDevice
from evener_conformance.reference.engine import play
from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads

ATTENTION = AttentionSpec(heads=2, head_dim=8, scale=1.0)


def tensors(heads: int = 1) -> tuple[StateTensor, ...]:
    return (StateTensor("key", (heads, 8), "float32"), StateTensor("value", (heads, 8), "float32"))


FULL = StateSpec("full", tensors())
WINDOW = StateSpec("window", tensors(), window=16)


class Sized(ReferenceState):
    """Offers some block sizes only."""

    def __init__(self, name: str, sizes: Sequence[int], owns_memory: bool = False) -> None:
        self.name, self._sizes, self.owns_memory = name, sizes, owns_memory

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return self._sizes


def slots(*specs: StateSpec, provider: ReferenceState | None = None) -> list[StateSlot]:
    return [
        StateSlot(f"layer{i}", spec, ATTENTION, provider=provider or ReferenceState()) for i, spec in enumerate(specs)
    ]


def test_fifteen_sliding_and_three_full_layers_make_six_groups_of_three() -> None:
    layers = slots(*([WINDOW] * 5 + [FULL]) * 3)
    geometry = plan_geometry(layers, alignment=64)
    assert [(len(g.slots), g.spec.kind) for g in geometry.groups] == [(3, "window")] * 5 + [(3, "full")]
    assert geometry.layer_slots == 3
    assert sorted(slot.group for slot in layers) == [g for g in range(6) for _ in range(3)]
    assert all(geometry.groups[slot.group].spec == slot.spec for slot in layers)


def test_equal_layers_are_one_group_and_waste_nothing() -> None:
    geometry = plan_geometry(slots(*[FULL] * 30), alignment=64)
    assert (len(geometry.groups), geometry.layer_slots) == (1, 30)
    assert geometry.slab_bytes == FULL.nbytes * geometry.block_size


def test_a_slab_holds_the_largest_block_and_is_aligned() -> None:
    wide = StateSpec("full", tensors(3))
    geometry = plan_geometry(slots(WINDOW, wide), alignment=4096)
    assert geometry.slab_bytes % 4096 == 0 and geometry.slab_bytes >= wide.nbytes * geometry.block_size


ROW = StateSpec("recurrent", (StateTensor("row", (1700, 8), "float32"),), per="request")


def test_a_large_recurrent_row_does_not_enlarge_blocks() -> None:
    geometry = plan_geometry(slots(*[ROW] * 3, FULL), alignment=64)
    rows, full = geometry.groups[0], geometry.groups[-1]
    assert rows.cut == 1 and full.cut >= 50
    assert ROW.nbytes <= geometry.slab_bytes < 1.13 * ROW.nbytes
    assert geometry.slab_bytes / full.cut < 1.05 * FULL.nbytes * geometry.block_size


def test_blocks_of_two_sizes_share_slabs_and_waste_little() -> None:
    latent = StateSpec("latent", (StateTensor("latent", (512,), "bfloat16"), StateTensor("rope", (64,), "bfloat16")))
    index = StateSpec("index", (StateTensor("key", (128,), "bfloat16"),))
    geometry = plan_geometry(slots(*[latent, index] * 61), alignment=64)
    assert [(len(g.slots), g.cut) for g in geometry.groups] == [(61, 1), (61, 4)] and geometry.spans == (4, 1)
    a_block_each = 61 * geometry.slab_bytes * (1 + 1 / 4)
    assert a_block_each < 1.05 * 61 * (latent.nbytes + index.nbytes) * geometry.block_size


@pytest.mark.parametrize("specs", [(WINDOW, WINDOW, FULL) * 2, (ROW, FULL, ROW, WINDOW)])
def test_every_slot_gets_pages_of_its_own_that_share_no_byte(specs: tuple[StateSpec, ...]) -> None:
    layers = slots(*specs)
    geometry = plan_geometry(layers, alignment=64)
    geometry.bind(4, HostDevice(0))
    for slab in range(1, 4):
        # Layers of different groups take turns in one slab: it belongs to blocks of one size at a time.
        for group in geometry.groups:
            blocks = range(slab * group.cut, (slab + 1) * group.cut)
            for number, slot in enumerate(group.slots):
                for view in slot.views:
                    for block in blocks:
                        view[block] = 10 * block + number
            for number, slot in enumerate(group.slots):
                assert all((view[block] == 10 * block + number).all() for view in slot.views for block in blocks)
    assert all((view[0] == 0).all() for slot in layers for view in slot.views)


def test_the_block_size_is_the_first_that_every_provider_offers() -> None:
    layers = [*slots(FULL, provider=Sized("a", (128, 32, 16))), *slots(WINDOW, provider=Sized("b", (16, 32)))]
    assert plan_geometry(layers, 64).block_size == 32
    assert plan_geometry(layers, 64, block_size=16).block_size == 16


def test_a_block_size_that_is_not_offered_is_an_error_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"infer\.block_size=24 is not offered by a; they offer \[16, 32\]"):
        plan_geometry(slots(FULL, provider=Sized("a", (16, 32))), 64, block_size=24)


def test_stages_on_different_backends_take_the_smallest_common_block_size_and_cut_alike() -> None:
    offers, alignments = ((16, 32, 64), (128, 64, 32)), (64, 512)
    # The second stage's chip stores a row in more bytes.
    wide = StateSpec("recurrent", (StateTensor("row", (1900, 8), "float32"),), per="request")

    def plan(group: ThreadCommunicator) -> tuple[int, int, list[int], int]:
        rank = group.rank
        layers = [*slots(*[(ROW, wide)[rank]] * 3), *slots(FULL, provider=Sized("a", offers[rank]))]
        geometry = plan_geometry(layers, alignments[rank], agreement=Agreement(group))
        return geometry.block_size, geometry.slab_bytes, [g.cut for g in geometry.groups], len(geometry.groups)

    first, second = run_on_threads(2, plan)
    assert first == second and first[0] == 32 and first[1] % 512 == 0 and first[1] >= wide.nbytes


def test_stages_on_different_backends_without_a_common_block_size_are_refused() -> None:
    def plan(group: ThreadCommunicator) -> str:
        layers = slots(FULL, provider=Sized("ab"[group.rank], ((16, 32), (128,))[group.rank]))
        with pytest.raises(ConfigError) as refused:
            plan_geometry(layers, 64, block_size=(None, 16)[group.rank], agreement=Agreement(group))
        return str(refused.value)

    first, second = run_on_threads(2, plan)
    assert "a offer [16, 32], but with the other stages no common block size" in first
    assert "infer.block_size=16 is not offered by b; they offer []" in second


def test_providers_without_a_common_block_size_are_an_error_that_says_what_to_type() -> None:
    layers = [*slots(FULL, provider=Sized("a", (32,))), *slots(WINDOW, provider=Sized("b", (16,)))]
    with pytest.raises(ConfigError, match=r"a, b offer no common block size; force one with ops\.attention="):
        plan_geometry(layers, 64)


@pytest.mark.parametrize("sizes", [(64, 96), (), (0, 16)])
def test_block_sizes_that_are_not_multiples_of_the_smallest_are_an_error_that_names_their_provider(
    sizes: tuple[int, ...],
) -> None:
    layers = [*slots(FULL), *slots(WINDOW, provider=Sized("a", sizes))]
    with pytest.raises(ResolveError, match=r"state provider a offers blocks of \[.*set ops\.attention=reference"):
        plan_geometry(layers, 64)


def test_memory_that_a_provider_owns_is_counted_and_takes_no_page() -> None:
    owner = Sized("a", (16,), owns_memory=True)
    geometry = plan_geometry(slots(FULL, FULL, provider=owner), 64)
    assert (geometry.layer_slots, geometry.block_bytes) == (0, 2 * FULL.nbytes * 16)


def test_memory_that_a_provider_owns_is_counted_for_every_group() -> None:
    owner = Sized("a", (16,), owns_memory=True)
    geometry = plan_geometry([*slots(FULL, FULL, provider=owner), *slots(WINDOW, provider=owner)], 64)
    layers = sum(len(group.slots) * group.spec.nbytes for group in geometry.groups)
    assert len(geometry.groups) > 1
    assert geometry.block_bytes == layers * 16


GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def gemma(make_config: Any) -> Any:
    limits = {"infer.max_seq_len": 256, "infer.step_tokens": 32, "infer.kv_memory": 2**24}
    return lambda **more: build_controller(
        make_config("Gemma3", {"sliding_window": 16, "num_hidden_layers": 4}, **limits, **more)
    )[0]


def test_a_long_context_holds_only_its_windows_blocks_in_the_sliding_groups(gemma: Any) -> None:
    controller = gemma()
    size = controller.scheduler.state.block_size
    kinds = [spec.kind for spec in controller.scheduler.state.specs]
    assert kinds.count("window") == 3 and kinds.count("full") == 1
    controller.handle([NewRequest(id="a", prompt=[i % 97 for i in range(200)], max_tokens=20, sampling=GREEDY)])
    while not controller.scheduler.running or controller.scheduler.running[0].computed < 205:
        controller.step()
    (request,) = controller.scheduler.running
    held = {kind: sum(block > 0 for block in blocks) for kind, blocks in zip(kinds, request.table.blocks, strict=True)}
    assert held["full"] == -(-request.computed // size)
    assert held["window"] <= 16 // size + 1
    assert controller.scheduler.state.pool.used == held["full"] + 3 * held["window"]
    while not controller.idle:
        controller.step()
    assert controller.scheduler.state.pool.used == 0


def test_a_window_still_gets_prefix_hits_and_the_same_tokens(gemma: Any) -> None:
    controller = gemma()
    prompt = [7 * i % 89 for i in range(200)]
    first = play(controller, [NewRequest(id="a", prompt=prompt, max_tokens=12, sampling=GREEDY)])
    again = play(controller, [NewRequest(id="b", prompt=prompt, max_tokens=12, sampling=GREEDY)])
    longer = play(controller, [NewRequest(id="c", prompt=[*prompt, *first.tokens["a"]], max_tokens=4, sampling=GREEDY)])
    size = controller.scheduler.state.block_size
    assert again.tokens["b"] == first.tokens["a"] and again.cached["b"] == 199 // size * size
    assert longer.cached["c"] >= 200 // size * size
    fresh = gemma(**{"infer.prefix_cache": False})
    expected = play(fresh, [NewRequest(id="c", prompt=[*prompt, *first.tokens["a"]], max_tokens=4, sampling=GREEDY)])
    assert longer.tokens == expected.tokens and expected.cached["c"] == 0
    assert torch.get_num_threads() == 1
