"""Checks a conversation, and makes of it what chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from evener.errors import RequestError
from evener_formats.chat.images import ImageCollector

#: Fields of a message that templates read; any other field with a value is refused, not ignored.
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_REASONING = ("reasoning_content", "thinking", "reasoning")


def normalize(
    messages: object, supports_developer_role: bool = False, images: ImageCollector | None = None
) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as a string with the model's marks for ``images``, the role
    ``developer`` as ``system`` if the template does not know it, tool arguments as objects, no fields that are None.

    Raises:
        RequestError: a message is invalid; ``param`` is the path (``messages[2].content[0]``).
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    return [_message(message, f"messages[{i}]", supports_developer_role, images) for i, message in enumerate(messages)]


def _message(
    message: object, place: str, supports_developer_role: bool, images: ImageCollector | None
) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object with role and content", place)
    role = message.get("role")
    if not (isinstance(role, str) and role):
        raise RequestError(f"{place}.role must be a string, as 'user'", f"{place}.role")
    for name, value in message.items():
        if name not in FIELDS and value not in (None, [], {}):
            where = f"{place}.{name}"
            raise RequestError(f"{where} is not supported by this server", where, "unsupported_parameter")
    plain = {name: message[name] for name in FIELDS if message.get(name) is not None}
    plain["role"] = "system" if role == "developer" and not supports_developer_role else role
    plain["content"] = _content(message.get("content"), f"{place}.content", role == "assistant", images)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{place}.tool_calls")
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    # Templates read it under the first or second name; clients send any of the three.
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _content(content: object, place: str, optional: bool, images: ImageCollector | None) -> str:
    if isinstance(content, str) or (content is None and optional):
        return content or ""  # many templates add it to other text
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a string or a list of parts", place)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and images is not None:
            texts.append(images.add(part["image"]))
            continue
        if kind != "text":
            message = f"{place}[{i}] is of type {kind!r}; this model takes parts of type 'text' only"
            raise RequestError(message, f"{place}[{i}].type", "unsupported_parameter")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{place}[{i}].text must be a string", f"{place}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list", place)
    plain = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{place}[{i}] must have a function with a name", f"{place}[{i}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # OpenAI's API has JSON text; templates need an object.
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:  # also a number of very many digits
                where = f"{place}[{i}].function.arguments"
                raise RequestError(f"{where} is not valid JSON: {error}", where) from error
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain
