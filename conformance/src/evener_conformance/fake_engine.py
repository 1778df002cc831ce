"""An engine without a model, for tests of front ends.

It repeats the prompt: output token i is ``prompt[i % len(prompt)]``, until ``max_tokens`` or a stop token. Every
``receive`` is one step that gives each open request one token. It is deterministic, needs no torch and starts no
thread::

    engine = FakeEngine(info_overrides={"max_model_len": 64})
    llm = AsyncLLM(engine, model_dir=folder)

``script`` replaces the echo. With ``pooling`` in its info it gives rows (``fake_row``) and no tokens. Rows of
prompt tokens are ``fake_rows``. ``hold`` stops
the steps and ``release`` continues them, so that a test can look at a running request without sleeping. ``fail`` and
``die`` inject errors; with ``weights_error`` weights cannot be changed, nor any other command done.
``sent`` has every message, ``open_ids`` the requests that have not ended.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evener.contracts.outputs import FinishReason, PromptOutputs
from evener.engine.facts.engine_info import EngineInfo
from evener.engine.facts.memory_plan import MeasuredMemory
from evener.engine.wire.client import EngineClient
from evener.engine.wire.messages import (
    Abort,
    Command,
    CommandDone,
    Dead,
    Finish,
    Finished,
    FromController,
    GetStats,
    NewRequest,
    Ready,
    Shutdown,
    StatsReport,
    ToController,
    TokenLogprobs,
    Tokens,
)
from evener.sampling_params import MAX_LOGPROBS

Script = Callable[[NewRequest], list[int]]


def echo(request: NewRequest) -> list[int]:
    """The prompt, repeated to ``max_tokens`` tokens."""
    return [request.prompt[i % len(request.prompt)] for i in range(request.max_tokens)]


@dataclass
class _Running:
    request: NewRequest
    tokens: list[int]
    done: int = 0
    scored: bool = False


#: Of an engine without weights and state.
NO_MEMORY = MeasuredMemory(
    weights=0, copies=0, mapped=0, tables=0, workspace=0, state=0, blocks=0, block_bytes=0, free=0,
    measured_weights=0, measured_mapped=0, measured_host=0,
)  # fmt: skip


class FakeEngine(EngineClient):
    """See the module's docstring. Thread-safe.

    Args:
        script: the tokens of a request; cut at ``max_tokens`` and after a stop token.
        info_overrides: changes to ``Ready.info``.
        tokens_per_step: tokens that each request gets in one event.
        cached: number of prompt tokens reported as taken from the prefix cache.
        hold_after: call ``hold`` after this many steps; None: never.
        auto_ready: False delays the ``Ready`` event until ``become_ready``.
    """

    def __init__(
        self,
        script: Script = echo,
        *,
        info_overrides: dict[str, object] | None = None,
        tokens_per_step: int = 1,
        cached: int = 0,
        hold_after: int | None = None,
        auto_ready: bool = True,
    ) -> None:
        fields: dict[str, Any] = {
            "model": "", "served_name": "fake", "max_model_len": 128, "vocab_size": 512,
            "backend": "fake", "backend_reason": "asked for", "device": "", "memory": NO_MEMORY,
            **(info_overrides or {}),
        }  # fmt: skip
        self.info = EngineInfo(**fields)
        self.sent: list[ToController] = []
        self.closed = False
        self.weights_error: str | None = None
        self._script, self._tokens_per_step, self._cached = script, tokens_per_step, cached
        self._steps_left = hold_after
        self._running: dict[str, _Running] = {}
        self._events: list[FromController] = []
        self._changed = threading.Condition()
        self._held = self._dead = False
        if auto_ready:
            self.become_ready()

    def send(self, message: ToController) -> None:
        with self._changed:
            if self._dead or self.closed:
                return
            self.sent.append(message)
            if isinstance(message, NewRequest):
                self._running[message.id] = _Running(message, self._script(message)[: message.max_tokens])
            elif isinstance(message, (Abort, Finish)):
                self._end(message.id, "abort" if isinstance(message, Abort) else "stop")
            elif isinstance(message, Command):
                self._events.append(CommandDone(self.weights_error))
            elif isinstance(message, GetStats):
                self._events.append(self._stats())
            elif isinstance(message, Shutdown) and not message.drain:
                for request_id in list(self._running):
                    self._end(request_id, "abort")
            self._changed.notify_all()

    def receive(self, timeout: float | None) -> list[FromController]:
        with self._changed:
            self._changed.wait_for(self._has_work, timeout)
            if self._running and not self._held and not self.closed:
                for running in list(self._running.values()):
                    self._step(running)
                if self._steps_left is not None:
                    self._steps_left -= 1
                    self._held = self._steps_left == 0
            events, self._events = self._events, []
            return events

    def close(self, drain: bool = False) -> None:
        while drain and self.open_ids and not self._held:
            self._events += self.receive(0)
        with self._changed:
            for request_id in list(self._running):
                self._end(request_id, "abort")
            self.closed = True
            self._changed.notify_all()

    def become_ready(self) -> None:
        """Send ``Ready``."""
        with self._changed:
            self._events.append(Ready(info=self.info))
            self._changed.notify_all()

    def hold(self) -> None:
        """No more tokens until ``release``; aborts are still answered."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Continue after ``hold``; ``hold_after`` no longer applies."""
        with self._changed:
            self._held, self._steps_left = False, None
            self._changed.notify_all()

    def expire(self, request_id: str) -> None:
        """End one request because its time limit has passed."""
        with self._changed:
            self._end(request_id, "timeout")
            self._changed.notify_all()

    def fail(self, request_id: str, error: str, status: int = 500) -> None:
        """End one request with an error."""
        with self._changed:
            self._end(request_id, "error", error, status)
            self._changed.notify_all()

    def die(self, reason: str) -> None:
        """Die as a crashed process does: send ``Dead`` and nothing else; open requests get no answer."""
        with self._changed:
            self._running.clear()
            self._events.append(Dead(reason))
            self._dead = True
            self._changed.notify_all()

    @property
    def open_ids(self) -> list[str]:
        """Ids of the requests that have not ended: an engine would hold blocks for them."""
        with self._changed:
            return list(self._running)

    @property
    def steps_left(self) -> int | None:
        """Steps until it holds; 0 once it does, None without ``hold_after``."""
        with self._changed:
            return self._steps_left

    @property
    def aborted_ids(self) -> list[str]:
        """Ids of all ``Abort`` messages, in order."""
        with self._changed:
            return [message.id for message in self.sent if isinstance(message, Abort)]

    def _has_work(self) -> bool:
        return bool(self._events) or self.closed or (bool(self._running) and not self._held)

    def _step(self, running: _Running) -> None:
        request = running.request
        ids = running.tokens[running.done : running.done + self._tokens_per_step]
        stop = next((i for i, token in enumerate(ids) if token in request.stop_token_ids), None)
        if stop is not None:
            ids = ids[: stop + 1]
        running.done += len(ids)
        logprobs = None
        if request.sampling.logprobs is not None:
            named = request.sampling.logprob_ids
            logprobs = [_named(token, named) if named else _logprobs(token, request.sampling.logprobs) for token in ids]
        scores, top = None, request.sampling.prompt_logprobs
        if top is not None and not running.scored and len(request.prompt) > 1:
            scores = [_logprobs(token, top) for token in request.prompt[1:]]
        rows = b""
        if request.sampling.prompt_outputs is not None and not running.scored:
            rows = fake_rows(request.sampling.prompt_outputs, self.info)
        for entries, most in ((scores, top), (logprobs, request.sampling.logprobs)):
            rows += b"".join(_logits(entry, self.info) for entry in entries or () if (most or 0) > MAX_LOGPROBS)
        running.scored = True
        if ids and self.info.pooling is not None:
            self._events.append(Tokens(id=request.id, ids=[], cached=self._cached, pooled=fake_row(request.prompt)))
        elif ids:
            self._events.append(Tokens(
                id=request.id, ids=ids, logprobs=logprobs, prompt_logprobs=scores, cached=self._cached, pooled=rows
            ))  # fmt: skip
        if stop is not None:
            self._end(request.id, "stop")
        elif running.done >= len(running.tokens):
            self._end(request.id, "length")

    def _stats(self) -> StatsReport:
        """One block for each request; nothing is counted."""
        running = len(self._running)
        return StatsReport(
            waiting=0, running=running, blocks=100, blocks_used=running, steps=0, mixed_steps=0, preemptions=0,
            prefix_hits=0, cached_tokens=0, computed_tokens=0, finished=0,
        )  # fmt: skip

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None, status: int = 500) -> None:
        if self._running.pop(request_id, None) is not None:
            self._events.append(Finished(id=request_id, reason=reason, error=error, status=status))


def fake_row(prompt: Sequence[int]) -> bytes:
    """The pooled row of a prompt: its length, its first and its last id, and 1."""
    return struct.pack("=4f", len(prompt), prompt[0], prompt[-1], 1)


def fake_rows(outputs: PromptOutputs, info: EngineInfo) -> bytes:
    """Rows of prompt tokens: each the token's position, as often as a row has numbers."""
    width = info.vocab_size if outputs.kind == "logits" else info.hidden_size
    positions = [at for first, end in outputs.ranges for at in range(first, end)]
    return b"".join(struct.pack("=f", at) * width for at in positions)


def _logits(entry: TokenLogprobs, info: EngineInfo) -> bytes:
    """The row of logits of a position: each token's log-probability, which is low if it has none."""
    values = dict(zip(entry.ids, entry.values, strict=True))
    return struct.pack(f"={info.vocab_size}f", *(values.get(i, -1e6) for i in range(info.vocab_size)))


def _named(token: int, ids: list[int]) -> TokenLogprobs:
    """The sampled token at -0.5, then ``ids``: the token itself, and others at -1, -2, … in their order."""
    values = [-0.5 if i == token else -1.0 - place for place, i in enumerate(ids)]
    return TokenLogprobs(ids=[token, *ids], values=[-0.5, *values])


def _logprobs(token: int, top: int) -> TokenLogprobs:
    """The sampled token at -0.5, then the ``top`` most likely: the token itself, and ids from 0 up at -1, -2, …"""
    others = [i for i in range(top + 1) if i != token][: max(top - 1, 0)]
    likeliest = [token, *others][:top]
    return TokenLogprobs(ids=[token, *likeliest], values=[-0.5, *(-0.5 - i for i in range(len(likeliest)))])
