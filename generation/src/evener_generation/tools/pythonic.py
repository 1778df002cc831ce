"""Calls as a Python list of function calls, ``[get_weather(city="Paris"), get_time()]``: Llama 3.2, Llama 4, others."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Mapping
from typing import Any

from evener.contracts.writing import CallFormat, CallWriter
from evener_generation.tools.base import StepParser
from evener_generation.tools.writing import keywords, parameters, tag

#: A longer list is content: parsing takes a hundred times its size.
_MOST_CHARS = 1 << 17


class Pythonic(StepParser, CallWriter):
    """The whole answer is the list. Its calls are certain only when it is complete."""

    special_tokens = ("<|python_start|>", "<|python_end|>")

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        return "[func_name1(params_name1=" in chat_template

    @classmethod
    def call_format(cls, functions: Mapping[str, Mapping[str, Any]], chat_template: str) -> CallFormat:
        names = [*functions, *(name for schema in functions.values() for name, _, _ in parameters(schema))]
        if wrong := [name for name in names if not all(part.isidentifier() for part in name.split("."))]:
            raise ValueError(f"{wrong[0][:64]!r} is no name in Python, in which this model writes calls")
        tags = [tag(f"{name}(", keywords(schema, ", "), ")") for name, schema in functions.items()]
        return CallFormat(tags=tags, begin="[", separator=", ", end="]")

    def content(self) -> bool:
        begin = self.stream.text.lstrip().removeprefix(self.special_tokens[0]).lstrip()
        opening = self.special_tokens[0].startswith(self.stream.text.lstrip())
        if not self.stream.ended and (opening or begin[:1] in ("", "[")) and len(self.stream.text) <= _MOST_CHARS:
            return False  # wait for the end
        calls = _read(begin) if self.stream.ended and begin[:1] == "[" else None
        if calls is None:
            self.step = self._plain
            return True
        self.stream.text = ""
        for name, arguments in calls:
            self.start(name)
            self.argue(arguments)
            self.end_call()
        return False

    def _plain(self) -> bool:
        self.say(self.stream.take(len(self.stream.text)))
        return False


def _read(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments as JSON text; None if this is no list of calls with literal arguments, or has text that they
    have no place for."""
    if len(text) > _MOST_CHARS:
        return None
    text = text.strip().removesuffix("<|python_end|>").strip()
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts or ("#" in text and _has_comment(text)):
            return None
        return [_call(each) for each in tree.elts]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, tokenize.TokenError):
        return None


def _has_comment(text: str) -> bool:
    return any(each.type == tokenize.COMMENT for each in tokenize.generate_tokens(io.StringIO(text).readline))


class _JsonWords(ast.NodeTransformer):
    """The words of JSON as Python's: models write both, and forced values are in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A name is a word, or no literal."""
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        """A key that comes twice would lose its first value."""
        self.generic_visit(node)
        if len({ast.literal_eval(key) for key in node.keys if key is not None}) < len(node.keys):
            raise ValueError("a key comes twice")
        return node


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with names for its arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("** is not a literal, and a name comes once")
        arguments[keyword.arg] = ast.literal_eval(_JsonWords().visit(keyword.value))
    name, text = ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        raise ValueError("the function is no name")
    text.encode()  # which UTF-8 cannot carry is a ValueError
    return name, text
