"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from evener_pooling.vectors import TextVectors
from pydantic import BeforeValidator, Field, WithJsonSchema

from evener.contracts.media import MediaPrompt
from evener.errors import RequestError
from evener_server.field_types import PROMPT_SCHEMA, as_prompts
from evener_server.generation import Generation
from evener_server.messages import TextPart, allowed_values
from evener_server.pooled import PooledJob
from evener_server.protocol import ChatBody, PromptBody
from evener_server.service import Service
from evener_server.streaming import to_json
from evener_server.vector_bytes import ByteOrder, NumberType, item_size, vector_bytes

#: Texts of one request, as in OpenAI's API.
MOST_INPUTS = 2048
#: Texts whose vectors a header can list: Python's clients read 64 KiB of one.
MOST_LISTED = 512
_BYTES = ("bytes", "bytes_only")


class VectorFields(PromptBody):
    """What both bodies of /v1/embeddings say of the vectors."""

    #: base64: of the numbers as ``embed_dtype`` and ``endianness`` say. bytes: the answer is the bytes of all vectors,
    #: and a header says where each is; bytes_only: without that header.
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    #: Numbers of each vector; default: as many as the model has.
    dimensions: Annotated[int | None, Field(ge=1)] = None
    #: Divide each vector by its length. Default: as the model's folder says.
    normalize: bool | None = None
    #: vLLM's name of the same.
    use_activation: bool | None = None
    #: Of numbers as bytes; default: float32.
    embed_dtype: NumberType | None = None
    #: Of the same; default: little.
    endianness: ByteOrder | None = None
    # Of vLLM's API: what would change the answer.
    padding: Annotated[Any, allowed_values(False, "do_not_pad")] = None

    def without_effect(self) -> list[str]:
        as_bytes = self.encoding_format not in (None, "float")
        unused = [name for name in ("embed_dtype", "endianness") if getattr(self, name) is not None and not as_bytes]
        return super().without_effect() + unused


class EmbeddingBody(VectorFields):
    """POST /v1/embeddings: texts."""

    #: Always a list of prompts here, each a text or a list of ids.
    input: Annotated[
        list[Any], BeforeValidator(as_prompts), WithJsonSchema(PROMPT_SCHEMA), Field(max_length=MOST_INPUTS)
    ]

    def check(self) -> None:
        super().check()
        if self.encoding_format == "bytes" and len(self.input) > MOST_LISTED:
            message = f"a header lists at most {MOST_LISTED} vectors, but input has {len(self.input)} texts"
            raise RequestError(f"{message}; send bytes_only", "encoding_format")


class EmbeddingChat(VectorFields, ChatBody):
    """POST /v1/embeddings: a conversation, rendered with the model's chat template, as in vLLM's API. Fields about an
    answer are accepted and change nothing."""

    #: Default: false, as no answer follows.
    add_generation_prompt: bool | None = None

    @property
    def answer_tokens(self) -> int:
        return 0

    def check(self) -> None:
        super().check()
        if any(not isinstance(part, TextPart) for message in self.messages for part in message.content or ()):
            raise RequestError("only texts of messages can be embedded; leave other parts out", "messages")

    def template(self, keep_tools: bool = False) -> dict[str, Any]:
        return {**super().template(keep_tools), "add_generation_prompt": bool(self.add_generation_prompt)}


def embedding_body(value: Mapping[str, Any]) -> type[EmbeddingBody] | type[EmbeddingChat]:
    """Which body a decoded request to ``/v1/embeddings`` has."""
    return EmbeddingChat if "messages" in value else EmbeddingBody


class EmbeddingJob(PooledJob):
    """One request for the vectors of one or more texts, or of a conversation.

    Raises:
        RequestError: vectors of this model cannot have so many numbers.
    """

    def __init__(self, service: Service, body: EmbeddingBody | EmbeddingChat) -> None:
        count, param = (1, "messages") if isinstance(body, EmbeddingChat) else (len(body.input), "input")
        super().__init__(service, body, count, param, "embd")
        self._body, info = body, service.info
        self._vectors = vectors = TextVectors(info.pooling, info.hidden_size, body.dimensions)
        normalize = body.use_activation if body.normalize is None else body.normalize
        if normalize is not None:
            vectors.settings = msgspec.structs.replace(vectors.settings, normalize=normalize)
        self._number, self._order = body.embed_dtype or "float32", body.endianness or "little"
        if body.encoding_format in _BYTES:
            self.media_type = "application/octet-stream"

    async def prompt(self, place: int) -> str | list[int]:
        body, prompts = self._body, self._service.prompts
        cut = body.truncate_prompt_tokens is not None
        if isinstance(body, EmbeddingChat):
            ids = await prompts.conversation(body, bool(body.add_special_tokens), any_length=cut)
            assert not isinstance(ids, MediaPrompt), "it is of texts"
            return prompts.cut(ids, body)
        prompt: str | list[int] = body.input[place]
        if not body.own_prompt_tokens:
            return prompt
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            prompt = await prompts.text(prompt, special, "input", any_length=cut)
        return prompts.cut(prompt, body)

    async def full_response(self, generation: Generation) -> bytes:
        rows = await self.rows(generation)
        # Thousands of vectors take a while to write.
        return await asyncio.to_thread(self._write, rows, self.usage(generation))

    def _write(self, rows: list[bytes], usage: Mapping[str, int]) -> bytes:
        vectors, form = [self._vectors.of_row(row) for row in rows], self._body.encoding_format
        if form in (None, "float"):
            shown: list[Any] = [vector.tolist() for vector in vectors]
        else:
            shown = [vector_bytes(vector, self._number, self._order) for vector in vectors]
        if form == "bytes":
            self.headers = {"metadata": self._places([len(vector) for vector in vectors], usage)}
        if form in _BYTES:
            return b"".join(shown)
        if form == "base64":
            shown = [base64.b64encode(each).decode("ascii") for each in shown]
        data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(shown)]
        return to_json({**self._head, "data": data, "usage": usage})

    def _places(self, sizes: list[int], usage: Mapping[str, int]) -> str:
        """The header of an answer in bytes, as vLLM's: which of them are each vector's. ASCII."""
        data, start = [], 0
        for index, size in enumerate(sizes):
            end = start + size * item_size(self._number)
            data.append({"index": index, "embed_dtype": self._number, "endianness": self._order, "start": start,
                         "end": end, "shape": [size]})  # fmt: skip
            start = end
        head = {name: self._head[name] for name in ("id", "created", "model")}
        return json.dumps({**head, "data": data, "usage": usage}, separators=(",", ":"))
