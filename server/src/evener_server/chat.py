"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

from evener.errors import ContextLengthError, RequestError
from evener_server.generation import Generation
from evener_server.images import decode_images
from evener_server.logprobs import TokenNames, chat_logprobs
from evener_server.messages import TextPart
from evener_server.protocol import ChatBody
from evener_server.service import Service
from evener_server.streaming import DONE, ChunkEnd, Job, event, to_json


class ChatJob(Job):
    """One chat completion."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.stream = bool(body.stream)
        self._service, self._body = service, body
        self._params, self._top = service.sampling(body), body.num_logprobs()
        self._names = TokenNames(service.llm.tokenizer)
        self._head = service.head("chatcmpl", "chat.completion.chunk" if self.stream else "chat.completion")

    async def start(self) -> Generation:
        service, body = self._service, self._body
        with service.llm.reserve(body.samples) as room:
            self._check_length()
            messages = [message.plain() for message in body.messages]
            if service.info.encoders:
                messages = await asyncio.to_thread(decode_images, messages)
            submit = functools.partial(
                service.llm.submit_chat, messages, self._params, request_id=str(self._head["id"]), reservation=room,
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

    async def full_response(self, generation: Generation) -> bytes:
        texts: list[list[str]] = [[] for _ in range(generation.choices)]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in texts]
        async for choice, delta in generation:
            texts[choice].append(delta.text)
            if self._top is not None:
                logprobs[choice] += chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._top)
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(texts[i]), "refusal": None},
                "logprobs": None if self._top is None else {"content": logprobs[i], "refusal": None},
                "finish_reason": generation.finish_reasons[i],
            }
            for i in range(generation.choices)
        ]
        return to_json({**self._head, "choices": choices, "usage": generation.usage()})

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        # The parts of a chunk that do not change are encoded once.
        head = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        end = ChunkEnd(generation, self._body.include_usage, self._body.continuous_usage)
        chunk = head + b'%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b'
        head_sent = False
        async for choice, delta in generation:
            pieces = []
            if not head_sent:
                head_sent = True
                role = b'{"role":"assistant","content":"","refusal":null}'
                pieces = [chunk % (i, role, b"null", b"null", end()) for i in range(generation.choices)]
            logprobs = b"null"
            if self._top is not None and delta.token_ids:
                content = chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._top)
                logprobs = to_json({"content": content, "refusal": None})
            if delta.text or logprobs != b"null":
                pieces.append(chunk % (choice, b'{"content":' + to_json(delta.text) + b"}", logprobs, b"null", end()))
            if delta.finish_reason is not None:
                pieces.append(chunk % (choice, b"{}", b"null", to_json(delta.finish_reason), end()))
            if pieces:
                yield b"".join(pieces)
        if self._body.include_usage:
            yield event(to_json({**self._head, "choices": [], "usage": generation.usage()}))
        yield DONE
