"""Calls as JSON objects: Hermes (Qwen 2.5, Qwen 3), Llama 3, Mistral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.contracts.writing import CallFormat, CallWriter
from evener_generation.json_call import JsonCall, MalformedCall, ObjectEnd
from evener_generation.tools.base import StepParser
from evener_generation.tools.writing import json_tags, quoted


class JsonParser(StepParser):
    """Calls ``{"name": …, "arguments": …}``; a subclass says where they begin and what comes after one."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        #: What was dropped before the call, and what was read of it.
        self._mark, self._raw, self._call = "", "", JsonCall(0)

    def begin(self, mark: str) -> bool:
        """A call may begin here; ``mark`` is what was dropped before it."""
        self._mark, self._raw, self._call, self.step = mark, "", JsonCall(self.calls), self.call
        return True

    def call(self) -> bool:
        """Inside of a call."""
        try:
            count, parsed = self._call.feed(self.stream.text)
        except MalformedCall:
            return self.no_call()
        self._raw += self.stream.take(count)
        self.add(parsed)
        broken_off = self.stream.ended and bool(self._call.unread.strip())
        if self._call.done or (self._call.started and broken_off):
            self.end_call()
            self.stream.text, self.step = self._call.unread + self.stream.text, self.after
            return True
        return self.no_call() if self.stream.ended and not self._call.started else False

    def no_call(self) -> bool:
        """The text was not a call; pass it on as content. Another call may begin after its marker."""
        self.say(self._mark)
        self.stream.text, self._raw = self._raw + self.stream.text, ""
        self.step = self.plain
        return True

    def after(self) -> bool:
        """Behind a call."""
        raise NotImplementedError

    def plain(self) -> bool:
        """Text after something that was no call. Default: as any text."""
        self.step = self.content
        return True

    def another(self, separator: str) -> bool | None:
        """Behind a call: whether another one begins, with a separator before it or without one. None: that is not
        certain yet. A separator that no call follows is content."""
        if not self.skip_blank():
            return False if self.stream.ended else None
        behind = self.stream.text.removeprefix(separator).lstrip()
        if behind[:1] == "{":
            return self.begin(self.stream.take(len(self.stream.text) - len(behind)))
        return False if behind or self.stream.ended else None


class Hermes(JsonParser, CallWriter):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, of Hermes, Qwen 2.5 and Qwen 3."""

    opening, closing = "<tool_call>", "</tool_call>"

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        other = any(mark in chat_template for mark in ("<function=", "<arg_key>"))
        return cls.opening in chat_template and not other

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        def begin(name: str) -> str:
            return f'{cls.opening}\n{{"name": {quoted(name)}, "arguments": '

        tags = json_tags(functions, begin, f"}}\n{cls.closing}")
        return CallFormat(tags=tags, separator="\n", trigger=cls.opening)

    def content(self) -> bool:
        text, mark = self.stream.until((self.opening,))
        self.say(text, before_call=bool(mark))
        return self.begin(mark) if mark else False

    def after(self) -> bool:
        if not self.skip_blank():
            return False
        closes = self.stream.starts_with(self.closing)
        if closes is None:
            return False
        if closes:
            self.stream.take(len(self.closing))
        self.step = self.content
        return True


class Llama3(JsonParser, CallWriter):
    """The whole answer is one call, ``{"name": …, "parameters": {…}}``, or several with ``;`` between them, as the chat
    templates of Llama 3.1 to 3.3. ``<|python_tag|>`` may stand before."""

    special_tokens = ("<|python_tag|>",)

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return '"parameters": dictionary of argument name and its value' in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        tags = json_tags(functions, lambda name: f'{{"name": {quoted(name)}, "parameters": ', "}")
        return CallFormat(tags=tags, separator="; ")

    def content(self) -> bool:
        stripped = self.stream.text.lstrip()
        mark = self.special_tokens[0]
        if not stripped or (not self.stream.ended and mark.startswith(stripped)):
            return self._end()
        raw = self.stream.take(len(self.stream.text) - len(stripped))
        if stripped.startswith(mark):
            self._mark, self._raw, self.step = raw + self.stream.take(len(mark)), "", self._tagged
            return True
        if stripped[0] == "{":
            return self.begin(raw)
        self.say(raw)
        self.step = self.plain
        return True

    def _tagged(self) -> bool:
        self._raw += self.take_blank()
        if not self.stream.text:
            return self.no_call() if self.stream.ended else False
        if self.stream.text[0] == "{":
            return self.begin(self._mark + self._raw)
        return self.no_call()

    def _end(self) -> bool:
        if self.stream.ended and not self.calls:
            self.say(self.stream.take(len(self.stream.text)))
        return False

    def after(self) -> bool:
        begins = self.another(";")
        if begins is False:
            self.step = self.plain
        return begins is not None

    def plain(self) -> bool:
        self.say(self.stream.take(len(self.stream.text)))
        return False


class Mistral(JsonParser, CallWriter):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or since version 11 of Mistral's tokenizer
    ``[TOOL_CALLS]name[ARGS]{…}`` for each call."""

    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return "[TOOL_CALLS]" in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        if "[ARGS]" in chat_template:
            tags = json_tags(functions, lambda name: f"[TOOL_CALLS]{name}[ARGS]", "")
            return CallFormat(tags=tags, separator="", trigger="[TOOL_CALLS]")
        tags = json_tags(functions, lambda name: f'{{"name": {quoted(name)}, "arguments": ', "}")
        return CallFormat(tags=tags, begin="[TOOL_CALLS][", separator=", ", end="]", trigger="[TOOL_CALLS]")

    def content(self) -> bool:
        text, mark = self.stream.until(("[TOOL_CALLS]",))
        self.say(text, before_call=bool(mark))
        if not mark:
            return False
        self._mark, self._raw, self.step = mark, "", self._first
        return True

    def _first(self) -> bool:
        self._raw += self.take_blank()
        if not self.stream.text:
            return self.no_call() if self.stream.ended else False
        if self.stream.text[0] == "[":
            return self.begin(self._mark + self._raw + self.stream.take(1))
        self.step = self._name
        return True

    def _name(self) -> bool:
        at = self.stream.text.find("{")
        if at < 0:
            return self.no_call() if self.stream.ended else False
        head = self.stream.text[:at]
        head, _, behind = head.partition("[ARGS]")
        name, _, call_id = head.partition("[CALL_ID]")
        name = name.strip()
        if behind.strip() or not name.replace("-", "_").replace(".", "_").isidentifier():
            return self.no_call()
        self.stream.take(at)
        self.start(name, call_id.strip())
        self._object, self.step = ObjectEnd(), self._arguments
        return True

    def _arguments(self) -> bool:
        self.argue(self.stream.take(self._object.feed(self.stream.text)))
        if not self._object.done:
            return False
        self.end_call()
        self.step = self.content
        return True

    def after(self) -> bool:
        begins = self.another(",")
        if begins is False:
            if self.stream.text[:1] == "]":
                self.stream.take(1)
            self.step = self.content
        return begins is not None
