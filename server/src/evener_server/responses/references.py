"""Items of earlier answers that a request names instead of sending them: ``item_reference``."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from evener.errors import RequestError
from evener_server.errors import ApiError
from evener_server.responses.store import ResponseStore

#: An item's id has that of its response, and its place there.
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4,8}")


def item_id(prefix: str, response: str, place: int) -> str:
    """The id of item number ``place`` of a response; ``response``: the 32 digits of its id."""
    return f"{prefix}_{response}{place:04x}"


class References:
    """The items that one request may name.

    Args:
        store: the answers that are kept.
        most_bytes: so many bytes of answers are read at most, so that a short request does not become a long one.
    """

    def __init__(self, store: ResponseStore, most_bytes: int) -> None:
        self._store, self._left = store, most_bytes
        self._items: dict[str, dict[str, dict[str, Any]]] = {}

    def take(self, name: Any, place: str) -> dict[str, Any]:
        """The item with the id ``name``; ``place`` is the path of what names it.

        Raises:
            ApiError: 404, its answer is not kept.
            RequestError: it is named twice, or the answers are too long together.
        """
        where, shown = f"{place}.id", repr(name)[:80]
        found = _ID.fullmatch(name) if isinstance(name, str) else None
        response = "" if found is None else f"resp_{found[1]}"
        if response not in self._items:
            self._items[response] = self._read(response, where, shown)
        items = self._items[response]
        if name not in items:
            message = f"Item {shown} is no item of its response, or was named before; name each once, or send it whole"
            raise RequestError(message, where)
        return items.pop(name)

    def _read(self, response: str, where: str, shown: str) -> dict[str, dict[str, Any]]:
        try:
            answer = self._store.response(response)
        except ApiError as error:
            message = f"Item {shown} not found: the response that it is of is not kept here; send it whole"
            raise ApiError(404, message, where, "not_found") from error
        self._left -= len(answer)
        if self._left < 0:
            message = "the responses of the named items are too long together; name fewer, or send previous_response_id"
            raise RequestError(message, where)
        return {item["id"]: item for item in msgspec.json.decode(answer)["output"]}
