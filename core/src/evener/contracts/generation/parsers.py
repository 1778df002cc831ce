"""The parser contract: find reasoning and tool calls in the text that a model generates, while it is generated.

Announce a class in ``Descriptor.reasoning_parsers`` or ``Descriptor.tool_parsers``. There is one object for each
generated sequence; it is fed the sequence's text in pieces of any size, and never twice. Text that does not have the
parser's format is content: a parser raises nothing, and drops nothing but the marks of its format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from evener.contracts.generation.parsed import Parsed


class Parser(ABC):
    """One format.

    Attributes:
        special_tokens: texts of special tokens that are marks of the format. They are kept in the text that the parser
            is fed, although special tokens are hidden otherwise.
    """

    special_tokens: Sequence[str] = ()

    @classmethod
    @abstractmethod
    def recognizes(cls, chat_template: str) -> bool:
        """Whether a model with this chat template writes this format. Of the installed parsers that say yes, the one
        whose name sorts first is used; ``server.tool_parser`` and ``server.reasoning_parser`` choose by name."""

    @abstractmethod
    def feed(self, text: str) -> Sequence[Parsed]:
        """Parse the next piece of text; return what can no longer change, and keep the rest."""

    @abstractmethod
    def finish(self) -> Sequence[Parsed]:
        """The rest, when the text has ended."""


class ReasoningParser(Parser):
    """Separates ``Reasoning`` from ``Content``; yields nothing else.

    Args:
        prompt_end: the last characters of the rendered prompt; some templates open the reasoning there.
    """

    def __init__(self, prompt_end: str = "") -> None:
        self.prompt_end = prompt_end


class ToolParser(Parser):
    """Separates tool calls from ``Content``; yields no ``Reasoning``.

    Args:
        tools: the request's tools, as OpenAI's API gives them. Formats without JSON need the types of the parameters.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools
