"""Calls in a section of their own, between special tokens: DeepSeek V3 and V3.1, Kimi K2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from evener.contracts.writing import CallFormat, CallWriter
from evener_generation.tools.base import StepParser
from evener_generation.tools.writing import arguments, constant, json_tags, sequence, tag


class SectionParser(StepParser, CallWriter):
    """A section of calls; each has a head, a separator, and arguments up to its end.

    Attributes:
        section: the marks around all calls; ``call``: those around one call; ``separator``: the one behind its head.
        ends: what may end the arguments.
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]
    separator: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._raw = ""

    @abstractmethod
    def begin(self, head: str) -> bool:
        """Begin the call whose head this is, and set the next step. False: this is no call."""

    def content(self) -> bool:
        text, mark = self.stream.until((self.section[0],))
        self.say(text, before_call=bool(mark))
        if mark:
            self._raw, self.step = mark, self.between
        return bool(mark)

    def between(self) -> bool:
        """In the section, outside of calls."""
        text, mark = self.stream.until((self.call[0], self.section[1]))
        if text.strip():
            # All of it is content, which may hold the begin of another section before this mark.
            self.stream.text = text + mark + self.stream.text
            self.say(self._raw)
            self.step = self.content
            return True
        self._raw += text
        if self.stream.ended and not mark:
            return self._no_call(mark)
        if mark == self.section[1]:
            self.step = self.content
        elif mark:
            self._raw, self.step = self._raw + mark, self.head
        return bool(mark)

    def head(self) -> bool:
        """Between a call's begin and its separator."""
        text, mark = self.stream.until((self.separator, *self.call, self.section[1]))
        self._raw += text
        if mark == self.separator:
            head = self._raw[self._raw.rfind(self.call[0]) + len(self.call[0]) :]
            return True if self.begin(head) else self._no_call(mark)
        return self._another(mark)

    def _another(self, mark: str) -> bool:
        """In a head, at a mark that does not belong there: what was read is content; another call may begin."""
        if mark == self.call[0]:
            self.say(self._raw)
            self._raw, self.step = mark, self.head
            return True
        return self._no_call(mark) if mark or self.stream.ended else False

    def arguments(self) -> bool:
        """Behind the separator."""
        text, mark = self.stream.until(self.ends)
        self.argue(text)
        if mark:
            self.end_call()
            self._raw, self.step = "", self.between
        return bool(mark)

    def _no_call(self, mark: str) -> bool:
        if self.calls and not self._raw.strip() and not mark:
            self.step = self.content  # blank text after the last call of a section that was not closed
            return False
        self.say(self._raw + mark)
        self.step = self.content
        return True


class DeepSeek(SectionParser):
    """V3: ``function``, separator, name, then the arguments as a block of JSON in Markdown. V3.1: name, separator,
    arguments."""

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator = "<｜tool▁sep｜>"
    ends = ("\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>")
    special_tokens = (*section, *call, separator)
    _fence = "\n```json\n"

    def begin(self, head: str) -> bool:
        name = head.strip()
        if name == "function":
            self._raw, self.step = self._raw + self.separator, self._fenced
        elif name:
            self.start(name)
            self.step = self.arguments
        return bool(name)

    def _fenced(self) -> bool:
        text, mark = self.stream.until((self._fence, *self.call, self.section[1]))
        self._raw += text
        # The first separator is that behind the word "function".
        name = self._raw[self._raw.find(self.separator) + len(self.separator) :].strip()
        if mark != self._fence:
            return self._another(mark)
        if not name:
            return self._no_call(mark)
        self.start(name)
        self.step = self.arguments
        return True


class DeepSeekV3(DeepSeek):
    """Of DeepSeek V3, and of R1 since 0528."""

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return cls.call[0] in chat_template and "```json" in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        def begin(name: str) -> str:
            return f"{cls.call[0]}function{cls.separator}{name}{cls._fence}"

        tags = json_tags(functions, begin, cls.ends[0])
        return CallFormat(tags=tags, begin=cls.section[0], separator="\n", end=cls.section[1], trigger=cls.section[0])


class DeepSeekV31(DeepSeek):
    """Of DeepSeek V3.1."""

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return cls.call[0] in chat_template and "```json" not in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        tags = json_tags(functions, lambda name: f"{cls.call[0]}{name}{cls.separator}", cls.call[1])
        return CallFormat(tags=tags, begin=cls.section[0], separator="", end=cls.section[1], trigger=cls.section[0])


class KimiK2(SectionParser):
    """``functions.NAME:INDEX`` as the head, which is also the call's id."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    separator = "<|tool_call_argument_begin|>"
    ends = ("<|tool_call_end|>",)
    special_tokens = (*section, *call, separator)

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return cls.section[0] in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        index = {"type": "regex", "pattern": "[0-9]{1,4}"}
        tags = [
            tag(
                f"{cls.call[0]}functions.{name}:",
                sequence([index, constant(cls.separator), arguments(schema)]),
                cls.call[1],
            )
            for name, schema in functions.items()
        ]
        return CallFormat(tags=tags, begin=cls.section[0], separator="", end=cls.section[1], trigger=cls.section[0])

    def begin(self, head: str) -> bool:
        call_id = head.strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
        if name:
            self.start(name, call_id)
            self.step = self.arguments
        return bool(name)
