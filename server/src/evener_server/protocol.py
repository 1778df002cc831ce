"""Request bodies: every field that a client may send, and its checks.

A field is implemented, or it is listed with the values that have no effect (``allowed_values``), because other values
would change the answer: those are a 400 that names the field. All other fields change nothing and are left out
(``unknown_fields``). null always means that the field was not sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from evener_beam.search import BeamOptions
from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from evener.contracts.grammar.library import GrammarSpec
from evener.errors import RequestError, did_you_mean
from evener.sampling_params import MAX_REPETITION, MAX_STOP_IDS, MIN_REPETITION, SamplingParams
from evener_server.bad_words import BadWords
from evener_server.beams import BeamFields
from evener_server.field_types import (
    INT32,
    MAX_SHOWN_CHARS,
    Biases,
    Embeds,
    Likeliest,
    LikeliestOrSwitch,
    Prompts,
    Stops,
    TokenId,
    short,
)
from evener_server.messages import Body, ImagePart, Message, Messages, RefusalPart, RowsPart, TextPart, allowed_values
from evener_server.structured import Choices, ResponseFormat, StructuredOutputs, only, only_ids
from evener_server.tools import Choice, ToolChoice, Tools
from evener_server.unknown_fields import drop_unknown

#: Of a template in a request: those of models have up to 20,000. Compiling takes a hundred times as much memory.
MAX_TEMPLATE_CHARACTERS = 1 << 16
#: Ids of ``allowed_token_ids``.
MAX_ALLOWED = 4096
_INT64 = 2**63
_MISSING, _UNKNOWN, _UNSUPPORTED = "missing", "extra_forbidden", "unsupported_parameter"


class StreamOptions(Body):
    """``include_usage``: one more chunk at the end, with the usage. ``continuous_usage_stats``: then each chunk
    has the usage so far."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, allowed_values(False)] = None


class TransferParams(Body):
    """What a router sends on from a server that has computed the prompt: the ids of its tokens, so that messages are
    not tokenized again, and where the state of the prompt is; see ``transfers``."""

    model_config = ConfigDict(extra="allow")

    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    #: Another server goes on with the state of this prompt, or has computed it.
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_host: Annotated[str | None, Field(max_length=253)] = None
    remote_port: Annotated[int | None, Field(ge=1, le=65_535)] = None
    remote_request_id: Annotated[str | None, Field(max_length=200)] = None
    # Others need them; here they say nothing.
    remote_engine_id: Any = None
    remote_block_ids: Any = None
    tp_size: Any = None


class PromptBody(Body):
    """The fields of every endpoint that hands prompts to the engine."""

    #: Default: the model that is served.
    model: str | None = None
    #: Appears in the request's log line.
    user: str | None = None
    #: Seconds that the whole request may take, waiting included.
    max_time: Annotated[float | None, Field(gt=0)] = None

    #: Tokens that are left of a longer prompt; -1: as many as fit.
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=INT32)] = None
    #: What is cut off. Default: left, so that the prompt's end is left.
    truncation_side: Literal["left", "right"] | None = None
    #: Default: true for a text, false for a conversation, whose template has them.
    add_special_tokens: bool | None = None

    @property
    def answer_tokens(self) -> int:
        """Tokens for which the context must have room besides the prompt's."""
        return 0

    @property
    def own_prompt_tokens(self) -> bool:
        """Whether the prompt is tokenized otherwise than by default, or cut."""
        return self.truncate_prompt_tokens is not None or self.add_special_tokens is not None

    def without_effect(self) -> list[str]:
        """Paths of fields that were sent and that change nothing."""
        return []

    def check(self) -> None:
        """Check fields that depend on each other.

        Raises:
            RequestError: they contradict each other.
        """
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens is 0; send 1 or more, or -1", "truncate_prompt_tokens")


class GenerationBody(PromptBody, BeamFields):
    """The fields of every endpoint that generates."""

    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=INT32)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-_INT64, le=_INT64 - 1)] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    stop: Stops = None
    stop_with_eos: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(ge=MIN_REPETITION, le=MAX_REPETITION)] = None
    #: Token ids as text, because JSON keys are text.
    logit_bias: Biases = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    #: Default: true.
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Earlier names of the same.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    #: Texts that must not be generated.
    bad_words: BadWords | None = None

    # Of vLLM's API: what would change the answer.
    logits_processors: Annotated[Any, allowed_values([])] = None
    prompt_embeds: Annotated[Any, allowed_values()] = None
    spaces_between_special_tokens: Annotated[Any, allowed_values(True)] = None
    return_token_ids: Annotated[Any, allowed_values(False)] = None
    return_tokens_as_token_ids: Annotated[Any, allowed_values(False)] = None

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def choices(self) -> int:
        """Choices that are returned for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def samples(self) -> int:
        """Samples that run for each prompt."""
        return self.choices

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def requested_max_tokens(self) -> int | None:
        """The requested maximum of new tokens; None: the client did not send one."""
        return self.max_tokens

    @property
    def answer_tokens(self) -> int:
        return self.requested_max_tokens() or 1

    def num_prompt_logprobs(self) -> int | None:
        """As ``num_logprobs``, for the prompt's tokens."""
        return None

    @property
    def beams(self) -> BeamOptions | None:
        """How to search for the likeliest texts; None: the request samples."""
        return self.beam_options(self.choices)

    @property
    def own_prompt_tokens(self) -> bool:
        """Whether the prompt's tokens are needed first, or made otherwise than by default, or cut."""
        return self.beams is not None or super().own_prompt_tokens

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to return at each position; None: no log-probabilities."""

    def check(self) -> None:
        super().check()
        if self.stop_with_eos is not None and self.ignore_eos is not None and self.stop_with_eos == self.ignore_eos:
            raise RequestError("stop_with_eos and ignore_eos contradict each other; send one of them", "ignore_eos")
        if self.beams is not None and self.samples > self.choices:
            raise RequestError("best_of cannot be used with beam search; send num_beams instead", "best_of")
        if self.bad_words and self.beams is not None:
            raise RequestError("bad_words cannot be used with beam search; leave it out", "bad_words")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for stream=true only; leave it out", "stream_options")
        if self.min_tokens and self.grammar() is not None:
            message = f"min_tokens cannot be used with {self.grammar_field}: a complete answer ends; leave it out"
            raise RequestError(message, "min_tokens")

    def grammar(self) -> GrammarSpec | None:
        """What the answer has to be; None: any text.

        Raises:
            RequestError: several fields ask for different things.
        """
        guided = StructuredOutputs(
            schema_=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        asked = self.structured_outputs and self.structured_outputs.spec("structured_outputs")
        form = self.response_format and self.response_format.grammar()
        return only([form or None, asked or None, guided.spec("structured_outputs")], "structured_outputs")

    @property
    def grammar_field(self) -> str:
        """The field that asks for ``grammar``."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        fields = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
        return next((name for name in fields if getattr(self, name) is not None), "response_format")

    def sampling(self, *, detokenize: bool) -> SamplingParams:
        """The parameters for the engine, which has the defaults for fields that were not sent.

        Args:
            detokenize: False for a model without a tokenizer.

        Raises:
            RequestError: a value is out of range.
        """
        ignore_eos = self.ignore_eos
        if ignore_eos is None and self.stop_with_eos is not None:
            ignore_eos = not self.stop_with_eos
        return SamplingParams(
            n=self.samples,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.requested_max_tokens(),
            min_tokens=self.min_tokens or 0,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=ignore_eos,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            # best_of ranks samples by their tokens' log-probabilities.
            logprobs=0 if self.num_logprobs() is None and self.samples > self.choices else self.num_logprobs(),
            prompt_logprobs=self.num_prompt_logprobs(),
            max_time=self.max_time,
            detokenize=detokenize,
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            grammar=self.grammar(),
        )


class TokenOutputs(GenerationBody):
    """What chats and completions can say of tokens, besides log-probabilities: fields of vLLM's API."""

    #: The ids of the prompt's and the answer's tokens.
    return_token_ids: bool | None = None
    #: Log-probabilities name tokens by their ids.
    return_tokens_as_token_ids: bool | None = None
    #: The only tokens that may be sampled.
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ALLOWED, fail_fast=True)] | None = None
    #: Tokens whose log-probabilities are returned in place of the likeliest tokens'.
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    #: Likeliest tokens to return at each position of the prompt, besides the prompt's own.
    prompt_logprobs: LikeliestOrSwitch = None
    #: Of a router: where the state of the prompt is, and for chats its tokens, in place of those of the messages.
    kv_transfer_params: TransferParams | None = None

    @property
    def prompt_count(self) -> int:
        """Prompts of the request."""
        return 1

    def without_effect(self) -> list[str]:
        extra = [] if self.kv_transfer_params is None else sorted(self.kv_transfer_params.model_extra or ())
        return [f"kv_transfer_params.{name[:MAX_SHOWN_CHARS]}" for name in extra]

    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def grammar(self) -> GrammarSpec | None:
        ids = self.allowed_token_ids
        return only([super().grammar(), only_ids(ids) if ids else None], "allowed_token_ids")

    @property
    def grammar_field(self) -> str:
        return "allowed_token_ids" if self.allowed_token_ids else super().grammar_field

    def sampling(self, *, detokenize: bool) -> SamplingParams:
        params = super().sampling(detokenize=detokenize)
        if not self.logprob_token_ids:
            return params
        return replace(params, logprobs=0, logprob_ids=tuple(dict.fromkeys(self.logprob_token_ids)))

    def shown_logprobs(self) -> int | None:
        """Tokens that are shown at each position at most, without the sampled one; None: no log-probabilities."""
        count = self.num_logprobs()
        return count if count is None or not self.logprob_token_ids else len(self.logprob_token_ids) + 1

    @property
    @abstractmethod
    def embedded(self) -> bool:
        """Whether a prompt, or part of it, is given as embeddings."""

    @property
    def own_prompt_tokens(self) -> bool:
        return self.embedded or super().own_prompt_tokens

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs is not streamed: send stream=false, or leave it out"
            raise RequestError(message, "prompt_logprobs")
        if self.embedded:
            self._check_embedded()
        if self.logprob_token_ids and self.num_logprobs() is None:
            raise RequestError("logprob_token_ids needs logprobs; send it too", "logprob_token_ids")
        if self.logprob_token_ids and self.beams is not None:
            raise RequestError("logprob_token_ids cannot be used with beam search; leave it out", "logprob_token_ids")

    def _check_embedded(self) -> None:
        for name in ("prompt_logprobs", "truncate_prompt_tokens", "add_special_tokens", "echo", "suffix"):
            value = getattr(self, name, None)
            if value is not None and value is not False:
                raise RequestError(f"{name} is not compatible with prompt_embeds; leave it out", name)


class ChatBody(TokenOutputs):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Tools | None = None
    #: Default: auto.
    tool_choice: Choice = None
    #: False: an answer has one call at most.
    parallel_tool_calls: bool | None = None
    #: False: the answer is given without what the model wrote before it.
    include_reasoning: bool | None = None
    #: A variable for the chat template.
    reasoning_effort: Annotated[str | None, Field(max_length=32)] = None
    #: A switch of the chat template. Default: its own, but false with the reasoning effort "none".
    enable_thinking: bool | None = None
    #: Tokens that the reasoning may have.
    thinking_token_budget: Annotated[int | None, Field(ge=0, le=INT32)] = None

    functions: Annotated[Any, allowed_values([])] = None
    function_call: Annotated[Any, allowed_values("none", "auto")] = None
    modalities: Annotated[Any, allowed_values(["text"])] = None
    audio: Annotated[Any, allowed_values()] = None
    web_search_options: Annotated[Any, allowed_values()] = None
    #: Begin the answer with the last message, if the assistant wrote it.
    echo: bool | None = None
    #: Used instead of the model's, if the operator trusts requests.
    chat_template: Annotated[str | None, Field(min_length=1, max_length=MAX_TEMPLATE_CHARACTERS)] = None
    #: Variables for the chat template, such as ``{"enable_thinking": false}``.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def embedded(self) -> bool:
        return any(message.embedded for message in self.messages)

    def without_effect(self) -> list[str]:
        images = [part.image_url for m in self.messages for part in m.content or () if isinstance(part, ImagePart)]
        chosen = any(image.detail not in (None, "auto") for image in images)
        return super().without_effect() + ["messages[].content[].image_url.detail"] * chosen

    @property
    def prompt_ids(self) -> list[int] | None:
        """The ids of the prompt's tokens, if they were sent."""
        return None if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids

    @property
    def own_prompt_tokens(self) -> bool:
        return self.chat_template is not None or super().own_prompt_tokens

    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if (self.chat_template_kwargs or {}).get("chat_template") is not None:
            message = "chat_template_kwargs has chat_template, which is a field of its own; send it there"
            raise RequestError(message, "chat_template_kwargs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt contradict each other; send one of them"
            raise RequestError(message, "continue_final_message")
        self.choice.check(self.tools or ())
        if self.min_tokens and self.choice.forced:
            message = "min_tokens cannot be used with a tool_choice that forces a call, which ends; leave it out"
            raise RequestError(message, "min_tokens")

    @property
    def choice(self) -> ToolChoice:
        """Which tools the answer calls."""
        return ToolChoice() if self.tool_choice is None else self.tool_choice

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and not self.choice.never

    def template(self, keep_tools: bool = False) -> dict[str, Any]:
        """The chat template's arguments besides the messages. ``keep_tools``: it gets the tools also if none may be
        called."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        thinks = self.enable_thinking
        if thinks is None and self.reasoning_effort == "none":
            thinks = False
        if thinks is not None:
            # The names of the switch in templates; those of Qwen and GLM have the first, of DeepSeek the second.
            variables = {"enable_thinking": thinks, "thinking": thinks, **variables}
        return {
            "template_kwargs": variables or None,
            "tools": [tool.plain() for tool in self.tools] if self.tools and (keep_tools or self.calls_tools) else None,
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
        }


class CompletionBody(TokenOutputs):
    """POST /v1/completions."""

    prompt: Prompts = None
    #: Prompts as embeddings. Their choices come before those of ``prompt``.
    prompt_embeds: Embeds = None
    logprobs: Likeliest | None = None
    #: 0 returns only the prompt, with ``echo``.
    max_tokens: Annotated[int | None, Field(ge=0)] = None

    #: Return the prompt's text and, with ``logprobs``, its log-probabilities before those of the answer.
    echo: bool | None = None
    #: Samples to draw, of which the ``n`` likeliest are returned.
    best_of: Annotated[int | None, Field(ge=1, le=128)] = None
    #: The text after the gap that the answer fills.
    suffix: str | None = None

    @property
    def embedded(self) -> bool:
        return bool(self.prompt_embeds)

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return len(self.prompt_embeds or ()) + len(self.prompt or ())

    @property
    def prompt_count(self) -> int:
        return self.prompts

    def without_effect(self) -> list[str]:
        unread = self.kv_transfer_params is not None and self.kv_transfer_params.prompt_token_ids is not None
        return super().without_effect() + ["kv_transfer_params.prompt_token_ids"] * unread

    @property
    def samples(self) -> int:
        return self.choices if self.best_of is None else self.best_of

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def requested_max_tokens(self) -> int | None:
        # The engine samples at least one token; it is not returned.
        return 1 if self.max_tokens == 0 else self.max_tokens

    def num_prompt_logprobs(self) -> int | None:
        asked = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return -1 if -1 in asked else max(asked, default=None)

    def check(self) -> None:
        super().check()
        if not self.prompts:
            message = "Either prompt or prompt_embeds must be provided and non-empty."  # the words of vLLM's API
            raise RequestError(message, "prompt", "missing_required_parameter")
        if self.suffix and self.echo:
            raise RequestError("echo cannot be used with suffix: the prompt is two texts; leave it out", "echo")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens is 0, which is only allowed with echo=true; send 1 or more", "max_tokens")
        if self.samples < self.choices:
            raise RequestError(f"best_of is {self.best_of}, but n is {self.choices}; send n or more", "best_of")
        if self.stream and self.samples > self.choices:
            message = "best_of cannot be streamed: the best are only known when all have ended; send stream=false"
            raise RequestError(message, "best_of")


B = TypeVar("B", bound=PromptBody)


def parse_body(kind: type[B], value: Mapping[str, Any]) -> tuple[B, list[str]]:
    """Check a decoded body. Returns it, and the paths of the fields that were ignored.

    Raises:
        RequestError: the first field that is wrong; ``param`` is its path, ``code`` one of OpenAI's error codes.
    """
    kinds: tuple[type[Body], ...] = (TextPart, ImagePart, RowsPart, RefusalPart)
    parts = {"message": _fields(Message), "part": set[str]().union(*map(_fields, kinds))}
    parts = parts if issubclass(kind, ChatBody) else {}
    known, ignored = drop_unknown(value, kind.model_fields, parts, samples=issubclass(kind, GenerationBody))
    try:
        body = kind.model_validate(known)
    except ValidationError as error:
        raise _request_error(kind, error.errors(include_url=False, include_context=False)[0]) from error
    body.check()
    return body, ignored + body.without_effect()


def _fields(kind: type[Body]) -> set[str]:
    return set(kind.model_fields)


def _request_error(kind: type[PromptBody], found: ErrorDetails) -> RequestError:
    param = path(_untagged(found["loc"]))
    what, message = found["type"], found["msg"]
    if what == "union_tag_not_found" and isinstance(found["input"], dict):
        what, param = _MISSING, f"{param}.type"
    if what == "union_tag_invalid":
        given = short(found["input"].get("type"))
        asked = found["loc"][0] == "questions"
        known = "predicate, choice or score" if asked else "text, image_url or prompt_embeds"
        message = f"{param}.type is {given}, which this server does not support: send {known}"
        return RequestError(message, f"{param}.type", _UNSUPPORTED)
    if what == _MISSING:
        return RequestError(f"{param} is missing; send it", param, "missing_required_parameter")
    if what == _UNKNOWN:
        near = did_you_mean(param, kind.model_fields) if len(found["loc"]) == 1 else "; leave it out"
        return RequestError(f"{param} is not a field of this API{near}", param, "unknown_parameter")
    if what == _UNSUPPORTED:
        return RequestError(f"{param} {message}", param, _UNSUPPORTED)
    if what == "literal_error" and found["loc"][-1] == "type":
        return RequestError(
            f"{param} is {short(found['input'])}, which this server does not support: {message}", param, _UNSUPPORTED
        )
    code = "invalid_type" if what.endswith("_type") else "invalid_value"
    if what == "invalid_value":
        return RequestError(f"{param} {message}", param, code)
    # Programs that were written for vLLM look for the name of the rule.
    return RequestError(f"{param} is {short(found['input'])}: {message} ({what})", param, code)


def _untagged(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The path without the kind of content part, of reasoning, or of a question, which pydantic puts into it."""
    if loc[0] == "questions":
        return (*loc[:2], *loc[3:])
    kind = {"content": 4, "reasoning": 3, "reasoning_content": 3}.get(str(loc[2])) if len(loc) > 2 else None
    return loc if kind is None or loc[0] != "messages" else (*loc[:kind], *loc[kind + 1 :])


def path(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    text = ""
    for part in (p if isinstance(p, int) or len(p) <= MAX_SHOWN_CHARS else p[:MAX_SHOWN_CHARS] + "…" for p in loc):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
