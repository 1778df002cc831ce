"""``SamplingParams``: the parameters of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evener.api.numbers import check_integer, check_number
from evener.contracts.adapters import HeldAdapter
from evener.contracts.grammar.library import GrammarSpec
from evener.contracts.outputs import PromptOutputs
from evener.errors import RequestError

#: Likeliest tokens that the sampler reports of a position, and a server by default; of more, the logits of the whole
#: vocabulary go to the host.
MAX_LOGPROBS = 20
#: At much larger values all tokens are equally likely, and float32 overflows.
MAX_TEMPERATURE = 1000.0
#: The work for each token grows with the stop strings.
MAX_STOPS, MAX_STOP_CHARS = 32, 1024
#: Token ids of one request whose logits are changed: by ``logit_bias``, and stop tokens by ``min_tokens``.
MAX_BIASES = 1024
MAX_LOGIT_BIAS, MAX_STOP_IDS = 512, 256
#: Penalties far from 1 make the model's output meaningless, and logits overflow float32.
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
#: Priorities are from minus this to this.
MAX_PRIORITY = 100
_SEED_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request. If ``temperature``, ``top_p``, ``top_k``, ``min_p`` or ``repetition_penalty`` is None,
    the value in the model's ``generation_config.json`` is used (its ``do_sample`` is ignored), or else 1.0, 1.0, 0, 0.0
    and 1.0.

    Attributes:
        n: number of samples for the prompt.
        temperature: 0 is greedy; at most 1,000.
        top_p: sample from the likeliest tokens whose probabilities add up to this; in (0, 1].
        top_k: sample from this many of the likeliest tokens; 0 or -1: from all.
        min_p: drop tokens less likely than this times the likeliest token; in [0, 1].
        seed: the same seed gives the same tokens, whatever else is in the batch; None: a random seed.
        max_tokens: maximum number of new tokens. None: the rest of the context for chat, 16 for completions and
            ``generate``.
        min_tokens: minimum number of new tokens: before, EOS and stop tokens are not sampled, and stop strings do not
            end the sample.
        stop: string or strings that end the sample.
        stop_token_ids: token ids that end the sample as EOS does; they are not part of the text.
        ignore_eos: continue after an EOS token; None: as the engine's ``infer.stop_with_eos`` says (default: stop).
        frequency_penalty: subtracted from a token's logit for each occurrence in the sample; in [-2, 2].
        presence_penalty: subtracted from a token's logit once if it occurs in the sample; in [-2, 2].
        repetition_penalty: for tokens in the prompt or the sample, divides a positive logit and multiplies a negative
            one; in [0.01, 100]. 1.0 is off.
        logit_bias: token id to what is added to its logit; values in [-100, 100], or minus infinity, which forbids
            the token; at most 512 ids.
        logprobs: return the sampled token's log-probability and this many of the likeliest; -1: of all tokens; None:
            none. They are the model's own, before penalties, biases, temperature and filters.
        logprob_ids: with ``logprobs``: return the log-probabilities of these token ids in place of the likeliest.
        prompt_logprobs: like ``logprobs``, for the prompt's tokens; the prefix cache is not used for the prompt then.
        prompt_outputs: rows of the prompt's tokens, returned as ``CompletionOutput.pooled`` of the first sample; the
            prefix cache is not used for the prompt then.
        priority: waiting requests with a higher one start first; each point counts as much as half a minute of waiting.
        max_time: seconds, waiting included, after which the sample ends with the tokens so far.
        detokenize: False returns ids only.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        grammar: what the text has to be, such as ``GrammarSpec(kind="json_schema", text=…)``; the sample ends where it
            is complete, also with ``ignore_eos``.
        lora: the adapter that the model has for this request, by its name or as ``Adapters.hold`` returned it; None:
            none.
        transfer: where the state of the prompt is, or that another server wants it, as ``kv_transfer_params`` of the
            HTTP API say; "": neither.

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
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    logprob_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    prompt_outputs: PromptOutputs | None = None
    priority: int = 0
    max_time: float | None = None
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    lora: str | HeldAdapter | None = None
    transfer: str = ""

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1, 128)
        check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_number("max_time", self.max_time, 0.0, math.inf, open_low=True)
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_integer("top_k", self.top_k, -1, None)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_integer("seed", self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)
        check_integer("max_tokens", self.max_tokens, 1, None)
        check_integer("logprobs", self.logprobs, -1, None)
        check_integer("prompt_logprobs", self.prompt_logprobs, -1, None)
        check_integer("min_tokens", self.min_tokens, 0, None)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
        for name in ("n", "priority", "min_tokens", "frequency_penalty", "presence_penalty"):
            if getattr(self, name) is None:
                raise RequestError(f"{name} must be a number, not None", name)
        if self.logprob_ids and self.logprobs is None:
            raise RequestError("logprob_ids needs logprobs; send 0 or more", "logprob_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}", "min_tokens")
        self._check_ids()
        if not isinstance(self.grammar, GrammarSpec | None) or (self.grammar and self.min_tokens):
            raise RequestError("grammar must be a GrammarSpec or None, and without min_tokens", "grammar")
        for name in ("ignore_eos", "detokenize", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), (bool, type(None)) if name == "ignore_eos" else bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        for name, kind, what in (("prompt_outputs", PromptOutputs | None, "PromptOutputs"), ("transfer", str, "text"),
                                 ("lora", str | HeldAdapter | None, "the name of an adapter or None")):  # fmt: skip
            if not isinstance(getattr(self, name), kind):
                raise RequestError(f"{name} must be {what}, not {getattr(self, name)!r}", name)
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise RequestError(f"stop must be a string or a list of strings, not {self.stop!r}", "stop")
        if len(self.stop_strings) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop_strings)} strings; at most {MAX_STOPS} are allowed", "stop")
        for text in self.stop_strings:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError(f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters, not {text!r}", "stop")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop needs text: stop strings cannot be used with detokenize=False", "stop")

    def _check_ids(self) -> None:
        names = {"stop_token_ids": self.stop_token_ids, "logprob_ids": self.logprob_ids}
        lists = {name: (ids, Sequence, MAX_STOP_IDS) for name, ids in names.items()}
        for name, (ids, kind, limit) in {**lists, "logit_bias": (self.logit_bias, Mapping, MAX_LOGIT_BIAS)}.items():
            if not isinstance(ids, kind) or len(ids) > limit or not all(type(i) is int and i >= 0 for i in ids):
                raise RequestError(f"{name} must contain only token ids, at most {limit} of them", name)
        for value in [each for each in self.logit_bias.values() if each != -math.inf]:
            check_number("logit_bias", math.nan if value is None else value, -100.0, 100.0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty when unset."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
