"""Steps of a beam search as forks of ended requests: each computes one token and shares its parent's blocks, with and
without a prefix cache, and finds the same texts as requests that compute all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from evener_beam.search import BeamOptions, BeamSearch
from evener_forks.mark import ForkMark

from evener.engine.controller.blocks import BlockPool
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Command, NewRequest, Sampling

BEAMS, LENGTH = 4, 9
OPTIONS = BeamOptions(BEAMS)
PROMPT = torch.randint(3, 150, (100,), generator=torch.Generator().manual_seed(2)).tolist()


class Searches:
    """Beam searches on a controller, a step of all of them at a time."""

    def __init__(self, controller: Controller, play: Callable[..., Any], forked: bool) -> None:
        self._controller, self._play, self._forked = controller, play, forked
        self.requests = 0
        if forked:
            self.command("open", "")

    def command(self, action: str, search: str) -> None:
        (done,) = self._controller.handle([Command("forks", [action, search])])
        assert done.error is None

    def run(self, prompts: Mapping[str, list[int]], others: Mapping[int, list[NewRequest]] | None = None) -> Any:
        """The texts of each search and the tokens of ``others``, which arrive at their step."""
        searches = {name: BeamSearch(OPTIONS, [], LENGTH) for name in prompts}
        computed: dict[str, dict[tuple[int, ...], str]] = {name: {} for name in prompts}
        found: dict[str, Any] = {}
        for step in range(LENGTH):
            messages, names = list[NewRequest](), dict[str, list[str]]()
            for name, search in searches.items():
                beams, before = search.running, computed[name]
                parents = [before.get(beam.ids[:-1], "") for beam in beams]
                names[name] = [f"{name}-{step}-{i}" for i in range(len(beams))]
                messages += [
                    NewRequest(
                        id=own, prompt=[*prompts[name], *beam.ids], max_tokens=1,
                        sampling=Sampling(temperature=0.0, logprobs=search.needed),
                        transfer=ForkMark(name, parent, parents).to_text() if self._forked else "",
                    ) for own, beam, parent in zip(names[name], beams, parents, strict=True)
                ]  # fmt: skip
                computed[name] = {beam.ids: own for beam, own in zip(beams, names[name], strict=True)}
            self.requests += len(messages)
            more = (others or {}).get(step, [])
            played = self._play(self._controller, [*more, *messages])
            found |= {each.id: played.tokens[each.id] for each in more}
            for name, search in searches.items():
                entries = [played.logprobs[own][0] for own in names[name]]
                search.advance([dict(zip(each.ids, each.values, strict=True)) for each in entries])
        return found | {name: [beam.ids for beam in search.finished] for name, search in searches.items()}


@pytest.fixture
def most_used(monkeypatch: pytest.MonkeyPatch) -> dict[BlockPool, int]:
    """The most pages of each pool that were held at a time."""
    most: dict[BlockPool, int] = {}
    allocate = BlockPool.allocate_all

    def counted(pool: BlockPool, wanted: Any) -> Any:
        taken = allocate(pool, wanted)
        most[pool] = max(most.get(pool, 0), pool.used)
        return taken

    monkeypatch.setattr(BlockPool, "allocate_all", counted)
    return most


@pytest.mark.parametrize(
    ("family", "depth", "cache"),
    [("Llama", 2, False), ("Qwen3Next", 2, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("Llama", 1, True), ("Gemma3", 2, False), ("DeepseekV32", 2, False), ("Qwen3Next", 1, False),
    ))],
)  # fmt: skip
def test_a_step_computes_one_token_for_each_beam_and_beams_share_the_blocks_of_their_prompt(
    family: str, depth: int, cache: bool, make_lively: Any, play: Any, one_thread: None,
    most_used: dict[BlockPool, int],
) -> None:  # fmt: skip
    config = make_lively(family, **{"infer.depth": depth, "infer.prefix_cache": cache})
    apart, forked = (build_controller(config)[0] for _ in range(2))
    expected = Searches(apart, play, forked=False).run({"s": PROMPT})
    search = Searches(forked, play, forked=True)
    assert search.run({"s": PROMPT}) == expected and len(set(expected["s"])) == BEAMS
    state, stats = forked.scheduler.state, forked.scheduler.stats
    assert search.requests == 1 + (LENGTH - 1) * BEAMS
    assert stats.computed_tokens == len(PROMPT) + search.requests - 1
    assert stats.forks == search.requests - 1
    if family in ("Llama", "DeepseekV32") and not cache:  # each block of a prompt counts
        alone = state.slabs_for(len(PROMPT) + LENGTH, forked.scheduler.step_tokens) * state.pool.slab
        assert most_used[state.pool] <= BEAMS * alone // 2
    assert state.pool.used > 0
    search.command("end", "s")
    assert state.pool.used == 0


def other(name: str, size: int, count: int) -> NewRequest:
    prompt = torch.randint(3, 150, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    return NewRequest(id=name, prompt=prompt, max_tokens=count, sampling=Sampling(temperature=0.0))


@pytest.mark.parametrize(
    ("family", "host"), [pytest.param("Llama", False, marks=pytest.mark.slow), ("Qwen3Next", True)]
)
def test_without_free_blocks_states_are_given_back_and_the_texts_stay_the_same(
    family: str, host: bool, make_lively: Any, play: Any, one_thread: None, shrink_pool: Any
) -> None:
    keys = {"infer.kv_host_memory": "1MiB"} if host else {"infer.prefix_cache": False}
    config = make_lively(family, **keys)
    prompts = {"a": PROMPT[:41], "b": PROMPT[20:70]}
    others = {0: [other(f"early{i}", 30 + i, 50) for i in range(4)], 2: [other("late", 50, 60)]}
    apart, forked = (build_controller(config)[0] for _ in range(2))
    expected = Searches(apart, play, forked=False).run(prompts, others)
    state = forked.scheduler.state
    needed = state.slabs_for(len(PROMPT) + 41, forked.scheduler.step_tokens)
    shrink_pool(forked, needed + 8)
    search = Searches(forked, play, forked=True)
    assert search.run(prompts, others) == expected
    stats = forked.scheduler.stats
    assert stats.preemptions and 0 < stats.forks < search.requests - 2
    for name in prompts:
        search.command("end", name)
    assert state.pool.used == 0


def test_only_the_states_that_a_step_names_are_kept_and_an_emptied_cache_keeps_none(
    make_lively: Any, play: Any, one_thread: None
) -> None:
    controller, _ = build_controller(make_lively("Llama"))
    Searches(controller, play, forked=True)
    pool, greedy = controller.scheduler.state.pool, Sampling(temperature=0.0)

    def step(name: str, prompt: list[int], parent: str, parents: list[str], **fields: Any) -> int:
        mark = ForkMark("s", parent, parents).to_text()
        message = NewRequest(id=name, prompt=prompt, max_tokens=1, sampling=greedy, transfer=mark, **fields)
        forks = controller.scheduler.stats.forks
        play(controller, [message])
        return controller.scheduler.stats.forks - forks

    assert step("first", PROMPT, "", []) == 0
    one = pool.used
    # Another salt, and other tokens than the parent's, do not start from its state.
    assert step("salted", [*PROMPT, 5], "first", ["first"], cache_salt="tenant") == 0
    assert step("other", [*PROMPT[:-1], 7, 5], "first", ["first"]) == 0
    assert pool.used > one
    assert step("second", [*PROMPT, 5], "first", ["first"]) == 1
    assert step("beside it", [*PROMPT, 6], "first", ["first"]) == 1  # after "second" has ended, whose state stays
    assert step("third", [*PROMPT, 5, 6], "second", ["second"]) == 1
    controller.scheduler.end_all("abort")
    assert 0 < pool.used <= one + 2
    pool.clear_keys()
    assert pool.used == 0
    assert step("fourth", [*PROMPT, 5, 6, 7], "third", ["third"]) == 0


def test_a_mark_reads_back_and_other_texts_are_none() -> None:
    mark = ForkMark("s", "p", ["p", "q"])
    assert ForkMark.from_text(mark.to_text()) == mark
    assert ForkMark.from_text("") is None and ForkMark.from_text('{"remote": 1}') is None
