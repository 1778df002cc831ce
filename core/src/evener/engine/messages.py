"""What the three roles say to each other: plain msgspec structs, the same in memory and between processes.

Front end to controller: ``NewRequest``, ``Abort``, ``Finish``, ``GetStats``, ``Shutdown``. Controller to front end:
``Tokens``, ``Finished``, ``StatsReport``, ``Ready``, ``Dead``. Controller to worker and back: see ``plan``. Every
request that was accepted ends in exactly one ``Finished``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.contracts.media import MediaItem

FinishReason = Literal["stop", "length", "timeout", "abort", "error"]
#: Upper bounds, in seconds, of ``StatsReport.queued``; its last count has none.
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Sampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the sampler needs of a request. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0,
    ``repetition_penalty`` 1 and the other penalties at 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    #: Number of the likeliest tokens whose raw log-probabilities are wanted beside the sampled one's; None: no
    #: log-probabilities.
    logprobs: int | None = None
    #: The same for the prompt's own tokens, from the second on.
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    #: (id, added to its logit, for how many generated tokens; 0: for all): biases, and ids that may not come yet.
    bias: list[tuple[int, float, int]] = []

    @property
    def penalized(self) -> bool:
        """Whether what was seen changes the logits."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p removes anything."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class NewRequest(msgspec.Struct, frozen=True, kw_only=True, tag="new"):
    """One sequence to generate. ``n`` samples of a prompt are ``n`` of these; all but the first are forks of it.

    ``max_tokens`` is already limited to the context. ``stop_token_ids`` ends with reason ``stop``; the token itself is
    reported. ``max_time`` seconds after the controller took it in, a request ends with reason ``timeout``.
    ``cache_salt`` separates prefix caches (adapter, tenant). ``media`` stand for some of the prompt's tokens, in their
    order. ``fork_of`` names a request that was sent
    before and begins with the same tokens, at least a block of them: this one waits until they are computed and starts
    from that state; if that request has ended or gone on, it makes no difference.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: list[int] = []
    max_time: float | None = None
    cache_salt: str = ""
    priority: int = 0
    fork_of: str = ""
    media: list[MediaItem] = []


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client has gone, or asked to stop: end the request with reason ``abort``. Unknown ids are ignored."""

    id: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The front end found a stop string: end the request with reason ``stop``. Unknown ids are ignored."""

    id: str


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Answer with one ``StatsReport``."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop. With ``drain`` running requests are finished first; otherwise they end with reason ``abort``."""

    drain: bool = True


ToController = NewRequest | Abort | Finish | GetStats | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-probabilities at one position: the token's that stands there, then the likeliest, ids and values alike.
    """

    ids: list[int]
    values: list[float]

    def likeliest(self, count: int) -> TokenLogprobs:
        """With no more than ``count`` of the likeliest."""
        return self if len(self.ids) <= count + 1 else TokenLogprobs(self.ids[: count + 1], self.values[: count + 1])


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """New tokens of one request, in order. ``cached`` = prompt tokens that were taken from the prefix cache.
    ``prompt_logprobs`` belong to the next prompt tokens, from the second on; they come before or with the first id."""

    id: str
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The one terminal event of a request. ``error`` says why when the reason is ``error``; ``status`` is its HTTP
    status."""

    id: str
    reason: FinishReason
    error: str | None = None
    status: int = 500


class StatsReport(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """How busy the engine is, between two steps. ``waiting``, ``running``, ``blocks`` (of the pool) and ``blocks_used``
    (held by requests; prefixes that are only remembered hold none) are of this moment; the rest are counters since the
    start, as in ``scheduler.Stats``."""

    waiting: int
    running: int
    blocks: int
    blocks_used: int
    steps: int
    mixed_steps: int
    preemptions: int
    prefix_hits: int
    cached_tokens: int
    computed_tokens: int
    finished: int
    queried_tokens: int = 0
    queued: list[int] = msgspec.field(default_factory=lambda: [0] * (len(QUEUE_SECONDS) + 1))
    queued_seconds: float = 0.0
    forks: int = 0
    forked_tokens: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine takes requests. ``info`` is the run's manifest in brief (backend, why, versions, memory)."""

    info: dict[str, object]


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """The engine has stopped for the reason given; every open request was ended before."""

    reason: str


FromController = Tokens | Finished | StatsReport | Ready | Dead
