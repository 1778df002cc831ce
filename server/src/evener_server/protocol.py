"""Request bodies: every field that a client may send, and what becomes of it.

A field is implemented, or it is listed with the values that ask for nothing (``only``), which official clients send
unasked; any other value is a 400 that names it, and so is a field that nobody knows. null means "not said" everywhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from evener.errors import RequestError, did_you_mean
from evener.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION,
    MAX_STOP_IDS,
    MIN_REPETITION,
    SamplingParams,
)
from evener_server.messages import Body, Messages, only

MAX_STOPS = 16
_INT32, _INT64 = 2**31 - 1, 2**63
_ID_DIGITS = 10
#: Characters of what a client sent that an error repeats.
_SHOWN = 60
_MISSING, _UNKNOWN, _UNSUPPORTED = "missing", "extra_forbidden", "unsupported_parameter"


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is not None and not (
        isinstance(stops, list) and len(stops) <= MAX_STOPS and all(isinstance(s, str) and s for s in stops)
    ):
        raise _invalid(f"must be a string or a list of at most {MAX_STOPS} strings, none of them empty")
    return stops


def _biases(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise _invalid(f"must be an object with at most {MAX_LOGIT_BIAS} token ids")
    wrong = [key for key in value if not (key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS)]
    if wrong:
        raise _invalid(f"has the key {_short(wrong[0])}: keys are token ids, as in {{\"50256\": -100}}")
    for bias in value.values():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise _invalid(f"has the value {_short(bias)}: values are numbers from -100 to 100")
    biases = {int(key): float(bias) for key, bias in value.items()}
    if len(biases) < len(value):
        raise _invalid("has the same token id twice")
    return biases


def _prompts(value: object) -> object:
    """One text, one list of ids, or a list of either, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {str}:
        return value
    if kinds == {int}:
        return [value]
    if kinds == {list} and all(set(map(type, ids)) == {int} for ids in value):  # type: ignore[attr-defined]
        return value
    raise _invalid(
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids; none empty"
    )


_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
        {"type": "null"},
    ]
}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
    ]
}


_TokenId = Annotated[int, Field(ge=0, le=_INT32)]
_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        },
        {"type": "null"},
    ]
}


class StreamOptions(Body):
    """``include_usage``: one more chunk at the end, with the usage."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class GenerationBody(Body):
    """What both endpoints take."""

    model: str
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=_INT32)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-_INT64, lt=_INT64)] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    stop: Annotated[list[str] | None, BeforeValidator(_stops), WithJsonSchema(_STOP_SCHEMA)] = None
    stop_with_eos: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    #: For the log line, where it stands beside the request's id.
    user: str | None = None

    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(ge=MIN_REPETITION, le=MAX_REPETITION)] = None
    #: By token id, as text, since JSON has no other keys.
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)] = None
    stop_token_ids: Annotated[list[_TokenId] | None, Field(max_length=MAX_STOP_IDS)] = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    #: Seconds that the whole request may take, waiting included.
    max_time: Annotated[float | None, Field(gt=0)] = None

    use_beam_search: Annotated[Any, only(False)] = None

    @property
    def choices(self) -> int:
        """Choices that each prompt gets."""
        return 1 if self.n is None else self.n

    @property
    def samples(self) -> int:
        """Samples that run for each prompt."""
        return self.choices

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def token_limit(self) -> int | None:
        """At most this many new tokens, as far as the client says."""
        return self.max_tokens

    def prompt_top_count(self) -> int | None:
        """The same for the prompt's tokens."""
        return None

    @abstractmethod
    def top_count(self) -> int | None:
        """How many likeliest tokens are wanted at each position; None: no log-probabilities."""

    def check(self) -> None:
        """What more than one field says together.

        Raises:
            RequestError: they contradict each other.
        """
        if self.stop_with_eos is not None and self.ignore_eos is not None and self.stop_with_eos == self.ignore_eos:
            raise RequestError("stop_with_eos and ignore_eos contradict each other; send one of them", "ignore_eos")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for stream=true only; leave it out", "stream_options")

    def sampling(self, *, detokenize: bool) -> SamplingParams:
        """The parameters for the engine, which knows what holds for requests that do not say.

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
            max_tokens=self.token_limit(),
            min_tokens=self.min_tokens or 0,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=ignore_eos,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            # Which samples are best is told by their tokens' own.
            logprobs=0 if self.top_count() is None and self.samples > self.choices else self.top_count(),
            prompt_logprobs=self.prompt_top_count(),
            max_time=self.max_time,
            detokenize=detokenize,
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    #: Without tools there are no calls, parallel or not: both values are kept.
    parallel_tool_calls: bool | None = None

    response_format: Annotated[Any, only({"type": "text"})] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None
    metadata: Annotated[Any, only({})] = None
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    prompt_cache_key: Annotated[Any, only()] = None
    prompt_cache_retention: Annotated[Any, only()] = None
    safety_identifier: Annotated[Any, only(hint="; send user, which is logged")] = None
    chat_template: Annotated[Any, only()] = None
    #: Variables for the chat template, such as ``{"enable_thinking": false}``.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError("max_tokens and max_completion_tokens mean the same; send one of them", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt contradict each other; send one of them"
            raise RequestError(message, "continue_final_message")

    def template(self) -> dict[str, Any]:
        """What the chat template is told beside the messages."""
        return {
            "template_kwargs": self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
        }


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    #: A list of prompts, each a text or a list of ids, whichever way it was sent.
    prompt: Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    #: 0 gives nothing but the prompt, with ``echo``.
    max_tokens: Annotated[int | None, Field(ge=0)] = None

    #: Text and, with ``logprobs``, log-probabilities of the prompt come before those of the answer.
    echo: bool | None = None
    #: Samples to draw, of which the ``n`` likeliest are returned.
    best_of: Annotated[int | None, Field(ge=1, le=128)] = None
    suffix: Annotated[Any, only("")] = None
    prompt_logprobs: Annotated[Any, only(hint="; send echo=true with logprobs")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None

    @property
    def samples(self) -> int:
        return self.choices if self.best_of is None else self.best_of

    def top_count(self) -> int | None:
        return self.logprobs

    def token_limit(self) -> int | None:
        # A request of the engine samples at least one token; nobody sees it then.
        return 1 if self.max_tokens == 0 else self.max_tokens

    def prompt_top_count(self) -> int | None:
        return self.logprobs if self.echo else None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens is 0, which is for echo=true only; send 1 or more", "max_tokens")
        if self.samples < self.choices:
            raise RequestError(f"best_of is {self.best_of}, but n is {self.choices}; send n or more", "best_of")
        if self.stream and self.samples > self.choices:
            message = "best_of cannot be streamed: the best are known when all have ended; send stream=false"
            raise RequestError(message, "best_of")


B = TypeVar("B", bound=GenerationBody)


def parse_body(kind: type[B], value: Mapping[str, Any]) -> B:
    """Check a decoded body.

    Raises:
        RequestError: the first thing that is wrong; ``param`` is its place, ``code`` one of OpenAI's words for it.
    """
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _request_error(kind, error.errors(include_url=False, include_context=False)[0]) from error
    body.check()
    return body


def _request_error(kind: type[GenerationBody], found: ErrorDetails) -> RequestError:
    param = path(_untagged(found["loc"]))
    what, message = found["type"], found["msg"]
    if what == "union_tag_not_found" and isinstance(found["input"], dict):
        what, param = _MISSING, f"{param}.type"
    if what == "union_tag_invalid":
        given = _short(found["input"].get("type"))
        return RequestError(
            f"{param}.type is {given}, which this server does not support: send text or image_url", f"{param}.type",
            _UNSUPPORTED,
        )  # fmt: skip
    if what == _MISSING:
        return RequestError(f"{param} is missing; send it", param, "missing_required_parameter")
    if what == _UNKNOWN:
        near = did_you_mean(param, kind.model_fields) if len(found["loc"]) == 1 else "; leave it out"
        return RequestError(f"{param} is not a field that this server knows{near}", param, "unknown_parameter")
    if what == _UNSUPPORTED:
        return RequestError(f"{param} {message}", param, _UNSUPPORTED)
    if what == "literal_error" and found["loc"][-1] == "type":
        return RequestError(
            f"{param} is {_short(found['input'])}, which this server does not support: {message}", param, _UNSUPPORTED
        )
    code = "invalid_type" if what.endswith("_type") else "invalid_value"
    if what == "invalid_value":
        return RequestError(f"{param} {message}", param, code)
    return RequestError(f"{param} is {_short(found['input'])}: {message}", param, code)


def _untagged(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Without the kind that pydantic names behind a part of a content."""
    return (*loc[:4], *loc[5:]) if loc[:1] == ("messages",) and loc[2:3] == ("content",) else loc


def _short(value: object) -> str:
    """What was sent, if that is worth showing."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def path(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    text = ""
    for part in (p if isinstance(p, int) or len(p) <= _SHOWN else p[:_SHOWN] + "…" for p in loc):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
