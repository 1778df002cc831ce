"""Constraints on an answer: the grammar of its form, tool calls that it must make, and reasoning before it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.contracts.generation.parsers import ReasoningParser, ToolParser
from evener.contracts.grammar.library import GrammarSpec
from evener.contracts.writing import CallFormat, CallWriter, ReasoningFormat, ReasoningWriter
from evener.errors import RequestError
from evener_server.tools import Tool, ToolChoice

Format = dict[str, Any]
#: Schemas of arguments where the tool gives none: of a tool without parameters, and of one that is not strict.
_NONE: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class Held:
    """The constraints on one answer.

    Attributes:
        answer: the grammar of an answer that calls no tool; None: any text.
        calls: the grammar of an answer that calls tools; None: any text.
        forced: the answer must call a tool.
        budget: tokens that the reasoning may have; None: any number.
        loose: fields that ask for a constraint which is not enforced.
        marks: special tokens that text around calls may have.
    """

    answer: GrammarSpec | None = None
    calls: Format | None = None
    forced: bool = False
    budget: int | None = None
    loose: Sequence[str] = ()
    marks: Sequence[str] = ()

    @property
    def anything(self) -> bool:
        """Whether the answer is held to nothing."""
        return self.answer is None and self.calls is None and self.budget is None

    def spec(self, reasoning: ReasoningFormat | None) -> GrammarSpec | None:
        """The grammar; ``reasoning``: what may stand before; None: nothing."""
        mark = "" if reasoning is None else reasoning.answer
        if self.calls is None and reasoning is None:
            return self.answer
        found: Format | None = self.calls
        if self.answer is not None and not self.forced:
            answer = format_of(self.answer)
            if mark:
                answer = {"type": "sequence", "elements": [{"type": "const_string", "value": mark}, answer]}
            found = answer if found is None else {"type": "or", "elements": [found, answer]}
        before = None
        if reasoning is not None and (found is not None or self.budget is not None):
            before = {"begin": reasoning.begin, "end": reasoning.end, "budget": self.budget}
        if found is None and before is None:
            return None
        text = {"format": found, "reasoning": before, **({"marks": list(self.marks)} if self.marks else {})}
        return GrammarSpec(kind="structural_tag", text=json.dumps(text))


def held_to(
    tools: Sequence[Tool], choice: ToolChoice, parser: type[ToolParser] | None, template: str, several: bool,
    answer: GrammarSpec | None, budget: int | None,
) -> Held:  # fmt: skip
    """What an answer is held to.

    Args:
        tools: the request's; ``choice``: which of them must or may be called.
        parser: of the model's calls; None: the answer calls no tool.
        template: the model's chat template.
        several: the answer may have more than one call.
        answer: the grammar of an answer without calls.
        budget: tokens that the reasoning may have.

    Raises:
        RequestError: calls of this model's format cannot be forced.
    """
    if parser is None:
        return Held(answer=answer, budget=budget)
    strict = any(tool.function.strict for tool in tools)
    if not (choice.forced or strict or answer is not None or choice.names is not None):
        return Held(budget=budget)
    if not issubclass(parser, CallWriter):
        if choice.forced:
            message = f"a call cannot be forced: {parser.__name__} does not say how calls are written; send auto"
            raise RequestError(message, "tool_choice", "unsupported_parameter")
        return Held(answer=answer, budget=budget, loose=_STRICT if strict else ())
    whole = choice.forced or answer is not None
    functions = {
        tool.function.name: (tool.function.parameters or _NONE) if whole or tool.function.strict else _ANY
        for tool in tools
        if choice.names is None or tool.function.name in choice.names
    }
    try:
        written = parser.call_format(functions, template)
    except ValueError as error:
        raise RequestError(f"calls of these tools cannot be held to their schemas: {error}", "tools") from error
    if whole:
        calls = _only_calls(written, several and not choice.single)
        return Held(answer=answer, calls=calls, forced=choice.forced, budget=budget)
    if written.trigger is None:
        return Held(calls=_or_text(written, several, parser.special_tokens), budget=budget)
    return Held(calls=_among_text(written, several), budget=budget, marks=parser.special_tokens)


_STRICT = ("tools[].function.strict",)


def _only_calls(written: CallFormat, several: bool) -> Format:
    """One call at least, and nothing else."""
    around = [{"type": "const_string", "value": text} for text in (written.begin, written.end)]
    return {"type": "sequence", "elements": [around[0], _separated(written, several), around[1]]}


def _separated(written: CallFormat, several: bool) -> Format:
    """One call at least."""
    return {
        "type": "tags_with_separator", "tags": list(written.tags), "separator": written.separator or "",
        "at_least_one": True, "stop_after_first": not several or written.separator is None,
    }  # fmt: skip


def _among_text(written: CallFormat, several: bool) -> Format:
    """Any text, and calls in it."""
    tags = list(written.tags)
    if written.trigger and written.begin.startswith(written.trigger):
        # What stands around the calls is one tag, with all calls inside.
        calls = _separated(written, several)
        tags = [{"type": "tag", "begin": written.begin, "content": calls, "end": written.end}]
    return {"type": "triggered_tags", "triggers": [written.trigger], "tags": tags, "stop_after_first": not several}


def _or_text(written: CallFormat, several: bool, marks: Sequence[str]) -> Format:
    """Calls and nothing else, or any text that begins otherwise.

    Args:
        marks: special tokens that may stand before calls. A free text begins with none of them.
    """
    begins = {(written.begin or tag["begin"])[0] for tag in written.tags}
    text = {"type": "regex", "pattern": f"[ \\t\\r\\n]{{0,64}}({_other_than(begins | set(marks), _BLANK)})?"}
    return {"type": "or", "elements": [_only_calls(written, several), text]}


#: Blank characters, in a class of a regular expression: they do not decide how an answer begins.
_BLANK = r"\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ANY_TEXT = r"(.|\n)*"


def _other_than(begins: Collection[str], but: str = "") -> str:
    """A regular expression of texts that begin with none of ``begins``.

    Args:
        but: other characters with which they do not begin, as in a class.
    """
    rests: dict[str, set[str]] = {}
    for begin in begins:
        rests.setdefault(begin[0], set()).add(begin[1:])
    ways = [f"[^{''.join(map(re.escape, sorted(rests)))}{but}]{_ANY_TEXT}"]
    ways += [f"{re.escape(first)}({_other_than(rest)})?" for first, rest in sorted(rests.items()) if "" not in rest]
    return "|".join(ways)


def before(parser: type[ReasoningParser] | None, prompt_end: str) -> ReasoningFormat | None:
    """The reasoning that may stand before an answer which is held to something."""
    if parser is None or not issubclass(parser, ReasoningWriter):
        return None
    return parser.reasoning_format(prompt_end)


def format_of(spec: GrammarSpec) -> Format:
    """A grammar as a format of a structural tag.

    Raises:
        RequestError: its JSON is damaged.
    """
    if spec.kind == "regex":
        return {"type": "regex", "pattern": spec.text}
    if spec.kind == "lark":
        return {"type": "grammar", "grammar": spec.text}
    try:
        found = json.loads(spec.text)
    except ValueError as error:
        raise RequestError(f"the grammar is not valid JSON: {error}", "structured_outputs") from error
    if spec.kind == "json_schema":
        return {"type": "json_schema", "json_schema": found}
    if spec.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in found]}
    inner: Format = found.get("format", found)
    return inner
