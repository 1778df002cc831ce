"""Tiny random models on the reference backend, which is installed into a temporary folder for this process and its children."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from evener.config import from_overrides
from evener.config.schema import Config
from evener.engine.controller import Controller
from evener.builtin.kinds import BUILTIN_KINDS
from evener.engine.messages import Abort, Dead, Finish, Finished, FromController, NewRequest, Ready, Tokens, ToController
from evener.engine.scheduler import Scheduler
from evener.engine.state import StateManager
from evener.testing.installed import install_reference_backend
from evener.testing.naive import find_architecture

MakeConfig = Callable[..., Config]
Play = Callable[..., "Played"]


class Played:
    """What every request got: its tokens, log-probabilities and terminal events."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.ends: dict[str, list[Finished]] = {}
        self.cached: dict[str, int] = {}
        self.dead: list[str] = []

    def see(self, events: Sequence[FromController]) -> list[str]:
        """Take events in; returns the requests that ended."""
        for event in events:
            if isinstance(event, Tokens):
                self.tokens.setdefault(event.id, []).extend(event.ids)
                self.logprobs.setdefault(event.id, []).extend(event.logprobs or [])
                self.cached[event.id] = event.cached
            elif isinstance(event, Finished):
                self.ends.setdefault(event.id, []).append(event)
            elif isinstance(event, Dead):
                self.dead.append(event.reason)
        return [e.id for e in events if isinstance(e, Finished)]

    def reasons(self) -> dict[str, str]:
        """The one reason of each."""
        assert all(len(ends) == 1 for ends in self.ends.values()), "more than one terminal event"
        return {name: ends[0].reason for name, ends in self.ends.items()}


@pytest.fixture(scope="session")
def installed_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_reference_backend(tmp_path_factory.mktemp("reference")).parent


@pytest.fixture
def reference(installed_reference: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reference backend on ``sys.path`` and, for child processes, in PYTHONPATH."""
    monkeypatch.syspath_prepend(str(installed_reference))
    paths = [str(installed_reference), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return installed_reference


@pytest.fixture
def make_config(reference: Path, tmp_path: Path) -> MakeConfig:
    """``make_config("Llama", {"vocab_size": 99}, **{"infer.depth": 1})``: a tiny dummy model and small limits."""
    del reference
    numbers = itertools.count()

    def make(family: str = "Llama", changes: Mapping[str, Any] | None = None, **overrides: Any) -> Config:
        folder = tmp_path / f"model{next(numbers)}"
        folder.mkdir()
        config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **(changes or {})}
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        small = {
            "backend": "reference", "load": "dummy", "dtype": "float32", "infer.max_reqs": 4, "infer.max_seq_len": 128,
            "infer.step_tokens": 24, "infer.threads": 1, "infer.kv_memory": 2**22,
        }  # fmt: skip
        return from_overrides(str(folder), {**small, **overrides})

    return make


@pytest.fixture
def shrink_pool() -> Callable[[Controller, int], None]:
    """``shrink_pool(controller, 9)``: the scheduler may use 9 blocks of the pool only, so that few requests fill it."""

    def shrink(controller: Controller, blocks: int) -> None:
        old = controller.scheduler
        kinds = {kind.name: kind for kind in BUILTIN_KINDS}
        state = StateManager(old.state.specs, kinds, old.state.block_size, blocks + 1, old.state.prefix_cache)
        assert blocks < old.state.pool.count and controller.idle
        controller.scheduler = Scheduler(state, len(old._slots), old.step_tokens)

    return shrink


@pytest.fixture
def play() -> Play:
    """``play(controller, messages, aborts={"a": 3})``: run to the end; aborts (or Finish) are sent once that many tokens were seen."""

    def run(
        controller: Controller, messages: Sequence[ToController], aborts: Mapping[str, int] | None = None,
        arrivals: Mapping[str, int] | None = None, how: type[Abort] | type[Finish] = Abort,
        steps: int = 5000,
    ) -> Played:  # fmt: skip
        played, waiting = Played(), dict(aborts or {})
        later = [(arrivals or {}).get(m.id, 0) if isinstance(m, NewRequest) else 0 for m in messages]
        for step in range(steps):
            played.see(controller.handle([m for m, at in zip(messages, later, strict=True) if at == step]))
            if controller.idle and step >= max(later):
                return played
            played.see(controller.step())
            for name, count in list(waiting.items()):
                if len(played.tokens.get(name, [])) >= count:
                    del waiting[name]
                    played.see(controller.handle([how(name)]))
        raise AssertionError(f"{controller.scheduler.open} requests are open after {steps} steps")

    return run


@pytest.fixture
def drive() -> Callable[..., Played]:
    """``drive(client, messages)``: send all over a client and receive until each has ended or the engine is dead."""

    def run(client: Any, messages: Sequence[NewRequest]) -> Played:
        played, open_ids = Played(), {m.id for m in messages}
        for message in messages:
            client.send(message)
        while open_ids and not played.dead:
            events = client.receive(20)
            assert events, "nothing came for 20 seconds"
            assert not any(isinstance(e, Ready) for e in events) or not played.tokens, "Ready comes first"
            open_ids -= set(played.see(events))
        return played

    return run
