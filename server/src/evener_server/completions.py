"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeAlias

from evener.contracts.media import MediaPrompt
from evener.contracts.outputs import Delta
from evener.errors import RequestError
from evener.frontend.capacity import Reservation
from evener.frontend.frontend import COMPLETION_MAX_TOKENS
from evener.sampling_params import SamplingParams
from evener_server.beams import check_beams, start_beams
from evener_server.echo import with_echo
from evener_server.embedded_prompts import decode_rows, prompt_of_rows
from evener_server.fill_in_middle import with_suffix
from evener_server.generation import Generation, Submit
from evener_server.logprobs import CompletionLogprobs, beside, check_together, extend, prompt_logprobs
from evener_server.prompt_tokens import left_of
from evener_server.protocol import CompletionBody
from evener_server.router_info import setting
from evener_server.service import Service
from evener_server.streaming import DONE, ChunkEnd, Job, event, to_json
from evener_server.transfers import asked_transfer, transfer_answer, unused_fields

Prompt: TypeAlias = "str | list[int] | MediaPrompt"


class CompletionJob(Job):
    """One request for completions, with one or more prompts."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        self.stream = bool(body.stream)
        self._service, self._body = service, body
        self._params, self._tokenizer = service.sampling(body), service.llm.tokenizer
        self._params = replace(self._params, transfer=asked_transfer(service, body))
        self.without_effect = unused_fields(service, body)
        if body.beams is not None:
            check_beams(self._params, self.stream)
        self._names = service.token_names(body.return_tokens_as_token_ids)
        self._head = service.head("cmpl", "text_completion", body.model)

    async def start(self) -> Generation:
        service, count, samples = self._service, self._body.prompts, self._body.samples
        await service.check_grammar(self._params, self._body.grammar_field)
        self._params = await service.without_words(self._params, self._body.bad_words)
        request_id = self._head["id"]
        names = [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]
        with service.llm.reserve(count * samples, "n" if count == 1 else "prompt") as room:
            began = time.monotonic()
            given: list[Prompt] = [await self._rows(i, data) for i, data in enumerate(self._body.prompt_embeds or ())]
            given += [await self._prompt(prompt) for prompt in self._body.prompt or ()]
            params = left_of(self._params, began)
            submits = [self._submit(*each, params, room) for each in zip(given, names, strict=True)]
            new = params.max_tokens or setting(service.info, "request.max_new_tokens", None) or COMPLETION_MAX_TOKENS
            check = functools.partial(check_together, params, service.info.vocab_size, new_tokens=new)
            generation = await service.running.start(submits, samples, self._body.max_tokens, check)
        generation.prompt_only = self._body.max_tokens == 0
        return generation

    def _submit(self, prompt: Prompt, name: str, params: SamplingParams, room: Reservation) -> Submit:
        llm, beams = self._service.llm, self._body.beams
        if beams is None:
            return functools.partial(llm.submit, prompt, params, request_id=name, reservation=room)
        if isinstance(prompt, MediaPrompt):
            message = "beam search cannot be used with prompt_embeds; leave it out"
            raise RequestError(message, "use_beam_search")
        return functools.partial(start_beams, llm, prompt, params, beams, self._body.choices, name)

    async def _rows(self, index: int, data: str) -> MediaPrompt:
        width, most = self._service.info.hidden_size, self._service.max_model_len
        place = f"prompt_embeds[{index}]"
        return prompt_of_rows(await asyncio.to_thread(decode_rows, data, place, width, most))

    async def _prompt(self, prompt: str | list[int]) -> Prompt:
        """The prompt that the engine gets for one of the request's prompts."""
        body, prompts = self._body, self._service.prompts
        if body.suffix:
            prompt = with_suffix(prompt, body.suffix, prompts.gap_marks)
        if not body.own_prompt_tokens:
            return prompt
        if isinstance(prompt, str):
            special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
            prompt = await prompts.text(prompt, special, "prompt", any_length=cut)
        return prompts.cut(prompt, body)

    def _deltas(self, generation: Generation) -> AsyncIterator[tuple[int, Delta]]:
        if not self._body.echo:
            return aiter(generation)
        return with_echo(generation, self._tokenizer, scored=self._body.logprobs is not None)

    async def full_response(self, generation: Generation) -> bytes:
        texts: list[list[str]] = [[] for _ in range(generation.choices)]
        ids: list[list[int]] = [[] for _ in texts]
        logprob_builders = self._logprob_builders(generation)
        logprobs: list[dict[str, list[Any]]] = [{} for _ in texts]
        top = self._body.shown_logprobs()
        async for choice, delta in self._deltas(generation):
            ids[choice] += self._answer_ids(generation, choice, delta, first=not texts[choice])
            texts[choice].append(delta.text)
            if logprob_builders:
                add = functools.partial(logprob_builders[choice].add, delta.token_ids, delta.logprobs or [])
                extend(logprobs[choice], await beside(top, add))
        choices = [
            {
                "index": place,
                "text": "".join(texts[i]),
                "logprobs": logprobs[i] if logprob_builders else None,
                "finish_reason": generation.finish_reasons[i],
                **await beside(self._body.prompt_logprobs, functools.partial(self._of_tokens, generation, i, ids[i])),
            }
            for place, i in enumerate(self._best_choices(generation))
        ]
        times = self._service.metrics_of(generation)
        times |= transfer_answer(self._service, self._body.kv_transfer_params, self._head["id"])
        return to_json({**self._head, "choices": choices, "usage": generation.usage(), **times})

    def _answer_ids(self, generation: Generation, choice: int, delta: Delta, first: bool) -> list[int]:
        """A delta's tokens without an echoed prompt, which a choice's first delta has."""
        echoed = first and self._body.echo and self._body.logprobs is not None
        return delta.token_ids[len(generation.streams[choice // generation.n].prompt_token_ids) if echoed else 0 :]

    def _of_tokens(self, generation: Generation, choice: int, ids: list[int]) -> dict[str, Any]:
        """The fields of a choice for ``prompt_logprobs`` and ``return_token_ids``; null if they were not asked for."""
        body, prompt = self._body, choice // generation.n
        prompt_ids, entries = generation.streams[prompt].prompt_token_ids, None
        if body.prompt_logprobs is not None:
            known = generation.prompt_logprobs[prompt]
            entries = prompt_logprobs(self._names, prompt_ids, known, body.prompt_logprobs)
        shown = bool(body.return_token_ids)
        return {
            "prompt_logprobs": entries, "prompt_token_ids": prompt_ids if shown else None,
            "token_ids": ids if shown else None,
        }  # fmt: skip

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
        usage = self._body.include_usage or self._service.options.force_include_usage
        end = ChunkEnd(generation, usage, self._service.continuous_usage(self._body))
        chunk = head + b'%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b'
        logprob_builders, begun = self._logprob_builders(generation), set[int]()
        top = self._body.shown_logprobs()
        async for choice, delta in self._deltas(generation):
            logprobs = b"null"
            if logprob_builders and delta.token_ids:
                add = functools.partial(logprob_builders[choice].add, delta.token_ids, delta.logprobs or [])
                logprobs = to_json(await beside(top, add))
            ids = b""
            if self._body.return_token_ids:
                ids = b',"token_ids":' + to_json(self._answer_ids(generation, choice, delta, choice not in begun))
                if choice not in begun:
                    prompt_ids = generation.streams[choice // generation.n].prompt_token_ids
                    ids += b',"prompt_token_ids":' + to_json(prompt_ids)
                begun.add(choice)
            if delta.text or logprobs != b"null" or ids or delta.finish_reason is not None:
                yield chunk % (choice, to_json(delta.text), logprobs, to_json(delta.finish_reason), ids, end())
        if usage:
            times = self._service.metrics_of(generation)
            yield event(to_json({**self._head, "choices": [], "usage": generation.usage(), **times}))
        yield DONE

    def _logprob_builders(self, generation: Generation) -> list[CompletionLogprobs]:
        """One for each choice; empty unless log-probabilities were requested."""
        count = self._body.shown_logprobs()
        if count is None:
            return []
        return [CompletionLogprobs(self._names, self._tokenizer, count) for _ in range(generation.choices)]
