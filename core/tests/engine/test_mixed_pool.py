"""One pool for all kinds of state at once: a test model under random traffic, compared with the naive engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.backend_search import BackendSearch
from evener.builtin.kinds import BUILTIN_KINDS
from evener.config.schema import Config
from evener.engine.controller.state import StateManager
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Abort, Finish, NewRequest, Sampling
from evener.engine.wire.plan import Admission, Plan, TableUpdate
from evener.engine.worker.worker import Worker
from evener_conformance.distributions import write_distribution
from evener_conformance.naive.model import NaiveModel

from .traffic import CUTS, STEP_TOKENS, Pick, check_tokens, patient, picks

GREEDY = Sampling(temperature=0.0)
NOISE = torch.Generator().manual_seed(11)
LONG = torch.randint(0, 97, (75,), generator=NOISE).tolist()
#: Prompts that share beginnings of 0, 1, 2 and 4 blocks, and end inside and at the end of blocks.
PROMPTS = [LONG, LONG[:64], [*LONG[:40], 1, 2], LONG[:32], [*LONG[:20], *[3] * 9], LONG[1:35], [5], LONG[:16]]


@pytest.fixture
def mixed(make_lively: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Any:
    """``mixed(**options)``: the made-up model's configuration, its package installed."""
    write_distribution(tmp_path / "installed", "mixed", {"evener.plugins": {"mixed": "mixed_model:descriptor"}})
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    limits = {"infer.kv_memory": 2**24, "infer.snapshot_every": 32}
    return lambda **options: make_lively("Mixed", **{**limits, **options})


@pytest.fixture
def naive(mixed: Any) -> NaiveModel:
    return NaiveModel(mixed().model, max_positions=128)


def test_mixed_model_has_groups_of_every_state_kind_without_enlarging_blocks(mixed: Any) -> None:
    controller, _ = build_controller(mixed())
    state = controller.scheduler.state
    assert {s.kind for s in state.specs} == {"full", "window", "chunk", "latent", "index", "recurrent"}
    assert len(set(state.cuts)) > 2


@pytest.mark.parametrize("examples", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.slow
def test_random_traffic_matches_the_naive_engine_and_leaks_no_block(
    examples: int, mixed: Any, naive: NaiveModel, play: Any, shrink_pool: Any
) -> None:
    base: Config = mixed()
    seen = {"preemptions": 0, "prefix_hits": 0, "forks": 0, "aborts": 0, "from the host": 0}

    @cache
    def wanted(prompt: int, count: int) -> list[int]:
        return naive.greedy(PROMPTS[prompt], count)

    @patient(examples)
    @given(
        picked=picks(len(PROMPTS), least=3),
        parents=st.dictionaries(st.integers(1, 6), st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=4),
        cuts=CUTS,
        how=st.sampled_from([Abort, Finish]),
        depth=st.integers(1, 3),
        step_tokens=STEP_TOKENS,
        room=st.integers(0, 2),
        host=st.sampled_from([None, 2**21, 2**25]),
    )
    def traffic(
        picked: list[Pick], parents: dict[int, tuple[int, bool]], cuts: dict[int, int], how: Any,
        depth: int, step_tokens: int, room: int, host: int | None,
    ) -> None:  # fmt: skip
        for child, (parent, same) in sorted(parents.items()):
            if same and parent < child < len(picked):  # another sample of the same prompt, sent with it
                picked[child] = (picked[parent][0], picked[child][1], picked[parent][2])
        config = replace(base, infer=replace(base.infer, depth=depth, step_tokens=step_tokens, kv_host_memory=host))
        controller, _ = build_controller(config)
        shrink_pool(controller, controller.scheduler.state.slabs_for(75 + 14, step_tokens) + room)
        messages = [
            NewRequest(
                id=f"r{i}", prompt=PROMPTS[prompt], max_tokens=count, sampling=GREEDY,
                fork_of=f"r{parents[i][0]}" if i in parents else "",
            )
            for i, (prompt, count, _) in enumerate(picked)
        ]  # fmt: skip
        aborts = {f"r{i}": after for i, after in cuts.items() if i < len(picked)}
        arrivals = {f"r{i}": at for i, (_, _, at) in enumerate(picked)}
        played = play(controller, messages, aborts=aborts, arrivals=arrivals, how=how)
        check_tokens(played, picked, aborts, wanted)
        pool = controller.scheduler.state.pool
        assert pool.used == 0 and pool.free == pool.count - pool.slab
        seen["preemptions"] += controller.scheduler.stats.preemptions
        seen["prefix_hits"] += controller.scheduler.stats.prefix_hits
        seen["forks"] += controller.scheduler.stats.forks
        seen["from the host"] += controller.scheduler.stats.counters.get("kv_host_hits", 0)
        seen["aborts"] += "length" in played.reasons().values() and len(set(played.reasons().values())) > 1

    traffic()
    assert all(seen.values()), seen


@pytest.mark.parametrize("length", [19, *(pytest.param(n, marks=pytest.mark.slow) for n in (32, 48))])
def test_a_fork_diverges_from_copied_state(length: int, mixed: Any, naive: NaiveModel) -> None:
    config: Config = mixed(**{"infer.step_tokens": 64})
    worker = Worker(config, BackendSearch("reference"))
    facts = worker.facts
    kinds = {kind.name: kind for kind in BUILTIN_KINDS}
    state = StateManager(facts.specs, kinds, facts.block_size, facts.slabs, cuts=facts.cuts)
    prompt = LONG[:length]
    first, _ = state.open(prompt, "")
    state.grow(first, length)
    whole = TableUpdate(0, 0, [list(b) for b in first.blocks])
    start = Plan(
        id=0, admissions=[Admission(0, prompt, GREEDY)], updates=[whole], slots=[0], starts=[0], counts=[length],
        samples=[0],
    )  # fmt: skip
    (token,) = worker.execute(start).wait().ids
    made = state.fork(first, length)
    assert made is not None
    second, copies = made
    other = [*prompt, (token + 1) % 97]
    ways = {0: [*prompt, token], 1: other}
    for step in range(20):
        updates, tables = [], {0: first, 1: second}
        for slot, table in tables.items():
            grown = state.grow(table, length + step + 1)
            assert grown is not None
            if slot == 1 and step == 0:
                updates.append(TableUpdate(1, 0, [list(b) for b in table.blocks]))
            elif grown.blocks:
                updates.append(TableUpdate(slot, grown.start, [list(b) for b in grown.blocks]))
        plan = Plan(
            id=step + 1, admissions=[Admission(1, other, GREEDY)] if step == 0 else [], updates=updates,
            copies=copies if step == 0 else [], slots=[0, 1], starts=[length + step] * 2, counts=[1, 1], samples=[0, 1],
        )  # fmt: skip
        for slot, token in enumerate(worker.execute(plan).wait().ids):
            ways[slot].append(token)
    for tokens in ways.values():
        assert max(naive.greedy_gaps(tokens[: length + 1], tokens[length + 1 :])) == 0.0
    state.close(first)
    state.close(second)
    assert state.pool.used == 0
