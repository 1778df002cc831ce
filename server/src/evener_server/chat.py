"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from evener.contracts.generation.parsers import ReasoningParser, ToolParser
from evener.contracts.media import MediaPrompt
from evener.errors import ContextLengthError, RequestError
from evener.frontend.capacity import Reservation
from evener.frontend.stream import RequestStream
from evener_server.generation import Generation, Submit
from evener_server.images import decode_images
from evener_server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from evener_server.message_parts import MessageParts
from evener_server.messages import TextPart
from evener_server.prompt_tokens import left_of
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
        self._names = TokenNames(service.llm.tokenizer, bool(body.return_tokens_as_token_ids))
        self._echoed = _last_answer(body) if body.echo else ""
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
            try:
                submit = await self._submit(room)
                return await service.running.start([submit], body.samples, body.requested_max_tokens())
            except RequestError as error:
                if error.param == "template_kwargs":
                    error.param = "chat_template_kwargs"
                raise

    async def _submit(self, room: Reservation) -> Submit:
        """What sends the conversation to the engine."""
        llm, body = self._service.llm, self._body
        cut = body.truncate_prompt_tokens is not None
        if not cut:
            self._check_length()
        if body.own_prompt_tokens:
            prompts, began = self._service.prompts, time.monotonic()
            prompt = await prompts.conversation(body, bool(body.add_special_tokens), any_length=cut)
            if cut and isinstance(prompt, MediaPrompt):
                message = "truncate_prompt_tokens cannot be used with images; leave it out"
                raise RequestError(message, "truncate_prompt_tokens")
            given = prompt if isinstance(prompt, MediaPrompt) else prompts.cut(prompt, body)
            params = left_of(self._params, began)
            return functools.partial(
                llm.submit, given, params, request_id=self.request_id, kind="chat", reservation=room
            )
        messages = [message.plain() for message in body.messages]
        if self._service.info.encoders:
            messages = await asyncio.to_thread(decode_images, messages)
        return functools.partial(
            llm.submit_chat, messages, self._params, request_id=self.request_id, reservation=room, **body.template()
        )

    def _check_length(self) -> None:
        """Before the template is rendered.

        Raises:
            ContextLengthError: the texts alone do not fit the context.
        """
        tokenizer, limit = self._service.llm.tokenizer, self._service.max_model_len
        parts = (part for message in self._body.messages for part in message.content or ())
        size = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        if tokenizer is not None and size > limit and size > limit * tokenizer.most_bytes:
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
        body, prompt = self._body, self._prompt_end(generation.streams[0])
        tools = [tool.plain() for tool in body.tools or ()]
        return [
            MessageParts(
                None if self._reasoning is None else self._reasoning(prompt),
                None if self._tools is None else self._tools(tools),
                show_reasoning=body.include_reasoning is not False,
                several_calls=body.parallel_tool_calls is not False,
            )
            for _ in range(generation.choices)
        ]  # fmt: skip

    def _prompt_end(self, stream: RequestStream) -> str:
        tokenizer = self._service.llm.tokenizer
        if stream.prompt is not None or tokenizer is None:
            return (stream.prompt or "")[-PROMPT_END:]
        return tokenizer.decode(stream.prompt_token_ids[-PROMPT_END:], skip_special_tokens=False)[-PROMPT_END:]

    async def full_response(self, generation: Generation) -> bytes:
        messages, body = self.messages(generation), self._body
        logprobs: list[list[dict[str, Any]]] = [[] for _ in messages]
        ids: list[list[int]] = [[] for _ in messages]
        async for choice, delta in generation:
            ids[choice] += delta.token_ids
            messages[choice].feed(delta.text, last=delta.finish_reason is not None)
            if self._top is not None:
                logprobs[choice] += chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._top)
        choices = [
            {
                "index": i,
                "message": self._with_echo(messages[i].message),
                "logprobs": None if self._top is None else {"content": logprobs[i], "refusal": None},
                "finish_reason": finish_reason(generation.finish_reasons[i], messages[i]),
                **({"token_ids": ids[i]} if body.return_token_ids else {}),
            }
            for i in range(generation.choices)
        ]
        prompt_ids, fields = generation.streams[0].prompt_token_ids, dict[str, Any]()
        if body.prompt_logprobs is not None:
            entries = generation.prompt_logprobs[0]
            fields["prompt_logprobs"] = prompt_logprobs(self._names, prompt_ids, entries, body.prompt_logprobs)
        if body.return_token_ids:
            fields["prompt_token_ids"] = prompt_ids
        return to_json({**self._head, "choices": choices, "usage": generation.usage(), **fields})

    def _with_echo(self, message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": self._echoed + (message["content"] or "")} if self._echoed else message

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        # The parts of a chunk that do not change are encoded once.
        head = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        end = ChunkEnd(generation, self._body.include_usage, self._body.continuous_usage)
        chunk = head + b'%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]%b'
        messages, head_sent = self.messages(generation), False
        async for choice, delta in generation:
            pieces = []
            if not head_sent:
                head_sent = True
                role = to_json({"role": "assistant", "content": self._echoed, "refusal": None})
                first = end(before_tokens=True)
                if self._body.return_token_ids:
                    first = b',"prompt_token_ids":' + to_json(generation.streams[0].prompt_token_ids) + first
                pieces = [chunk % (i, role, b"null", b"null", b"", first) for i in range(generation.choices)]
            logprobs, message, ids = b"null", messages[choice], b""
            if self._body.return_token_ids and delta.token_ids:
                ids = b',"token_ids":' + to_json(delta.token_ids)
            if self._top is not None and delta.token_ids:
                content = chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._top)
                logprobs = to_json({"content": content, "refusal": None})
            parts = message.feed(delta.text, last=delta.finish_reason is not None)
            for part in parts or ([{"content": ""}] if logprobs != b"null" or ids else []):
                pieces.append(chunk % (choice, to_json(part), logprobs, b"null", ids, end()))
                logprobs, ids = b"null", b""
            if delta.finish_reason is not None:
                reason = to_json(finish_reason(delta.finish_reason, message))
                pieces.append(chunk % (choice, b"{}", b"null", reason, b"", end()))
            if pieces:
                yield b"".join(pieces)
        if self._body.include_usage:
            yield event(to_json({**self._head, "choices": [], "usage": generation.usage()}))
        yield DONE


def _last_answer(body: ChatBody) -> str:
    """The text of the last message, if the assistant wrote it."""
    last = body.messages[-1]
    parts = last.content or () if last.role == "assistant" else ()
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def finish_reason(reason: str, message: MessageParts) -> str:
    """OpenAI's reason why a message ended, from the engine's."""
    return "tool_calls" if reason == "stop" and message.called else reason
