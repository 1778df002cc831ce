"""Requests that need chunks, preemption, prefix hits and aborts in one run, and how two runs of them compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.builtin.kinds import BUILTIN_KINDS
from evener.engine.controller.controller import Controller
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import StateManager
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.reference.engine import RunResult
from evener_kv.host_blocks import HostBlocks

#: Blocks hold 128 tokens on the simulated chip. Steps of 24 tokens cut the prompts into chunks.
LIMITS = {"infer.max_seq_len": 256, "infer.kv_memory": 2**24, "infer.max_reqs": 4, "infer.step_tokens": 24}
GREEDY = Sampling(temperature=0.0)


def traffic() -> dict[str, Any]:
    """Long prompts, which three blocks cannot hold together; a prompt again; one request with noise; two aborts."""
    ids = [5 + 7 * i * i % 89 for i in range(200)]
    asked: Mapping[str, tuple[list[int], int, Sampling]] = {
        "first": (ids[:120], 14, GREEDY), "second": (ids[40:160], 14, GREEDY), "third": (ids[70:120], 14, GREEDY),
        "short": (ids[3:9], 9, GREEDY), "noise": (ids[20:50], 9, Sampling(temperature=0.8, seed=3)),
        "stopped": (ids[50:80], 30, GREEDY), "again": (ids[:140], 9, GREEDY), "once more": (ids[:140], 9, GREEDY),
    }  # fmt: skip
    messages = [NewRequest(id=k, prompt=p, max_tokens=n, sampling=s) for k, (p, n, s) in asked.items()]
    return {"messages": messages, "arrivals": {"again": 70, "once more": 120}, "aborts": {"stopped": 4, "noise": 2}}


def some() -> dict[str, Any]:
    """Two long prompts and a short one of it, for what preemption, cached prefixes and aborts do not change."""
    return {"messages": [each for each in traffic()["messages"] if each.id in ("first", "second", "short")]}


def shrink(controller: Controller, blocks: int) -> None:
    """Leave the scheduler this many blocks, so that few requests fill them."""
    was, kinds = controller.scheduler.state, {kind.name: kind for kind in BUILTIN_KINDS}
    state = StateManager(was.specs, kinds, was.block_size, blocks + 1, was.prefix_cache, was.cuts)
    assert blocks < was.slabs and controller.idle
    old = controller.scheduler
    kept = old.connector.places if isinstance(old.connector, HostBlocks) else None
    files = old.connector.files if isinstance(old.connector, HostBlocks) else None
    connector = HostBlocks(state, kept.count // kept.slab - 1, files) if kept else None
    controller.scheduler = Scheduler(
        state,
        len(old._slots),
        old.step_tokens,
        old.batches,
        old.media,
        old.limit,
        old.grammars,
        old.drafts,
        old.adapters,
        connector,
    )


def assert_some(got: RunResult, want: RunResult) -> None:
    """The answers to ``some`` are those that ``traffic`` had."""
    assert not got.dead and set(got.reasons().values()) == {"length"}
    assert got.tokens == {name: want.tokens[name] for name in ("first", "second", "short")}


def assert_same(got: RunResult, want: RunResult) -> None:
    """Whole answers are equal; of what was aborted, as much as both runs gave."""
    assert not got.dead and got.reasons() == want.reasons()
    assert len({tuple(tokens) for tokens in want.tokens.values()}) > 5, "the model is too flat to show a difference"
    for name, tokens in want.tokens.items():
        both = min(len(tokens), len(got.tokens[name])) if want.reasons()[name] == "abort" else None
        assert got.tokens[name][:both] == tokens[:both], name
