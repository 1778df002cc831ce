"""``SamplingParams``: what a caller may ask of one request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evener.errors import RequestError

#: At most this many likeliest tokens at a position: host work a step is bounded.
MAX_LOGPROBS = 20
#: Far beyond it all tokens are equally likely, and float32 overflows.
MAX_TEMPERATURE = 1000.0
#: The work on each token grows with the stop strings.
MAX_STOPS, MAX_STOP_CHARS = 32, 1024
_SEED_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request. None means "not said": ``temperature``, ``top_p``, ``top_k`` and ``min_p`` then come
    from the model's ``generation_config.json`` where it has them (its ``do_sample`` is not read), else 1.0, 1.0, 0
    and 0.0.

    Attributes:
        n: samples of the prompt.
        temperature: 0 is greedy; at most 1,000.
        top_p: keep the likeliest tokens whose probabilities add up to this; in (0, 1].
        top_k: keep this many of the likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this times the likeliest; in [0, 1].
        seed: the same seed gives the same tokens, in any company; None draws one.
        max_tokens: at most this many new tokens. None: the rest of the context for chat, 16 for completions and
            ``generate``.
        stop: string or strings that end the sample.
        ignore_eos: go on after an EOS token; None: as the engine's ``infer.stop_with_eos`` says, which is not to.
        logprobs: report the sampled token's log-probability and this many of the likeliest; None reports none.
        detokenize: False gives ids only.
        include_stop_str_in_output: leave the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value is out of range; ``param`` names the field.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, 128)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)
        _integer("max_tokens", self.max_tokens, 1, None)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.n is None:
            raise RequestError("n must be an integer of at least 1, not None", "n")
        if not isinstance(self.ignore_eos, (bool, type(None))):
            raise RequestError(f"ignore_eos must be true or false, not {self.ignore_eos!r}", "ignore_eos")
        for name in ("detokenize", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise RequestError(f"stop must be a string or a list of strings, not {self.stop!r}", "stop")
        if len(self.stop_strings) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop_strings)} strings; at most {MAX_STOPS} are allowed", "stop")
        for text in self.stop_strings:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError(f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters, not {text!r}", "stop")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop needs text: stop strings cannot be used with detokenize=False", "stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty when unset."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be an integer {limits}, not {value!r}", name)


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        limits = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        without = f", {low:g} excluded" if open_low else ""
        raise RequestError(f"{name} must be a number {limits}{without}, not {value!r}", name)
