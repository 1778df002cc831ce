"""Captures that run their segments anew, for ranks that are threads: a segment may say something to other ranks, which
a recording of torch calls does not hold."""

from __future__ import annotations

from collections.abc import Callable

from evener.contracts.graph import GraphCapture, Replay
from evener.errors import EngineError


class Again(Replay):
    """Runs the segment anew, with whatever it says to other ranks."""

    def __init__(self, segment: Callable[[], None]) -> None:
        self.segment, self.runs = segment, 0

    def __call__(self) -> None:
        self.runs += 1
        self.segment()


class Reruns(GraphCapture):
    """Captures everything, but for the captures whose numbers are in ``fails``."""

    def __init__(self, fails: frozenset[int]) -> None:
        self.fails, self.asked, self.replays, self.released = fails, 0, list[Again](), False

    def capture(self, segment: Callable[[], None]) -> Replay:
        self.asked += 1
        if self.asked - 1 in self.fails:
            raise EngineError("out of room for graphs")
        self.replays.append(Again(segment))
        return self.replays[-1]

    def release(self) -> None:
        self.released = True
