"""Which requests of a plan get drafts, and how many tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from evener.contracts.generation.drafter import BY_WORKER, Drafter
from evener.contracts.generation.drafts import NEVER, NOT_YET, DecodingRequest, DraftedRow, Drafts
from evener_generation.drafting.grammar_drafter import GrammarDrafter
from evener_generation.drafting.payoff import Payoff

log = logging.getLogger("evener.engine")
#: The longest pause after wrong drafts, in tokens.
_LONGEST_PAUSE = 32
#: So many requests that could go on wait for one whose last token is not read yet: a step takes about as long with it,
#: and it has several tokens there. More lose more by the pause between the steps.
_GATHERED = 4


@dataclass
class _Text:
    """What is known of one request.

    Attributes:
        drafter: proposes its tokens, and has seen the first ``seen`` of them.
        length: how many it may propose.
        misses: drafts in a row without a right token.
        resume: the length of the text from which on it has drafts again.
        asked: how many it proposed for the newest plan; a grammar may have forbidden them all.
        followed: the length of the text when the worker proposed for it last; it had computed little less by then.
        lost: the worker can propose nothing for it.
    """

    drafter: Drafter
    length: int
    seen: int = 0
    misses: int = 0
    resume: int = 0
    asked: int = 0
    followed: int = 0
    lost: bool = False

    def record(self, drafted: int, right: int, tokens: int, longest: int) -> None:
        """The first ``right`` of ``drafted`` tokens were accepted; the text has ``tokens`` tokens now."""
        self.followed, self.lost = tokens, False
        self.length = min(longest, self.length + 2) if right == drafted else max(1, self.length - 1)
        self.misses = 0 if right else self.misses + 1
        self.resume = tokens + (min(_LONGEST_PAUSE, 2**self.misses) if self.misses else 0)


class Speculation(Drafts):
    """Drafts for each request that decodes.

    The number of tokens follows how many were right before: two more when all were, one less otherwise, as in the
    heuristic schedule of transformers' assisted generation. After a draft without a right token a request has none for
    a while, twice as long each time. After an error of a drafter, no request has any.

    A request with drafts has no plan while its last token is not read, and another plan may run meanwhile. So the
    requests could fall into two groups that take turns, and each step would read all weights for a part of them. Unless
    they are many more, the others wait too, and all are in one plan again. Where a step has less room than all drafts
    need, each request gets an equal share.

    Args:
        drafter: makes the drafter of one request.
        length: the most tokens that are proposed for a request.
        max_samples: rows that a step may sample: the memory plan has room for their logits.
        vocabulary: number of ids of the model.
        payoff: decides when requests get drafts; None: always.

    Attributes:
        forced: tokens that the grammar of a request leaves no choice about, for a request whose tokens were all read;
            None: it has no grammar.

    Tokens that a grammar leaves no choice about come before those of the drafter, unless the worker finds these. They
    are as many each time, however many were right before: the text is certain, and only its tokens may be others.
    """

    forced: Callable[[Any], Sequence[int] | None] = staticmethod(lambda request: None)

    def __init__(
        self, drafter: Callable[[], Drafter], length: int, max_samples: int, vocabulary: int,
        payoff: Payoff | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._drafter, self._length, self._max_samples, self._vocabulary = drafter, length, max_samples, vocabulary
        self._payoff, self._clock, self._failed = payoff, clock, False
        self._by_worker = isinstance(drafter, type) and issubclass(drafter, Drafter) and drafter.by_worker
        self._only_forced = drafter is GrammarDrafter
        self._texts: WeakKeyDictionary[DecodingRequest, _Text] = WeakKeyDictionary()
        self._room, self._share, self._gathers = 0, 0, False
        #: Whether the last step that was read had drafts, and when that was; None: it was no decode step.
        self._last: tuple[bool, float] | None = None

    def begin(self, running: Sequence[DecodingRequest], joining: int) -> None:
        requests = len(running) + joining
        self._room = self._max_samples - requests
        pays = self._payoff is None or self._payoff.pays(requests)
        self.on = requests > 0 and pays and not self._failed
        decoding = [request for request in running if self._continues(request)] if self.on else []
        waiting = sum(self._is_read_first(request) for request in decoding)
        self._gathers = waiting > 0 and len(decoding) - waiting <= _GATHERED * waiting
        self._share = max(1, self._room // max(1, len(decoding)))

    def waits(self, request: DecodingRequest) -> bool:
        if not self.on or not self._continues(request):
            return False
        return self._gathers or self._is_read_first(request)

    def _is_read_first(self, request: DecodingRequest) -> bool:
        """Whether a request that decodes has no plan before its last token was read."""
        if not request.unread:
            return False
        return self._guesses(request) or (not self._by_worker and self.forced(request) is not None)

    def _continues(self, request: DecodingRequest) -> bool:
        """Whether the next plan may have more tokens of a request than its last one."""
        return request.decodes

    def _guesses(self, request: DecodingRequest) -> bool:
        """Whether the drafter is asked for tokens of a request."""
        text = self._texts.get(request)
        return not self._only_forced and (text is None or request.length >= text.resume)

    def propose(self, request: DecodingRequest, budget: int) -> list[int]:
        if not self.on or request.unread or not self._continues(request):
            return []
        # The last token before the limit is sampled and never computed.
        most = min(budget, self._room, self._share, request.limit - request.length - 1)
        found = [] if self._by_worker else list(self.forced(request) or ())[: max(0, min(most, self._length))]
        if not found and self._guesses(request):
            with self._no_more_after_errors():
                found = self._ask(request, most)
        self._room -= len(found)
        return found

    def _known(self, request: DecodingRequest) -> _Text:
        """The known text of a request, whose drafter has seen all its tokens."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(self._drafter(), self._length)
        text.drafter.extend(request.tokens[text.seen :])
        text.seen = len(request.tokens)
        return text

    @contextmanager
    def _no_more_after_errors(self) -> Iterator[None]:
        """A package may raise anything: then its drafts end, and the engine goes on."""
        try:
            yield
        except Exception as error:
            log.warning("no more drafts: %s failed with %s: %s", self._drafter, type(error).__name__, error)
            self._failed, self.on = True, False

    def _ask(self, request: DecodingRequest, most: int) -> list[int]:
        text = self._known(request)
        count = min(text.length, most)
        found = list(text.drafter.propose(count))[:count] if count > 0 else []
        by_worker = text.drafter.by_worker and found == [BY_WORKER] * len(found)
        if not by_worker and not all(type(id) is int and 0 <= id < self._vocabulary for id in found):
            raise ValueError(f"it proposed {found}, but ids are integers from 0 to {self._vocabulary - 1}")
        text.asked = len(found)
        return found

    def record(self, rows: Sequence[DraftedRow], on: bool, tokens: int) -> None:
        usual = self._payoff is not None and not (on and self._is_late(rows))
        for row in rows:
            text = self._texts.get(row.request)
            if row.samples and text is not None and text.asked:
                self._learn(text, row)
                text.asked = 0
        if self._payoff is None:
            return
        lost = sum(text.lost for row in rows if (text := self._texts.get(row.request)) is not None)
        usual = usual and not (on and 2 * lost > len(rows))
        now = self._clock()
        decodes = all(row.samples and row.count == 1 + row.recomputed + len(row.drafts) for row in rows)
        if decodes and usual and self._last is not None and self._last[0] == on:
            self._payoff.record(len(rows), on, tokens, now - self._last[1])
        self._last = (on, now) if decodes else None

    def _learn(self, text: _Text, row: DraftedRow) -> None:
        """What became of a draft."""
        length = len(row.request.tokens)
        if NOT_YET in row.drafts:  # asked again, the worker gets on
            return
        if NEVER in row.drafts:
            # Now and then it is asked all the same: what follows each token rests if nobody asks for drafts.
            text.lost, text.resume = True, length + _LONGEST_PAUSE
            return
        right = length - 1 - (row.start + row.count - len(row.drafts))
        text.record(len(row.drafts) or text.asked, right, length, self._length)

    def _is_late(self, rows: Sequence[DraftedRow]) -> bool:
        """Whether the worker had more to compute for a step than it will have for the next: a text that had no drafts
        for a while."""
        texts = [(row, self._texts.get(row.request)) for row in rows if row.drafts and self._by_worker]
        return any(NOT_YET in row.drafts or row.start - text.followed > _LONGEST_PAUSE
                   for row, text in texts if text is not None)  # fmt: skip


def measured(drafter: Callable[[], Drafter], length: int, max_samples: int, vocabulary: int) -> Speculation:
    """Drafts while they make more tokens a second; the arguments are those of ``Speculation``."""
    return Speculation(drafter, length, max_samples, vocabulary, Payoff())
