"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

from evener.errors import RequestError
from evener_server.generation import Generation
from evener_server.images import decoded
from evener_server.logprobs import TokenNames, chat_logprobs
from evener_server.protocol import ChatBody
from evener_server.service import Service
from evener_server.streaming import DONE, Job, event, to_json


class ChatJob(Job):
    """One chat completion."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.stream = bool(body.stream)
        self._service, self._body = service, body
        self._params, self._top = service.sampling(body), body.top_count()
        self._names = TokenNames(service.llm.tokenizer)
        self._head = service.head("chatcmpl", "chat.completion.chunk" if self.stream else "chat.completion")

    async def start(self) -> Generation:
        service, body = self._service, self._body
        service.check_room(body.samples, "n")
        messages = [message.plain() for message in body.messages]
        if service.llm.info.get("encoders"):
            messages = await asyncio.to_thread(decoded, messages)
        request_id = str(self._head["id"])

        submit = functools.partial(
            service.llm.submit_chat, messages, self._params, request_id=request_id, **body.template()
        )
        try:
            return await service.running.start([submit], body.samples)
        except RequestError as error:
            if error.param == "template_kwargs":
                error.param = "chat_template_kwargs"
            raise

    async def whole(self, generation: Generation) -> bytes:
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
        # Everything of a chunk that does not change is encoded once.
        head = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        tail = b"}]" + (b',"usage":null' if self._body.include_usage else b"") + b"}\n\n"
        chunk = head + b'%d,"delta":%b,"logprobs":%b,"finish_reason":%b' + tail
        head_sent = False
        async for choice, delta in generation:
            pieces = []
            if not head_sent:
                head_sent = True
                role = b'{"role":"assistant","content":"","refusal":null}'
                pieces = [chunk % (i, role, b"null", b"null") for i in range(generation.choices)]
            logprobs = b"null"
            if self._top is not None and delta.token_ids:
                content = chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._top)
                logprobs = to_json({"content": content, "refusal": None})
            if delta.text or logprobs != b"null":
                pieces.append(chunk % (choice, b'{"content":' + to_json(delta.text) + b"}", logprobs, b"null"))
            if delta.finish_reason is not None:
                pieces.append(chunk % (choice, b"{}", b"null", to_json(delta.finish_reason)))
            if pieces:
                yield b"".join(pieces)
        if self._body.include_usage:
            yield event(to_json({**self._head, "choices": [], "usage": generation.usage()}))
        yield DONE
