"""The harmony format of gpt-oss: messages on channels, as OpenAI's description of it has them.

``<|channel|>analysis<|message|>…<|end|>`` is reasoning, the channel ``final`` is the answer, and a message on
``commentary`` to ``functions.NAME`` is a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from evener.contracts.generation.parsed import Content, Parsed, Reasoning
from evener.contracts.generation.parsers import ReasoningParser
from evener.contracts.writing import CallFormat, CallWriter, ReasoningFormat, ReasoningWriter
from evener_generation.harmony_messages import harmony_messages
from evener_generation.message_reader import Message, MessageReader
from evener_generation.text_stream import TextStream
from evener_generation.tools.base import StepParser
from evener_generation.tools.writing import json_tags

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_FUNCTIONS = "functions."
#: The head of a message: its role, recipient and channel, and the kind of its content. Models also leave out the mark
#: of the kind.
_HEAD = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?:\s*to=(?P<first>[\w.-]+))?"
    r"(?:\s*<\|channel\|>\s*(?P<channel>\w*))?(?:\s*to=(?P<second>[\w.-]+))?"
    r"(?:\s*<\|constrain\|>\s*\w*|\s+(?:json|code))?\s*\Z"
)
#: With what a head may begin; it may be empty.
_HEAD_BEGINS = re.compile(r"<\|start\|>|assistant|to=|<\|channel\|>|<\|constrain\|>|\Z")
_MARKS = re.compile("|".join(map(re.escape, MARKS)))
#: Stands before a call that the reasoning parser leaves to the tool parser.
_CALL = "<|start|>assistant"
#: The author of a message that was begun again before it had anything else.
_AUTHORS = re.compile(r"^(<\|start\|>assistant\s*)+")


class HarmonyReasoning(ReasoningParser, ReasoningWriter, MessageReader):
    """Gives out the channel ``analysis`` as reasoning, and calls unchanged as content, for ``HarmonyTools``."""

    special_tokens = MARKS

    def __init__(self, prompt_end: str = "") -> None:
        super().__init__(prompt_end)
        self._stream, self._head, self._kind = TextStream(), "", ""

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return "<|channel|>" in chat_template

    @classmethod
    def reasoning_format(cls, prompt_end: str) -> ReasoningFormat | None:
        return ReasoningFormat(
            begin="<|channel|>analysis<|message|>", end="<|end|><|start|>assistant",
            answer="<|channel|>final<|message|>",
        )  # fmt: skip

    @classmethod
    def messages(cls, prompt: str, answer: str) -> tuple[Sequence[Message], Sequence[Message]]:
        return harmony_messages(prompt, answer)

    def feed(self, text: str) -> Sequence[Parsed]:
        self._stream.text += text
        return self._read()

    def finish(self) -> Sequence[Parsed]:
        self._stream.ended = True
        found = self._read()
        if not self._kind and self._head.strip():
            # The text broke off in a head, or has none.
            head = _HEAD.match(self._head)
            if head is None or head["first"] or head["second"] or not _MARKS.match(self._head.lstrip()):
                found.append(Content(self._head))
        return found

    def _read(self) -> list[Parsed]:
        found: list[Parsed] = []
        while True:
            marks = _ENDS if self._kind else ("<|message|>", "<|end|>")
            text, mark = self._stream.until(marks)
            if not self._kind:
                self._head += text
                if mark == "<|message|>":
                    self._begin(found)
                elif mark:
                    # A head without a message says nothing, unless it has more than the author.
                    self._head = self._head + mark if self._told(self._head) else ""
                else:
                    return found
                continue
            if text:
                found.append(Reasoning(text) if self._kind == "analysis" else Content(text))
            if not mark:
                return found
            if self._kind == "call":
                found.append(Content("<|call|>"))
            self._kind, self._head = "", "<|start|>" if mark == "<|start|>" else ""

    @staticmethod
    def _told(head: str) -> bool:
        """Whether this is more than the beginning of the model's next message."""
        return bool(head.removeprefix("<|start|>").removeprefix("assistant").strip())

    def _begin(self, found: list[Parsed]) -> None:
        """A message's head is complete."""
        # At each place where one may begin: a search at all places takes long where there are many blank characters.
        places = (each.start() for each in _HEAD_BEGINS.finditer(self._head))
        head = next(head for place in places if (head := _HEAD.match(self._head, place)))
        recipients = [each for each in (head["first"], head["second"]) if each]
        function = _function(head)
        self._kind = "call" if function else "analysis" if head["channel"] == "analysis" else "final"
        # What does not belong to the head, and whom else the message is for.
        lost = _MARKS.sub("", _AUTHORS.sub("", self._head[: head.start()]))
        lost += " ".join(f"to={each}" for each in recipients if each != _FUNCTIONS + function)
        if lost.strip():
            found.append(Reasoning(lost) if self._kind == "analysis" else Content(lost))
        if function:
            found.append(Content(f"{_CALL}<|channel|>commentary to={_FUNCTIONS}{function}<|message|>"))
        self._head = ""


def _function(head: re.Match[str]) -> str:
    """The function that a message calls; "" if it calls none."""
    named = [each for each in (head["first"], head["second"]) if each and each.startswith(_FUNCTIONS)]
    return named[0].removeprefix(_FUNCTIONS) if named else ""


class HarmonyTools(StepParser, CallWriter):
    """Calls on the channel ``commentary``."""

    special_tokens = MARKS

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return "<|channel|>" in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        def begin(name: str) -> str:
            return f"to=functions.{name} <|constrain|>json<|message|>"

        # The recipient may also stand before the channel, so the channel does not tell where a call begins.
        tags = json_tags(functions, begin, "<|call|>")
        return CallFormat(tags=tags, begin="<|channel|>commentary ", trigger="to=functions.")

    def content(self) -> bool:
        text, mark = self.stream.until((_CALL,))
        self.say(text, before_call=bool(mark))
        if mark:
            self._raw, self.step = mark, self._head
        return bool(mark)

    def _head(self) -> bool:
        text, mark = self.stream.until(("<|message|>", "<|end|>"))
        self._raw += text
        head = _HEAD.fullmatch(self._raw)
        function = "" if head is None or (head["first"] and head["second"]) else _function(head)
        if mark == "<|message|>" and function:
            self.start(function)
            self.step = self._arguments
        elif mark or self.stream.ended:
            self.say(self._raw + mark)
            self.step = self.content
            return True
        return bool(mark)

    def _arguments(self) -> bool:
        text, mark = self.stream.until(("<|call|>", "<|end|>"))
        self.argue(text)
        if mark or self.stream.ended:
            self.end_call()
            self.step = self.content
        return bool(mark)
