"""Messages with blocks of content, in the format of the Messages API, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.errors import RequestError

Message = dict[str, Any]
_ROLES = ("user", "assistant", "system")
#: Each means something to Anthropic's servers alone.
_SKIPPED = ("redacted_thinking",)


class Conversation:
    """Messages of a chat.

    Args:
        system: the system prompt: a text, or blocks of text.
        messages: in the Messages API's format.

    Attributes:
        messages: the chat's messages.
        origins: the path of what each came from.

    Raises:
        RequestError: a block has a wrong form, or a type that this server does not have.
    """

    def __init__(self, system: str | list[Any] | None, messages: Sequence[Any]) -> None:
        self.messages: list[Message] = []
        self.origins: list[str] = []
        if text := "\n".join(_text(block, f"system[{i}]") for i, block in _blocks(system or "", "system")):
            self._append({"role": "system", "content": text}, "system")
        for i, message in enumerate(messages):
            where = f"messages[{i}]"
            role = message.get("role") if isinstance(message, dict) else None
            if role not in _ROLES:
                raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
            blocks = _blocks(message.get("content"), f"{where}.content")
            if role == "assistant":
                self._append(_assistant(blocks, f"{where}.content"), where)
            else:
                self._add_user(role, blocks, where)

    def _add_user(self, role: str, blocks: list[tuple[int, Mapping[str, Any]]], where: str) -> None:
        """Results of tools are messages of their own, before the rest of the user's."""
        rest = []
        for i, block in blocks:
            place = f"{where}.content[{i}]"
            if block.get("type") != "tool_result":
                rest.append(_part(block, place))
                continue
            inner = _blocks(block.get("content") or "", f"{place}.content")
            parts = [_part(each, f"{place}.content[{k}]") for k, each in inner]
            call_id = _field(block, "tool_use_id", place)
            self._append({"role": "tool", "tool_call_id": call_id, "content": parts}, where)
        if rest:
            self._append({"role": role, "content": rest}, where)

    def _append(self, message: Message, origin: str) -> None:
        self.messages.append(message)
        self.origins.append(origin)


def _assistant(blocks: list[tuple[int, Mapping[str, Any]]], where: str) -> Message:
    thinking, parts, calls = [], [], []
    for i, block in blocks:
        place, kind = f"{where}[{i}]", block.get("type")
        if kind == "thinking":
            thinking.append(_field(block, "thinking", place))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise RequestError(f"{place}.input must be an object", f"{place}.input", "invalid_type")
            function = {"name": _field(block, "name", place), "arguments": json.dumps(block["input"])}
            calls.append({"id": _field(block, "id", place), "type": "function", "function": function})
        elif kind not in _SKIPPED:
            parts.append(_part(block, place))
    message: Message = {"role": "assistant", "content": parts or None}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    return {**message, "tool_calls": calls} if calls else message


def _blocks(content: Any, where: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The blocks of a content, which may be a text, with their places."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks) or content is None:
        raise RequestError(f"{where} must be a string or a list of blocks", where, "invalid_type")
    return list(enumerate(blocks))


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", f"{where}.{name}", "invalid_type")
    return value


def _text(block: Mapping[str, Any], where: str) -> str:
    return str(_part(block, where, ("text",))["text"])


def _part(block: Mapping[str, Any], where: str, kinds: Sequence[str] = ("text", "image")) -> dict[str, Any]:
    """A block of text or an image as a part of a chat message's content."""
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": _field(block, "text", where)}
    if isinstance(kind, str) and kind in _WRITTEN and "image" in kinds:
        return {"type": "text", "text": _WRITTEN[kind](block, where)}
    if kind not in kinds:
        raise RequestError(
            f"{where}.type is {str(kind)[:60]!r}, which this server does not support here: send "
            + " or ".join([*kinds, *(_WRITTEN if "image" in kinds else ())]),
            f"{where}.type", "unsupported_parameter",
        )  # fmt: skip
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
        raise RequestError(f"{where}.source.type must be base64 or url", f"{where}.source.type")
    if source["type"] == "url":
        url = _field(source, "url", f"{where}.source")
    else:
        kind, data = _field(source, "media_type", f"{where}.source"), _field(source, "data", f"{where}.source")
        url = f"data:{kind};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Mapping[str, Any], where: str) -> str:
    """A document as a text: its title and its context before it."""
    source, inner = block.get("source"), f"{where}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise RequestError(
            f"{inner}.type is {str(kind)[:60]!r}, which this server does not support: send the document's text, as "
            "text or content", f"{inner}.type", "unsupported_parameter",
        )  # fmt: skip
    text = _field(source, "data", inner) if kind == "text" else _texts(source.get("content"), f"{inner}.content")
    return _with_heads(block, ("title", "context"), text, where)


def _search_result(block: Mapping[str, Any], where: str) -> str:
    """What a search found as a text: its title and where it is from before it."""
    return _with_heads(block, ("title", "source"), _texts(block.get("content"), f"{where}.content"), where)


def _texts(content: Any, where: str) -> str:
    return "\n".join(_text(block, f"{where}[{i}]") for i, block in _blocks(content, where))


def _with_heads(block: Mapping[str, Any], names: Sequence[str], text: str, where: str) -> str:
    heads = [_field(block, name, where) for name in names if block.get(name) is not None]
    return "\n".join([*heads, text])


#: Blocks that the model reads as texts.
_WRITTEN: Mapping[str, Callable[[Mapping[str, Any], str], str]] = {
    "document": _document, "search_result": _search_result,
}  # fmt: skip
