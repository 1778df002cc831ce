"""POST /v1/chat/completions/batch: several conversations in one request, a field of vLLM's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from evener_server.chat import ChatJob
from evener_server.generation import Generation, Stream
from evener_server.logprobs import beside, check_together
from evener_server.messages import Messages, allowed_values
from evener_server.protocol import ChatBody
from evener_server.router_info import setting
from evener_server.service import Service
from evener_server.streaming import Job, to_json

#: Conversations of one request.
MOST_CONVERSATIONS = 1024


class BatchBody(ChatBody):
    """The fields of a chat, of which ``messages`` has one list for each conversation."""

    messages: Annotated[  # type: ignore[assignment]  # lists of what a chat has
        list[Messages], Field(min_length=1, max_length=MOST_CONVERSATIONS, fail_fast=True)
    ]
    stream: Annotated[Any, allowed_values(False)] = None
    n: Annotated[Any, allowed_values(1)] = None
    kv_transfer_params: Annotated[Any, allowed_values()] = None

    @property
    def embedded(self) -> bool:
        return any(chat.embedded for chat in self.chats())

    def without_effect(self) -> list[str]:
        return list(dict.fromkeys(name for chat in self.chats() for name in chat.without_effect()))

    def chats(self) -> Iterator[ChatBody]:
        """The same request for each conversation."""
        fields = {name: getattr(self, name) for name in ChatBody.model_fields}
        for messages in self.messages:
            yield ChatBody.model_construct(**{**fields, "messages": messages})


class BatchJob(Job):
    """One request with several conversations; choice i is the answer to conversation i."""

    stream = False

    def __init__(self, service: Service, body: BatchBody) -> None:
        self._service, self._body = service, body
        self._chats = [ChatJob(service, each) for each in body.chats()]
        self.without_effect = self._chats[0].without_effect
        self._head = service.head("chatcmpl", "chat.completion", body.model)

    async def start(self) -> Generation:
        service = self._service
        with service.llm.reserve(len(self._chats), "messages") as room:
            submits = [await chat.submit(room) for chat in self._chats]
            return await service.running.start(submits, 1, self._body.requested_max_tokens(), self._check)

    def _check(self, streams: Sequence[Stream]) -> None:
        """By default an answer may have the rest of the context."""
        params, info = self._chats[0].params, self._service.info
        rest = self._service.max_model_len - min(len(stream.prompt_token_ids) for stream in streams)
        new = params.max_tokens or setting(info, "request.max_new_tokens", None) or rest
        check_together(params, info.vocab_size, streams, min(new, rest))

    async def full_response(self, generation: Generation) -> bytes:
        choices = [chat.choices(generation, place)[0] for place, chat in enumerate(self._chats)]
        async for choice, delta in generation:
            await beside(self._body.shown_logprobs(), partial(choices[choice].add, delta))
        shown = []
        for i, chat in enumerate(self._chats):
            fields = await beside(self._body.prompt_logprobs, partial(chat.of_prompt, generation, i))
            shown.append({**chat.shown(i, choices[i], generation.finish_reasons[i]), **fields})
        usage = await self._service.usage(generation, [each.message.reasoned for each in choices])
        return to_json({**self._head, "choices": shown, "usage": usage})

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        raise AssertionError("such a request is not streamed")
