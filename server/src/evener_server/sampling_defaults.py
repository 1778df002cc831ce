"""``server.sampling_defaults``: values of sampling parameters that requests do not name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evener.errors import ConfigError, RequestError, did_you_mean
from evener.sampling_params import SamplingParams
from evener_server.protocol import GenerationBody

_KEY = "server.sampling_defaults"
#: What may have a default, and which of it are whole numbers.
_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
_WHOLE = ("top_k",)
#: Names in vLLM's ``--override-generation-config`` that are keys of their own.
_KEYS = dict.fromkeys(("max_tokens", "max_new_tokens"), "request.max_new_tokens")


def read_defaults(text: str) -> Mapping[str, float]:
    """The values in ``text``: ``temperature=0,top_p=0.9``, or the same as a JSON object; empty: none.

    Raises:
        ConfigError: a name is unknown or there twice, or a value is out of range.
    """
    pairs = _json(text) if text.strip().startswith("{") else _pairs(text)
    found: dict[str, float] = {}
    for name, value in pairs:
        if name in _KEYS:
            raise ConfigError(f"{_KEY} has {name}, which is a key: set {_KEYS[name]}={value}")
        if name not in _NAMES:
            near = did_you_mean(name, _NAMES)
            raise ConfigError(f"{_KEY} has {name!r}, which is not a sampling parameter that can have a default{near}")
        if name in found:
            raise ConfigError(f"{_KEY} has {name} twice; leave one out")
        found[name] = _number(name, value)
    try:
        SamplingParams(**found)  # type: ignore[arg-type]  # its fields are numbers
    except RequestError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
    return found


def _json(text: str) -> list[tuple[str, Any]]:
    try:
        found = json.loads(text, object_pairs_hook=list)
    except ValueError as error:
        raise ConfigError(f"{_KEY} is not JSON: {error}; or give it as temperature=0,top_p=0.9") from error
    assert isinstance(found, list), "the text begins with a brace"
    return found


def _pairs(text: str) -> list[tuple[str, Any]]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if "=" not in part]:
        raise ConfigError(f"{_KEY} has {wrong[0]!r}; give NAME=NUMBER, as in temperature=0,top_p=0.9")
    return [(name.strip(), value.strip()) for name, _, value in (part.partition("=") for part in parts)]


def _number(name: str, value: Any) -> float:
    kind: type[int] | type[float] = int if name in _WHOLE else float
    try:
        if isinstance(value, str) or type(value) in (int, kind):
            return kind(value)
    except ValueError:
        pass
    raise ConfigError(f"{_KEY}: {name} is {value!r}; give a{' whole' if name in _WHOLE else ''} number")


def with_defaults(params: SamplingParams, body: GenerationBody, defaults: Mapping[str, float]) -> SamplingParams:
    """``params`` with the operator's values where ``body`` names none. Beam search has no use for them."""
    if not defaults or body.beams is not None:
        return params
    missing = {name: value for name, value in defaults.items() if getattr(body, name) is None}
    return replace(params, **missing)  # type: ignore[arg-type]  # they are numbers
