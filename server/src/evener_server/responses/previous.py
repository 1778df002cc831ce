"""``previous_input_messages``: messages of earlier requests and answers, as items of a conversation.

They have the form of ``input_messages`` and ``output_messages``, or that of a chat completion's messages. Those of the
system are left out: as with ``previous_response_id``, instructions are this request's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evener.errors import RequestError
from evener_server.responses.conversation import Conversation

Item = dict[str, Any]
#: Before the name of a function, in the recipient of a call and in the author of its result.
_FUNCTION = "functions."
_SYSTEM = ("system", "developer")


def add_previous(said: Conversation, messages: Sequence[Mapping[str, Any]]) -> None:
    """Add the messages to a conversation.

    Raises:
        RequestError: a message has a wrong form, or is to or from something other than the user, the model and its
            functions.
    """
    reader = _Reader()
    for i, message in enumerate(messages):
        where = f"previous_input_messages[{i}]"
        for item in reader.items(message, where):
            said.add_item(item, where)


class _Reader:
    """Turns messages into items. Results have no id of their call: they belong to the first of their function without
    a result."""

    def __init__(self) -> None:
        self._calls = 0
        #: For each function the ids of its calls without a result.
        self._open: dict[str, list[str]] = {}

    def items(self, message: Mapping[str, Any], where: str) -> Iterator[Item]:
        """The items of one message."""
        author = message.get("author")
        author = author if isinstance(author, dict) else message
        role, name = author.get("role"), author.get("name")
        if role in _SYSTEM:
            return
        if role == "user":
            yield _message(role, message.get("content"))
        elif role == "assistant":
            yield from self._of_model(message, where)
        elif role == "tool":
            call = message.get("tool_call_id") or self._answered(name, where)
            yield {"type": "function_call_output", "call_id": call, "output": message.get("content")}
        else:
            raise RequestError(
                f"{where}.role is {str(role)[:60]!r}: send messages with the role user, assistant, tool, system or "
                "developer, as in a chat, or as input_messages of gpt-oss has them", f"{where}.role",
            )  # fmt: skip

    def _of_model(self, message: Mapping[str, Any], where: str) -> Iterator[Item]:
        content, recipient = message.get("content"), message.get("recipient")
        calls = message.get("tool_calls") or ()
        if isinstance(recipient, str) and recipient.startswith(_FUNCTION):
            yield self._call(recipient.removeprefix(_FUNCTION), _text(content, where), None)
        elif recipient not in (None, "user", "all"):
            raise RequestError(
                f"{where}.recipient is {str(recipient)[:60]!r}: this server runs no tools; send {_FUNCTION}NAME",
                f"{where}.recipient", "unsupported_parameter",
            )  # fmt: skip
        elif message.get("channel") == "analysis":
            yield _reasoning(_text(content, where))
        else:
            if thought := message.get("reasoning") or message.get("reasoning_content"):
                yield _reasoning(thought)
            if content or not calls:
                yield _message("assistant", content)
        for k, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise RequestError(f"{where}.tool_calls[{k}].function must be an object", where, "invalid_type")
            yield self._call(function.get("name"), function.get("arguments"), call.get("id"))

    def _call(self, name: Any, arguments: Any, call_id: Any) -> Item:
        self._calls += 1
        found = call_id or f"call_{self._calls}"
        self._open.setdefault(str(name), []).append(found)
        return {"type": "function_call", "call_id": found, "name": name, "arguments": arguments}

    def _answered(self, author: Any, where: str) -> str:
        name = str(author or "").removeprefix(_FUNCTION)
        if not self._open.get(name):
            message = f"{where} is the result of {name[:60]!r}, which no message before it calls; send the call too"
            raise RequestError(message, where)
        return self._open[name].pop(0)


def _message(role: str, content: Any) -> Item:
    return {"type": "message", "role": role, "content": content}


def _reasoning(text: Any) -> Item:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def _text(content: Any, where: str) -> str:
    """The text of a message's content.

    Raises:
        RequestError: it has something else.
    """
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise RequestError(f"{where}.content must be a text, or a list of parts with a text", f"{where}.content",
                           "invalid_type")  # fmt: skip
    return "".join(texts)
