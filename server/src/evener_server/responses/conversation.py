"""Items of a conversation, in the format of the Responses API, as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.errors import RequestError
from evener_server.responses.body import SEPARATOR
from evener_server.responses.references import References

Message = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class Conversation:
    """Messages of a chat that grow item by item.

    What a model says in one turn, its reasoning, text and calls, is one message.

    Args:
        messages: what was said before, which is changed.
        references: finds items that are named instead of sent; None: they are refused.

    Attributes:
        messages: all messages.
        origins: the path of the item that each message began with.
    """

    def __init__(self, messages: list[Message] | None = None, references: References | None = None) -> None:
        self.messages, self._references = messages or [], references
        self.origins = ["previous_response_id"] * len(self.messages)

    def add_text(self, role: str, text: str, origin: str) -> None:
        """Add a message."""
        self._append({"role": role, "content": text}, origin)

    def add(self, items: Sequence[Any], place: str) -> None:
        """Add items; ``place`` is the path of their list.

        Raises:
            RequestError: an item has a wrong form or a type that this server does not have.
            ApiError: an item that is named is not known.
        """
        for i, item in enumerate(items):
            self.add_item(item, f"{place}[{i}]")

    def add_item(self, item: Any, where: str) -> None:
        """Add an item; ``where`` is its path.

        Raises:
            RequestError, ApiError: as ``add``.
        """
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", where, "invalid_type")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "item_reference" and self._references is not None:
            item = self._references.take(item.get("id"), where)
            kind = item["type"]
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            call_id, content = _text(item, "call_id", where), _content(item.get("output"), f"{where}.output")
            self._append({"role": "tool", "tool_call_id": call_id, "content": content}, where)
        elif kind == "reasoning":
            if text := _reasoning(item, where):
                self._append({"role": "assistant", "reasoning_content": text}, where)
        else:
            known = ["message", "function_call", "function_call_output", "reasoning"]
            known += [] if self._references is None else ["item_reference"]
            raise RequestError(
                f"{where}.type is {str(kind)[:60]!r}, which this server does not support: send "
                f"{', '.join(known[:-1])} or {known[-1]}", f"{where}.type", "unsupported_parameter",
            )  # fmt: skip

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, content = _text(item, "role", where), _content(item.get("content"), f"{where}.content")
        if role not in _ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
        if role == "assistant" and (turn := self._turn()) is not None and not {"content", "tool_calls"} & turn.keys():
            turn["content"] = content
        else:
            self._append({"role": role, "content": content}, where)

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        name, space = _text(item, "name", where), item.get("namespace")
        name = f"{space}{SEPARATOR}{name}" if isinstance(space, str) and space else name
        function = {"name": name, "arguments": _text(item, "arguments", where)}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        if (turn := self._turn()) is None:
            turn = self._append({"role": "assistant"}, where)
        turn.setdefault("tool_calls", []).append(call)

    def _turn(self) -> Message | None:
        """The model's message, if the last one is its."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None

    def _append(self, message: Message, origin: str) -> Message:
        self.messages.append(message)
        self.origins.append(origin)
        return message


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", f"{where}.{name}", "invalid_type")
    return value


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    """A text, or parts of content, as a chat has them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a string or a list of parts", where, "invalid_type")
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(value)]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _TEXT:
        return {"type": "text", "text": _text(part, _TEXT[kind], where)}
    if kind == "input_image":
        image = {"url": _text(part, "image_url", where), "detail": part.get("detail")}
        return {"type": "image_url", "image_url": image}
    raise RequestError(
        f"{where}.type is {str(kind)[:60]!r}, which this server does not support: send input_text, output_text, "
        "refusal or input_image", f"{where}.type", "unsupported_parameter",
    )  # fmt: skip


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The whole reasoning, else its summary."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise RequestError(f"{where}.{name} must be a list of parts", f"{where}.{name}", "invalid_type")
        if parts:
            return "\n".join(
                _text(part if isinstance(part, dict) else {}, "text", f"{where}.{name}[{i}]")
                for i, part in enumerate(parts)
            )
    return ""
