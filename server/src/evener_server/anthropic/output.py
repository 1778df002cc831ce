"""A generated message as blocks of content of the Messages API, and as the events of their stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Event = dict[str, Any]
#: For each type of block: the field that grows, and the type of its deltas.
_GROWS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class MessageOutput:
    """Blocks that grow with the deltas of a chat message. One block is open at a time.

    Attributes:
        blocks: all blocks so far; complete after ``finish``.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open, self._input = False, ""

    def add(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """Events for one delta of the message."""
        if delta.get("reasoning"):
            yield from self._text({"type": "thinking", "thinking": "", "signature": ""}, delta["reasoning"])
        elif delta.get("content"):
            yield from self._text({"type": "text", "text": "", "citations": []}, delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                name = call["function"]["name"]
                yield from self._begin(
                    {"type": "tool_use", "id": call["id"], "name": name, "input": {}, "caller": {"type": "direct"}}
                )
            elif text := call["function"]["arguments"]:
                self._input += text
                yield self._delta(text)

    def finish(self) -> Iterator[Event]:
        """The last events of the last block."""
        if not self._open:
            return
        self._open, block = False, self.blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._input)
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _text(self, block: dict[str, Any], text: str) -> Iterator[Event]:
        kind = block["type"]
        if not self._open or self.blocks[-1]["type"] != kind:
            yield from self._begin(block)
        self.blocks[-1][_GROWS[kind]] += text
        yield self._delta(text)

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.finish()
        self.blocks.append(block)
        self._open, self._input = True, ""
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, text: str) -> Event:
        kind = self.blocks[-1]["type"]
        return {
            "type": "content_block_delta", "index": len(self.blocks) - 1,
            "delta": {"type": _DELTAS[kind], _GROWS[kind]: text},
        }  # fmt: skip


def _object(text: str) -> dict[str, Any]:
    """A call's input. Text that is no JSON object, such as an answer that was cut off, is kept under the key that
    Anthropic's documents give it."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
