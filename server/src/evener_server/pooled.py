"""Requests whose prompts are pooled: what embeddings and scores have in common."""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from evener_pooling.vectors import EMBED

from evener_server.generation import Generation
from evener_server.key_use import current_priority
from evener_server.prompt_tokens import left_of
from evener_server.protocol import PromptBody
from evener_server.service import Service
from evener_server.streaming import Job


class PooledJob(Job):
    """One request with several prompts, of which each gets a row of numbers.

    Args:
        count: prompts; param: the field that has them.
        prefix: of the response's id.
    """

    stream = False

    def __init__(self, service: Service, body: PromptBody, count: int, param: str, prefix: str) -> None:
        self._service, self._count, self._param = service, count, param
        lora, priority = service.adapter(body.model), current_priority()
        self._params = replace(EMBED, max_time=body.max_time, lora=lora, priority=priority)
        head = service.head(prefix, "list", body.model)
        self._head = {name: head[name] for name in ("id", "object", "created", "model")}

    @abstractmethod
    async def prompt(self, place: int) -> str | list[int]:
        """What the engine gets for prompt number ``place``.

        Raises:
            RequestError: it cannot be made.
        """

    async def start(self) -> Generation:
        service, request_id = self._service, self._head["id"]
        with service.llm.reserve(self._count, self._param) as room:
            began = time.monotonic()
            given = [await self.prompt(place) for place in range(self._count)]
            params = left_of(self._params, began)
            submits = [
                functools.partial(
                    service.llm.submit, prompt, params, request_id=f"{request_id}-{i}", kind="embed", reservation=room
                )
                for i, prompt in enumerate(given)
            ]
            return await service.running.start(submits, 1)

    async def rows(self, generation: Generation) -> list[bytes]:
        """The pooled row of each prompt, float32.

        Raises:
            ApiError: the engine ended the request.
        """
        found: dict[int, bytes] = {}
        async for choice, delta in generation:
            if delta.pooled:
                found[choice] = delta.pooled
        return [found[place] for place in range(generation.choices)]

    def usage(self, generation: Generation) -> Mapping[str, int]:
        """The usage: prompts only."""
        return {"prompt_tokens": generation.prompt_tokens, "total_tokens": generation.prompt_tokens}

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        raise AssertionError("such a request is not streamed")
