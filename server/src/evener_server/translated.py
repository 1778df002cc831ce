"""Shared by the APIs that are translated into chat completions: running the request, and names of fields in errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from evener.errors import RequestError
from evener_server.chat import ChatJob
from evener_server.generation import Generation
from evener_server.protocol import ChatBody, GenerationBody, parse_body
from evener_server.service import Service
from evener_server.streaming import Job


def _text_or_list(value: Any) -> Any:
    if value is None or (isinstance(value, (str, list)) and value != []):
        return value
    raise PydanticCustomError("invalid_value", "must be a string, or a list that is not empty")


#: A field that is a text or a list. Its error has no path of either.
TextOrList = Annotated[
    Any,
    BeforeValidator(_text_or_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {}, "minItems": 1}]}),
]
_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True)
class Names:
    """What the fields of a translated request are called where it came from.

    Attributes:
        messages: the path of each chat message's origin.
        fields: beginnings of a chat field's path, and what stands there in the other API; the first that fits counts.
    """

    messages: Sequence[str] = ()
    fields: Mapping[str, str] = field(default_factory=dict)

    def translate(self, error: RequestError) -> None:
        """Let the error speak of the fields that the client sent."""
        if error.param is None:
            return
        theirs = self.path(error.param)
        if theirs != error.param:
            error.args = (str(error).replace(error.param, theirs), *error.args[1:])
            error.param = theirs

    def path(self, param: str) -> str:
        """The client's path of what has the path ``param`` in the chat completion."""
        if (found := _MESSAGE.match(param)) is not None and int(found[1]) < len(self.messages):
            # Fields differ between the APIs, so the message is found by its index.
            return self.messages[int(found[1])]
        for ours, theirs in self.fields.items():
            if param == ours or param.startswith((f"{ours}.", f"{ours}[")):
                return theirs + param[len(ours) :]
        return param


def sampling_fields(body: GenerationBody, *but: str) -> dict[str, Any]:
    """The fields that every body has, as a client would send them, without those that ``but`` names."""
    return body.model_dump(mode="json", include=set(GenerationBody.model_fields) - set(but), exclude_none=True)


def chat_body(fields: Mapping[str, Any], names: Names) -> ChatBody:
    """The body of a chat completion.

    Raises:
        RequestError: a field is wrong; with the client's name for it.
    """
    try:
        return parse_body(ChatBody, {name: value for name, value in fields.items() if value is not None})[0]
    except RequestError as error:
        names.translate(error)
        raise


class TranslatedJob(Job):
    """A request that runs as a chat completion.

    Attributes:
        chat: the chat completion.
    """

    def __init__(self, service: Service, body: ChatBody, names: Names) -> None:
        self.chat, self.stream, self._names = ChatJob(service, body), bool(body.stream), names
        self.without_effect = [*self.chat.without_effect, *map(names.path, body.without_effect())]

    async def _drop_turns(self) -> None:
        """Leave out the oldest turns of a conversation that does not fit the context.

        Raises:
            RequestError: as ``newest_turns``.
        """
        try:
            await self.chat.drop_turns()
        except RequestError as error:
            self._names.translate(error)
            raise

    async def start(self) -> Generation:
        try:
            return await self.chat.start()
        except RequestError as error:
            self._names.translate(error)
            raise
