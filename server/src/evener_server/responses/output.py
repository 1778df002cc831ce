"""A generated message as items of the Responses API, and as the events of their stream."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from evener_server.responses.references import item_id

Event = dict[str, Any]
#: For each type of item: the prefix of its id, and the type of its part of content.
_KINDS = {"reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text"), "function_call": ("fc", "")}


class ResponseOutput:
    """Items that grow with the deltas of a chat message. One item is open at a time.

    Args:
        response: the 32 digits of the response's id, which its items have in theirs.
        namespaces: for functions of a namespace, the namespace and their names there.

    Attributes:
        items: all items so far; complete after ``finish``.
    """

    def __init__(self, response: str, namespaces: Mapping[str, tuple[str, str]] | None = None) -> None:
        self._response, self._namespaces = response, namespaces or {}
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []

    def add(self, delta: Mapping[str, Any], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Events for one delta of the message; ``logprobs``: of the tokens that came with it."""
        self._logprobs += logprobs
        if delta.get("reasoning"):
            yield from self._text("reasoning", delta["reasoning"])
        elif delta.get("content"):
            yield from self._text("message", delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                name = call["function"]["name"]
                space, short = self._namespaces.get(name, (None, name))
                more = {"call_id": call["id"], "name": short, "arguments": ""}
                more |= {} if space is None else {"namespace": space}
                yield from self._begin("function_call", more)
            elif text := call["function"]["arguments"]:
                self.items[-1]["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)

    def finish(self, complete: bool) -> Iterator[Event]:
        """The last events. ``complete``: the message did not reach a limit."""
        yield from self._end("completed" if complete else "incomplete")

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self._begin(kind, {"role": "assistant"} if kind == "message" else {"summary": []})
            part = _part(kind)
            # A copy: what was sent does not grow.
            yield self._event("response.content_part.added", content_index=0, part=_part(kind))
            self.items[-1]["content"] = [part]
        part = self.items[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
            return
        logprobs = self._logprobs_of(text)
        part["logprobs"] += logprobs
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _logprobs_of(self, text: str) -> list[dict[str, Any]]:
        """Take those of the tokens that ``text`` was made of. Earlier ones are of marks and of reasoning."""
        ends = list(accumulate(len(each["token"]) for each in self._logprobs))
        begin = "".join(each["token"] for each in self._logprobs).find(text)
        if begin < 0:  # a character of several tokens is not in the tokens' texts
            taken, self._logprobs = self._logprobs, []
            return taken
        first, last = bisect_right(ends, begin), bisect_left(ends, begin + len(text)) + 1
        taken, self._logprobs = self._logprobs[first:last], self._logprobs[last:]
        return taken

    def _begin(self, kind: str, more: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._end("completed")
        name = item_id(_KINDS[kind][0], self._response, len(self.items))
        item = {"id": name, "type": kind, "status": "in_progress", **more}
        if kind != "function_call":
            item["content"] = []
        self.items.append(item)
        self._open = True
        yield {
            "type": "response.output_item.added", "output_index": len(self.items) - 1,
            "item": {**item, "content": []} if "content" in item else dict(item),
        }  # fmt: skip

    def _end(self, status: str) -> Iterator[Event]:
        """Close the open item."""
        if not self._open:
            return
        self._open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            (part,) = item["content"]
            done: Event = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                done["logprobs"] = part["logprobs"]
            yield self._event(f"response.{_KINDS[item['type']][1]}.done", **done)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _part(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _KINDS[kind][1], "text": ""}
    return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": []}
