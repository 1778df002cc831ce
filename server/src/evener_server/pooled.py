"""Requests whose prompts are pooled: what embeddings and scores have in common."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from evener.pooling.vectors import EMBED
from evener_server.generation import Generation
from evener_server.prompt_tokens import left_of
from evener_server.protocol import PromptBody
from evener_server.service import Service
from evener_server.streaming import Job


class PooledJob(Job):
    """One request with several prompts, of which each gets a row of numbers.

    Args:
        prompts: texts or token ids.
        param: the field that has them.
        prefix: of the response's id; kind: its ``object``.
    """

    stream = False

    def __init__(
        self, service: Service, body: PromptBody, prompts: Sequence[str | list[int]], param: str, prefix: str, kind: str
    ) -> None:
        self._service, self._body, self._prompts, self._param = service, body, prompts, param
        self._params = replace(EMBED, max_time=body.max_time)
        self._head = service.head(prefix, kind)

    async def start(self) -> Generation:
        service, request_id = self._service, self._head["id"]
        with service.llm.reserve(len(self._prompts), self._param) as room:
            began = time.monotonic()
            given = [await self._tokens(prompt) for prompt in self._prompts]
            params = left_of(self._params, began)
            submits = [
                functools.partial(
                    service.llm.submit, prompt, params, request_id=f"{request_id}-{i}", kind="embed", reservation=room
                )
                for i, prompt in enumerate(given)
            ]
            return await service.running.start(submits, 1)

    async def _tokens(self, prompt: str | list[int]) -> str | list[int]:
        """What the engine gets for a prompt."""
        body, prompts = self._body, self._service.prompts
        if not body.own_prompt_tokens:
            return prompt
        if isinstance(prompt, str):
            special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
            prompt = await prompts.text(prompt, special, self._param, any_length=cut)
        return prompts.cut(prompt, body)

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
