"""Stored answers, which a later request can continue."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from evener_server.errors import ApiError

#: Answers that are kept, and the bytes of their JSON texts, conversations included.
MOST_RESPONSES, MOST_BYTES = 10_000, 256 << 20


class _Kept(NamedTuple):
    """One answer: its JSON text, the messages of its conversation, and the events of its stream."""

    response: bytes = b""
    messages: bytes = b"[]"
    events: bytes = b""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.messages) + len(self.events)


_NOTHING = _Kept(messages=b"")


class ResponseStore:
    """The latest answers, in memory; the oldest go first.

    Args:
        most, most_bytes: so many answers are kept, and so many bytes.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def add(self, name: str, response: bytes, messages: list[dict[str, Any]]) -> None:
        """Keep an answer: its JSON text, and all messages of the conversation, its own included."""
        self._replace(name, _Kept(response, msgspec.json.encode(messages)))

    def replace(self, name: str, response: bytes) -> None:
        """Keep another JSON text of an answer that is kept, or one whose conversation is not known yet."""
        self._replace(name, self._kept.get(name, _Kept())._replace(response=response))

    def add_events(self, name: str, events: bytes) -> None:
        """Keep the events of an answer, if that is kept."""
        if name in self._kept:
            self._replace(name, self._kept[name]._replace(events=events))

    def _replace(self, name: str, entry: _Kept) -> None:
        if entry.size > self._most_bytes:  # it would be forgotten too, after all the others
            self._bytes -= self._kept.pop(name, _NOTHING).size
            return
        self._bytes += entry.size - self._kept.get(name, _NOTHING).size
        self._kept[name] = entry
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size

    def response(self, name: str) -> bytes:
        """The JSON text of an answer.

        Raises:
            ApiError: 404, it is not kept.
        """
        if name not in self._kept:
            raise ApiError(404, f"Response with id {name[:64]!r} not found. {self._advice}", None, "not_found")
        return self._kept[name].response

    def events(self, name: str) -> bytes:
        """The events of an answer; none if it was not streamed in the background.

        Raises:
            ApiError: 404, it is not kept.
        """
        self.response(name)
        return self._kept[name].events

    def messages(self, name: str) -> list[dict[str, Any]]:
        """The messages up to an answer, for the caller to keep.

        Raises:
            ApiError: 400, it is not kept.
        """
        if name not in self._kept:
            raise ApiError(
                400, f"Previous response with id {name[:64]!r} not found. {self._advice}", "previous_response_id",
                "previous_response_not_found",
            )  # fmt: skip
        found: list[dict[str, Any]] = msgspec.json.decode(self._kept[name].messages)
        return found

    def remove(self, name: str) -> None:
        """Forget an answer.

        Raises:
            ApiError: 404, it is not kept.
        """
        self.response(name)
        self._bytes -= self._kept.pop(name).size

    @property
    def _advice(self) -> str:
        return (
            f"This server keeps the last {self._most} responses that were not sent with store=false, of at most "
            f"{self._most_bytes >> 20} MiB, until it is stopped: send the whole conversation as input."
        )
