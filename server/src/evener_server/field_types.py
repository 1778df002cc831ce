"""Types of fields that need more than a type and bounds: stop strings, biases, prompts."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from evener.sampling_params import MAX_LOGIT_BIAS

MAX_STOPS = 16
INT32 = 2**31 - 1
#: Characters of a client's value that an error message repeats.
MAX_SHOWN_CHARS = 60
_ID_DIGITS, _MOST_SHOWN = 10, 8


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not (isinstance(stops, list) and len(stops) <= MAX_STOPS and all(isinstance(s, str) for s in stops)):
        raise _invalid(f"must be a string or a list of at most {MAX_STOPS} strings")
    # Clients send an empty one for none.
    return [stop for stop in stops if stop] or None


def _biases(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise _invalid(f"must be an object with at most {MAX_LOGIT_BIAS} token ids")
    wrong = [key for key in value if not (key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS)]
    if wrong:
        named = ", ".join(map(short, wrong[:_MOST_SHOWN])) + (", …" if len(wrong) > _MOST_SHOWN else "")
        raise _invalid(f'has the key {named}: keys are token ids, as in {{"50256": -100}}')
    for bias in value.values():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise _invalid(f"has the value {short(bias)}: values are numbers from -100 to 100")
    biases = {int(key): float(bias) for key, bias in value.items()}
    if len(biases) < len(value):
        raise _invalid("has the same token id twice")
    return biases


def as_prompts(value: object) -> object:
    """One text, one list of ids, or a list of either, turned into a list of prompts."""
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


def _maybe_prompts(value: object) -> object:
    return None if value is None else as_prompts(value)


def _as_count(value: object) -> object:
    """A switch as a number of tokens: vLLM's clients send one too."""
    return {True: 1, False: None}[value] if isinstance(value, bool) else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS},
        {"type": "null"},
    ]
}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
    ]
}
_OPTIONAL_PROMPT_SCHEMA = {"anyOf": [*PROMPT_SCHEMA["anyOf"], {"type": "null"}]}
_EMBEDS_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}, {"type": "null"}]
}
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
_COUNT_SCHEMA = {"anyOf": [{"type": "integer", "minimum": -1, "maximum": INT32}, {"type": "boolean"}, {"type": "null"}]}

TokenId: TypeAlias = Annotated[int, Field(ge=0, le=INT32)]
Stops: TypeAlias = Annotated[list[str] | None, BeforeValidator(_stops), WithJsonSchema(_STOP_SCHEMA)]
Biases: TypeAlias = Annotated[dict[int, float] | None, BeforeValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)]
#: A number of the likeliest tokens; -1: all. The server's own limit is ``server.max_logprobs``.
Likeliest: TypeAlias = Annotated[int, Field(ge=-1, le=INT32)]
#: The same, or a switch: true is 1, false none.
LikeliestOrSwitch: TypeAlias = Annotated[Likeliest | None, BeforeValidator(_as_count), WithJsonSchema(_COUNT_SCHEMA)]
#: Always a list of prompts, each a text or a list of ids.
Prompts: TypeAlias = Annotated[
    list[Any] | None, BeforeValidator(_maybe_prompts), WithJsonSchema(_OPTIONAL_PROMPT_SCHEMA)
]
#: Always a list.
Embeds: TypeAlias = Annotated[list[str] | None, BeforeValidator(_as_list), WithJsonSchema(_EMBEDS_SCHEMA)]


def short(value: object) -> str:
    """The sent value, shortened for a message."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
