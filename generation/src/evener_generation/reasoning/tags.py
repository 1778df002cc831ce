"""Reasoning between an opening and a closing mark, before the answer.

Formats as their chat templates write them: ``<think>`` of Qwen3, DeepSeek R1 and V3.1, GLM-4.5, Kimi K2 Thinking and
others; ``[THINK]`` of Mistral's Magistral.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from evener.contracts.generation.parsed import Content, Parsed, Reasoning
from evener.contracts.generation.parsers import ReasoningParser
from evener.contracts.writing import ReasoningFormat, ReasoningWriter
from evener_generation.text_stream import TextStream


class TagReasoning(ReasoningParser, ReasoningWriter):
    """The first text of an answer, if it begins with the opening mark, or if the prompt ended with it."""

    opening: ClassVar[str]
    closing: ClassVar[str]

    def __init__(self, prompt_end: str = "") -> None:
        super().__init__(prompt_end)
        self._stream = TextStream()
        opened = prompt_end.rstrip().endswith(self.opening)
        self._state = "reasoning" if opened else "start"
        #: Blank characters between the marks and the text belong to neither.
        self._strip = opened

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return cls.closing in chat_template

    @classmethod
    def reasoning_format(cls, prompt_end: str) -> ReasoningFormat | None:
        end = prompt_end.rstrip()
        if end.endswith(cls.closing):
            return None  # the template wrote that there is no reasoning
        return ReasoningFormat(begin="" if end.endswith(cls.opening) else cls.opening, end=cls.closing)

    def feed(self, text: str) -> Sequence[Parsed]:
        self._stream.text += text
        return self._read()

    def finish(self) -> Sequence[Parsed]:
        self._stream.ended = True
        return self._read()

    def _read(self) -> list[Parsed]:
        found: list[Parsed] = []
        stream = self._stream
        if self._state == "start":
            blank = len(stream.text) - len(stream.text.lstrip())
            begin = TextStream()
            begin.text, begin.ended = stream.text[blank:], stream.ended
            opens = begin.starts_with(self.opening)
            if opens is None:
                return found
            if opens:
                stream.take(blank + len(self.opening))
            self._state, self._strip = ("reasoning", True) if opens else ("content", False)
        if self._state == "reasoning":
            if not self._stripped():
                return found
            text, mark = stream.until((self.closing,))
            if text:
                found.append(Reasoning(text))
            if mark:
                self._state, self._strip = "content", True
        if self._state == "content" and self._stripped() and stream.text:
            found.append(Content(stream.take(len(stream.text))))
        return found

    def _stripped(self) -> bool:
        """Drop the blank characters after a mark. Whether text is left."""
        if self._strip:
            self._stream.text = self._stream.text.lstrip()
            self._strip = not self._stream.text
        return not self._strip


class Think(TagReasoning):
    """``<think>…</think>``."""

    opening, closing = "<think>", "</think>"


class BracketThink(TagReasoning):
    """``[THINK]…[/THINK]``."""

    opening, closing = "[THINK]", "[/THINK]"
    special_tokens = ("[THINK]", "[/THINK]")
