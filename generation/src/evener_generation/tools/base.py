"""What tool parsers share: text in a stream, and steps that read it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.contracts.generation.parsed import CallArguments, CallStart, Content, Parsed
from evener.contracts.generation.parsers import ToolParser
from evener_generation.text_stream import TextStream

#: Reads some of the stream. True: go on; False: it needs more text.
Step = Callable[[], bool]


class StepParser(ToolParser):
    """A parser that is always in one step, a method, which says what comes next by setting ``step``.

    Blank characters between a call and other text belong to the format and are dropped.

    Attributes:
        stream: the text that is not read yet.
        calls: number of calls that have ended.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.stream, self.calls = TextStream(), 0
        self._found: list[Parsed] = []
        self._blank, self._after_call, self._argued = "", False, False
        self.step: Step = self.content

    @abstractmethod
    def content(self) -> bool:
        """The first step: text outside of calls."""

    def feed(self, text: str) -> Sequence[Parsed]:
        self.stream.text += text
        return self._run()

    def finish(self) -> Sequence[Parsed]:
        self.stream.ended = True
        return self._run()

    def _run(self) -> list[Parsed]:
        while self.step():
            continue
        found, self._found = self._found, []
        return found

    def say(self, text: str, before_call: bool = False) -> None:
        """Give out content. Blank characters at its end are held back until it is certain that no call follows."""
        text = self._blank + text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        shown = text.rstrip() if before_call or not self.stream.ended or self.stream.text else text
        self._blank = text[len(shown) :]
        if shown:
            self._found.append(Content(shown))

    def start(self, name: str, call_id: str = "") -> None:
        """Begin a call."""
        self._argued, self._blank = False, ""
        self._found.append(CallStart(self.calls, name, call_id))

    def argue(self, text: str) -> None:
        """Give out the next piece of the call's arguments."""
        if text:
            self._argued = True
            self._found.append(CallArguments(self.calls, text))

    def skip_blanks(self) -> None:
        """Drop the blank characters that stand before the next content."""
        self._blank, self._after_call = "", True

    def end_call(self) -> None:
        """The call is complete."""
        if not self._argued:
            self.argue("{}")
        self.calls, self._after_call = self.calls + 1, True

    def add(self, parsed: Sequence[Parsed]) -> None:
        """Give out what another reader found of the call."""
        if any(isinstance(each, CallStart) for each in parsed):
            self._argued, self._blank = False, ""
        self._argued = self._argued or any(isinstance(each, CallArguments) for each in parsed)
        self._found.extend(parsed)

    def take_blank(self) -> str:
        """Take blank characters; others are left, or no text is."""
        return self.stream.take(len(self.stream.text) - len(self.stream.text.lstrip()))

    def skip_blank(self) -> bool:
        """Drop blank characters. Whether text is left."""
        self.take_blank()
        return bool(self.stream.text)
