"""Structural tags as grammars in the syntax of llguidance.

A structural tag describes a text by nested formats: constant texts, JSON of a schema, regular expressions, any text up
to a mark, choices and repetitions. The formats are those of
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html; the grammars follow
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

#: Of one structural tag: formats inside each other.
_MOST_DEPTH = 32
_TEXT = r"/(?s:.*)/"
_UNESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)


def lark_of(tag: Mapping[str, Any], special: Mapping[str, int], whitespace: str) -> str:
    """The grammar of one structural tag, for ``LLMatcher.grammar_from_lark`` or, with grammars inside, as JSON.

    Args:
        tag: its format, or an object with the key ``format``.
        special: ids of special tokens by their texts.
        whitespace: regular expression of what may stand between the parts of JSON texts.

    Raises:
        ValueError: it is not a structural tag, or has a format that this module does not know.
    """
    writer = _Writer(special, whitespace)
    inner = tag.get("format", tag)
    writer.rules.insert(0, f"start: {writer.expression(inner, 0)}")
    lark = "%llguidance {}\n" + "\n".join(writer.rules) + "\n"
    if not writer.grammars:
        return lark
    return json.dumps({"grammars": [{"name": "tag", "lark_grammar": lark}, *writer.grammars]})


def in_lark(text: str) -> str:
    """A grammar in Lark's syntax, from that or from GBNF.

    Raises:
        ValueError: it is neither.
    """
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter has errors of its own kind, and may recurse too deeply
        raise ValueError(str(error) or type(error).__name__) from error


class _Writer:
    """Writes rules; each method gives an expression for the right side of one."""

    def __init__(self, special: Mapping[str, int], whitespace: str) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._special, self._whitespace = special, whitespace
        marks = sorted(special, key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
        self._kinds: dict[str, Callable[[Mapping[str, Any], int], str]] = {
            "const_string": lambda of, _: self.text(_string(of, "value")),
            "json_schema": lambda of, _: self._json(of.get("json_schema")),
            "regex": lambda of, _: self._terminal(self._text_of(of)),
            "grammar": lambda of, _: self._grammar(_string(of, "grammar")),
            "any_text": lambda of, _: self._terminal(self._text_of(of)),
            "sequence": lambda of, depth: self._all(_list(of, "elements"), depth, " "),
            "or": lambda of, depth: self._all(_list(of, "elements"), depth, " | "),
            "optional": lambda of, depth: f"({self.expression(of.get('content'), depth)})?",
            "star": lambda of, depth: f"({self.expression(of.get('content'), depth)})*",
            "plus": lambda of, depth: f"({self.expression(of.get('content'), depth)})+",
            "tag": lambda of, depth: self._tag(of, depth, ""),
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def expression(self, of: Any, depth: int) -> str:
        """One format.

        Raises:
            ValueError: it is none.
        """
        kind = of.get("type") if isinstance(of, Mapping) else None
        if depth > _MOST_DEPTH:
            raise ValueError(f"a structural tag may have at most {_MOST_DEPTH} formats inside each other")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise ValueError(f"a structural tag has no format {str(kind)[:60]!r}; known are {', '.join(self._kinds)}")
        return self._kinds[kind](of, depth + 1) or '""'

    def text(self, text: str) -> str:
        """A constant text. Special tokens in it are these tokens."""
        pieces = self._marks.split(text) if self._marks else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, piece: str) -> str:
        return f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)

    def _rule(self, right: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {right}")
        return name

    def _terminal(self, right: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {right}")
        return name

    def _all(self, elements: Sequence[Any], depth: int, between: str) -> str:
        if not elements:
            raise ValueError("a sequence or a choice of a structural tag has no elements")
        return "(" + between.join(self.expression(each, depth) for each in elements) + ")"

    def _json(self, schema: Any) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, Mapping):
            raise ValueError("a format json_schema needs an object as json_schema")
        options = {"whitespace_pattern": self._whitespace, **_mapping(schema.get("x-guidance"))}
        return self._rule("%json " + json.dumps({**schema, "x-guidance": options}))

    def _grammar(self, text: str) -> str:
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": in_lark(text)})
        return f"@{name}"

    def _text_of(self, of: Mapping[str, Any]) -> str:
        """A text that fits a pattern if there is one, is within bounds of its length, and has nothing excluded."""
        parts = [_regex(_string(of, "pattern")) if of.get("type") == "regex" else _TEXT]
        least, most = of.get("min_chars") or 0, of.get("max_chars")
        if not all(isinstance(each, int) and each >= 0 for each in (least, most or 0)):
            raise ValueError("min_chars and max_chars of a text are integers of at least 0")
        if least or most is not None:
            parts.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
        for each in of.get("excludes") or ():
            parts.append(f"~/(?s:.*){re.escape(_plain_text(each)).replace('/', _SLASH)}(?s:.*)/")
        return " & ".join(parts)

    def _tag(self, of: Mapping[str, Any], depth: int, trigger: str) -> str:
        """Without ``trigger``, with which it begins."""
        begin, ends = _string(of, "begin")[len(trigger) :], of.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in ends):
            raise ValueError("the end of a tag is a text, or a list of texts")
        content = of.get("content")
        endings = [self._ending(content, end, depth) for end in ends]
        return f"{self.text(begin)} ({' | '.join(endings)})"

    def _ending(self, content: Any, end: str, depth: int) -> str:
        """The content of a tag and its end. Any text goes up to the first place where the end stands."""
        first, rest = self._first(end)
        texts = isinstance(content, Mapping) and content.get("type") in ("any_text", "regex")
        if not texts or first in self._special or not first:
            return f"{self.expression(content, depth)} {self.text(end)}"
        text = self._terminal(self._text_of(content))
        return f"{self._rule(f'{text} {self._piece(first)}', '[lazy]')} {self.text(rest)}"

    def _first(self, text: str) -> tuple[str, str]:
        """The first special token or text without one, and the rest."""
        pieces = [piece for piece in (self._marks.split(text) if self._marks else [text]) if piece]
        return (pieces[0], "".join(pieces[1:])) if pieces else ("", "")

    def _triggered(self, of: Mapping[str, Any], depth: int) -> str:
        """Any text, in which each trigger begins one of the tags."""
        tags, groups, triggers = _list(of, "tags"), [], [_plain_text(each) for each in _list(of, "triggers")]
        # A parser reads the text of a special token as it reads the token, so other text does not have it.
        used = {first for trigger in triggers if (first := self._first(trigger)[0]) in self._special}
        text = self._terminal(self._text_of({"excludes": sorted(used)}))
        for trigger in triggers:
            begun = [tag for tag in tags if _string(tag, "begin").startswith(trigger)]
            if not trigger or not begun:
                raise ValueError(f"no tag begins with the trigger {trigger[:60]!r}")
            first, rest = self._first(trigger)
            if first in self._special:
                head = f"{text} {self.text(trigger)}"
            elif rest:
                raise ValueError(f"the trigger {trigger[:60]!r} has a special token behind text")
            else:
                head = self._rule(f"{_TEXT} {self._piece(trigger)}", "[lazy]")
            choice = " | ".join(self._tag(tag, depth, trigger) for tag in begun)
            groups.append(self._rule(f"{head} ({choice})"))
        if lost := [tag for tag in tags if not _string(tag, "begin").startswith(tuple(of["triggers"]))]:
            raise ValueError(f"no trigger begins the tag {_string(lost[0], 'begin')[:60]!r}")
        # Other special tokens are text here.
        others = sorted(token for mark, token in self._special.items() if mark not in used)
        other = [self._rule(f"{text} <[{','.join(map(str, others))}]>")] if others else []
        before = [f"({other[0]})*"] if other else []
        if of.get("stop_after_first"):
            end = groups if of.get("at_least_one") else [*groups, text]
            return " ".join([*before, f"({' | '.join(end)})"])
        start = [*before, f"({' | '.join(groups)})"] if of.get("at_least_one") else []
        return " ".join([*start, f"({' | '.join([*groups, *other])})*", text])

    def _separated(self, of: Mapping[str, Any], depth: int) -> str:
        one = self._rule(self._all([{**tag, "type": "tag"} for tag in _list(of, "tags")], depth, " | "))
        more = "" if of.get("stop_after_first") else f" ({self.text(_string(of, 'separator'))} {one})*"
        return f"({one}{more})" + ("" if of.get("at_least_one") else "?")


_SLASH = r"\x2f"


def _regex(pattern: str) -> str:
    plain = {"/": _SLASH, r"\/": _SLASH, "\n": r"\n"}
    return f"/{_UNESCAPED.sub(lambda found: plain.get(found[0], found[0]), pattern)}/"


def _string(of: Any, name: str) -> str:
    value = of.get(name) if isinstance(of, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(f"a structural tag needs a text as {name!r}")
    return value


def _plain_text(value: Any) -> str:
    return _string({"excludes or triggers": value}, "excludes or triggers")


def _list(of: Mapping[str, Any], name: str) -> list[Any]:
    value = of.get(name)
    if not isinstance(value, list):
        raise ValueError(f"a structural tag needs a list as {name!r}")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
