"""POST /score and /rerank: how well documents answer a query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from evener.contracts.pooling import PoolingSettings, check_task
from evener.errors import ContextLengthError, RequestError
from evener_server.generation import Generation
from evener_server.messages import allowed_values
from evener_server.pair_text import pair_text
from evener_server.pooled import PooledJob
from evener_server.protocol import PromptBody
from evener_server.service import Service
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
    # It would cut the template, which the model needs.
    truncate_prompt_tokens: Annotated[Any, allowed_values(hint="; shorten the texts")] = None
    max_tokens_per_doc: Annotated[Any, allowed_values(hint="; shorten the documents")] = None


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
        text = await pair_text(self._service, *self._pairs[place], self._body.instruction)
        prompts, special = self._service.prompts, self._body.add_special_tokens
        # A template has them; a pair that the tokenizer joins is joined by them.
        special = not isinstance(text, str) if special is None else special
        ids = await prompts.text(text, special, self._param)
        if len(ids) > prompts.context:
            message = f"pair {place} has {len(ids)} tokens with what joins it, which do not fit the context of"
            raise ContextLengthError(f"{message} {prompts.context}: shorten its texts", self._param)
        return ids

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
