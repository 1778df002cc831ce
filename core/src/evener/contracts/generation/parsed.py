"""What a parser finds in generated text. The pieces of a stream, joined in order, are the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins.

    Attributes:
        index: 0 for the first call of an answer, then 1, and so on.
        name: the function's name.
        id: the call's id, if the model's format has one; else "".
    """

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments, which all together are one JSON object as text."""

    index: int
    text: str


Parsed: TypeAlias = "Content | Reasoning | CallStart | CallArguments"
