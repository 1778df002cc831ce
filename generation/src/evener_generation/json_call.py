"""Reads ``{"name": …, "arguments": {…}}`` while it is written, and gives the arguments out as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from evener.contracts.generation.parsed import CallArguments, CallStart, Parsed

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class MalformedCall(ValueError):
    """The text is not a call."""


class JsonCall:
    """One call as a JSON object with the keys ``name``, ``arguments`` or ``parameters``, and perhaps ``id``.

    The arguments are given out unchanged, as text. Where a model writes them as a JSON string, the string's content is.
    Other keys have no place in a call: their values are dropped where there are arguments, and an object that has other
    keys in place of arguments is no call.

    Args:
        index: of the call in its answer.

    Attributes:
        done: the object's last bracket was read.
        started: a ``CallStart`` was given out.
        unread: text behind the last complete member of a call that has started: the begin of another one, so far. It
            is left when the object breaks off there.
    """

    def __init__(self, index: int) -> None:
        self.done = self.started = False
        self.unread = ""
        self._index, self._name, self._id = index, "", ""
        #: What comes next: "open", "key", "colon", "value", "inside" a value, "after" a value.
        self._next = "open"
        self._key, self._raw, self._held = "", "", ""
        self._depth, self._quoted, self._escaped, self._has_arguments = 0, False, False, False
        #: It has other members; the last character was the end of one, or given out.
        self._others = self._certain = False

    def feed(self, text: str) -> tuple[int, list[Parsed]]:
        """Read on.

        Returns:
            How many characters belong to the call, ``unread`` among them, and what is certain now.

        Raises:
            MalformedCall: this is not a call, and nothing was given out. Later faults end the call.
        """
        found: list[Parsed] = []
        for at, character in enumerate(text):
            try:
                self._step(character)
            except ValueError as error:
                if not self.started:
                    raise MalformedCall(str(error)) from error
                self.done = True
                return at, [*found, *self._arguments()]
            self.unread, self._certain = "" if self._certain else self.unread + character, False
            if not self.started and self._name and (self._has_arguments or self.done):
                # At once: what comes next cannot take it back, however the text is cut.
                self.started = True
                found.append(CallStart(self._index, self._name, self._id))
            if self.done:
                if not self.started:
                    raise MalformedCall("it has no name")
                self.unread = ""
                return at + 1, [*found, *self._arguments()]
        return len(text), [*found, *self._arguments()]

    def _arguments(self) -> Iterator[Parsed]:
        if self.started and self._held:
            yield CallArguments(self._index, self._held)
            self._held = ""

    def _step(self, character: str) -> None:
        if self._next == "inside":
            self._inside(character)
        elif self._next == "key" and self._quoted:
            self._raw += character
            if self._ends_string(character):
                self._key, self._next = _value_of(self._raw), "colon"
        elif character in _SPACE:
            return
        elif self._next == "value":
            self._begin_value(character)
        elif self._next == "key" and character == '"':
            self._raw, self._quoted = character, True
        elif (self._next, character) in (("key", "}"), ("after", "}")):
            if self._others and not self._has_arguments:
                raise ValueError("it has no arguments, but other keys")
            self.done = True
        else:
            expected = {"open": ("{", "key"), "colon": (":", "value"), "after": (",", "key")}.get(self._next)
            if expected is None or character != expected[0]:
                raise ValueError(f"{character!r} where {expected[0] if expected else 'a key'!r} belongs")
            self._next = expected[1]

    def _begin_value(self, character: str) -> None:
        self._raw, self._next, self._depth = "", "inside", 0
        if self._has_arguments if self._key in _ARGUMENTS else self._key == "name" and self._name:
            raise ValueError(f"a second {self._key}")
        self._inside(character)

    def _inside(self, character: str) -> None:
        if not self._quoted and not self._depth and self._raw and character in ",}" + _SPACE:
            self._end_value()  # of a number or a word, which has no last character of its own
            self._step(character)
            return
        self._raw += character
        if self._key in _ARGUMENTS and self._raw[0] == "{":
            self._has_arguments = self._certain = True
            self._held += character
        if self._quoted:
            if self._ends_string(character) and not self._depth:
                self._end_value()
                self._certain = True
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth < 0:
                raise ValueError(f"{character!r} where a value belongs")
            if not self._depth:
                self._end_value()
                self._certain = True

    def _ends_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
            return True
        return False

    def _end_value(self) -> None:
        self._next = "after"
        if self._key in _ARGUMENTS and self._raw[0] == "{":
            return  # given out as it came
        value = _value_of(self._raw)
        if self._key == "name":
            if not (isinstance(value, str) and value):
                raise ValueError("the name is no text")
            self._name = value
        elif self._key in _ARGUMENTS:
            self._has_arguments = True
            self._held = value if isinstance(value, str) else "" if value is None else self._raw
        elif self._key == "id":
            self._id = value if isinstance(value, str) else self._raw
        else:
            self._others = self._others or self._key != "type"
        self._raw = self.unread = ""


def _value_of(text: str) -> Any:
    """Raises ValueError: the text is not JSON, or has a text that UTF-8 cannot carry."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if isinstance(value, str):
        value.encode()
    return value


class ObjectEnd:
    """Finds the end of a JSON object.

    Attributes:
        done: its last bracket was read.
    """

    def __init__(self) -> None:
        self.done = False
        self._depth, self._quoted, self._escaped = 0, False, False

    def feed(self, text: str) -> int:
        """How many characters of ``text`` belong to the object."""
        for at, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return at + 1
        return len(text)
