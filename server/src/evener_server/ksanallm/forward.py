"""POST /forward."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evener.contracts.outputs import PromptOutputs
from evener.contracts.pooling import check_task
from evener.errors import RequestError
from evener.sampling_params import SamplingParams
from evener_server.generation import Generation
from evener_server.key_use import current_priority
from evener_server.ksanallm.body import ForwardBody, Target
from evener_server.ksanallm.encoding import Encoding
from evener_server.ksanallm.positions import length, ranges_of
from evener_server.ksanallm.prompt import ids_of, with_rows
from evener_server.prompt_tokens import left_of
from evener_server.service import Service
from evener_server.streaming import Job

#: KsanaLLM's names of what the engine gives.
_KINDS: dict[str, Any] = {"transformer": "hidden", "layernorm": "normed", "logits": "logits"}
_TENSOR: Mapping[str, Any] = {
    "type": "object", "required": ["data", "shape", "dtype"],
    "properties": {
        "data": {"type": "string"}, "shape": {"type": "array", "items": {"type": "integer"}},
        "dtype": {"enum": ["float32"]},
    },
}  # fmt: skip
#: An answer, for the API's description.
ANSWER_SCHEMA: Mapping[str, Any] = {
    "type": "object", "required": ["responses", "message", "code"],
    "properties": {
        "message": {"type": "string"}, "code": {"type": "integer"},
        "responses": {"type": "array", "items": {
            "type": "object", "required": ["input_token_ids", "response"],
            "properties": {
                "input_token_ids": {"type": "array", "items": {"type": "integer"}},
                "response": {"type": "array", "items": {
                    "type": "object", "required": ["target_name", "tensor"],
                    "properties": {"target_name": {"type": "string"}, "tensor": _TENSOR},
                }},
            },
        }},
    },
}  # fmt: skip


@dataclass(frozen=True)
class _Wanted:
    """A target of the request, and the positions that it names. The engine computes the prompt once for each."""

    prompt: int
    target: Target
    ranges: list[tuple[int, int]]
    width: int

    @property
    def shape(self) -> list[int]:
        """The shape of its tensor."""
        return [length(self.ranges)] if self.target.next_token else [length(self.ranges), self.width]

    def params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with what is asked of the engine."""
        if self.target.next_token:
            return replace(params, prompt_logprobs=0)
        return replace(params, prompt_outputs=PromptOutputs(_KINDS[self.target.target_name], self.ranges))


class ForwardJob(Job):
    """One request for numbers of one or more prompts.

    Raises:
        RequestError: the model generates no text.
    """

    stream = False

    def __init__(self, service: Service, body: ForwardBody, encoding: Encoding) -> None:
        check_task("generate", service.info.pooling)
        self._service, self._body, self._encoding = service, body, encoding
        self.media_type = encoding.media_type
        self._params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, max_time=body.max_time, lora=service.adapter(body.model),
            priority=current_priority(),
        )  # fmt: skip
        self._wanted: list[_Wanted] = []
        self._ids: list[list[int]] = []

    async def start(self) -> Generation:
        service, prompts = self._service, self._body.requests
        name = service.head("forward", "", None)["id"]
        count = sum(len(prompt.request_target) for prompt in prompts)
        with service.llm.reserve(count, "requests") as room:
            began = time.monotonic()
            for number, prompt in enumerate(prompts):
                place = f"requests[{number}]."
                ids = await ids_of(service.prompts, prompt.prompt, prompt.input_tokens, place)
                self._ids.append(ids)
                for which, target in enumerate(prompt.request_target):
                    width = service.info.vocab_size if target.target_name == "logits" else service.info.hidden_size
                    ranges = ranges_of(target, ids, f"{place}request_target[{which}]")
                    self._wanted.append(_Wanted(number, target, ranges, width))
            self._check_size()
            width, submits = service.info.hidden_size, []
            given = [
                await asyncio.to_thread(with_rows, ids, prompt.input_refit_embedding, width, f"requests[{i}].")
                for i, (ids, prompt) in enumerate(zip(self._ids, prompts, strict=True))
            ]
            params = left_of(self._params, began)
            for number, wanted in enumerate(self._wanted):
                submits.append(functools.partial(
                    service.llm.submit, given[wanted.prompt], wanted.params(params), request_id=f"{name}-{number}",
                    reservation=room,
                ))  # fmt: skip
            generation = await service.running.start(submits, 1)
        generation.prompt_only = True
        return generation

    def _check_size(self) -> None:
        """Before anything is computed."""
        size, most = 4 * sum(math.prod(each.shape) for each in self._wanted), self._service.options.forward_bytes
        if size > most:
            raise RequestError(
                f"the targets have {size} bytes together, more than {most}; send fewer positions (slice_pos), "
                "GATHER_TOKEN_ID for logits, or the operator can set server.forward_bytes", "requests", "too_large",
            )  # fmt: skip

    async def full_response(self, generation: Generation) -> bytes:
        rows: list[list[bytes]] = [[] for _ in self._wanted]
        async for choice, delta in generation:
            rows[choice].append(delta.pooled)
        # Megabytes take a while to write.
        return await asyncio.to_thread(self._write, [b"".join(parts) for parts in rows], generation.prompt_logprobs)

    def _write(self, rows: list[bytes], logprobs: list[list[dict[int, float] | None]]) -> bytes:
        responses: list[dict[str, Any]] = [{"input_token_ids": ids, "response": []} for ids in self._ids]
        for number, wanted in enumerate(self._wanted):
            data = rows[number]
            if wanted.target.next_token:
                positions = [at + 1 for first, end in wanted.ranges for at in range(first, end)]
                found = [logprobs[number][at] or {} for at in positions]
                values = np.array([next(iter(entry.values())) for entry in found], dtype=np.float64)
                data = np.exp(values).astype(np.float32).tobytes()
            tensor = self._encoding.tensor(data, wanted.shape)
            responses[wanted.prompt]["response"].append({"target_name": wanted.target.target_name, "tensor": tensor})
        return self._encoding.write({"responses": responses, "message": "", "code": 0})

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        raise AssertionError("such a request is not streamed")
