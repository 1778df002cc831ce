"""What a caller gets back and a request plugin sees: ``Delta`` while it streams, ``RequestOutput`` once complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

#: Why a sample ended: a stop token or string, its length limit, its time limit, the caller, or an error.
FinishReason = Literal["stop", "length", "timeout", "abort", "error"]


class PromptOutputs(msgspec.Struct, frozen=True, array_like=True):
    """What a request wants of its prompt's tokens besides log-probabilities: a row of numbers for each.

    Attributes:
        kind: "hidden", the hidden states before the final norm; "normed", those after it; or "logits".
        ranges: of which tokens: from the first position to before the second; ascending, without overlaps.
    """

    kind: Literal["hidden", "normed", "logits"]
    ranges: list[tuple[int, int]]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.ranges[-1][1] if self.ranges else 0


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` samples.

    Attributes:
        index: which sample, from 0.
        text: the text; empty with ``detokenize=False``. Without the EOS token, and without the stop string unless
            asked for.
        token_ids: every sampled id, the EOS token and the tokens of a stop string included.
        logprobs: one dict a token, id to raw log-probability (natural log): the sampled token first, then the
            likeliest; None unless asked for.
        finish_reason: ``stop``, ``length``, ``timeout``, ``abort`` or ``error``; None while it runs.
        stop_reason: the stop string that was found, or the one of ``stop_token_ids``; None for EOS and every other
            reason.
        pooled: of a prompt that is embedded, the pooled row, float32 in the host's byte order; with ``PromptOutputs``
            their rows, one after another.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    pooled: bytes = b""


@dataclass(slots=True)
class RequestOutput:
    """A request with all of its samples. ``num_cached_tokens`` = prompt tokens taken from the prefix cache; ``error``
    says why a sample ended with reason ``error``; ``prompt`` is None when ids were given. ``prompt_logprobs``, if asked
    for, has an entry a prompt token, None for the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


@dataclass(slots=True)
class Delta:
    """What is new in one sample. ``finish_reason`` is set in the last one of each sample and only there.

    ``text`` and ``token_ids`` need not match: text is held back while it may be part of a character or of a stop
    string. ``request_id`` is the caller's, not the sample's. ``status`` is the HTTP status that fits ``error``.
    ``prompt_logprobs`` come with sample 0, in the prompt's order.
    ``pooled``: as in ``CompletionOutput``; of ``PromptOutputs`` as they come.
    ``queued``: seconds that the sample waited for its first step.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    status: int = 500
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, float] | None] | None = None
    pooled: bytes = b""
    queued: float = 0.0

    def merge(self, later: Delta) -> None:
        """Append ``later``, the next delta of the same sample."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.pooled += later.pooled
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs or []) + later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.status = later.error, later.status
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.queued = max(self.queued, later.queued)
