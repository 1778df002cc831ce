"""Small engines for tests: a tiny dummy model on the reference backend, and requests run through a controller."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.config import from_overrides
from evener.config.schema import Config
from evener.engine.controller.controller import Controller
from evener.engine.wire.messages import Abort, Dead, Finish, Finished, FromController, NewRequest, ToController, Tokens
from evener_conformance.naive.model import find_architecture


def small_config(
    folder: Path, family: str = "Llama", changes: Mapping[str, Any] | None = None, **overrides: Any
) -> Config:
    """Write the family's ``tiny_config`` with ``changes`` to ``folder``; returns an engine config of small limits with
    ``overrides``."""
    folder.mkdir(parents=True)
    shape = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **(changes or {})}
    (folder / "config.json").write_text(json.dumps(shape), "utf-8")
    small = {
        "backend": "reference",
        "load": "dummy",
        "dtype": "float32",
        "infer.max_reqs": 4,
        "infer.max_seq_len": 128,
        "infer.step_tokens": 24,
        "infer.threads": 1,
        "infer.kv_memory": 2**22,
    }
    return from_overrides(str(folder), {**small, **overrides})


class RunResult:
    """What each request got.

    Attributes:
        tokens, logprobs, prompt_logprobs, pooled: by request id; ends: its terminal events; cached: its prompt tokens
            from the prefix cache.
        dead: reasons of ``Dead``.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.prompt_logprobs: dict[str, list[Any]] = {}
        self.pooled: dict[str, bytes] = {}
        self.ends: dict[str, list[Finished]] = {}
        self.cached: dict[str, int] = {}
        self.dead: list[str] = []

    def see(self, events: Sequence[FromController]) -> list[str]:
        """Record events; returns the requests that ended."""
        for event in events:
            if isinstance(event, Tokens):
                self.tokens.setdefault(event.id, []).extend(event.ids)
                self.logprobs.setdefault(event.id, []).extend(event.logprobs or [])
                self.prompt_logprobs.setdefault(event.id, []).extend(event.prompt_logprobs or [])
                self.pooled[event.id] = self.pooled.get(event.id, b"") + event.pooled
                self.cached[event.id] = event.cached
            elif isinstance(event, Finished):
                self.ends.setdefault(event.id, []).append(event)
            elif isinstance(event, Dead):
                self.dead.append(event.reason)
        return [e.id for e in events if isinstance(e, Finished)]

    def reasons(self) -> dict[str, str]:
        """The reason of each request's only terminal event."""
        assert all(len(ends) == 1 for ends in self.ends.values()), "more than one terminal event"
        return {name: ends[0].reason for name, ends in self.ends.items()}


def play(
    controller: Controller,
    messages: Sequence[ToController],
    aborts: Mapping[str, int] | None = None,
    arrivals: Mapping[str, int] | None = None,
    how: Callable[[str], Abort | Finish] = Abort,
    steps: int = 5000,
) -> RunResult:
    """Run until every request has ended or the engine is dead.

    Args:
        aborts: request → number of its tokens after which ``how`` ends it: once, called with its id.
        arrivals: request → step before which it arrives; default 0.
    """
    played, waiting = RunResult(), dict(aborts or {})
    later = [(arrivals or {}).get(m.id, 0) if isinstance(m, NewRequest) else 0 for m in messages]
    for step in range(steps):
        played.see(controller.handle([m for m, at in zip(messages, later, strict=True) if at == step]))
        if played.dead or (controller.idle and step >= max(later)):
            return played
        played.see(controller.step())
        for name, count in list(waiting.items()):
            if len(played.tokens.get(name, [])) >= count:
                del waiting[name]
                played.see(controller.handle([how(name)]))
    raise AssertionError(f"{controller.scheduler.open} requests are open after {steps} steps")
