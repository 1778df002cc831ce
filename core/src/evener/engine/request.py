"""One request as the scheduler sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from evener.engine.messages import FinishReason, NewRequest
from evener.engine.state import BlockTable


@dataclass(eq=False)
class Request:
    """A sequence on its way.

    Attributes:
        message: what was asked.
        order: position in the order of arrival.
        tokens: known ids, the prompt's and those that were read.
        unread: tokens that submitted plans sample and that nobody has read yet.
        planned: tokens whose state submitted plans compute.
        scored: prompt tokens, from the second on, whose log-probabilities were read.
        last_plan: id of the last plan that names this request; -1 before the first.
        slot, table: held while running.
        alone: it runs in an otherwise empty pool.
        parent, shared: the request that it is to start from, and how many tokens both have in common; see ``forks``.
        pauses: lengths at which a step ends, because a fork starts there.
        finish: set once; the request is over and its terminal event was emitted.
    """

    message: NewRequest
    order: int
    tokens: list[int] = field(default_factory=list)
    unread: int = 0
    planned: int = 0
    cached: int = 0
    scored: int = 0
    preemptions: int = 0
    last_plan: int = -1
    slot: int = -1
    alone: bool = False
    table: BlockTable | None = None
    parent: Request | None = None
    shared: int = 0
    pauses: set[int] = field(default_factory=set)
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.message.prompt)
        self.arrived = time.monotonic()
        self.prompt_length = len(self.tokens)
        self.limit = self.prompt_length + self.message.max_tokens
        self.stop_ids = frozenset(self.message.stop_token_ids)

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def length(self) -> int:
        """Tokens that exist: known ones and unread ones."""
        return len(self.tokens) + self.unread

    @property
    def to_score(self) -> bool:
        """Whether log-probabilities of prompt tokens are still wanted; those rows have to be computed then."""
        return self.message.sampling.prompt_logprobs is not None and self.scored < self.prompt_length - 1

    @property
    def to_compute(self) -> int:
        """Tokens that the next plan may compute. A token that reaches the limit is never computed on."""
        if self.length >= self.limit:
            return 0
        if self.planned in self.pauses:
            return 1  # so that the step's budget is there for the forks
        return min((p for p in self.pauses if p > self.planned), default=self.length) - self.planned

    @property
    def held(self) -> bool:
        """Whether it waits for its parent to compute what both have in common."""
        return self.parent is not None and self.parent.finish is None and self.parent.planned < self.shared
