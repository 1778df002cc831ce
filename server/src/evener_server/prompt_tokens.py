"""Token ids of texts and conversations, made by the server itself: to show or count them, or to cut a prompt."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from dataclasses import replace

from evener.async_llm import AsyncLLM
from evener.contracts.generation.chat import Chat
from evener.contracts.media import MediaPrompt
from evener.errors import ContextLengthError, RenderTimeoutError, RequestError, TemplateError
from evener.frontend.tokenizer import Tokenizer
from evener.sampling_params import SamplingParams
from evener_server.embedded_prompts import RowParts
from evener_server.errors import deadline_missed
from evener_server.fill_in_middle import GapMarks, spelling_of
from evener_server.images import decode_images
from evener_server.protocol import ChatBody, PromptBody


class PromptTokens:
    """Tokenizes, one text at a time: whoever asks much does not hold up those who generate.

    Args:
        llm: the engine.
        trusts_templates: conversations may bring their chat template.
        keeps_tools: the chat template gets a conversation's tools also if none may be called.
    """

    def __init__(self, llm: AsyncLLM, trusts_templates: bool = False, keeps_tools: bool = False) -> None:
        self._llm, self._turn, self._trusts_templates = llm, asyncio.Semaphore(1), trusts_templates
        self.keeps_tools = keeps_tools

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: it has none.
        """
        if self._llm.tokenizer is None:
            raise RequestError("the model folder has no tokenizer: start the server with tokenizer=FOLDER", None)
        return self._llm.tokenizer

    @functools.cached_property
    def gap_marks(self) -> GapMarks | None:
        """The model's marks around a gap to be filled; None: it has none, or no tokenizer."""
        return None if self._llm.tokenizer is None else spelling_of(self._llm.tokenizer)

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        assert self._llm.info is not None, "the server is ready"
        return self._llm.info.max_model_len

    def chat(self, body: ChatBody) -> Chat | None:
        """What renders a conversation: with the request's own template, if it has one, else with the model's. None:
        the model has no tokenizer.

        Raises:
            RequestError: templates of requests are not trusted here.
        """
        if body.chat_template is None:
            return self._llm.chat
        if not self._trusts_templates:
            message = "this server takes no chat_template from requests; leave it out, or the operator can set "
            message += "server.trust_request_chat_template=true"
            raise RequestError(message, "chat_template", "unsupported_parameter")
        chat = copy.copy(self._llm.chat)  # with the same render process and its limits
        if chat is not None:
            chat.templates = {"default": body.chat_template}
        return chat

    async def text(
        self, text: str | tuple[str, str], add_special_tokens: bool, param: str, *, any_length: bool = False
    ) -> list[int]:
        """The token ids of ``text``, or of a pair of texts. ``any_length``: the caller cuts them (the limit of bytes
        still holds).

        Raises:
            RequestError: there is no tokenizer, or the text is longer than the context; ``param`` is its field.
        """
        tokenizer, limit = self.tokenizer, self.context
        texts = [text] if isinstance(text, str) else text

        def encode() -> list[int]:
            # Before the whole text is tokenized, which cannot be interrupted.
            long = () if any_length else (each for each in texts if tokenizer.exceeds(each, limit))
            if (found := next(iter(long), None)) is not None:
                raise ContextLengthError(
                    f"the text of {len(found)} characters is longer than the context of {limit} tokens: shorten it",
                    param,
                )
            return tokenizer.encode(text, add_special_tokens)

        async with self._turn:
            return await asyncio.to_thread(encode)

    async def conversation(
        self, body: ChatBody, add_special_tokens: bool = False, *, any_length: bool = False
    ) -> list[int] | MediaPrompt:
        """The token ids of a conversation; with images or embeddings, these too.

        Raises:
            RequestError: as ``text``, or the template refuses the messages.
        """
        tokenizer, chat, info = self.tokenizer, self.chat(body), self._llm.info
        assert chat is not None and info is not None, "they are ready together with the tokenizer"
        messages = [message.plain() for message in body.messages]

        def render() -> str | MediaPrompt:
            if body.embedded:
                rows = RowParts(info.hidden_size, self.context)
                text = chat.render(rows.messages(messages), **body.template(self.keeps_tools))
                if tokenizer.exceeds(text, self.context):
                    message = f"the messages do not fit the context of {self.context} tokens: shorten them"
                    raise ContextLengthError(message, "messages")
                return rows.prompt(text, tokenizer)
            read = decode_images(messages) if info.encoders else messages
            return chat.prompt(read, **body.template(self.keeps_tools))

        try:
            async with self._turn:
                prompt = await asyncio.to_thread(render)
        except TemplateError as error:
            if body.chat_template is not None and not isinstance(error, RenderTimeoutError):
                error.param = "chat_template"
            raise
        if isinstance(prompt, MediaPrompt):
            return prompt
        return await self.text(prompt, add_special_tokens, "messages", any_length=any_length)

    def cut(self, ids: list[int], body: PromptBody) -> list[int]:
        """The part of a prompt that ``truncate_prompt_tokens`` leaves: its end, or with ``truncation_side="right"`` its
        beginning. -1 leaves what fits the context together with the answer.

        Raises:
            RequestError: more tokens are to be left than the context has.
        """
        left = body.truncate_prompt_tokens
        if left is None:
            return ids
        if left > self.context:
            param, why = "truncate_prompt_tokens", f"more than the context of {self.context} tokens"
            raise RequestError(f"{param} is {left}, {why}; send less, or -1", param)
        if left == -1:
            left = max(self.context - (body.answer_tokens), 1)
        return ids[:left] if body.truncation_side == "right" else ids[-left:]


def left_of(params: SamplingParams, began: float) -> SamplingParams:
    """``params`` with the rest of ``max_time``, which began at ``began`` (of ``time.monotonic``).

    Raises:
        ApiError: 504, nothing is left of it.
    """
    if params.max_time is None:
        return params
    left = params.max_time - (time.monotonic() - began)
    if left <= 0:
        raise deadline_missed()
    return replace(params, max_time=left)
