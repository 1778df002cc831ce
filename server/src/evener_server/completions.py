"""POST /v1/completions."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any

from evener.contracts.outputs import Delta
from evener_server.echo import with_echo
from evener_server.generation import Generation
from evener_server.logprobs import CompletionLogprobs, TokenNames, extend
from evener_server.protocol import CompletionBody
from evener_server.service import Service
from evener_server.streaming import DONE, ChunkEnd, Job, event, to_json


class CompletionJob(Job):
    """One request for completions, with one or more prompts."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        self.stream = bool(body.stream)
        self._service, self._body = service, body
        self._params, self._tokenizer = service.sampling(body), service.llm.tokenizer
        self._head = service.head("cmpl", "text_completion")

    async def start(self) -> Generation:
        service, prompts, samples = self._service, self._body.prompt, self._body.samples
        await service.check_grammar(self._body, self._params)
        request_id = self._head["id"]
        names = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
        with service.llm.reserve(len(prompts) * samples, "n" if len(prompts) == 1 else "prompt") as room:
            submits = [
                functools.partial(service.llm.submit, prompt, self._params, request_id=name, reservation=room)
                for prompt, name in zip(prompts, names, strict=True)
            ]
            generation = await service.running.start(submits, samples, self._body.max_tokens)
        generation.prompt_only = self._body.max_tokens == 0
        return generation

    def _deltas(self, generation: Generation) -> AsyncIterator[tuple[int, Delta]]:
        if not self._body.echo:
            return aiter(generation)
        return with_echo(generation, self._tokenizer, scored=self._body.logprobs is not None)

    async def full_response(self, generation: Generation) -> bytes:
        texts: list[list[str]] = [[] for _ in range(generation.choices)]
        logprob_builders = self._logprob_builders(generation)
        logprobs: list[dict[str, list[Any]]] = [{} for _ in texts]
        async for choice, delta in self._deltas(generation):
            texts[choice].append(delta.text)
            if logprob_builders:
                extend(logprobs[choice], logprob_builders[choice].add(delta.token_ids, delta.logprobs or []))
        choices = [
            {
                "index": place,
                "text": "".join(texts[i]),
                "logprobs": logprobs[i] if logprob_builders else None,
                "finish_reason": generation.finish_reasons[i],
            }
            for place, i in enumerate(self._best_choices(generation))
        ]
        return to_json({**self._head, "choices": choices, "usage": generation.usage()})

    def _best_choices(self, generation: Generation) -> list[int]:
        """The samples to return. If ``best_of`` is larger than ``n``: of each prompt the ``n`` with the highest total
        log-probability, best first."""
        n, wanted = generation.n, self._body.choices
        if n == wanted:
            return list(range(generation.choices))
        prompts = [range(first, first + n) for first in range(0, generation.choices, n)]
        score = generation.cumulative_logprobs
        return [i for samples in prompts for i in sorted(samples, key=lambda i: -score[i])[:wanted]]

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        head = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        end = ChunkEnd(generation, self._body.include_usage, self._body.continuous_usage)
        chunk = head + b'%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b'
        logprob_builders = self._logprob_builders(generation)
        async for choice, delta in self._deltas(generation):
            logprobs = b"null"
            if logprob_builders and delta.token_ids:
                logprobs = to_json(logprob_builders[choice].add(delta.token_ids, delta.logprobs or []))
            if delta.text or logprobs != b"null" or delta.finish_reason is not None:
                yield chunk % (choice, to_json(delta.text), logprobs, to_json(delta.finish_reason), end())
        if self._body.include_usage:
            yield event(to_json({**self._head, "choices": [], "usage": generation.usage()}))
        yield DONE

    def _logprob_builders(self, generation: Generation) -> list[CompletionLogprobs]:
        """One for each choice; empty unless log-probabilities were requested."""
        count = self._body.num_logprobs()
        if count is None:
            return []
        names = TokenNames(self._tokenizer)
        return [CompletionLogprobs(names, self._tokenizer, count) for _ in range(generation.choices)]
