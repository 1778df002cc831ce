"""POST /v1/decisions: typed questions about an input, answered with the probability of every option.

The form is that of OpenAI's Decisions API. Each question is a chat of its own, whose last message ends with the options
and a label for each. How likely each label is as the answer's first token, divided by the sum over all labels, is the
probability of its option. No text is generated, and the prefix cache has the input after the first question.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import product
from string import ascii_lowercase, ascii_uppercase
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, StrictStr

from evener.contracts.pooling import check_task
from evener.errors import RequestError
from evener.frontend.tokenizer import Tokenizer
from evener_server.chat import ChatJob
from evener_server.generation import Generation
from evener_server.messages import Body
from evener_server.protocol import ChatBody, PromptBody
from evener_server.responses.conversation import Conversation
from evener_server.service import Service
from evener_server.streaming import Job, to_json
from evener_server.translated import Names, TextOrList, chat_body

#: Of one request, and of one question.
MOST_QUESTIONS, MOST_OPTIONS = 400, 255
_Name = Annotated[str, Field(max_length=256)]
#: The labels of a predicate: what a model says anyway.
_YES, _NO = "Yes", "No"


class Predicate(Body):
    """Is a statement about the input true?"""

    type: Literal["predicate"]
    name: _Name | None = None
    instructions: TextOrList

    def options(self) -> list[tuple[str, str | None]]:
        """Each option and its description."""
        return [(_YES, None), (_NO, None)]

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """The fields of the answer; ``probabilities``: of the options."""
        return {"probability": probabilities[0]}


class Option(Body):
    """One option of a choice; a text and a boolean are different options."""

    value: StrictStr | StrictBool
    description: str | None = None


class Choice(Body):
    """Which of these options fits the input?"""

    type: Literal["choice"]
    name: _Name | None = None
    instructions: TextOrList
    choices: Annotated[list[Option], Field(min_length=2, max_length=MOST_OPTIONS, fail_fast=True)]

    def options(self) -> list[tuple[str, str | None]]:
        """As of a predicate."""
        return [(_shown(each.value), each.description) for each in self.choices]

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """As of a predicate."""
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        shown = [
            {"value": each.value, "probability": found} for each, found in zip(self.choices, probabilities, strict=True)
        ]
        return {"choice": self.choices[best].value, "confidence": probabilities[best], "probabilities": shown}


class Level(Body):
    """One level of a scale."""

    label: str
    description: str | None = None


class Score(Body):
    """Where on a scale is the input? The levels are in order, and count from 0."""

    type: Literal["score"]
    name: _Name | None = None
    instructions: TextOrList
    levels: Annotated[list[Level], Field(min_length=2, max_length=MOST_OPTIONS, fail_fast=True)]

    def options(self) -> list[tuple[str, str | None]]:
        """As of a predicate."""
        return [(each.label, each.description) for each in self.levels]

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """As of a predicate."""
        shown = [
            {"value": value, "label": each.label, "probability": found}
            for value, (each, found) in enumerate(zip(self.levels, probabilities, strict=True))
        ]
        score = math.fsum(value * found for value, found in enumerate(probabilities))
        return {"score": score, "confidence": max(probabilities), "probabilities": shown}


Question = Annotated[Predicate | Choice | Score, Discriminator("type")]


class DecisionBody(PromptBody):
    """POST /v1/decisions."""

    #: A text, or messages as of the Responses API.
    input: TextOrList
    questions: Annotated[list[Question], Field(min_length=1, max_length=MOST_QUESTIONS, fail_fast=True)]

    def chats(self, tokenizer: Tokenizer) -> Iterator[tuple[ChatBody, list[int]]]:
        """The chat of each question, and the token of each option's label.

        Raises:
            RequestError: the input or a question has another form, or the model has too few labels.
        """
        said = Conversation()
        if isinstance(self.input, str):
            said.add_text("user", self.input, "input")
        else:
            said.add(self.input, "input")
        for message, origin in zip(said.messages, said.origins, strict=True):
            _check_text(message, origin)
        for i, question in enumerate(self.questions):
            where = f"questions[{i}]"
            options = question.options()
            if len({name for name, _ in options}) < len(options):
                raise RequestError(f"{where} has two options with the same text; give each another", where)
            labels = _labels(question, len(options), tokenizer)
            asked = f"{_instructions(question.instructions, where)}\n\n{_ending(labels, options)}"
            ids = [id_of for _, id_of in labels]
            fields = {
                "model": self.model, "user": self.user, "max_time": self.max_time, "max_tokens": 1, "temperature": 0,
                "messages": [*said.messages, {"role": "user", "content": asked}], "enable_thinking": False,
                "logprobs": True, "logprob_token_ids": ids,
            }  # fmt: skip
            yield chat_body(fields, Names([*said.origins, where])), ids


class DecisionJob(Job):
    """One request.

    Raises:
        RequestError: the model generates no text or has no tokenizer, or as ``DecisionBody.chats``.
    """

    stream = False

    def __init__(self, service: Service, body: DecisionBody) -> None:
        check_task("generate", service.info.pooling)
        self._service, self._body = service, body
        self._chats, self._labels = [], []
        for chat, labels in body.chats(service.prompts.tokenizer):
            self._chats.append(ChatJob(service, chat))
            self._labels.append(labels)

    async def start(self) -> Generation:
        service = self._service
        with service.llm.reserve(len(self._chats), "questions") as room:
            return await service.running.start([await chat.submit(room) for chat in self._chats], 1, 1)

    async def full_response(self, generation: Generation) -> bytes:
        if self._chats[0].thinks_first(generation):
            message = "this model's chat template begins every answer with reasoning, so no answer can be one token"
            raise RequestError(f"{message}; ask a server whose model can answer at once", "model")
        found: dict[int, list[float]] = {}
        async for place, delta in generation:
            if delta.logprobs:
                found[place] = _shares([delta.logprobs[0][label] for label in self._labels[place]])
        answers = [
            {"type": question.type, "name": question.name, **question.answer(found[place])}
            for place, question in enumerate(self._body.questions)
        ]
        usage = generation.usage()
        prompt, cached = usage["prompt_tokens"], generation.shown_cached_tokens or 0
        shown = {
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": len(answers), "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + len(answers),
        }  # fmt: skip
        name = self._service.adapter(self._body.model) or self._service.model_name
        return to_json({"model": name, "answers": answers, "usage": shown})

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        raise AssertionError("such a request is not streamed")


def _shares(logprobs: Sequence[float]) -> list[float]:
    """Probabilities that add up to 1, from log-probabilities."""
    most = max(logprobs)
    weights = [math.exp(each - most) for each in logprobs] if most > -math.inf else [1.0] * len(logprobs)
    total = math.fsum(weights)
    return [each / total for each in weights]


def _labels(question: Predicate | Choice | Score, count: int, tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """So many different texts that are one token each, with the token: Yes and No for a predicate, else letters."""
    pairs = ("".join(pair) for pair in product(ascii_uppercase, ascii_lowercase))
    candidates = [(_YES, _NO)] if isinstance(question, Predicate) else []
    for words in (*candidates, (*ascii_uppercase, *ascii_lowercase, *pairs)):
        found: dict[int, str] = {}
        for word in words:
            ids = tokenizer.encode(word, add_special_tokens=False)
            if len(ids) == 1:
                found.setdefault(ids[0], word)
            if len(found) == count:
                return [(word, token) for token, word in found.items()]
    raise RequestError(f"this model has {len(found)} labels of one token; send at most so many options", "questions")


def _ending(labels: Sequence[tuple[str, int]], options: Sequence[tuple[str, str | None]]) -> str:
    """The end of a question: its options with their labels, and how to answer."""
    words = [word for word, _ in labels]
    if words == [name for name, _ in options]:
        return f"Answer with one word: {' or '.join(words)}."
    lines = [
        f"{word}: {name}" + (f" ({description})" if description else "")
        for word, (name, description) in zip(words, options, strict=True)
    ]
    return "\n".join([*lines, "", "Answer with the label of one option, and nothing else."])


def _instructions(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    said = Conversation()
    said.add([{"role": "user", "content": value}], f"{where}.instructions")
    _check_text(said.messages[0], f"{where}.instructions")
    return "\n".join(part["text"] for part in said.messages[0]["content"])


def _check_text(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    if isinstance(content, list) and any(part["type"] != "text" for part in content):
        raise RequestError(f"{where} has an image, but /v1/decisions takes text input only; leave it out", where)


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()
