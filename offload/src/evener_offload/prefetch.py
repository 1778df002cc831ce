"""Copies experts to slots before the routing of their layer is known.

A step first reaches the layers whose experts are on the device. Meanwhile no routing of a streamed layer is known, and
the link is idle. So the slots are filled with the experts that most rows of the last streamed step chose, layer after
layer. The first streamed layer's own copies come after these, so only as many are submitted as end before its routing
is known. Where texts change from step to step, such guesses are wrong and cost time. Then the next steps make none.
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

#: An expert is copied ahead if at least so many rows will probably choose it.
_LIKELY_ROWS = 2.0
#: At least this part of the experts that were copied ahead must have been needed, because the copies slow the first
#: layers down. If fewer were needed, the next step copies none; each time that it happens again, twice as many steps
#: copy none, up to the second number.
_NEEDED, _LONGEST_REST = 0.75, 64


@dataclass(frozen=True)
class Place:
    """The slots of a streamed layer.

    Attributes:
        held: which experts are in ``slots``.
        number: of the layer, among the layers that share these slots.
    """

    slots: ResidentLayer
    held: PassingExperts
    number: int

    def absent(self, rows: Indices) -> Indices:
        """A copy of ``rows``, int64 [experts], with 0 for experts that are in slots."""
        first, there = self.number * self.slots.experts, np.fromiter(self.held.slots, np.int64, len(self.held.slots))
        left = rows.copy()
        left[there[(there >= first) & (there < first + len(left))] - first] = 0
        return left


class Prefetch:
    """Copies experts ahead.

    Args:
        places: by path, in the order in which a step reaches the layers.
        share: computes the host's part, if measured costs decide.
    """

    def __init__(self, places: Mapping[str, Place], share: PromptShare | None) -> None:
        self._places, self._share = places, share
        #: By layer: the tokens of the last streamed step, and the rows of each expert.
        self._seen: dict[str, tuple[int, Indices]] = {}
        #: By size of a step (a power of two of tokens): the fewest seconds until the first streamed layer's routing was
        #: known. The fewest, because copies delay the routing: with a mean, more copies would seem to have more time.
        self._lead: dict[int, float] = {}
        #: When the step began, until its first streamed layer is reached; then 0.
        self._began = 0.0
        #: When the submitted copies will have ended, according to measured costs.
        self._copied = 0.0
        #: By layer: the experts that were copied ahead when this step began.
        self._ahead: dict[str, list[int]] = {}
        #: Of the layers reached in this step: how many of those experts were needed, and how many were copied.
        self._needed = self._guessed = 0
        #: How many of the next steps copy none; and how many will after the next wrong guesses.
        self._resting, self._rest = 0, 1

    @property
    def under_way(self) -> float:
        """Seconds until the submitted copies will have ended."""
        return max(0.0, self._copied - time.perf_counter())

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins. Its own uploads have been submitted, so they do not wait for copies."""
        self._began = time.perf_counter()
        self._ahead.clear()
        self._judge()
        if self._resting:
            self._resting -= 1
            return
        left, share = self._lead.get(tokens.bit_length(), 0.0), self._share
        for path, place in self._places.items():
            slots = place.slots
            # Without measured costs, as many as the slots hold.
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
        """The routing of a layer is known: the rows of each expert, int64 [experts]."""
        if self._began:
            size, lead = tokens.bit_length(), time.perf_counter() - self._began
            self._lead[size], self._began = min(lead, self._lead.get(size, lead)), 0.0
        self._seen[path] = tokens, rows
        if ahead := self._ahead.pop(path, None):
            self._guessed += len(ahead)
            self._needed += int(np.count_nonzero(rows[ahead]))

    def note_copies(self, nbytes: int, count: int) -> None:
        """Copies of ``count`` experts of ``nbytes`` bytes each have been submitted."""
        if self._share is not None and self._share.measured:
            seconds = count * self._share.copying(nbytes)
            self._copied = max(self._copied, time.perf_counter()) + seconds

    def _judge(self) -> None:
        """Decide whether the last guesses were good enough to go on."""
        if self._guessed:
            wrong = self._needed < _NEEDED * self._guessed
            self._resting = self._rest if wrong else 0
            self._rest = min(2 * self._rest, _LONGEST_REST) if wrong else 1
            self._needed = self._guessed = 0

    def _likely(self, path: str, place: Place, tokens: int) -> list[int]:
        """The experts that the layer will probably need, those with the most rows first. Without the experts that the
        host will compute."""
        before, seen = self._seen[path]
        rows, share = seen * (tokens / before), self._share
        left = np.where(rows < _LIKELY_ROWS, 0.0, rows)
        if share is not None and share.active and share.measured:
            (some,) = seen.nonzero()
            left[share.choose(place.slots.nbytes, some, np.maximum(1.0, rows[some]))] = 0
        order = (-left).argsort(kind="stable")[: np.count_nonzero(left)]
        return (order + place.number * place.slots.experts).tolist()  # type: ignore[no-any-return]
