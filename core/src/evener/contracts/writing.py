"""The writing contract: how a model writes the calls and the reasoning that a parser reads, so that an answer can be
held to it.

A parser class that is also a ``CallWriter`` or a ``ReasoningWriter`` describes its format; without it, calls of that
format can be read but not forced. Contents are formats of structural tags, as
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html describes them: plain JSON, such as
``{"type": "json_schema", "json_schema": …}``. Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One or more calls, as a model writes them. Texts of special tokens stand for these tokens.

    Attributes:
        tags: for each function a structural tag ``{"type": "tag", "begin": …, "content": …, "end": …}``: one call.
        begin: text before the first call; end: after the last one.
        separator: text between two calls; None: an answer has one call at most.
        trigger: the text with which calls begin after other text: the first part of ``begin``, or of each tag. None:
            calls are the whole answer, and an answer that calls nothing begins otherwise.
    """

    tags: Sequence[Mapping[str, Any]]
    begin: str = ""
    end: str = ""
    separator: str | None = None
    trigger: str | None = None


class CallWriter(ABC):
    """A format of calls that an answer can be held to."""

    @classmethod
    @abstractmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        """How a model with this chat template writes calls.

        Args:
            functions: for each name the JSON schema of its arguments, which is one of an object.

        Raises:
            ValueError: the format has no place for one of their names.
        """


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The reasoning before an answer.

    Attributes:
        begin: text before it; "" if the prompt ends with that text already.
        end: text after it.
        answer: text before an answer that calls no tool.
    """

    begin: str
    end: str
    answer: str = ""


class ReasoningWriter(ABC):
    """A format of reasoning after which an answer can be held to a grammar."""

    @classmethod
    @abstractmethod
    def reasoning_format(cls, prompt_end: str) -> ReasoningFormat | None:
        """How the answer to a prompt with this end begins; None: the prompt leaves no place for reasoning."""
