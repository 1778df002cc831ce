"""POST /tokenize and /detokenize, as vLLM's server has them: what a text or a conversation is in tokens, and back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from evener.contracts.media import MediaPrompt
from evener.errors import ContextLengthError, RequestError
from evener.loading.checkpoint import open_files
from evener_server.parsers import template_for_tools
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
    """What ``/tokenize`` and ``/detokenize`` answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, body: TokenizeText | TokenizeChat) -> bytes:
        """The tokens of a text or a conversation.

        Raises:
            RequestError: there is no tokenizer, the text is too long, or the template refuses the messages.
        """
        prompts = self._service.prompts
        if isinstance(body, TokenizeChat):
            ids = await self.chat_ids(body, bool(body.add_special_tokens))
        elif body.prompts != 1 or not body.prompt or not isinstance(body.prompt[0], str):
            raise RequestError("prompt must be one text: send one request for each", "prompt")
        else:
            ids = await prompts.text(body.prompt[0], body.add_special_tokens is not False, "prompt")
        entries = [prompts.tokenizer.token(token) for token in ids] if body.return_token_strs else None
        return to_json({"count": len(ids), "max_model_len": prompts.context, "tokens": ids, "token_strs": entries})

    async def chat_ids(self, body: ChatBody, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a conversation.

        Raises:
            RequestError: as ``tokenize``.
        """
        prompt = await self._service.prompts.conversation(body, add_special_tokens)
        return prompt.ids if isinstance(prompt, MediaPrompt) else prompt

    async def count(self, body: ChatBody) -> int:
        """How many tokens the model reads of a request.

        Raises:
            RequestError: as ``tokenize``, or the template has no place for the request's tools.
        """
        if body.calls_tools and (chat := self._service.prompts.chat(body)) is not None:
            template_for_tools(chat)
        return len(await self.chat_ids(body))

    async def info(self) -> bytes:
        """The tokenizer's settings: ``tokenizer_config.json``, and the chat template that is used.

        Raises:
            RequestError: there is no tokenizer.
        """
        llm, tokenizer = self._service.llm, self._service.prompts.tokenizer
        folder = self._service.info.setting("tokenizer").value or self._service.info.model
        settings = await asyncio.to_thread(lambda: open_files(Path(folder)).json("tokenizer_config.json"))
        shown = {"tokenizer_class": type(tokenizer).__name__, **settings, **tokenizer.special_tokens}
        templates = {} if llm.chat is None else llm.chat.templates
        return to_json({**shown, "chat_template": templates.get("default")})

    async def detokenize(self, body: DetokenizeBody) -> bytes:
        """The text of tokens, special ones included.

        Raises:
            RequestError: there is no tokenizer, or an id is not in the vocabulary.
        """
        tokenizer, limit = self._service.prompts.tokenizer, self._service.max_model_len
        size = self._service.info.vocab_size
        if len(body.tokens) > limit:
            raise ContextLengthError(f"tokens has {len(body.tokens)} ids, more than the context of {limit}", "tokens")
        wrong = [token for token in body.tokens if token >= size]
        if wrong:
            raise RequestError(f"tokens has {wrong[0]}: ids are integers from 0 to {size - 1}", "tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return to_json({"prompt": text})


def tokenize_body(value: dict[str, Any]) -> type[TokenizeText] | type[TokenizeChat]:
    """Which body a decoded request to ``/tokenize`` has."""
    return TokenizeChat if "messages" in value else TokenizeText
