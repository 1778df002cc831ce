"""The messages between front end and controller: plain msgspec structs, the same in memory and between processes.

Front end to controller: ``NewRequest``, ``Abort``, ``Finish``, ``LoadAdapter``, ``UnloadAdapter``,
``Command``, ``GetStats``, ``Shutdown``. Controller to front end:
``Tokens``, ``Finished``, ``CommandDone``, ``StatsReport``, ``Ready``, ``Dead``.
The module ``plan`` defines what controller and worker exchange.
Every request ends with exactly one ``Finished``, even if it was refused.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from evener.contracts.adapters import AdapterTensor
from evener.contracts.grammar.library import GrammarSpec
from evener.contracts.media import MediaItem
from evener.contracts.outputs import FinishReason, PromptOutputs
from evener.engine.facts.engine_info import EngineInfo

#: Upper bounds, in seconds, of the buckets of ``StatsReport.queued``; the last bucket has no bound.
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class LogitBias(msgspec.Struct, frozen=True, array_like=True):
    """``value`` is added to the logit of id ``token`` for the first ``count`` generated tokens; 0: for all of them."""

    token: int
    value: float
    count: int = 0


class Sampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The sampling parameters of one request. ``temperature`` 0 means greedy. These values turn a filter or a penalty
    off: ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``repetition_penalty`` 1, the other penalties 0."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    #: How many of the likeliest tokens get their raw log-probabilities reported, besides the sampled token; None: no
    #: log-probabilities at all.
    logprobs: int | None = None
    #: Ids whose log-probabilities are reported in place of the likeliest tokens', where ``logprobs`` is not None.
    logprob_ids: list[int] = []
    #: Like ``logprobs``, for the prompt's own tokens, from the second on.
    prompt_logprobs: int | None = None
    #: Hidden states or logits of prompt tokens that are returned; None: none.
    prompt_outputs: PromptOutputs | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    #: Logit biases; one of minus infinity forbids an id.
    bias: list[LogitBias] = []
    #: The grammar that the text has to follow; None: any text.
    grammar: GrammarSpec | None = None

    @property
    def penalized(self) -> bool:
        """Whether a penalty changes the logits of tokens that occurred before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p removes anything."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class NewRequest(msgspec.Struct, frozen=True, kw_only=True, tag="new"):
    """One sequence to generate. ``n`` samples of one prompt are ``n`` requests; all but the first fork from the first.

    Attributes:
        max_tokens: already limited to the model's context length.
        stop_token_ids: generating one of them ends the request with reason ``stop``. The token itself is reported.
        max_time: seconds from the controller's receipt until the request ends with reason ``timeout``; None: no limit.
        adapter: id of the adapter (LoRA) that it is computed with; "": none.
        cache_salt: requests with different salts (adapter, tenant) share no cached prefix.
        priority: waiting requests with a higher priority start first, see ``priority_and_age``.
        fork_of: id of an earlier request that begins with the same tokens, at least one block of them. This request
            waits until they are computed and starts from that state. If the other has ended or has computed more
            tokens than both share, this request starts as if ``fork_of`` were empty.
        media: items that stand for some of the prompt's tokens; in order of position.
        whole_prompt: the prompt has to be computed, even if its state is cached.
        transfer: passed on to the connector, such as where the request's state is; "": nothing.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: list[int] = []
    max_time: float | None = None
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
    fork_of: str = ""
    media: list[MediaItem] = []
    whole_prompt: bool = False
    transfer: str = ""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client disconnected or cancelled: end the request with reason ``abort``. Unknown ids are ignored."""

    id: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The front end found a stop string: end the request with reason ``stop``. Unknown ids are ignored."""

    id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Some tensors of an adapter; each rank keeps its part of them. After the ``last`` message, requests may name it.
    Adapters with equal ids are equal. Large ones come in several messages, between which steps run."""

    id: str
    tensors: list[AdapterTensor]
    last: bool = True


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """New requests with this adapter fail; those that were accepted keep it. Unknown ids are ignored. Sent to ranks, it
    says that they no longer need the adapter."""

    id: str


class Command(msgspec.Struct, frozen=True, tag="command"):
    """Work of an installed package between steps, see ``installed``; answered with one ``CommandDone``. The package
    that has announced ``name`` knows what the arguments mean. Its part in the controller may send it to ranks."""

    name: str
    arguments: list[str] = []


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Answer with one ``StatsReport``."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop. With ``drain`` running requests are finished first; otherwise they end with reason ``abort``."""

    drain: bool = True


ToController = NewRequest | Abort | Finish | LoadAdapter | UnloadAdapter | Command | GetStats | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-probabilities at one position. ``ids`` and ``values`` are parallel: the token at that position first,
    then the likeliest tokens."""

    ids: list[int]
    values: list[float]

    def likeliest(self, count: int) -> TokenLogprobs:
        """The same with at most ``count`` of the likeliest tokens."""
        return self if len(self.ids) <= count + 1 else TokenLogprobs(self.ids[: count + 1], self.values[: count + 1])


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """New tokens of one request, in order.

    Attributes:
        ids: the new ids; empty if ``pooled`` has the row of a prompt that is embedded.
        prompt_logprobs: they continue those of earlier messages, from the second prompt token on. All of them arrive
            before or with the first id.
        cached: prompt tokens that came from the prefix cache.
        pooled: as in ``Delta``. If more than ``MAX_LOGPROBS`` log-probabilities are wanted, rows of logits follow in
            it, float32 [vocabulary] in the host's byte order: one for each of ``prompt_logprobs``, then one for each of
            ``logprobs``. Logits differ from each other as log-probabilities do.
        queued: as in ``Delta``.
    """

    id: str
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached: int = 0
    pooled: bytes = b""
    queued: float = 0.0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The one terminal event of a request. For reason ``error``, ``error`` is the message and ``status`` the HTTP
    status."""

    id: str
    reason: FinishReason
    error: str | None = None
    status: int = 500


class Stats(msgspec.Struct, kw_only=True):
    """Counters of the scheduler since the start.

    Attributes:
        mixed_steps: steps that computed both prompt tokens and sampled tokens.
        queried_tokens: tokens that were looked up in the prefix cache; ``cached_tokens`` of them were found.
        preempted: at index n, the requests that were preempted n times before they ended; the last index counts those
            that were preempted more often too.
        queued: a histogram of the time that requests waited for their first step, with the buckets
            ``QUEUE_SECONDS``; ``queued_seconds``: the sum of these times.
        forks: requests that started from another request's state; ``forked_tokens``: tokens of that state.
        drafts: rows of plans with proposed tokens; ``drafted_tokens``: the number of these tokens;
            ``accepted_tokens``: those that were sampled too.
        counters: of the placement of experts, by name, on the first rank of the last stage.
    """

    steps: int = 0
    mixed_steps: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    finished: int = 0
    queried_tokens: int = 0
    preempted: list[int] = msgspec.field(default_factory=lambda: [0] * 8)
    queued: list[int] = msgspec.field(default_factory=lambda: [0] * (len(QUEUE_SECONDS) + 1))
    queued_seconds: float = 0.0
    forks: int = 0
    forked_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    counters: dict[str, int] = {}

    def record_queue_time(self, seconds: float) -> None:
        """Count a request that waited ``seconds`` for its first step."""
        self.queued[bisect_left(QUEUE_SECONDS, seconds)] += 1
        self.queued_seconds += seconds


class StatsReport(Stats, kw_only=True, tag="stats"):
    """How busy the engine is, between two steps: the counters, and the current numbers of ``waiting`` and ``running``
    requests, of pages in the pool (``blocks``) and of those that requests hold (``blocks_used``). What only the prefix
    cache remembers is not in use. ``GET /stats`` has the same names; a page is a block if all blocks have one size."""

    waiting: int
    running: int
    blocks: int
    blocks_used: int


class CommandDone(msgspec.Struct, frozen=True, tag="command_done"):
    """A ``Command`` has ended; ``error`` says why it changed nothing, None if it was done."""

    error: str | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine takes requests. ``info`` says what runs: model, limits, backend, memory."""

    info: EngineInfo


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """The engine has failed for this reason. The open requests have ended before, each with its ``Finished``."""

    reason: str


FromController = Tokens | Finished | CommandDone | StatsReport | Ready | Dead
