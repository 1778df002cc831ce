"""POST /generate."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any

from evener.contracts.media import MediaPrompt
from evener.contracts.outputs import Delta
from evener.errors import RequestError
from evener_server.completions import CompletionJob, Prompt
from evener_server.errors import ApiError
from evener_server.generation import Generation
from evener_server.ksanallm.body import GenerateBody, SamplingConfig
from evener_server.ksanallm.encoding import Encoding, error_object
from evener_server.ksanallm.prompt import ids_of, with_rows
from evener_server.logprobs import beside, compact
from evener_server.protocol import CompletionBody
from evener_server.router_info import setting
from evener_server.service import Service

#: A piece of a stream has all text so far, as KsanaLLM's. So long answers are sent in at most so many pieces for each
#: time that they double: otherwise the bytes of a stream would grow with the square of its length.
_PIECES_PER_DOUBLING = 256

_IDS: Mapping[str, Any] = {"type": "array", "items": {"type": "integer"}}
#: An id and its log-probability. Not ``prefixItems``, which tools that check OpenAPI's documents do not all read.
_PAIR = {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 2, "maxItems": 2}
#: A whole answer, for the API's description: of each sample its text, its ids, and of each of its tokens the likeliest
#: ids with their log-probabilities.
ANSWER_SCHEMA: Mapping[str, Any] = {
    "type": "object", "required": ["texts", "output_token_ids", "logprobs", "input_token_ids"],
    "properties": {
        "texts": {"type": "array", "items": {"type": "string"}},
        "output_token_ids": {"type": "array", "items": _IDS},
        "logprobs": {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": _PAIR}}},
        "input_token_ids": _IDS,
    },
}  # fmt: skip


class GenerateJob(CompletionJob):
    """One request for texts.

    Raises:
        RequestError: beam search cannot be streamed, or be used with another field.
    """

    def __init__(self, service: Service, body: GenerateBody, encoding: Encoding) -> None:
        config = body.sampling_config or SamplingConfig()
        fields: dict[str, Any] = {
            **config.fields(), "model": body.model, "user": body.user, "max_time": body.max_time,
            "stream": body.stream is not False,
        }  # fmt: skip
        if body.structured_output_regex is not None:
            fields["structured_outputs"] = {"regex": body.structured_output_regex}
        completion = CompletionBody.model_validate({**fields, "prompt": body.input_tokens or body.prompt or "x"})
        completion.check()
        super().__init__(service, completion)
        self._params = config.without_repeats(self._params)
        if completion.beams is not None and self._params.grammar is not None:
            message = "no_repeat_ngram_size cannot be used with num_beams; leave one of them out"
            raise RequestError(message, "sampling_config.no_repeat_ngram_size")
        self._generate, self._encoding = body, encoding
        self._count = config.logprobs or 0
        self.media_type = encoding.media_type
        self.stream_headers = [(b"content-type", encoding.stream_media_type.encode()), (b"cache-control", b"no-cache")]

    async def _prompt(self, prompt: str | list[int]) -> Prompt:
        """KsanaLLM's own prompt, and the rest of the context if neither the request nor the operator says how many new
        tokens there may be."""
        body, service = self._generate, self._service
        ids = await ids_of(service.prompts, body.prompt, body.input_tokens)
        asked = body.sampling_config and body.sampling_config.max_new_tokens
        default = setting(service.info, "request.max_new_tokens", None) if asked is None else None
        if self._body.max_tokens is None and default is None:
            self._params = replace(self._params, max_tokens=max(service.max_model_len - len(ids), 1))
        found = await asyncio.to_thread(with_rows, ids, body.input_refit_embedding, service.info.hidden_size)
        if isinstance(found, MediaPrompt) and self._body.beams is not None:
            message = "num_beams cannot be used with input_refit_embedding; send 1"
            raise RequestError(message, "sampling_config.num_beams")
        return found

    def error_event(self, error: ApiError) -> bytes:
        return self._encoding.write_piece(error_object(error))

    async def full_response(self, generation: Generation) -> bytes:
        answer = _Answer(generation, self._count, self._encoding)
        async for choice, delta in generation:
            await beside(self._count, functools.partial(answer.add, choice, delta))
        return self._encoding.write(answer.value())

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        answer, sent = _Answer(generation, self._count, self._encoding), 0
        async for choice, delta in generation:
            await beside(self._count, functools.partial(answer.add, choice, delta))
            ended = len(generation.finish_reasons) == generation.choices
            if ended or is_due(answer.tokens, sent):
                sent = answer.tokens
                yield self._encoding.write_piece(answer.value())


def is_due(tokens: int, sent: int) -> bool:
    """Whether a piece with all ``tokens`` is sent, if the last one had ``sent``."""
    return tokens - sent > tokens // _PIECES_PER_DOUBLING


class _Answer:
    """The texts of a request so far, in KsanaLLM's form."""

    def __init__(self, generation: Generation, logprobs: int, encoding: Encoding) -> None:
        self._prompt, self._count, self._encoding = generation.streams[0].prompt_token_ids, logprobs, encoding
        self._texts: list[list[str]] = [[] for _ in range(generation.choices)]
        self._ids: list[list[int]] = [[] for _ in self._texts]
        self._logprobs: list[list[Any]] = [[] for _ in self._texts]
        self.tokens = 0

    def add(self, choice: int, delta: Delta) -> None:
        """Add the next piece of a sample."""
        self._texts[choice].append(delta.text)
        self._ids[choice] += delta.token_ids
        self._logprobs[choice] += self._likeliest(delta)
        self.tokens += len(delta.token_ids)

    def value(self) -> dict[str, Any]:
        """All of it."""
        for pieces in self._texts:
            pieces[:] = ["".join(pieces)]
        texts = [pieces[0] for pieces in self._texts]
        return {
            "texts": texts, "output_token_ids": self._ids, "logprobs": self._logprobs if self._count else [],
            "input_token_ids": self._prompt,
        }  # fmt: skip

    def _likeliest(self, delta: Delta) -> Iterator[Any]:
        """The likeliest ids of each token, with their log-probabilities; long lists already encoded."""
        for entry in delta.logprobs or () if self._count else ():
            found = sorted(entry.items(), key=lambda item: -item[1])
            yield compact(found if self._count == -1 else found[: self._count], self._encoding.write)
