"""POST /score and /rerank: how well documents answer a query."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from evener.contracts.pooling import PoolingSettings, check_task
from evener.errors import ContextLengthError, RequestError
from evener_server.field_types import INT32
from evener_server.generation import Generation
from evener_server.pair_text import pair_text
from evener_server.pooled import PooledJob
from evener_server.protocol import PromptBody
from evener_server.service import Service
from evener_server.shortened import ShortenedText, shorten
from evener_server.streaming import to_json

#: Pairs of one request.
MOST_PAIRS = 2048


def _text(value: object) -> object:
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


def _texts(value: object) -> object:
    """One text or a list of them, as a list; a text may be an object ``{"text": …}``."""
    texts = [_text(each) for each in value] if isinstance(value, list) else [_text(value)]
    if not texts or len(texts) > MOST_PAIRS or not all(isinstance(each, str) for each in texts):
        message = f"must be a text or a list of 1 to {MOST_PAIRS} texts"
        raise PydanticCustomError("invalid_value", "{message}", {"message": message})
    return texts


_TEXT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}]
}
_TEXTS_SCHEMA = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1}]}
_Texts = Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(_TEXTS_SCHEMA)]


class PairBody(PromptBody):
    """The fields of both endpoints."""

    #: What makes a document fit. Default: what the model was trained with.
    instruction: str | None = None
    #: Default: false, because the template has them; true for pairs that the tokenizer joins.
    add_special_tokens: bool | None = None
    #: Tokens that are left of each query, and of each document, from its beginning; default, and 0: all.
    max_tokens_per_query: Annotated[int | None, Field(ge=0, le=INT32)] = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=0, le=INT32)] = None


class RerankBody(PairBody):
    """POST /rerank, as of Jina, Cohere and vLLM."""

    query: str
    documents: _Texts
    #: Number of best documents to return; default, and 0: all.
    top_n: Annotated[int | None, Field(ge=0)] = None
    #: Default: true.
    return_documents: bool | None = None

    def pairs(self) -> Sequence[tuple[str, str]]:
        """Query and document."""
        return [(self.query, document) for document in self.documents]


class ScoreBody(PairBody):
    """POST /score. The fields have two other names each: queries and documents, data_1 and data_2."""

    #: One text, or one for each of the others.
    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None

    def pairs(self) -> Sequence[tuple[str, str]]:
        """The texts of each pair."""
        first, second = self._given("text_1", "queries", "data_1"), self._given("text_2", "documents", "data_2")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def _given(self, *names: str) -> list[str]:
        given: list[str] = next(getattr(self, name) for name in names if getattr(self, name) is not None)
        return given

    def check(self) -> None:
        super().check()
        for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")):
            given = [name for name in names if getattr(self, name) is not None]
            if not given:
                raise RequestError(f"{names[0]} is missing; send it", names[0], "missing_required_parameter")
            if len(given) > 1:
                raise RequestError(f"{given[1]} is another name of {given[0]}; send one of them", given[1])
        first, second = self._given("text_1", "queries", "data_1"), self._given("text_2", "documents", "data_2")
        if len(first) not in (1, len(second)):
            message = f"text_1 has {len(first)} texts and text_2 {len(second)}: send one, or as many as in text_2"
            raise RequestError(message, "text_1")


class _PairJob(PooledJob):
    def __init__(self, service: Service, body: RerankBody | ScoreBody, param: str, prefix: str) -> None:
        self._pairs, self._body = body.pairs(), body
        super().__init__(service, body, len(self._pairs), param, prefix)
        check_task("score", service.info.pooling)
        self._settings = service.info.pooling or PoolingSettings()

    async def prompt(self, place: int) -> str | list[int]:
        body, prompts = self._body, self._service.prompts
        query, document = self._pairs[place]
        limits = body.max_tokens_per_query or None, body.max_tokens_per_doc or None
        if any(limits):
            query, document = await self._beginning(query, limits[0]), await self._beginning(document, limits[1])
        if body.truncate_prompt_tokens is not None:
            return await self._cut(query, document, body.truncate_prompt_tokens)
        ids = await self._joined(query, document)
        if len(ids) > prompts.context:
            message = f"pair {place} has {len(ids)} tokens with what joins it, which do not fit the context of"
            raise ContextLengthError(f"{message} {prompts.context}: shorten its texts", self._param)
        return ids

    async def _joined(self, query: str, document: str, *, any_length: bool = False) -> list[int]:
        """The tokens of a pair, with what joins it."""
        text = await pair_text(self._service, query, document, self._body.instruction)
        special = self._body.add_special_tokens
        # A template has them; a pair that the tokenizer joins is joined by them.
        special = not isinstance(text, str) if special is None else special
        return await self._service.prompts.text(text, special, self._param, any_length=any_length)

    async def _beginning(self, text: str, most: int | None) -> str:
        """The first ``most`` tokens of a text; None: all."""
        return text if most is None else await self._left_of(await self._tokens(text, most))

    async def _cut(self, query: str, document: str, most: int) -> list[int]:
        """The tokens of a pair whose texts are shortened until, with what joins them, there are ``most``; -1: as many
        as fit the context. The template is not cut: the model needs it."""
        context = self._service.prompts.context
        if most > context:
            message = f"truncate_prompt_tokens is {most}, more than the context of {context} tokens; send less, or -1"
            raise RequestError(message, "truncate_prompt_tokens")
        most = context if most == -1 else most
        first, second = await self._tokens(query, most), await self._tokens(document, most)
        while True:
            ids = await self._joined(await self._left_of(first), await self._left_of(second), any_length=True)
            if len(ids) <= most:
                return ids
            if not shorten(first, second, len(ids) - most):
                message = f"truncate_prompt_tokens is {most}, and what joins a pair has {len(ids)} tokens; send more"
                raise RequestError(message, "truncate_prompt_tokens")

    async def _tokens(self, text: str, most: int) -> ShortenedText:
        ids = await self._service.prompts.text(text, False, self._param, any_length=True)
        return ShortenedText(text, ids, most, keeps_end=self._body.truncation_side == "left")

    async def _left_of(self, text: ShortenedText) -> str:
        return await asyncio.to_thread(text.text, self._service.prompts.tokenizer)

    async def scores(self, generation: Generation) -> list[float]:
        """The score of each pair."""
        return [_score(row, self._settings) for row in await self.rows(generation)]


def _score(row: bytes, settings: PoolingSettings) -> float:
    """The score of a pooled ``row``: the probability of yes, or its log-odds."""
    logits = memoryview(row).cast("f")
    odds = logits[0] - logits[1] if len(logits) > 1 else logits[0]
    # Not exp(-odds) alone: of large odds it overflows.
    return (1 + math.tanh(odds / 2)) / 2 if settings.sigmoid else odds


class RerankJob(_PairJob):
    """One request for the order of documents."""

    def __init__(self, service: Service, body: RerankBody) -> None:
        super().__init__(service, body, "documents", "rerank")
        self._rerank = body

    async def full_response(self, generation: Generation) -> bytes:
        scores, body = await self.scores(generation), self._rerank
        results: list[dict[str, Any]] = []
        for place in sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]:
            document = {} if body.return_documents is False else {"document": {"text": body.documents[place]}}
            results.append({"index": place, **document, "relevance_score": scores[place]})
        head = {name: self._head[name] for name in ("id", "model")}
        return to_json({**head, "usage": self.usage(generation), "results": results})


class ScoreJob(_PairJob):
    """One request for the scores of pairs."""

    def __init__(self, service: Service, body: ScoreBody) -> None:
        super().__init__(service, body, "text_2", "score")

    async def full_response(self, generation: Generation) -> bytes:
        scores = await self.scores(generation)
        data = [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)]
        return to_json({**self._head, "data": data, "usage": self.usage(generation)})
