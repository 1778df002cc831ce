"""Beam search on an ``AsyncLLM``: each step asks the engine for one token behind each beam, in a request for each. Such
a request is a fork of the one that made the beam it goes on from: both share their full blocks, the block that is
partly filled is copied, and one token is computed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType

from evener_forks.search import ForkSearch

from evener.async_llm import AsyncLLM
from evener.contracts.adapters import HeldAdapter
from evener.contracts.outputs import Delta, FinishReason
from evener.errors import RequestError
from evener.sampling_params import MAX_LOGPROBS, SamplingParams
from evener_beam.search import Beam, BeamOptions, BeamSearch


class BeamStream:
    """The deltas of one prompt's search: one for each text that is returned, all at the end. Iterate it once.

    Attributes:
        request_id: the id of the request.
        prompt: None, because the prompt was given as ids.
        prompt_token_ids: the prompt's ids.
        n: texts that are returned.

    Args:
        n: texts that are returned, the best first; at most ``options.beams``.
        stops: tokens that end a text; ``hidden``: those of them that are not part of its text.
        max_tokens: tokens of the longest text.
        lora: the adapter; it is kept until the stream was read to its end, or closed.
        priority: of its requests, see ``SamplingParams``.
        max_time: seconds from now; then the texts that there are end with reason ``timeout``. None: no limit.

    Raises:
        RequestError: there are more beams than the engine names likeliest tokens for, or there is no such adapter.
    """

    def __init__(
        self, llm: AsyncLLM, request_id: str, ids: list[int], options: BeamOptions, *, n: int, stops: Collection[int],
        max_tokens: int, max_time: float | None = None, skip_special_tokens: bool = True,
        lora: str | HeldAdapter | None = None, priority: int = 0,
    ) -> None:  # fmt: skip
        self.request_id, self.prompt, self.prompt_token_ids, self.n = request_id, None, ids, n
        self._llm, self._skip_special, self._priority = llm, skip_special_tokens, priority
        self._search = BeamSearch(options, stops, max_tokens)
        self._stops = frozenset(stops)
        self._until = None if max_time is None else time.monotonic() + max_time
        self._closed, self._cached = False, 0
        if self._search.needed > MAX_LOGPROBS:
            most = MAX_LOGPROBS - len(self._stops)
            raise RequestError(f"num_beams is {options.beams}; this model's search has at most {most}", "num_beams")
        self._forks = ForkSearch(llm, request_id)
        #: The request that has computed all tokens of a beam but its last one, by these tokens.
        self._computed: dict[tuple[int, ...], str] = {}
        #: One adapter for all steps, also if it is replaced or unloaded before the last.
        self._adapter = llm.adapters.hold(lora)

    def _release(self) -> None:
        held, self._adapter = self._adapter, None
        if self._llm.alive:
            self._llm.adapters.release(held)

    async def __aenter__(self) -> BeamStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the search after the step that runs."""
        self._closed = True
        self._release()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for delta in self._deltas():
                yield delta
        finally:
            self._release()
            await self._forks.close()

    async def _deltas(self) -> AsyncIterator[Delta]:
        late = False
        await self._forks.open()
        while not self._search.done and not self._closed:
            failed = await self._step()
            if failed is not None and failed.finish_reason != "timeout":
                failed.request_id, failed.index, failed.token_ids, failed.text = self.request_id, 0, [], ""
                yield failed
                return
            if failed is not None:
                late = True
                self._search.stop()
        if self._closed:
            return
        if not self._search.finished:  # the time was over before the first token
            for index in range(self.n):
                yield Delta(self.request_id, index, finish_reason="timeout")
        # Fewer than n only if the vocabulary has fewer tokens: then the last is repeated.
        texts = self._search.finished
        for index in range(self.n if texts else 0):
            yield self._delta(index, texts[min(index, len(texts) - 1)], late)

    def _delta(self, index: int, beam: Beam, late: bool) -> Delta:
        ids, tokenizer = list(beam.ids), self._llm.tokenizer
        text = ""
        if tokenizer is not None:
            shown = ids[:-1] if beam.stopped else ids
            text = tokenizer.decode(shown, skip_special_tokens=self._skip_special)
        reason: FinishReason = "stop" if beam.stopped else "timeout" if late else "length"
        return Delta(
            self.request_id, index, text=text, token_ids=ids, logprobs=[dict(entry) for entry in beam.entries],
            finish_reason=reason, num_cached_tokens=self._cached,
        )  # fmt: skip

    async def _step(self) -> Delta | None:
        """One token behind each beam. Returns the last delta of a request that failed."""
        left = None if self._until is None else self._until - time.monotonic()
        if left is not None and left <= 0:
            return Delta(self.request_id, 0, finish_reason="timeout")
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=self._search.needed, ignore_eos=True, detokenize=False, max_time=left,
            lora=self._adapter, priority=self._priority,
        )  # fmt: skip
        first = not self._search.running[0].ids
        parents = [self._computed.get(beam.ids[:-1], "") for beam in self._search.running]
        computed: dict[tuple[int, ...], str] = {}
        likeliest: list[Mapping[int, float]] = []
        async with AsyncExitStack() as stack:
            room = stack.enter_context(self._llm.reserve(len(self._search.running), "num_beams"))
            streams = []
            for number, (beam, parent) in enumerate(zip(self._search.running, parents, strict=True)):
                name = f"{self.request_id}-{len(beam.ids)}-{number}"
                prompt = [*self.prompt_token_ids, *beam.ids]
                forked = replace(params, transfer=self._forks.transfer(parent, sorted(set(parents))))
                submitted = await self._llm.submit(prompt, forked, request_id=name, reservation=room)
                computed[beam.ids] = name
                streams.append(await stack.enter_async_context(submitted))
            for stream in streams:
                async for delta in stream:
                    if delta.logprobs:
                        likeliest.append(delta.logprobs[0])
                        self._cached = delta.num_cached_tokens if first else self._cached
                    elif delta.finish_reason is not None:
                        return delta
        self._search.advance(likeliest)
        self._computed = computed
        return None
