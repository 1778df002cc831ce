"""POST /v1/completions."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any

from evener.errors import ContextLengthError
from evener.frontend.outputs import Delta
from evener_server.echo import echoed
from evener_server.generation import Generation
from evener_server.logprobs import CompletionLogprobs, TokenNames, extend
from evener_server.protocol import CompletionBody
from evener_server.service import Service
from evener_server.streaming import DONE, Job, event, to_json


class CompletionJob(Job):
    """One request for completions, of one prompt or of many."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        self.stream = bool(body.stream)
        self._service, self._body = service, body
        self._params, self._tokenizer = service.sampling(body), service.llm.tokenizer
        self._head = service.head("cmpl", "text_completion")

    async def start(self) -> Generation:
        prompts, samples = self._body.prompt, self._body.samples
        self._service.check_room(len(prompts) * samples, "n" if len(prompts) == 1 else "prompt")
        self._check_lengths()
        request_id = self._head["id"]
        names = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
        submits = [
            functools.partial(self._service.llm.submit, prompt, self._params, request_id=name)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        generation = await self._service.running.start(submits, samples)
        generation.mute = self._body.max_tokens == 0
        return generation

    def _deltas(self, generation: Generation) -> AsyncIterator[tuple[int, Delta]]:
        if not self._body.echo:
            return aiter(generation)
        return echoed(generation, self._tokenizer, scored=self._body.logprobs is not None)

    def _check_lengths(self) -> None:
        """Refuse lists of ids that cannot fit, before anybody looks at each of a million ids."""
        limit = self._service.max_model_len
        for prompt in self._body.prompt:
            if isinstance(prompt, list) and len(prompt) >= limit:
                raise ContextLengthError(
                    f"the prompt has {len(prompt)} tokens, but the model's context is {limit} tokens, of which at "
                    "least one is for the answer: shorten the prompt",
                    "prompt",
                )

    async def whole(self, generation: Generation) -> bytes:
        texts: list[list[str]] = [[] for _ in range(generation.choices)]
        meters = self._meters(generation)
        logprobs: list[dict[str, list[Any]]] = [{} for _ in texts]
        async for choice, delta in self._deltas(generation):
            texts[choice].append(delta.text)
            if meters:
                extend(logprobs[choice], meters[choice].add(delta.token_ids, delta.logprobs or []))
        choices = [
            {
                "index": place,
                "text": "".join(texts[i]),
                "logprobs": logprobs[i] if meters else None,
                "finish_reason": generation.finish_reasons[i],
            }
            for place, i in enumerate(self._kept(generation))
        ]
        return to_json({**self._head, "choices": choices, "usage": generation.usage()})

    def _kept(self, generation: Generation) -> list[int]:
        """The samples that are returned: of each prompt's those that are likeliest, best first, if ``best_of`` drew
        more than are wanted."""
        n, wanted = generation.n, self._body.choices
        if n == wanted:
            return list(range(generation.choices))
        prompts = [range(first, first + n) for first in range(0, generation.choices, n)]
        score = generation.likelihood
        return [i for samples in prompts for i in sorted(samples, key=lambda i: -score[i])[:wanted]]

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        head = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        tail = b"}]" + (b',"usage":null' if self._body.include_usage else b"") + b"}\n\n"
        chunk = head + b'%d,"text":%b,"logprobs":%b,"finish_reason":%b' + tail
        meters = self._meters(generation)
        async for choice, delta in self._deltas(generation):
            logprobs = b"null"
            if meters and delta.token_ids:
                logprobs = to_json(meters[choice].add(delta.token_ids, delta.logprobs or []))
            if delta.text or logprobs != b"null" or delta.finish_reason is not None:
                yield chunk % (choice, to_json(delta.text), logprobs, to_json(delta.finish_reason))
        if self._body.include_usage:
            yield event(to_json({**self._head, "choices": [], "usage": generation.usage()}))
        yield DONE

    def _meters(self, generation: Generation) -> list[CompletionLogprobs]:
        """One a choice; empty unless log-probabilities are wanted."""
        count = self._body.top_count()
        if count is None:
            return []
        names = TokenNames(self._tokenizer)
        return [CompletionLogprobs(names, self._tokenizer, count) for _ in range(generation.choices)]
