"""The algorithm of beam search, without an engine. It follows transformers' ``generate(num_beams=…)``, so that both
return the same texts (``GenerationMixin._beam_search``, https://github.com/huggingface/transformers)."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BeamOptions:
    """How to search.

    Attributes:
        beams: unfinished texts that are kept after each step, and finished ones that are returned at most.
        length_penalty: a finished text's score is its log-probability divided by its number of tokens to this power;
            more than 0 favours long texts.
        early_stopping: True: end when there are as many finished texts as beams. False: end when the best unfinished
            text, at its present length, is worse than every finished one. "never": as False, but with a positive
            length penalty the unfinished text counts as if it had the longest length.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True)
class Beam:
    """One text.

    Attributes:
        ids: its tokens behind the prompt.
        score: their log-probability; of a finished one divided as ``length_penalty`` says.
        entries: for each token the likeliest tokens there with their log-probabilities, its own first.
        stopped: whether its last token is a stop token; otherwise it reached max_tokens.
    """

    ids: tuple[int, ...] = ()
    score: float = 0.0
    entries: tuple[Mapping[int, float], ...] = ()
    stopped: bool = False


class BeamSearch:
    """One search. Get the ``needed`` most likely next tokens of each of ``running``, give them to ``advance``, and
    repeat this until ``done``.

    Attributes:
        running: unfinished texts, the likeliest first.
        finished: finished ones, the best first; at most ``options.beams``.
        done: nothing better can come.

    Args:
        stops: tokens that end a text.
        max_tokens: the longest length of a text.
    """

    def __init__(self, options: BeamOptions, stops: Collection[int], max_tokens: int) -> None:
        self.options, self._stops, self._max = options, frozenset(stops), max_tokens
        self.running: list[Beam] = [Beam()]
        self.finished: list[Beam] = []
        self.done = False

    @property
    def needed(self) -> int:
        """Tokens that are needed of each beam: so many that, without those that stop, ``beams`` are left."""
        return self.options.beams + len(self._stops)

    def advance(self, likeliest: Sequence[Mapping[int, float]]) -> None:
        """One step. ``likeliest``: of each of ``running`` the tokens that may come next, with their log-probabilities;
        at least ``needed`` of them, or all that there are."""
        beams, length = self.options.beams, len(self.running[0].ids) + 1
        longer = (
            (beam.score + value, i, token)
            for i, beam in enumerate(self.running)
            for token, value in likeliest[i].items()
        )
        ranked = heapq.nlargest(beams * (1 + len(self._stops)), longer)
        running: list[Beam] = []
        finished: list[Beam] = []
        for place, (score, i, token) in enumerate(ranked):
            stopped = token in self._stops
            ends = stopped or length == self._max
            # Only what is among the best may finish; the others are there to go on with.
            if (ends and place < beams) or (not ends and len(running) < beams):
                own = {token: likeliest[i][token], **likeliest[i]}
                beam = Beam((*self.running[i].ids, token), score, (*self.running[i].entries, own), stopped)
                (finished if ends else running).append(beam)
        self._finish(finished, length)
        self.running = running
        self.done = not running or self._is_full() or not self._can_improve(length)

    def stop(self) -> None:
        """End now: the unfinished texts are finished as they are."""
        if self.running and self.running[0].ids:
            self._finish(self.running, len(self.running[0].ids))
        self.done = True

    def _finish(self, beams: Sequence[Beam], length: int) -> None:
        if self._is_full():
            return
        divided = [Beam(b.ids, b.score / length**self.options.length_penalty, b.entries, b.stopped) for b in beams]
        # Of equal ones the earlier comes first: sorting is stable.
        self.finished = sorted([*self.finished, *divided], key=lambda b: -b.score)[: self.options.beams]

    def _is_full(self) -> bool:
        return self.options.early_stopping is True and len(self.finished) == self.options.beams

    def _can_improve(self, length: int) -> bool:
        """Whether the best unfinished text may become better than the worst finished one."""
        if len(self.finished) < self.options.beams:
            return True
        longest = self.options.early_stopping == "never" and self.options.length_penalty > 0
        divisor: float = (self._max if longest else length) ** self.options.length_penalty
        return self.running[0].score / divisor > self.finished[-1].score
