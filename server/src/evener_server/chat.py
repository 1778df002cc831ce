"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from evener.contracts.generation.parsers import ReasoningParser, ToolParser
from evener.errors import ContextLengthError, RequestError
from evener_server.generation import Generation
from evener_server.images import decode_images
from evener_server.logprobs import TokenNames, chat_logprobs
from evener_server.message_parts import MessageParts
from evener_server.messages import TextPart
from evener_server.protocol import ChatBody
from evener_server.service import Service
from evener_server.streaming import DONE, ChunkEnd, Job, event, to_json

#: So many characters at a prompt's end are enough to see whether a template opened the reasoning there.
PROMPT_END = 256


class ChatJob(Job):
    """One chat completion."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.stream = bool(body.stream)
        self._service, self._body = service, body
        self._params, self._top = service.sampling(body), body.num_logprobs()
        self._reasoning, self._tools = self._parsers()
        if any(each and each.special_tokens for each in (self._reasoning, self._tools)):
            # Marks of the format are among them.
            self._params = replace(self._params, skip_special_tokens=False)
        self._names = TokenNames(service.llm.tokenizer)
        self._head = service.head("chatcmpl", "chat.completion.chunk" if self.stream else "chat.completion")

    def _parsers(self) -> tuple[type[ReasoningParser] | None, type[ToolParser] | None]:
        chat, called = self._service.llm.chat, self._body.calls_tools
        if chat is None or not self._params.detokenize:
            return None, None  # the request fails for it
        tools = self._service.parsers.tool(chat) if called else None
        # An answer that follows a grammar has nothing before it.
        free = self._params.grammar is None
        return self._service.parsers.reasoning(chat, called) if free else None, tools

    async def start(self) -> Generation:
        service, body = self._service, self._body
        await service.check_grammar(body, self._params)
        with service.llm.reserve(body.samples) as room:
            self._check_length()
            messages = [message.plain() for message in body.messages]
            if service.info.encoders:
                messages = await asyncio.to_thread(decode_images, messages)
            submit = functools.partial(
                service.llm.submit_chat, messages, self._params, request_id=self.request_id, reservation=room,
                **body.template(),
            )  # fmt: skip
            try:
                return await service.running.start([submit], body.samples, body.requested_max_tokens())
            except RequestError as error:
                if error.param == "template_kwargs":
                    error.param = "chat_template_kwargs"
                raise

    def _check_length(self) -> None:
        """Before the template is rendered.

        Raises:
            ContextLengthError: the texts alone do not fit the context.
        """
        tokenizer, limit = self._service.llm.tokenizer, self._service.max_model_len
        parts = (part for message in self._body.messages for part in message.content or ())
        size = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        if tokenizer is not None and size > limit and size > limit * tokenizer.longest_token:
            raise ContextLengthError(
                f"the messages have {size} characters of text, which do not fit the context of {limit} tokens: "
                "shorten them"
            )

    @property
    def request_id(self) -> str:
        """The request's id in the engine and in a response of chat completions."""
        return str(self._head["id"])

    def messages(self, generation: Generation) -> list[MessageParts]:
        """Readers of the generated messages, one for each choice."""
        body, prompt = self._body, generation.streams[0].prompt or ""
        tools = [tool.plain() for tool in body.tools or ()]
        return [
            MessageParts(
                None if self._reasoning is None else self._reasoning(prompt[-PROMPT_END:]),
                None if self._tools is None else self._tools(tools),
                show_reasoning=body.include_reasoning is not False,
                several_calls=body.parallel_tool_calls is not False,
            )
            for _ in range(generation.choices)
        ]  # fmt: skip

    async def full_response(self, generation: Generation) -> bytes:
        messages = self.messages(generation)
        logprobs: list[list[dict[str, Any]]] = [[] for _ in messages]
        async for choice, delta in generation:
            messages[choice].feed(delta.text, last=delta.finish_reason is not None)
            if self._top is not None:
                logprobs[choice] += chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._top)
        choices = [
            {
                "index": i,
                "message": messages[i].message,
                "logprobs": None if self._top is None else {"content": logprobs[i], "refusal": None},
                "finish_reason": finish_reason(generation.finish_reasons[i], messages[i]),
            }
            for i in range(generation.choices)
        ]
        return to_json({**self._head, "choices": choices, "usage": generation.usage()})

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        # The parts of a chunk that do not change are encoded once.
        head = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        end = ChunkEnd(generation, self._body.include_usage, self._body.continuous_usage)
        chunk = head + b'%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b'
        messages, head_sent = self.messages(generation), False
        async for choice, delta in generation:
            pieces = []
            if not head_sent:
                head_sent = True
                role = b'{"role":"assistant","content":"","refusal":null}'
                first = end(before_tokens=True)
                pieces = [chunk % (i, role, b"null", b"null", first) for i in range(generation.choices)]
            logprobs, message = b"null", messages[choice]
            if self._top is not None and delta.token_ids:
                content = chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._top)
                logprobs = to_json({"content": content, "refusal": None})
            parts = message.feed(delta.text, last=delta.finish_reason is not None)
            for part in parts or ([{"content": ""}] if logprobs != b"null" else []):
                pieces.append(chunk % (choice, to_json(part), logprobs, b"null", end()))
                logprobs = b"null"
            if delta.finish_reason is not None:
                reason = to_json(finish_reason(delta.finish_reason, message))
                pieces.append(chunk % (choice, b"{}", b"null", reason, end()))
            if pieces:
                yield b"".join(pieces)
        if self._body.include_usage:
            yield event(to_json({**self._head, "choices": [], "usage": generation.usage()}))
        yield DONE


def finish_reason(reason: str, message: MessageParts) -> str:
    """OpenAI's reason why a message ended, from the engine's."""
    return "tool_calls" if reason == "stop" and message.called else reason
