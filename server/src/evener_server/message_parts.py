"""The parts of one generated message: reasoning, content and tool calls, as deltas in OpenAI's format."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from evener.contracts.generation.parsed import CallArguments, CallStart, Content, Parsed, Reasoning
from evener.contracts.generation.parsers import ReasoningParser, ToolParser

Delta = dict[str, Any]


class MessageParts:
    """Turns one sample's text into deltas of its message.

    Args:
        reasoning, tools: parsers of this sample; None: there is nothing of the kind.
        show_reasoning: give reasoning out.
        several_calls: give out more than the first call.
        only_calls: the answer is held to calls, so text outside of them is a call that was cut off; it is left out.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, show_reasoning: bool, several_calls: bool,
        only_calls: bool = False,
    ) -> None:  # fmt: skip
        self._reasoning, self._tools = reasoning, tools
        self._show_reasoning, self._several_calls, self._only_calls = show_reasoning, several_calls, only_calls
        self.message: Delta = {"role": "assistant", "content": None if tools else "", "refusal": None}
        #: All reasoning, whether it is given out or not; None: the model writes none.
        self.reasoned: str | None = None if reasoning is None else ""

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return "tool_calls" in self.message

    def feed(self, text: str, last: bool) -> list[Delta]:
        """Deltas for the next piece of text; ``last``: no more comes."""
        if self._reasoning is None:
            found: Sequence[Parsed] = [Content(text)] if text else []
        else:
            found = [*self._reasoning.feed(text), *(self._reasoning.finish() if last else ())]
        if self._tools is not None:
            found = [*self._called(self._tools, found), *(self._tools.finish() if last else ())]
        deltas = [delta for each in found if (delta := self._delta(each))]
        if last and not self.called:
            self.message["content"] = self.message["content"] or ""
        return deltas

    @staticmethod
    def _called(tools: ToolParser, found: Iterable[Parsed]) -> Iterable[Parsed]:
        for each in found:
            yield from tools.feed(each.text) if isinstance(each, Content) else (each,)

    def _delta(self, part: Parsed) -> Delta | None:
        """The delta of one part, which is added to the message."""
        if isinstance(part, Content):
            if self._only_calls:
                return None
            self.message["content"] = (self.message["content"] or "") + part.text
            return {"content": part.text}
        if isinstance(part, Reasoning):
            self.reasoned = (self.reasoned or "") + part.text
            if not self._show_reasoning:
                return None
            # Clients read it under either name.
            both = {"reasoning": part.text, "reasoning_content": part.text}
            for name in both:
                self.message[name] = self.message.get(name, "") + part.text
            return both
        if part.index and not self._several_calls:
            return None
        if isinstance(part, CallStart):
            call: Delta = {
                "id": part.id or f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }  # fmt: skip
            self.message.setdefault("tool_calls", []).append(call)
            return {"tool_calls": [{"index": part.index, **call, "function": dict(call["function"])}]}
        return self._arguments(part)

    def _arguments(self, part: CallArguments) -> Delta:
        self.message["tool_calls"][part.index]["function"]["arguments"] += part.text
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
