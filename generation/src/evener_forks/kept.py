"""The states of ended requests, which requests that go on from them take over.

A request of a search computes one token and ends. Its blocks stay here, so that the search can choose which of the
requests to go on from. A request of the next step is a fork, as ``evener.engine.controller.forks`` makes it, of one
that has ended: it shares the full blocks, the next plan copies the one that is partly filled, and the request computes
nothing but its last token. This needs no prefix cache.

Kept blocks never stop anybody: they are given back when a running request lacks blocks, or when nothing else runs. A
request whose parent is gone starts from the prefix cache, as any other. vLLM's beam search always does that; its search
and SGLang's were read before this was made. SGLang's branches inside its scheduler, which was not done here: the search
stays outside of the engine, which knows only of forks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from msgspec.structs import replace

from evener.contracts.connector import BlockMoves, Connector, StartingRequest
from evener.engine.controller.blocks import CacheListener
from evener.engine.controller.request import Request
from evener.engine.controller.scheduler import Scheduler
from evener_forks.mark import ForkMark


class KeptStates(Connector, CacheListener):
    """Stands before the scheduler's own connector, and hears of the prefix cache when it has to be emptied."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._other = scheduler, scheduler.connector
        self.counters = self._other.counters
        #: Of the open requests of searches, by id.
        self._marks: dict[str, ForkMark] = {}
        #: By search and id: an ended request with its table.
        self._kept: dict[str, dict[str, Request]] = {}
        #: By the same two: its ``ForkMark.parents``, which the requests of one step have in common.
        self._steps: dict[tuple[str, str], list[str]] = {}
        #: Released, but plans in flight copy their blocks.
        self._leaving: list[Request] = []

    def install(self) -> None:
        """Let the scheduler use it."""
        self._scheduler.connector = self
        self._scheduler.state.pool.listeners.append(self)

    def end(self, search: str) -> None:
        """Release all states of a search. Unknown ones are ignored."""
        for name in list(self._kept.get(search, ())):
            self._release(search, name)

    def ready(self, request: StartingRequest, busy: bool) -> bool:
        if (mark := ForkMark.from_text(request.message.transfer)) is not None:
            self._marks[request.id] = mark
            request.message = replace(request.message, transfer="")  # the other connector would not understand it
            self._release_others(mark)
        if request.parent is None and request.id in self._marks:
            self._join(request, self._marks[request.id])
        return self._other.ready(request, busy)

    def _release_others(self, mark: ForkMark) -> None:
        """Release the states that a step of a search does not need. A request of the same step may have ended already:
        its state is for the next step."""
        for name in list(self._kept.get(mark.search, ())):
            if name not in mark.parents and self._steps[mark.search, name] != mark.parents:
                self._release(mark.search, name)

    def _join(self, request: StartingRequest, mark: ForkMark) -> None:
        """Make the request a fork of its parent, if that is kept and all but the request's last token are its own."""
        assert isinstance(request, Request)
        parent = self._kept.get(mark.search, {}).get(mark.parent)
        if parent is None or parent.message.cache_salt != request.message.cache_salt or request.needs_whole_prompt:
            return
        if request.tokens[:-1] == parent.tokens[: parent.computed]:
            request.parent, request.shared = parent, parent.computed

    def started(self, request: StartingRequest) -> None:
        self._other.started(request)

    def dropped(self, request: StartingRequest) -> None:
        self._other.dropped(request)
        mark = self._marks.pop(request.id, None)
        assert isinstance(request, Request)
        if mark is None or request.table is None or request.exclusive or request.finish != "length":
            return
        self._release(mark.search, request.id)  # of a search of the same name
        kept = copy.copy(request)
        kept.finish = None  # for its forks it is there
        # The scheduler releases the request with a table that has no blocks.
        request.table = self._scheduler.state.new_table("")
        self._kept.setdefault(mark.search, {})[request.id] = kept
        self._steps[mark.search, request.id] = mark.parents

    def give_back(self) -> bool:
        for search, states in self._kept.items():
            for name, kept in states.items():
                if not self._in_use(kept):
                    self._release(search, name)
                    return True
        return self._other.give_back()

    def moves(self) -> BlockMoves | None:
        return self._other.moves()

    def done(self, transfers: Sequence[int]) -> None:
        self._other.done(transfers)
        for kept in [each for each in self._leaving if not self._in_use(each)]:
            self._leaving.remove(kept)
            self._close(kept)

    def cleared(self) -> None:
        for search in list(self._kept):
            self.end(search)

    def _release(self, search: str, name: str) -> None:
        kept = self._kept.get(search, {}).pop(name, None)
        self._steps.pop((search, name), None)
        if not self._kept.get(search, True):
            del self._kept[search]
        if kept is not None and self._in_use(kept):
            self._leaving.append(kept)
        elif kept is not None:
            self._close(kept)

    def _in_use(self, kept: Request) -> bool:
        """Whether a plan in flight, or the one that is made now, copies its blocks."""
        return kept.last_plan >= self._scheduler.stats.steps - self._scheduler.in_flight

    def _close(self, kept: Request) -> None:
        assert kept.table is not None
        self._scheduler.state.close(kept.table)
        kept.table = None
