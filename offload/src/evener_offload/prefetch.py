"""Copies of experts to slots before the routing of their layer is known.

A step first reaches layers whose experts are on the device. No routing of streamed layers is known then, and no copies
are under way. So the slots are filled with the experts that most rows of the last such step chose, layer after layer.
The first streamed layer's own copies come after these, so no more are submitted than end before its routing is there.
Where texts change from step to step, such guesses are wrong, and wrong ones cost time: then a few steps make none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evener_offload.expert_costs import Indices
from evener_offload.passing_experts import PassingExperts
from evener_offload.prompt_share import PromptShare
from evener_offload.resident_layer import ResidentLayer

#: An expert is copied before its layer's routing is known if so many rows will probably choose it.
_LIKELY_ROWS = 2.0
#: So many of the experts that a step copied so must have been needed: copies that run beside the first layers make
#: these slower. If fewer were, the next step copies none, and twice as many steps each time that it happens again.
_NEEDED, _LONGEST_REST = 0.75, 64


@dataclass(frozen=True)
class Place:
    """Where a layer's experts pass.

    Attributes:
        held: the experts in ``slots``.
        number: of the layer, among those with these slots.
    """

    slots: ResidentLayer
    held: PassingExperts
    number: int

    def absent(self, rows: Indices) -> Indices:
        """``rows`` of each expert; 0 of those that are in slots."""
        first, there = self.number * self.slots.experts, np.fromiter(self.held.slots, np.int64, len(self.held.slots))
        left = rows.copy()
        left[there[(there >= first) & (there < first + len(left))] - first] = 0
        return left


class Prefetch:
    """What is copied ahead for the layers of ``places``, which are in the order in which a step reaches them.

    Args:
        share: what the host computes of them, if measured costs decide.
    """

    def __init__(self, places: Mapping[str, Place], share: PromptShare | None) -> None:
        self._places, self._share = places, share
        #: By layer: the tokens of the last step, and the rows of each expert.
        self._seen: dict[str, tuple[int, Indices]] = {}
        #: By size of a step (a power of two of tokens): seconds until the first layer's routing is there. The fewest,
        #: since copies make it later: the more of them, the more time they would seem to have.
        self._lead: dict[int, float] = {}
        #: When the step began whose first layer has not been reached yet; 0: there is none.
        self._began = 0.0
        #: When the copies that were submitted will have ended, as measured costs say.
        self._copied = 0.0
        #: By layer: the experts that were copied for it when this step began.
        self._ahead: dict[str, list[int]] = {}
        #: How many of them the layers that were reached have needed, and how many there were.
        self._needed = self._guessed = 0
        #: Steps that still copy none, and how many do after the next wrong guesses.
        self._resting, self._rest = 0, 1

    @property
    def under_way(self) -> float:
        """Seconds that the copies take which have been submitted."""
        return max(0.0, self._copied - time.perf_counter())

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins, and what it uploads has been submitted: copies come after that."""
        self._began = time.perf_counter()
        self._ahead.clear()
        self._judge()
        if self._resting:
            self._resting -= 1
            return
        left, share = self._lead.get(tokens.bit_length(), 0.0), self._share
        for path, place in self._places.items():
            slots = place.slots
            # Without measured costs, as much as the slots hold.
            each = share.copying(slots.nbytes) if share is not None and share.measured else 0.0
            if path not in self._seen or not left or left < each:
                return
            most = int(left / each) if each else slots.experts
            wave = place.held.further(self._likely(path, place, tokens), most)
            slots.copy_ahead(wave)
            self._ahead[path] = [expert - place.number * slots.experts for expert in wave.copied]
            self.note_copies(slots.nbytes, len(wave.copied))
            left -= each * len(wave.copied)

    def note_routing(self, path: str, tokens: int, rows: Indices) -> None:
        """The routing of a layer is there: the rows of each expert."""
        if self._began:
            size, lead = tokens.bit_length(), time.perf_counter() - self._began
            self._lead[size], self._began = min(lead, self._lead.get(size, lead)), 0.0
        self._seen[path] = tokens, rows
        if ahead := self._ahead.pop(path, None):
            self._guessed += len(ahead)
            self._needed += int(np.count_nonzero(rows[ahead]))

    def note_copies(self, nbytes: int, count: int) -> None:
        """Copies of so many experts of ``nbytes`` have been submitted."""
        if self._share is not None and self._share.measured:
            seconds = count * self._share.copying(nbytes)
            self._copied = max(self._copied, time.perf_counter()) + seconds

    def _judge(self) -> None:
        """Settle whether the last guesses were good enough."""
        if self._guessed:
            wrong = self._needed < _NEEDED * self._guessed
            self._resting = self._rest if wrong else 0
            self._rest = min(2 * self._rest, _LONGEST_REST) if wrong else 1
            self._needed = self._guessed = 0

    def _likely(self, path: str, place: Place, tokens: int) -> list[int]:
        """The experts that the layer will probably need, those with the most rows first, and not what the host will
        compute."""
        before, seen = self._seen[path]
        rows, share = seen * (tokens / before), self._share
        left = np.where(rows < _LIKELY_ROWS, 0.0, rows)
        if share is not None and share.active and share.measured:
            (some,) = seen.nonzero()
            left[share.choose(place.slots.nbytes, some, np.maximum(1.0, rows[some]))] = 0
        order = (-left).argsort(kind="stable")[: np.count_nonzero(left)]
        return (order + place.number * place.slots.experts).tolist()  # type: ignore[no-any-return]
