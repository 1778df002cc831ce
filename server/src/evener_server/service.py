"""What the endpoints share: the engine, the model's name, defaults, and the first fields of every response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from importlib_metadata import version

from evener.async_llm import AsyncLLM
from evener.contracts.pooling import check_task
from evener.contracts.writing import ReasoningWriter
from evener.engine.facts.engine_info import EngineInfo
from evener.errors import RequestError
from evener.sampling_params import SamplingParams
from evener_server.bad_words import without_words
from evener_server.body import BodyLimits
from evener_server.errors import ApiError, unavailable
from evener_server.generation import Generation, RunningGenerations
from evener_server.grammar_check import GrammarChecks
from evener_server.key_use import KeyUse, current_priority
from evener_server.logprobs import TokenNames
from evener_server.metrics import Metrics
from evener_server.options import ServerOptions
from evener_server.parsers import Parsers
from evener_server.prompt_tokens import PromptTokens
from evener_server.protocol import GenerationBody
from evener_server.sampling_defaults import read_defaults, with_defaults
from evener_server.watermark import read_key

#: One in so many places of the queue is kept for the highest priority.
_KEPT_PART = 8


class Service:
    """One engine behind the API.

    Attributes:
        llm: the engine.
        limits: limits of request bodies.
        options: keys of the server itself.
        parsers: readers of tool calls and reasoning.
        grammars: verdicts on the grammars of requests.
        prompts: token ids of texts and conversations.
        metrics: counters and histograms.
        running: the running generations.
        version: version of this package.
        key_uses: what each API key uses, by name.
        created: time of the start, in seconds since 1970.
    """

    def __init__(self, llm: AsyncLLM, limits: BodyLimits, options: ServerOptions | None = None) -> None:
        self.llm, self.limits = llm, limits
        self.options = options or ServerOptions()
        self.parsers = Parsers(self.options)
        path = self.options.watermark_key_file
        self._watermark = None if path is None else read_key(path)
        self._sampling_defaults = read_defaults(self.options.sampling_defaults)
        self.grammars = GrammarChecks()
        self.prompts = PromptTokens(
            llm, self.options.trust_request_chat_template, not self.options.exclude_tools_when_tool_choice_none
        )
        self.metrics = Metrics()
        self.running = RunningGenerations(llm, self.metrics, self.options.show_cached_tokens)
        self.version = version("evener-server")
        self.key_uses: Mapping[str, KeyUse] = {}
        self.created = int(time.time())

    @property
    def info(self) -> EngineInfo:
        """What the engine reported when it became ready.

        Raises:
            ApiError: 503, it is not ready yet.
        """
        if self.llm.info is None:
            raise unavailable(self.llm.dead_reason or "the engine is not ready yet")
        return self.llm.info

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.info.served_name

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.info.max_model_len

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: the same fingerprint and seed give the same tokens."""
        return f"evener-{self.version}-{self.info.backend}"

    def is_crowded(self) -> bool:
        """Whether only the last part of the queue is free, which is for requests with the highest priority."""
        queue, info = self.llm.max_queue, self.llm.info
        if queue is None or info is None:
            return False
        return self.llm.num_open >= info.max_reqs + queue - queue // _KEPT_PART

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the model itself."""
        return (self.model_name, *self.options.aliases)

    @property
    def adapters(self) -> Mapping[str, str]:
        """The folders of the loaded adapters (LoRA), by name; none before the engine is ready."""
        return self.llm.adapters.folders if self.llm.ready else {}

    def adapter(self, name: str | None) -> str | None:
        """The adapter (LoRA) that a request's ``model`` names; None if it is the model itself."""
        return None if name is None or name in self.own_names else name

    def answering_model(self, name: str | None) -> str:
        """The model or adapter that answers a request whose ``model`` is ``name``.

        Raises:
            ApiError: 503, the engine is not ready yet.
        """
        return self.adapter(name) or self.model_name

    def check_model(self, name: str) -> None:
        """Raises:
        ApiError: 404, ``name`` is another model.
        """
        if name not in self.own_names and name not in self.adapters:
            shown = name if len(name) <= 200 else name[:200] + "…"
            raise ApiError(
                404,
                f"model {shown!r} does not exist here; this server has "
                + ", ".join(map(repr, [self.model_name, *sorted(self.adapters)[:20]])),
                "model",
                "model_not_found",
            )

    def sampling(self, body: GenerationBody) -> SamplingParams:
        """The sampling parameters of ``body``.

        Raises:
            RequestError: the model generates no text, or a value is out of range.
        """
        check_task("generate", self.info.pooling)
        last = self.info.vocab_size - 1
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if (highest := max(getattr(body, name, None) or (), default=0)) > last:
                raise RequestError(f"{name} has {highest}: ids are from 0 to {last}", name)
        self._check_likeliest(body)
        params = body.sampling(detokenize=self.llm.tokenizer is not None)
        params = with_defaults(params, body, self._sampling_defaults)
        params = replace(params, lora=self.adapter(body.model), priority=current_priority())
        return params if self._watermark is None else replace(params, seed=self._watermark.seed(params.seed))

    def _check_likeliest(self, body: GenerationBody) -> None:
        """Raises:
        RequestError: log-probabilities of more tokens at a position are asked for than the operator allows.
        """
        most = self.options.max_logprobs
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            asked = getattr(body, name, None)
            if type(asked) is not int or most == -1:  # in chats, logprobs is true or false
                continue
            if (wanted := self.info.vocab_size if asked == -1 else asked) > most:
                whole = f", the whole vocabulary of {wanted} tokens" if asked == -1 else ""
                message = f"{name} is {asked}{whole}: this server returns at most {most}; send 0 to {most}, or start it"
                message += f" with server.max_logprobs={wanted} or more (-1: no limit)"
                raise RequestError(message, name, "invalid_value")

    def reasons(self, with_tools: bool) -> bool:
        """Whether the model writes reasoning that can be held to a budget."""
        kind = None if self.llm.chat is None else self.parsers.reasoning(self.llm.chat, with_tools)
        return kind is not None and issubclass(kind, ReasoningWriter)

    def continuous_usage(self, body: GenerationBody) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return body.continuous_usage or (self.options.force_include_usage and body.stream_options is None)

    def token_names(self, as_ids: bool | None) -> TokenNames:
        """How log-probabilities name tokens; ``as_ids``: what the request says."""
        return TokenNames(self.llm.tokenizer, self.options.token_ids if as_ids is None else as_ids)

    def metrics_of(self, generation: Generation) -> dict[str, Any]:
        """The field with the request's own times, if the server gives them."""
        return {"metrics": generation.times()} if self.options.request_metrics else {}

    async def usage(self, generation: Generation, reasoned: Sequence[str | None]) -> dict[str, Any]:
        """The usage with the tokens of reasoning, for a model that writes any; ``reasoned``: each choice's."""
        usage, texts = generation.usage(), [text for text in reasoned if text is not None]
        if not texts:
            return usage
        count = sum([await self.count_tokens(text) for text in texts])
        return {**usage, "completion_tokens_details": {"reasoning_tokens": count}}

    async def count_tokens(self, text: str) -> int:
        """Tokens of a text of the model's own. In a thread: a long one takes a while."""
        if not text or self.llm.tokenizer is None:
            return 0
        return len(await asyncio.to_thread(self.llm.tokenizer.encode, text, add_special_tokens=False))

    async def without_words(self, params: SamplingParams, words: Sequence[str] | None) -> SamplingParams:
        """``params`` with which none of ``words`` is generated. In a thread: many words take a while.

        Raises:
            RequestError: as ``bad_words.without_words``, or there is no library that makes masks.
        """
        if not words:
            return params
        found = await asyncio.to_thread(without_words, params, words, self.llm.tokenizer)
        if params.grammar is None:
            await self.check_grammar(found, "bad_words")
        return found

    async def check_grammar(self, params: SamplingParams, field: str) -> None:
        """Check what the answer has to be, before the engine sees it; ``field`` asks for it.

        Raises:
            RequestError: the grammar cannot be used.
        """
        if params.grammar is not None:
            await self.grammars.check(params.grammar, field)

    def head(self, prefix: str, kind: str, model: str | None) -> dict[str, Any]:
        """The first fields of a response, with a new id; ``model``: what the request says."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.answering_model(model),
            "system_fingerprint": self.fingerprint,
            **({} if self.options.weights_folder is None else {"weight_version": self.llm.weights_version}),
        }
