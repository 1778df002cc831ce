"""Calls with each parameter between tags of its own: Qwen3-Coder, GLM-4.5."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from evener.contracts.writing import CallFormat, CallWriter
from evener_generation.tools.base import StepParser
from evener_generation.tools.writing import (
    Format,
    constant,
    open_object,
    optional,
    parameters,
    raw_value,
    sequence,
    tag,
)


class ParameterParser(StepParser):
    """Each parameter is given out when it is complete, as the next piece of a JSON object."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._raw, self._name, self._key, self._value, self._first = "", "", "", "", True

    def begin(self, name: str) -> None:
        """A call begins."""
        self._name, self._first = name, True
        self.start(name)
        self.skip_blanks()

    def parameter(self, key: str, value: str) -> None:
        """A parameter is complete."""
        text = f"{json.dumps(key)}: {self._typed(key, value)}"
        self.argue(("{" if self._first else ", ") + text)
        self._first = False
        self.skip_blanks()

    def close(self) -> None:
        """The call is complete."""
        if not self._first:
            self.argue("}")
        self.end_call()

    def no_call(self, more: str = "") -> bool:
        """The text was not a call; pass it on as content."""
        self.say(self._raw + more)
        self._raw, self.step = "", self.content
        return True

    def no_parameter(self, text: str) -> bool:
        """The text did not become a parameter; pass it on as content, between parameters."""
        self.say(text)
        return True

    def _typed(self, key: str, value: str) -> str:
        """The value as JSON, by the type that the tool's schema gives; as a text if it does not fit."""
        kind = self._schema(key).get("type")
        if kind != "string":
            try:
                json.loads(value, parse_constant=_refuse)
                return value.strip()
            except (ValueError, RecursionError):
                if kind and (word := _PYTHON_WORDS.get(value.strip().lower())):
                    return word
        return json.dumps(value, ensure_ascii=False)

    def _schema(self, key: str) -> Mapping[str, Any]:
        for tool in self.tools:
            function = tool.get("function", tool)
            if function.get("name") == self._name:
                found = ((function.get("parameters") or {}).get("properties") or {}).get(key)
                return found if isinstance(found, Mapping) else {}
        return {}


#: Words of Python as those of JSON: models write both.
_PYTHON_WORDS = {"true": "true", "false": "false", "none": "null"}


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _unlined(value: str) -> str:
    """Without the one newline at each end that the format adds."""
    return value.removeprefix("\n").removesuffix("\n")


def _tagged(schema: Mapping[str, Any], begin: str, end: str, marks: Sequence[str]) -> Format:
    """All parameters in the order of the schema; ``begin`` has a place for the name, and no text has ``marks``.

    Raises:
        ValueError: a name cannot stand in a tag.
    """
    if wrong := [name for name, _, _ in parameters(schema) if not name.strip() or set(name) & set("<>\n{}")]:
        raise ValueError(f"the parameter {wrong[0][:64]!r} cannot stand in a tag, in which this model writes it")
    if open_object(schema):
        before, behind = begin.split("{}")
        name = {"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]{0,63}"}
        value = raw_value(behind, {"type": "string"}, end, marks)
        return {"type": "star", "content": sequence([constant(before), name, value])}
    found = [
        (raw_value(begin.format(name), inner, end, marks), required) for name, inner, required in parameters(schema)
    ]
    return sequence([each if required else optional(each) for each, required in found])


#: What ends a parameter of Qwen3-Coder: models forget closing tags.
_VALUE_ENDS = ("</parameter>", "<parameter=", "</function>")


class Qwen3Coder(ParameterParser, CallWriter):
    """``<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>``. Models may leave out the
    outer tag."""

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return "<function=" in chat_template and "<parameter=" in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        tags = [
            tag(
                f"<tool_call>\n<function={name}>\n",
                _tagged(schema, "<parameter={}>\n", "\n</parameter>\n", _VALUE_ENDS),
                "</function>\n</tool_call>",
            )
            for name, schema in functions.items()
        ]
        return CallFormat(tags=tags, separator="\n", trigger="<tool_call>")

    def content(self) -> bool:
        text, mark = self.stream.until(("<tool_call>", "<function="))
        self.say(text, before_call=bool(mark))
        if mark:
            self._raw, self.step = mark, self._function if mark == "<tool_call>" else self._named
        return bool(mark)

    def _function(self) -> bool:
        text, mark = self.stream.until(("<function=", "</tool_call>"))
        if text.strip():
            self.stream.text = text + mark + self.stream.text  # a call may begin there
            return self.no_call()
        self._raw += text
        if mark == "</tool_call>" or (self.stream.ended and not mark):
            return self.no_call(mark)
        if mark:
            self._raw, self.step = self._raw + mark, self._named
        return bool(mark)

    def _named(self) -> bool:
        text, mark = self.stream.until((">", "\n", "<function="))
        self._raw += text
        if mark == "<function=":
            self.say(self._raw)  # another call begins there
            self._raw = mark
            return True
        name = self._raw[self._raw.rfind("<function=") + len("<function=") :].strip()
        if mark == ">" and name:
            self.begin(name)
            self.step = self._body
        elif mark or self.stream.ended:
            return self.no_call(mark)
        return bool(mark)

    def _body(self) -> bool:
        text, mark = self.stream.until(("<parameter=", "</function>", "</tool_call>"))
        self.say(text, before_call=bool(mark))  # between parameters no text belongs to the call
        if mark == "<parameter=":
            self._key, self.step = "", self._parameter_name
        elif mark:
            self.close()
            self.step = self._closed if mark == "</function>" else self.content
        return bool(mark)

    def _parameter_name(self) -> bool:
        text, mark = self.stream.until((">",))
        self._key += text
        if mark:
            self._value, self.step = "", self._parameter_value
        elif self.stream.ended:
            self.step = self._body
            return self.no_parameter("<parameter=" + self._key)
        return bool(mark)

    def _parameter_value(self) -> bool:
        text, mark = self.stream.until(_VALUE_ENDS)
        self._value += text
        if mark or self.stream.ended:
            self.parameter(self._key.strip(), _unlined(self._value))
            # A closing tag that the model forgot.
            self.stream.text = ("" if mark == "</parameter>" else mark) + self.stream.text
            self.step = self._body
        return bool(mark)

    def _closed(self) -> bool:
        if not self.skip_blank():
            return False
        closes = self.stream.starts_with("</tool_call>")
        if closes is None:
            return False
        if closes:
            self.stream.take(len("</tool_call>"))
        self.step = self.content
        return True


class Glm4(ParameterParser, CallWriter):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>…</tool_call>``, of GLM-4.5 and later."""

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return "<arg_key>" in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        tags = [
            tag(
                f"<tool_call>{name}\n",
                _tagged(schema, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ["</arg_value>"]),
                "</tool_call>",
            )
            for name, schema in functions.items()
        ]
        return CallFormat(tags=tags, separator="\n", trigger="<tool_call>")

    def content(self) -> bool:
        text, mark = self.stream.until(("<tool_call>",))
        self.say(text, before_call=bool(mark))
        if mark:
            self._raw, self.step = mark, self._named
        return bool(mark)

    def _named(self) -> bool:
        text, mark = self.stream.until(("<arg_key>", "</tool_call>"))
        self._raw += text
        name = self._raw.removeprefix("<tool_call>").strip()
        if mark and name and not any(character.isspace() for character in name):
            self.begin(name)
            self.stream.text = mark + self.stream.text
            self.step = self._body
        elif mark or self.stream.ended:
            return self.no_call(mark)
        return bool(mark)

    def _body(self) -> bool:
        text, mark = self.stream.until(("<arg_key>", "</tool_call>"))
        self.say(text, before_call=bool(mark))  # between parameters no text belongs to the call
        if mark == "<arg_key>":
            self._key, self.step = "", self._argument_key
        elif mark:
            self.close()
            self.step = self.content
        return bool(mark)

    def _argument_key(self) -> bool:
        text, mark = self.stream.until(("<arg_value>", "<arg_key>", "</tool_call>"))
        self._key += text
        if mark == "<arg_value>":
            self._value, self.step = "", self._argument_value
        elif mark or self.stream.ended:
            self.stream.text, self.step = mark + self.stream.text, self._body
            return self.no_parameter("<arg_key>" + self._key)
        return bool(mark)

    def _argument_value(self) -> bool:
        text, mark = self.stream.until(("</arg_value>",))
        self._value += text
        if mark or self.stream.ended:
            self.parameter(self._key.replace("</arg_key>", "").strip(), self._value)
            self._value, self.step = "", self._body
        return bool(mark)
