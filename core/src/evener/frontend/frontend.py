"""Turns requests into engine messages, and engine events into deltas. No I/O and no threads: ``LLM`` and ``AsyncLLM``
do that.

Only the controller ends a request. If a stop string is found here, a ``Finish`` message goes to the controller; the
sample's last delta follows when its ``Finished`` arrives, and tokens that arrive in between are dropped.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from evener.contracts.adapters import Adapters, HeldAdapter
from evener.contracts.media import MediaItem, MediaPrompt
from evener.contracts.outputs import Delta
from evener.contracts.pooling import PoolingSettings, check_task
from evener.engine.wire import messages as wire
from evener.errors import ContextLengthError, RequestError
from evener.frontend.defaults import GenerationDefaults
from evener.frontend.detokenize import Detokenizer
from evener.frontend.plugins import RequestPlugins
from evener.frontend.stops import StopStrings
from evener.frontend.tokenizer import Tokenizer
from evener.plugins.discover import installed_catalog
from evener.sampling_params import MAX_BIASES, MAX_LOGPROBS, SamplingParams

Kind = Literal["chat", "completion", "embed"]
#: The parameter in which a request of each kind has its prompt, for errors.
_PROMPT_PARAM: dict[Kind, str] = {"chat": "messages", "completion": "prompt", "embed": "input"}
#: Default maximum of new tokens for completions, as in OpenAI's API.
COMPLETION_MAX_TOKENS = 16
_SEED_BITS = 31
#: A lower temperature is greedy in effect, and logits divided by it may overflow float32.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request that is not submitted yet.

    Attributes:
        ids: the prompt's token ids; media: what stands for some of them.
        max_tokens: new tokens, limited to the context.
        params: as given.
        eos_ids: the model's end-of-sequence ids, unless they are ignored; bias: see ``Sampling.bias``.
        rows: reads the rows of numbers that it wants for tokens; None: it wants none.
    """

    ids: list[int]
    media: list[MediaItem]
    max_tokens: int
    params: SamplingParams
    eos_ids: frozenset[int]
    bias: list[wire.LogitBias]
    rows: Any | None


@dataclass(slots=True)
class _Sample:
    """One open sample. ``stopped``: its text is complete, and only the controller's ``Finished`` is missing."""

    request_id: str
    index: int
    detokenizer: Detokenizer | None
    stops: StopStrings
    hidden_ids: frozenset[int]
    #: The caller's stop ids, without the model's EOS ids.
    stop_ids: frozenset[int]
    #: Number of next tokens for which stop strings are ignored (``min_tokens``).
    min_tokens_left: int
    last_id: int = -1
    stopped: bool = False
    failure: str | None = None
    stop_reason: str | int | None = None
    rows: Any | None = None
    #: The first prompt token has no log-probabilities: None must be reported for it before the others.
    prompt_logprobs_due: bool = False


class Frontend:
    """The front end of one engine.

    Args:
        max_model_len: maximum tokens of prompt and output together; context_reason: why, for error messages.
        vocab_size: token ids must be below it.
        tokenizer: None: token ids only.
        defaults: the model's sampling defaults and EOS ids.
        default_max_tokens: default maximum of new tokens; None: the rest of the context for chat, 16 for completions.
        stop_with_eos: whether an EOS token ends a request by default.
        plugins: process every request and its output.
        rng: draws the seeds of requests without one.
        hidden_size: width of embedding rows in media; media_rows: rows that one engine step takes.
        final_norm: whether the model gives hidden states after its final norm.
        pooling: what the model makes of a text, if it generates none.
        adapters: what ``SamplingParams.lora`` may name; default: nothing.
    """

    def __init__(
        self, *, max_model_len: int, vocab_size: int, tokenizer: Tokenizer | None = None,
        defaults: GenerationDefaults | None = None, default_max_tokens: int | None = None, stop_with_eos: bool = True,
        plugins: RequestPlugins | None = None, rng: random.Random | None = None, hidden_size: int = 0,
        media_rows: int = 1, final_norm: bool = True, context_reason: str = "", pooling: PoolingSettings | None = None,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        self.pooling, self.adapters = pooling, adapters or Adapters()
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._ids: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
        self.context = f"the context of {max_model_len} tokens" + (context_reason and f" ({context_reason})")
        self._hidden_size, self._media_rows, self._final_norm = hidden_size, media_rows, final_norm
        self.tokenizer, self.defaults = tokenizer, defaults or GenerationDefaults()
        self._default_max_tokens, self._stop_with_eos = default_max_tokens, stop_with_eos
        self.plugins = plugins or RequestPlugins()
        self._rng = rng or random.SystemRandom()
        self._samples: dict[str, _Sample] = {}
        self._requests: dict[str, set[str]] = {}
        self._held: dict[str, HeldAdapter | None] = {}

    @property
    def num_open(self) -> int:
        """Number of samples that were submitted and have not ended."""
        return len(self._samples)

    def is_open(self, request_id: str) -> bool:
        """Whether any sample of the request has not ended."""
        return request_id in self._requests

    def prepare(
        self, prompt: str | list[int] | MediaPrompt, params: SamplingParams, kind: Kind = "completion"
    ) -> PreparedRequest:
        """Tokenize a request and check everything but its id; nothing is submitted. Safe in another thread.

        A chat's prompt is the rendered template: no special tokens are added to it.

        Raises:
            RequestError: a kind of request that is not for this model, an unknown adapter, an empty prompt, an id
                outside the vocabulary, text without a tokenizer, media that do not fit the model, too many biased ids.
            ContextLengthError: the prompt, or prompt + ``max_tokens``, does not fit.
        """
        if (kind == "embed") != (self.pooling is not None):
            check_task("embed" if kind == "embed" else "generate", self.pooling)
        self.adapters.find(params.lora)
        ids = self._encode(prompt, params, kind)
        # First: a prompt that is far too long is refused before each of its ids is checked.
        max_tokens = self._max_tokens(len(ids), params, kind)
        rows = self._rows(params, max_tokens, len(ids))
        self._check_ids(ids, _PROMPT_PARAM[kind])
        for name in ("stop_token_ids", "logit_bias", "logprob_ids"):
            self._check_ids(list(getattr(params, name)), name)
        media = list(prompt.media) if isinstance(prompt, MediaPrompt) else []
        if media and (checks := installed_catalog().lazy_imports("part of media").get("checks")):
            media = checks.load()(media, self._hidden_size, self._media_rows)  # without it, the engine refuses them
        ignore_eos = not self._stop_with_eos if params.ignore_eos is None else params.ignore_eos
        # A text that follows a grammar ends where it is complete.
        goes_on = ignore_eos and (params.grammar is None or params.grammar.kind == "any")
        eos_ids = frozenset(() if goes_on else self.defaults.eos_ids)
        bias = self._bias(params, eos_ids | frozenset(params.stop_token_ids))
        return PreparedRequest(ids, media, max_tokens, params, eos_ids, bias, rows)

    def submit(self, prepared: PreparedRequest, request_id: str) -> list[wire.NewRequest]:
        """A prepared request as messages, one for each of its ``n`` samples, to be sent in order.

        With ``n`` > 1 sample i has the id ``<request_id>-<i>`` and a seed of its own.

        Raises:
            RequestError: the id is in use, or the adapter was unloaded meanwhile.
        """
        params, eos_ids = prepared.params, prepared.eos_ids
        names = [request_id] if params.n == 1 else [f"{request_id}-{i}" for i in range(params.n)]
        if request_id in self._requests or any(name in self._samples for name in names):
            raise RequestError(f"request id {request_id!r} is in use by a running request", "request_id")
        held, asked = self.adapters.hold(params.lora), frozenset(params.stop_token_ids)
        adapter = "" if held is None else held.id
        seed = self._rng.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        messages = []
        for index, name in enumerate(names):
            tokenizer = self.tokenizer if params.detokenize else None
            detokenizer = None if tokenizer is None else tokenizer.detokenizer(params.skip_special_tokens)
            sampling = self._sampling(params, sample_seed(seed, index), prepared.bias, index)
            self._samples[name] = _Sample(
                request_id, index, detokenizer, StopStrings(params.stop_strings, params.include_stop_str_in_output),
                hidden_ids=eos_ids if params.include_stop_str_in_output else eos_ids | asked,
                stop_ids=asked - eos_ids, min_tokens_left=params.min_tokens,
                rows=prepared.rows,
                prompt_logprobs_due=params.prompt_logprobs is not None and index == 0,
            )  # fmt: skip
            messages.append(
                wire.NewRequest(
                    id=name, prompt=prepared.ids, max_tokens=prepared.max_tokens, sampling=sampling,
                    stop_token_ids=sorted(eos_ids | asked), max_time=params.max_time,
                    fork_of=names[0] if index else "", media=prepared.media, adapter=adapter, cache_salt=adapter,
                    priority=params.priority, transfer=params.transfer,
                    # Other tokens' rows than the last one's are not in the prefix cache.
                    whole_prompt=self.pooling is not None and self.pooling.pooling != "last",
                )
            )  # fmt: skip
        self._requests[request_id], self._held[request_id] = set(names), held
        return messages

    def _encode(self, prompt: str | list[int] | MediaPrompt, params: SamplingParams, kind: Kind) -> list[int]:
        param = _PROMPT_PARAM[kind]
        prompt = prompt.ids if isinstance(prompt, MediaPrompt) else prompt
        if self.tokenizer is None and (isinstance(prompt, str) or params.detokenize):
            what = "the prompt is text" if isinstance(prompt, str) else "text was asked for"
            raise RequestError(
                f"{what}, but the model folder has no tokenizer: give token ids (over HTTP as the prompt, in "
                "Python with SamplingParams(detokenize=False)), or set tokenizer=FOLDER to a folder that has one",
                param if isinstance(prompt, str) else "detokenize",
            )
        if isinstance(prompt, str):
            assert self.tokenizer is not None, "checked above"
            try:
                too_long = self.tokenizer.exceeds(prompt, self.max_model_len)
            except UnicodeEncodeError as error:
                message = "the prompt has a lone surrogate, which is not a character: remove it"
                raise RequestError(message, param) from error
            if too_long:
                message = f"the prompt of {len(prompt)} characters does not fit {self.context}: shorten the prompt"
                raise ContextLengthError(message, param)
            ids = self.tokenizer.encode(prompt, add_special_tokens=kind != "chat")
        else:
            ids = list(prompt)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token", param)
        return ids

    def abort(self, request_id: str) -> list[wire.ToController]:
        """Messages that abort a request's open samples; their last deltas follow when the controller answers."""
        return [wire.Abort(name) for name in sorted(self._requests.get(request_id, ()))]

    def handle(self, event: wire.FromController) -> tuple[list[Delta], list[wire.ToController]]:
        """Handle one event: returns deltas for callers, and messages for the controller.

        After ``Dead`` every open sample has its last delta. Events of unknown requests are ignored.
        """
        if isinstance(event, wire.Tokens):
            return self._tokens(event)
        if isinstance(event, wire.Finished):
            return self._finished(event), []
        if isinstance(event, wire.Dead):
            error = f"the engine has stopped: {event.reason}"
            ends = [wire.Finished(id=name, reason="error", error=error, status=503) for name in list(self._samples)]
            return [delta for end in ends for delta in self._finished(end)], []
        return [], []

    def _tokens(self, event: wire.Tokens) -> tuple[list[Delta], list[wire.ToController]]:
        sample = self._samples.get(event.id)
        if sample is None or sample.stopped:
            return [], []
        try:
            text, count = self._read(sample, event.ids)
            delta = Delta(sample.request_id, sample.index, text, event.ids[:count])
            found, scored, delta.pooled = _named(event) if sample.rows is None else sample.rows.read(event)
            delta.logprobs = None if event.logprobs is None else found[:count]
            delta.num_cached_tokens, delta.queued = event.cached, event.queued
            if event.prompt_logprobs is not None or sample.prompt_logprobs_due:
                delta.prompt_logprobs = [None, *scored] if sample.prompt_logprobs_due else [*scored]
                sample.prompt_logprobs_due = False
            shown = self.plugins.postprocess_chunk(delta)
        except RequestError as error:
            sample.stopped, sample.failure = True, str(error)
            return [], [wire.Abort(event.id)]
        return [shown], [wire.Finish(event.id)] if sample.stopped else []

    def _read(self, sample: _Sample, ids: list[int]) -> tuple[str, int]:
        """Text that may be shown, and how many of ``ids`` belong to the sample: a stop string may end it earlier."""
        if ids:
            sample.last_id = ids[-1]
        if sample.detokenizer is None:
            return "", len(ids)
        pieces = []
        for count, token in enumerate(ids, 1):
            sample.min_tokens_left -= 1
            if token in sample.hidden_ids:
                continue
            if sample.min_tokens_left >= 0:
                pieces.append(sample.detokenizer.push(token))
                continue
            match = sample.stops.push(sample.detokenizer.push(token))
            pieces.append(match.text)
            if match.stop is not None:
                sample.stopped, sample.stop_reason = True, match.stop
                return "".join(pieces), count
        return "".join(pieces), len(ids)

    def _finished(self, event: wire.Finished) -> list[Delta]:
        sample = self._samples.pop(event.id, None)
        if sample is None:
            return []
        siblings = self._requests[sample.request_id]
        siblings.discard(event.id)
        if not siblings:
            del self._requests[sample.request_id]
            self.adapters.release(self._held.pop(sample.request_id))
        delta = Delta(sample.request_id, sample.index)
        if sample.detokenizer is not None and not sample.stopped:
            match = sample.stops.push(sample.detokenizer.finish())
            sample.stop_reason = match.stop
            delta.text = match.text if match.stop is not None else match.text + sample.stops.finish()
        if sample.failure is not None:
            delta.finish_reason, delta.error = "error", sample.failure
        elif sample.stop_reason is not None:
            # The text is complete, however the request ended in the engine before Finish arrived.
            delta.finish_reason, delta.stop_reason = "stop", sample.stop_reason
        else:
            delta.finish_reason, delta.error, delta.status = event.reason, event.error, event.status
            if event.reason == "stop" and sample.last_id in sample.stop_ids:
                delta.stop_reason = sample.last_id
            if event.reason == "error" and delta.error is None:
                delta.error = "the engine gave no reason"
        return [delta if sample.failure is not None else self._last(delta)]

    def _last(self, delta: Delta) -> Delta:
        """The last delta after the plugins; if a plugin fails, the delta becomes an error."""
        try:
            return self.plugins.postprocess_chunk(delta)
        except RequestError as error:
            delta.text, delta.finish_reason, delta.error, delta.status = "", "error", str(error), error.status
            return delta

    def _check_ids(self, ids: list[int], param: str) -> None:
        try:
            msgspec.convert(ids, self._ids)  # a few nanoseconds an id: prompts have many
        except msgspec.ValidationError:
            size = self.vocab_size
            bad = next(i for i, token in enumerate(ids) if type(token) is not int or not 0 <= token < size)
            message = f"{param} has {ids[bad]!r} at position {bad}, which is out of vocabulary: ids"
            raise RequestError(f"{message} of the {size} tokens are integers from 0 to {size - 1}", param) from None

    def _bias(self, params: SamplingParams, stop_ids: frozenset[int]) -> list[wire.LogitBias]:
        """What the engine adds to logits: ``logit_bias``, and -inf for ``stop_ids`` during ``min_tokens`` tokens."""
        bias = [wire.LogitBias(token, float(value)) for token, value in params.logit_bias.items() if value]
        if params.min_tokens:
            bias += [wire.LogitBias(token, -math.inf, params.min_tokens) for token in sorted(stop_ids)]
        if len(bias) > MAX_BIASES:
            message = f"logit_bias and min_tokens change the logits of {len(bias)} ids; at most {MAX_BIASES} may be"
            raise RequestError(message, "logit_bias")
        return bias

    def _rows(self, params: SamplingParams, max_tokens: int, prompt_len: int) -> Any | None:
        """What reads rows of numbers for tokens, from an installed package, which checks that they can be had."""
        asked = (0 if params.logprob_ids else params.logprobs, params.prompt_logprobs)
        most = tuple(self._likeliest(count) or 0 for count in asked)
        if params.prompt_outputs is None and max(most) <= MAX_LOGPROBS:
            return None
        what = "a request for hidden states, logits or the log-probabilities of the whole vocabulary"
        reader = installed_catalog().need("part of pooling", "rows", what, "evener-generation", RequestError)
        return reader(params, most, (max_tokens, prompt_len), self.vocab_size, self._final_norm)

    def _likeliest(self, count: int | None) -> int | None:
        """How many of the likeliest tokens are wanted where a request says ``count``; -1: all."""
        return count if count is None else self.vocab_size if count == -1 else min(count, self.vocab_size)

    def _max_tokens(self, prompt_len: int, params: SamplingParams, kind: Kind) -> int:
        # An embedded prompt may fill the context: the token after it is never computed.
        rest, param = self.max_model_len - prompt_len + (kind == "embed"), _PROMPT_PARAM[kind]
        if rest < 1:
            answer = "" if kind == "embed" else " and the answer at least one"
            message = f"the prompt has {prompt_len} tokens{answer}, which do not fit {self.context}"
            raise ContextLengthError(f"{message}: shorten the prompt", param)
        if params.min_tokens > rest:
            message = f"min_tokens is {params.min_tokens}, but the prompt of {prompt_len} tokens leaves {rest}"
            raise ContextLengthError(message, "min_tokens")
        if params.max_tokens is None:
            wanted = self._default_max_tokens or (rest if kind == "chat" else COMPLETION_MAX_TOKENS)
            return min(max(wanted, params.min_tokens), rest)
        if params.max_tokens > rest:
            raise ContextLengthError(
                f"the prompt has {prompt_len} tokens and max_tokens is {params.max_tokens}: together "
                f"{prompt_len + params.max_tokens}, which do not fit {self.context}: shorten the prompt or ask for at "
                f"most {rest} tokens",
                param,
            )
        return params.max_tokens

    def _sampling(self, params: SamplingParams, seed: int, bias: list[wire.LogitBias], index: int) -> wire.Sampling:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(params, name)) is not None}
        asked = replace(self.defaults, **given)
        return wire.Sampling(
            temperature=float(asked.temperature) if asked.temperature >= _MIN_TEMPERATURE else 0.0,
            top_k=min(max(asked.top_k, 0), self.vocab_size), top_p=float(asked.top_p), min_p=float(asked.min_p),
            repetition_penalty=float(asked.repetition_penalty),
            frequency_penalty=float(params.frequency_penalty), presence_penalty=float(params.presence_penalty),
            logprobs=self._likeliest(0 if params.logprob_ids else params.logprobs),
            logprob_ids=list(params.logprob_ids), seed=seed, bias=bias,
            prompt_logprobs=None if index else self._likeliest(params.prompt_logprobs),
            prompt_outputs=None if index else params.prompt_outputs,
            grammar=params.grammar and msgspec.structs.replace(params.grammar, ends=tuple(asked.eos_ids)),
        )  # fmt: skip


def _named(event: wire.Tokens) -> tuple[list[dict[int, float]], list[dict[int, float]], bytes]:
    """As ``read`` of what reads rows: the log-probabilities that the engine names, and what it sends beside them."""
    samples = [dict(zip(e.ids, e.values, strict=True)) for e in event.logprobs] if event.logprobs else []
    prompt = [dict(zip(e.ids, e.values, strict=True)) for e in event.prompt_logprobs] if event.prompt_logprobs else []
    return samples, prompt, event.pooled


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index``, in 31 bits. Sample 0 uses ``seed`` itself if it fits."""
    if index == 0 and 0 <= seed < 1 << _SEED_BITS:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> (32 - _SEED_BITS)
