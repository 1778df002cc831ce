"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, Literal

import msgspec
from evener_pooling.vectors import TextVectors
from pydantic import BeforeValidator, Field, WithJsonSchema

from evener_server.field_types import PROMPT_SCHEMA, as_prompts
from evener_server.generation import Generation
from evener_server.messages import allowed_values
from evener_server.pooled import PooledJob
from evener_server.protocol import PromptBody
from evener_server.service import Service
from evener_server.streaming import to_json

#: Texts of one request, as in OpenAI's API.
MOST_INPUTS = 2048


class EmbeddingBody(PromptBody):
    """POST /v1/embeddings."""

    #: Always a list of prompts here, each a text or a list of ids.
    input: Annotated[
        list[Any], BeforeValidator(as_prompts), WithJsonSchema(PROMPT_SCHEMA), Field(max_length=MOST_INPUTS)
    ]
    #: base64: of the numbers as float32, little-endian.
    encoding_format: Literal["float", "base64"] | None = None
    #: Numbers of each vector; default: as many as the model has.
    dimensions: Annotated[int | None, Field(ge=1)] = None
    #: Divide each vector by its length. Default: as the model's folder says.
    normalize: bool | None = None
    #: vLLM's name of the same.
    use_activation: bool | None = None
    # Of vLLM's API: what would change the answer.
    embed_dtype: Annotated[Any, allowed_values("float32")] = None
    endianness: Annotated[Any, allowed_values("native", "little")] = None


class EmbeddingJob(PooledJob):
    """One request for the vectors of one or more texts.

    Raises:
        RequestError: vectors of this model cannot have so many numbers.
    """

    def __init__(self, service: Service, body: EmbeddingBody) -> None:
        super().__init__(service, body, len(body.input), "input", "embd")
        self._body, info = body, service.info
        self._vectors = vectors = TextVectors(info.pooling, info.hidden_size, body.dimensions)
        normalize = body.use_activation if body.normalize is None else body.normalize
        if normalize is not None:
            vectors.settings = msgspec.structs.replace(vectors.settings, normalize=normalize)

    async def prompt(self, place: int) -> str | list[int]:
        body, prompts = self._body, self._service.prompts
        prompt: str | list[int] = body.input[place]
        if not body.own_prompt_tokens:
            return prompt
        if isinstance(prompt, str):
            special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
            prompt = await prompts.text(prompt, special, "input", any_length=cut)
        return prompts.cut(prompt, body)

    async def full_response(self, generation: Generation) -> bytes:
        rows = await self.rows(generation)

        def write() -> bytes:
            data = [{"object": "embedding", "index": i, "embedding": self._vector(row)} for i, row in enumerate(rows)]
            return to_json({**self._head, "data": data, "usage": self.usage(generation)})

        # Thousands of vectors take a while to write.
        return await asyncio.to_thread(write)

    def _vector(self, row: bytes) -> str | list[float]:
        vector = self._vectors.of_row(row)
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers
