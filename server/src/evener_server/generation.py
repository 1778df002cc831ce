"""The samples of one API request as they come, and the set of all that run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from evener.async_llm import AsyncLLM
from evener.frontend.outputs import Delta
from evener.frontend.stream import RequestStream
from evener_server.errors import ApiError, status_error, unavailable
from evener_server.metrics import Metrics, SampleMeter

Submit = Callable[[], Awaitable[RequestStream]]


class Running:
    """The generations that run in one application, so that a shutdown can end them."""

    def __init__(self, llm: AsyncLLM, metrics: Metrics) -> None:
        self.stop_reason: str | None = None
        self._llm, self._metrics = llm, metrics
        self._open: set[Generation] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def start(self, submits: Sequence[Submit], n: int) -> Generation:
        """Submit every prompt of a request; if one is refused, none runs.

        Raises:
            RequestError, OverloadedError, EngineDeadError: as ``AsyncLLM.submit``.
        """
        meter = SampleMeter(self._metrics)
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(await submit()) for submit in submits]
            stack.pop_all()
        generation = Generation(self, streams, n, meter)
        self._metrics.prompt_tokens += generation.prompt_tokens
        self._open.add(generation)
        return generation

    def abort_all(self, reason: str) -> int:
        """End what runs, and say why to its clients. Returns how many there were."""
        self.stop_reason = reason
        for generation in self._open:
            for stream in generation.streams:
                self._llm.abort(stream.request_id)
        return len(self._open)

    def forget(self, generation: Generation) -> None:
        """It has ended."""
        self._open.discard(generation)


class Generation:
    """One API request: ``n`` samples for each of its prompts, numbered prompt by prompt.

    Iterating gives ``(choice, delta)`` as they come. Leaving the context aborts what still runs.

    Attributes:
        streams: one a prompt.
        n: samples of each.
        finish_reasons: by choice, as far as they have ended.
        completion_tokens: sampled so far, over all choices.
        likelihood: by choice, log-probabilities of what was sampled, added up, as far as they came.
        mute: what is sampled is neither shown nor counted; only the prompt is wanted.
    """

    def __init__(self, running: Running, streams: list[RequestStream], n: int, meter: SampleMeter) -> None:
        self.streams, self.n = streams, n
        self._meter = meter
        self.finish_reasons: dict[int, str] = {}
        self.completion_tokens = 0
        self.likelihood = [0.0] * (len(streams) * n)
        self.mute = False
        self._running = running
        self._cached: dict[int, int] = {}

    @property
    def choices(self) -> int:
        """Number of samples over all prompts."""
        return len(self.streams) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(stream.prompt_token_ids) for stream in self.streams)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage. Of a prompt that samples share, those tokens are cached that the first of them found so."""
        cached = 0
        for i in range(len(self.streams)):
            cached += min(self._cached.get(i * self.n + k, 0) for k in range(self.n))
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.forget(self)
        for _ in range(self.choices - len(self.finish_reasons)):
            self._meter.end("abort")
        for stream in self.streams:
            await stream.aclose()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield self._seen(0, delta)
            return
        queue: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(self.streams)]
        left = len(tasks)
        try:
            while left:
                prompt, came = await queue.get()
                if came is None:
                    left -= 1
                else:
                    yield self._seen(prompt, came)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _seen(self, prompt: int, delta: Delta) -> tuple[int, Delta]:
        choice = prompt * self.n + delta.index
        if self.mute:
            delta.text, delta.token_ids, delta.logprobs = "", [], None
            delta.finish_reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        if delta.token_ids:
            self.completion_tokens += len(delta.token_ids)
            self._meter.tokens(choice, len(delta.token_ids))
        # The first entry at a position is the token that was sampled.
        self.likelihood[choice] += sum(next(iter(entry.values())) for entry in delta.logprobs or ())
        self._cached[choice] = max(self._cached.get(choice, 0), delta.num_cached_tokens)
        if delta.finish_reason is not None:
            self.finish_reasons[choice] = delta.finish_reason
            self._meter.end(delta.finish_reason)
        late = delta.finish_reason == "timeout" and not self.completion_tokens
        if late or delta.error is not None or delta.finish_reason in ("abort", "error"):
            raise self._failure(delta)
        return choice, delta

    def _failure(self, delta: Delta) -> ApiError:
        if delta.finish_reason == "abort":
            return unavailable(
                f"the request was aborted: {self._running.stop_reason or 'the engine was told to end it'}"
            )
        if delta.finish_reason == "timeout":
            message = "max_time was over before the first token; send a larger one, or try again when less is waiting"
            # Official clients would try again by themselves, with the same deadline.
            return ApiError(504, message, "max_time", "deadline_exceeded", {"x-should-retry": "false"})
        return status_error(delta.status, delta.error or "the engine gave no reason")


async def _pump(prompt: int, stream: RequestStream, queue: asyncio.Queue[tuple[int, Delta | None]]) -> None:
    try:
        async for delta in stream:
            queue.put_nowait((prompt, delta))
    finally:
        queue.put_nowait((prompt, None))
