"""Which media a step takes in: the controller's side of the rows that a worker keeps.

Encoding is work beside a step's tokens, so a step has a budget of rows for it; the first item of a step is always
within. An item is encoded in the step that computes the first token it stands for, or the first that is not in the
prefix cache, and is kept while requests compute on others. What nobody needs stays until there is no room for what
somebody does, longest unused first, so that the same image is not encoded twice in a while.

The worker does what plans say, in their order: nothing else has to be agreed on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evener.contracts.media import MediaItem
from evener.media.items import StepMedia, touched

if TYPE_CHECKING:
    from evener.engine.messages import NewRequest
    from evener.engine.request import Request


@dataclass
class _Kept:
    rows: int
    users: set[str] = field(default_factory=set)


class MediaPlanner:
    """Knows what the worker keeps.

    Args:
        room: rows that it may keep; step_rows: rows that a step may encode.
    """

    def __init__(self, room: int, step_rows: int) -> None:
        self.room, self.step_rows = room, step_rows
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._drops: list[bytes] = []
        self._items: list[MediaItem] = []

    def refusal(self, message: NewRequest) -> str | None:
        """Why a request can never run; None if it can."""
        end = 0
        for item in message.media:
            if item.start < end or item.rows < 1 or item.end > len(message.prompt):
                return "its media must lie one behind the other inside of the prompt, with at least one row each"
            if item.rows > self.room:
                return f"one of its media has {item.rows} rows; the engine keeps {self.room}, as infer.step_tokens says"
            end = item.end
        return None

    def allow(self, request: Request, count: int) -> int:
        """How many of the request's next ``count`` tokens the step that is being planned can compute."""
        start, needed = request.planned, dict[bytes, int]()
        encoded = fresh = sum(item.rows for item in self._items)
        for item in touched(request.message.media, start, start + count):
            if item.digest not in self._kept and item.digest not in needed:
                fresh += item.rows
            needed[item.digest] = item.rows
            others = sum(kept.rows for digest, kept in self._kept.items() if kept.users and digest not in needed)
            late = fresh > max(self.step_rows, item.rows) and fresh > encoded
            if late or others + sum(needed.values()) > self.room:
                return max(0, item.start - start)
        return count

    def take(self, request: Request, count: int) -> None:
        """The step computes the request's next ``count`` tokens, as many as were allowed."""
        items = list(touched(request.message.media, request.planned, request.planned + count))
        for item in items:
            if item.digest in self._kept:
                self._kept.move_to_end(item.digest)
                self._kept[item.digest].users.add(request.id)
        for item in items:
            if item.digest not in self._kept:
                self._make_room(item.rows)
                self._kept[item.digest] = _Kept(item.rows, {request.id})
                self._items.append(item)

    def _make_room(self, rows: int) -> None:
        held = sum(kept.rows for kept in self._kept.values())
        for digest in [digest for digest, kept in self._kept.items() if not kept.users]:
            if held + rows > self.room:
                held -= self._kept.pop(digest).rows
                self._drops.append(digest)

    def release(self, request: Request) -> None:
        """The request computes no more, or starts over."""
        for kept in self._kept.values():
            kept.users.discard(request.id)

    def hand_out(self, rows: Sequence[tuple[Request, int, int, bool]]) -> StepMedia | None:
        """What the step does, whose rows (request, first position, tokens, …) are these in their order; None for
        nothing. The next step is planned from here on."""
        overlays, at = [], 0
        for request, start, count, _ in rows:
            for item in touched(request.message.media, start, start + count):
                first, last = max(start, item.start), min(start + count, item.end)
                overlays.append((at + first - start, item.digest, first - item.start, last - first))
                users = self._kept[item.digest].users
                users.add(request.id) if last < item.end else users.discard(request.id)
            at += count
        if not overlays:
            return None
        made = StepMedia(self._drops, self._items, overlays)
        self._drops, self._items = [], []
        return made
