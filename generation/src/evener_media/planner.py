"""Which media a step stores, encodes and drops. The worker keeps media as rows; the controller decides which.

Encoding takes time besides the step's tokens, so a step has a budget of rows for it; its first item is always allowed.
An item is encoded in the step that computes the first of its tokens that is not in the prefix cache. It is kept as long
as a request still has to compute others of its tokens. After that it stays as a cache entry, so that the same image is
not encoded again soon, and is dropped, least recently used first, when new items need the room.

The worker only does what plans say, in their order, so both sides always agree on what it keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evener.contracts.media import MediaItem
from evener.engine.controller.media import Media
from evener.engine.wire.media import MediaOverlay, StepMedia, overlapping_items

if TYPE_CHECKING:
    from evener.engine.controller.request import PlannedRow, Request
    from evener.engine.wire.messages import NewRequest


@dataclass
class _CachedItem:
    """An item that the worker keeps, and the ids of the requests that still need it."""

    rows: int
    users: set[str] = field(default_factory=set)


class MediaPlanner(Media):
    """Plans the media of each step, and knows which items the worker keeps.

    Args:
        room: rows that the worker may keep.
        step_rows: rows that one step may encode.
    """

    def __init__(self, room: int, step_rows: int) -> None:
        self.room, self.step_rows = room, step_rows
        self._cached_items: OrderedDict[bytes, _CachedItem] = OrderedDict()
        self._drops: list[bytes] = []
        self._items: list[MediaItem] = []

    def rejection_reason(self, message: NewRequest) -> str | None:
        end = 0
        for item in message.media:
            if item.start < end or item.rows < 1 or item.end > len(message.prompt):
                return "media must lie inside the prompt, in order and without overlap, with at least one row each"
            if item.rows > self.room:
                return f"a media item has {item.rows} rows, but the engine keeps {self.room}; raise infer.step_tokens"
            end = item.end
        return None

    def allowed_tokens(self, request: Request, count: int) -> int:
        if not request.message.media:
            return count
        start, needed = request.computed, dict[bytes, int]()
        encoded = fresh = sum(item.rows for item in self._items)
        for item in overlapping_items(request.message.media, start, start + count):
            if item.digest not in self._cached_items and item.digest not in needed:
                fresh += item.rows
            needed[item.digest] = item.rows
            others = sum(
                kept.rows for digest, kept in self._cached_items.items() if kept.users and digest not in needed
            )
            late = fresh > max(self.step_rows, item.rows) and fresh > encoded
            if late or others + sum(needed.values()) > self.room:
                return max(0, item.start - start)
        return count

    def take(self, request: Request, count: int) -> None:
        if not request.message.media:
            return
        items = list(overlapping_items(request.message.media, request.computed, request.computed + count))
        for item in items:
            if item.digest in self._cached_items:
                self._cached_items.move_to_end(item.digest)
                self._cached_items[item.digest].users.add(request.id)
        for item in items:
            if item.digest not in self._cached_items:
                self._make_room(item.rows)
                self._cached_items[item.digest] = _CachedItem(item.rows, {request.id})
                self._items.append(item)

    def _make_room(self, rows: int) -> None:
        held = sum(kept.rows for kept in self._cached_items.values())
        for digest in [digest for digest, kept in self._cached_items.items() if not kept.users]:
            if held + rows > self.room:
                held -= self._cached_items.pop(digest).rows
                self._drops.append(digest)

    def release(self, request: Request) -> None:
        for kept in self._cached_items.values():
            kept.users.discard(request.id)

    def build_step_media(self, rows: Sequence[PlannedRow]) -> StepMedia | None:
        overlays, at = [], 0
        for row in rows if any(row.request.message.media for row in rows) else ():
            start, end = row.start, row.start + row.count
            for item in overlapping_items(row.request.message.media, start, end):
                first, last = max(start, item.start), min(end, item.end)
                overlays.append(MediaOverlay(at + first - start, item.digest, first - item.start, last - first))
                users = self._cached_items[item.digest].users
                users.add(row.request.id) if last < item.end else users.discard(row.request.id)
            at += row.count
        if not overlays:
            return None
        made = StepMedia(self._drops, self._items, overlays)
        self._drops, self._items = [], []
        return made
