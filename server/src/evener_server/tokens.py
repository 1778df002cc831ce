"""POST /tokenize and /detokenize, as vLLM's server has them: what a text or a conversation is in tokens, and back."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field

from evener.contracts.media import MediaPrompt
from evener.errors import ContextLengthError, RequestError
from evener.frontend.tokenizer import Tokenizer
from evener_server.images import decode_images
from evener_server.logprobs import TokenNames
from evener_server.protocol import ChatBody, CompletionBody, GenerationBody
from evener_server.service import Service
from evener_server.streaming import to_json

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeText(CompletionBody):
    """A text to tokenize. Other fields of completions are accepted and change nothing."""

    #: Default: true, as in completions.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatBody):
    """A conversation to tokenize, rendered with the model's chat template."""

    #: Default: false, because the template has them.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(GenerationBody):
    """Tokens to turn into text."""

    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]

    def num_logprobs(self) -> int | None:
        return None


class TokenService:
    """Tokenizes for clients, one request at a time: whoever asks much does not hold up those who generate."""

    def __init__(self, service: Service) -> None:
        self._service, self._turn = service, asyncio.Semaphore(1)

    async def tokenize(self, body: TokenizeText | TokenizeChat) -> bytes:
        """The tokens of a text or a conversation.

        Raises:
            RequestError: there is no tokenizer, the text is too long, or the template refuses the messages.
        """
        tokenizer = self._tokenizer()
        if isinstance(body, TokenizeChat):
            ids = await self.chat_ids(body, bool(body.add_special_tokens))
        elif len(body.prompt) != 1 or not isinstance(body.prompt[0], str):
            raise RequestError("prompt must be one text: send one request for each", "prompt")
        else:
            ids = await self._ids(body.prompt[0], body.add_special_tokens is not False, "prompt")
        names = TokenNames(tokenizer)
        return to_json(
            {
                "count": len(ids), "max_model_len": self._service.max_model_len, "tokens": ids,
                "token_strs": [names.name(token) for token in ids] if body.return_token_strs else None,
            }
        )  # fmt: skip

    async def chat_ids(self, body: ChatBody, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a conversation.

        Raises:
            RequestError: as ``tokenize``.
        """
        self._tokenizer()
        service, chat = self._service, self._service.llm.chat
        assert chat is not None, "it is ready together with the tokenizer"
        messages = [message.plain() for message in body.messages]

        def render() -> str | MediaPrompt:
            read = decode_images(messages) if service.info.encoders else messages
            return chat.prompt(read, **body.template())

        async with self._turn:
            prompt = await asyncio.to_thread(render)
        if isinstance(prompt, MediaPrompt):
            return prompt.ids
        return await self._ids(prompt, add_special_tokens, "messages")

    async def detokenize(self, body: DetokenizeBody) -> bytes:
        """The text of tokens, special ones included.

        Raises:
            RequestError: there is no tokenizer, or an id is not in the vocabulary.
        """
        tokenizer, size, limit = self._tokenizer(), self._service.info.vocab_size, self._service.max_model_len
        if len(body.tokens) > limit:
            raise ContextLengthError(f"tokens has {len(body.tokens)} ids, more than the context of {limit}", "tokens")
        wrong = [token for token in body.tokens if token >= size]
        if wrong:
            raise RequestError(f"tokens has {wrong[0]}: ids are integers from 0 to {size - 1}", "tokens")
        async with self._turn:
            text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return to_json({"prompt": text})

    def _tokenizer(self) -> Tokenizer:
        if self._service.llm.tokenizer is None:
            raise RequestError("the model folder has no tokenizer: start the server with tokenizer=FOLDER", None)
        return self._service.llm.tokenizer

    async def _ids(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        tokenizer, limit = self._tokenizer(), self._service.max_model_len

        def encode() -> list[int]:
            # Before the whole text is tokenized, which cannot be interrupted.
            if tokenizer.exceeds(text, limit):
                raise ContextLengthError(
                    f"the text of {len(text)} characters is longer than the context of {limit} tokens: shorten it",
                    param,
                )
            return tokenizer.encode(text, add_special_tokens)

        async with self._turn:
            return await asyncio.to_thread(encode)


def tokenize_body(value: dict[str, Any]) -> type[TokenizeText] | type[TokenizeChat]:
    """Which body a decoded request to ``/tokenize`` has."""
    return TokenizeChat if "messages" in value else TokenizeText
