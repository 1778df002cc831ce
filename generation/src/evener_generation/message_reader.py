"""Rendered conversations as messages, for formats in which a message names author, recipient and channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


class MessageReader(ABC):
    """A parser class that is one too can read whole conversations of its format, prompts included."""

    @classmethod
    @abstractmethod
    def messages(cls, prompt: str, answer: str) -> tuple[Sequence[Message], Sequence[Message]]:
        """The messages of a rendered prompt, and those of the answer to it, with all special tokens.

        A message that the prompt leaves open is the answer's from there on.
        """
