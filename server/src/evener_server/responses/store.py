"""Stored answers, which a later request can continue."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from evener_server.errors import ApiError

#: Answers that are kept, and the bytes of their JSON texts, conversations included.
MOST_RESPONSES, MOST_BYTES = 10_000, 256 << 20


class ResponseStore:
    """The latest answers, in memory; the oldest go first.

    Args:
        most, most_bytes: so many answers are kept, and so many bytes.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def add(self, name: str, response: bytes, messages: list[dict[str, Any]]) -> None:
        """Keep an answer: its JSON text, and all messages of the conversation, its own included."""
        self._replace(name, (response, msgspec.json.encode(messages)))

    def replace(self, name: str, response: bytes) -> None:
        """Keep another JSON text of an answer that is kept, or one whose conversation is not known yet."""
        self._replace(name, (response, self._kept[name][1] if name in self._kept else b"[]"))

    def _replace(self, name: str, entry: tuple[bytes, bytes]) -> None:
        if _size(entry) > self._most_bytes:  # it would be forgotten too, after all the others
            self._bytes -= _size(self._kept.pop(name, (b"", b"")))
            return
        self._bytes += _size(entry) - (_size(self._kept[name]) if name in self._kept else 0)
        self._kept[name] = entry
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)

    def response(self, name: str) -> bytes:
        """The JSON text of an answer.

        Raises:
            ApiError: 404, it is not kept.
        """
        if name not in self._kept:
            raise ApiError(404, f"Response with id {name[:64]!r} not found. {self._advice}", None, "not_found")
        return self._kept[name][0]

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
        found: list[dict[str, Any]] = msgspec.json.decode(self._kept[name][1])
        return found

    def remove(self, name: str) -> None:
        """Forget an answer.

        Raises:
            ApiError: 404, it is not kept.
        """
        self.response(name)
        self._bytes -= _size(self._kept.pop(name))

    @property
    def _advice(self) -> str:
        return (
            f"This server keeps the last {self._most} responses that were not sent with store=false, of at most "
            f"{self._most_bytes >> 20} MiB, until it is stopped: send the whole conversation as input."
        )


def _size(entry: tuple[bytes, bytes]) -> int:
    return len(entry[0]) + len(entry[1])
