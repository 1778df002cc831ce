"""The samples of one API request, and the set of all running requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, TypeAlias

from evener_beam.stream import BeamStream

from evener.async_llm import AsyncLLM
from evener.contracts.outputs import Delta
from evener.frontend.stream import RequestStream
from evener_server.errors import ApiError, deadline_missed, status_error, unavailable
from evener_server.key_use import current_client
from evener_server.metrics import Metrics, Moments, RequestTimer

#: What a prompt's deltas come from.
Stream: TypeAlias = "RequestStream | BeamStream"
Submit = Callable[[], Awaitable[Stream]]


class RunningGenerations:
    """The running generations of one application, so that a shutdown can end them.

    Attributes:
        shows_cached: the usage says how many tokens of the prompt were in the prefix cache.
    """

    def __init__(self, llm: AsyncLLM, metrics: Metrics, shows_cached: bool = True) -> None:
        self.stop_reason: str | None = None
        self.shows_cached = shows_cached
        self._llm, self._metrics = llm, metrics
        self._open: set[Generation] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def start(
        self, submits: Sequence[Submit], n: int, max_tokens: int | None = None,
        check: Callable[[Sequence[Stream]], None] | None = None,
    ) -> Generation:  # fmt: skip
        """Submit every prompt of a request; if one is refused, the others are aborted.

        Args:
            max_tokens: what the client asked for, if it did.
            check: called with the streams so far after each prompt; refuses what they are together.

        Raises:
            RequestError, OverloadedError, EngineDeadError: as ``AsyncLLM.submit`` and ``check``.
        """
        meter = RequestTimer(self._metrics)
        async with AsyncExitStack() as stack:
            streams: list[Stream] = []
            for submit in submits:
                streams.append(await stack.enter_async_context(await submit()))
                if check is not None:
                    check(streams)
                # A short prompt is tokenized on the loop; with many of them other requests take turns.
                await asyncio.sleep(0)
            stack.pop_all()
        generation = Generation(self, streams, n, meter)
        meter.prompts([len(stream.prompt_token_ids) for stream in streams], n, max_tokens)
        self._open.add(generation)
        return generation

    def abort_all(self, reason: str) -> int:
        """End all running generations; their clients get ``reason``. Returns their number."""
        self.stop_reason = reason
        for generation in self._open:
            for stream in generation.streams:
                self._llm.abort(stream.request_id)
        return len(self._open)

    def remove(self, generation: Generation) -> None:
        """The generation has ended."""
        self._open.discard(generation)


class Generation:
    """One API request: ``n`` samples for each of its prompts, numbered prompt by prompt.

    Iterating gives ``(choice, delta)`` as they come. Leaving the context aborts samples that still run.

    Attributes:
        streams: one for each prompt.
        n: samples of each prompt.
        finish_reasons: by choice; only choices that have ended.
        completion_tokens: tokens sampled so far, over all choices.
        cumulative_logprobs: by choice, the sum of the sampled tokens' log-probabilities, if they were requested.
        prompt_logprobs: by prompt, the entries of its tokens so far, if they were requested; None for the first token.
        prompt_only: only the prompt was requested; sampled tokens are neither returned nor counted.
    """

    def __init__(self, running: RunningGenerations, streams: list[Stream], n: int, meter: RequestTimer) -> None:
        self.streams, self.n = streams, n
        self._meter = meter
        self.finish_reasons: dict[int, str] = {}
        self.completion_tokens = 0
        self.cumulative_logprobs = [0.0] * (len(streams) * n)
        self.prompt_logprobs: list[list[dict[int, float] | None]] = [[] for _ in streams]
        self.prompt_only = False
        self._running, self._client = running, current_client.get()
        if self._client is not None:
            self._client.reserve()
        self._cached: dict[int, int] = {}
        self._queued = 0.0

    @property
    def choices(self) -> int:
        """Number of samples over all prompts."""
        return len(self.streams) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(stream.prompt_token_ids) for stream in self.streams)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were in the prefix cache. Of a prompt: the smallest number over its samples, as
        later samples always find the prompt of the first one cached."""
        places = (range(i * self.n, (i + 1) * self.n) for i in range(len(self.streams)))
        return sum(min(self._cached.get(place, 0) for place in each) for each in places)

    @property
    def shown_cached_tokens(self) -> int | None:
        """The same for clients; None: the operator does not want it shown."""
        return self.cached_tokens if self._running.shows_cached else None

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage."""
        cached = self.shown_cached_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}),
        }

    def times(self) -> dict[str, float]:
        """How long the request took, see ``RequestTimer.times``; of several samples the longest time in the queue."""
        return self._meter.times(self._queued)

    def moments(self) -> Moments:
        """When what happened."""
        return self._meter.moments()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.remove(self)
        if self._client is not None:
            self._client.release()
            self._client.use.charge(self.prompt_tokens + self.completion_tokens)
        for choice in set(range(self.choices)) - self.finish_reasons.keys():
            self._meter.end(choice, "abort", self._queued)
        self._meter.close()
        for stream in self.streams:
            await stream.aclose()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield self._record(0, delta)
            return
        queue: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_forward_deltas(i, stream, queue)) for i, stream in enumerate(self.streams)]
        left = len(tasks)
        try:
            while left:
                prompt, came = await queue.get()
                if came is None:
                    left -= 1
                else:
                    yield self._record(prompt, came)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _record(self, prompt: int, delta: Delta) -> tuple[int, Delta]:
        choice = prompt * self.n + delta.index
        if delta.token_ids or delta.pooled:
            self._meter.waited(delta.queued)
        if self.prompt_only:
            delta.text, delta.token_ids, delta.logprobs = "", [], None
            delta.finish_reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        if delta.token_ids:
            self.completion_tokens += len(delta.token_ids)
            self._meter.tokens(choice, len(delta.token_ids), delta.queued)
        # Only sample 0 has them.
        self.prompt_logprobs[prompt] += delta.prompt_logprobs or ()
        # The first entry at a position is the token that was sampled.
        self.cumulative_logprobs[choice] += sum(next(iter(entry.values())) for entry in delta.logprobs or ())
        self._queued = max(self._queued, delta.queued)
        self._cached[choice] = max(self._cached.get(choice, 0), delta.num_cached_tokens)
        if delta.finish_reason is not None:
            self.finish_reasons[choice] = delta.finish_reason
            self._meter.end(choice, delta.finish_reason, self._queued)
        late = delta.finish_reason == "timeout" and not self.completion_tokens
        if late or delta.error is not None or delta.finish_reason in ("abort", "error"):
            raise self._failure(delta)
        return choice, delta

    def _failure(self, delta: Delta) -> ApiError:
        if delta.finish_reason == "abort":
            return unavailable(
                f"the request was aborted: {self._running.stop_reason or 'the engine was asked to end it'}"
            )
        if delta.finish_reason == "timeout":
            return deadline_missed()
        return status_error(delta.status, delta.error or "the engine gave no reason")


async def _forward_deltas(prompt: int, stream: Stream, queue: asyncio.Queue[tuple[int, Delta | None]]) -> None:
    try:
        async for delta in stream:
            queue.put_nowait((prompt, delta))
    finally:
        queue.put_nowait((prompt, None))
