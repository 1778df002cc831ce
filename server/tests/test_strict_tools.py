"""Strict tools under ``tool_choice=auto``: hostile models, which draw any token that the grammar leaves them.

A free answer stays possible, and whatever a model writes behind a call's mark is read as calls that fit their schemas.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from evener.contracts.generation.parsed import CallArguments, CallStart, Content, Parsed
from evener.contracts.generation.parsers import ToolParser
from evener.contracts.grammar.library import GrammarLibrary, GrammarSpec, Matcher
from evener_conformance.tiny_tokenizer import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer
from evener_generation.harmony import HarmonyReasoning, HarmonyTools
from evener_generation.llguidance_grammars import LlguidanceLibrary
from evener_generation.tools.json_calls import Hermes, Llama3, Mistral
from evener_generation.tools.parameters import Glm4, Qwen3Coder
from evener_generation.tools.pythonic import Pythonic
from evener_generation.tools.sections import DeepSeekV3, DeepSeekV31, KimiK2
from evener_generation.xgrammar_grammars import XgrammarLibrary
from evener_server.held import held_to
from evener_server.tools import Function, Tool, ToolChoice

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
}
WEATHER = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["days"],
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
#: Parser, template, what a model may write before calls, and their mark.
FORMATS: dict[str, tuple[type[ToolParser], str, str, str]] = {
    "hermes": (Hermes, "", "Well, {[ ", "<tool_call>"),
    "qwen3_coder": (Qwen3Coder, "", "Well, {[ ", "<tool_call>"),
    "glm4": (Glm4, "", "Well, {[ ", "<tool_call>"),
    "mistral": (Mistral, "", "Well, {[ ", "[TOOL_CALLS]"),
    "mistral_args": (Mistral, "[ARGS]", "Well, {[ ", "[TOOL_CALLS]"),
    "deepseek_v3": (DeepSeekV3, "", "Well, {[ ", DeepSeekV3.section[0]),
    "deepseek_v31": (DeepSeekV31, "", "Well, {[ ", DeepSeekV31.section[0]),
    "kimi_k2": (KimiK2, "", "Well, {[ ", KimiK2.section[0]),
    "harmony": (HarmonyTools, "", "<|channel|>commentary ", "to=functions."),
    "llama3": (Llama3, "", "", "{"),
    "pythonic": (Pythonic, "", "", "["),
}
LIBRARIES: list[type[GrammarLibrary]] = [LlguidanceLibrary, XgrammarLibrary]


def tools_of(functions: Mapping[str, Any], strict: bool = True) -> list[Tool]:
    return [
        Tool(type="function", function=Function(name=name, parameters=schema, strict=strict))
        for name, schema in functions.items()
    ]


class Model:
    """A model with a token for each byte, and one for each of the format's special tokens, if there are any."""

    def __init__(self, folder: Path, name: str, library: type[GrammarLibrary], *, special: bool = False) -> None:
        path = write_tiny_tokenizer(folder) / "tokenizer.json"
        self.kind, self.template, _, _ = FORMATS[name]
        marks = list(self.kind.special_tokens) if special else []
        whole = tokenizers.Tokenizer.from_file(str(path))
        whole.add_special_tokens(marks)
        whole.save(str(path))
        self._marks = {VOCAB_SIZE + at: mark.encode() for at, mark in enumerate(marks)}
        self._tokens, self._size = whole, VOCAB_SIZE + len(marks)
        self._type, self._library = library, library(path.read_text("utf-8"), self._size)

    def start(self, tools: list[Tool], several: bool = True) -> Matcher:
        held = held_to(tools, ToolChoice(), self.kind, self.template, several, None, None)
        assert not held.loose and held.calls is not None
        grammar = held.spec(None)
        assert grammar is not None
        spec = GrammarSpec(kind=grammar.kind, text=grammar.text, ends=(EOS_ID,))
        assert self._type.problem(spec) is None
        return self._library.compile(spec)

    def allowed(self, matcher: Matcher) -> list[int]:
        bits = np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little")
        return [int(each) for each in np.flatnonzero(bits)]

    def writes(self, matcher: Matcher, text: str) -> str:
        """The part of a text that the grammar allows, and an arrow where the answer may end there."""
        ids = self._tokens.encode(text, add_special_tokens=False).ids
        for at, token in enumerate(ids):
            if token not in self.allowed(matcher):
                return self.text(ids[:at])
            matcher.accept(token)
        return text + (" →" if EOS_ID in self.allowed(matcher) else "")

    def drawn(self, matcher: Matcher, draw: random.Random, most: int = 5_000) -> str:
        """Any tokens that the grammar leaves, up to the first place where the answer may end, or a little further."""
        ids: list[int] = []
        while len(ids) < most:
            allowed = self.allowed(matcher)
            assert allowed
            if EOS_ID in allowed and (len(allowed) == 1 or draw.random() < 0.7):
                return self.text(ids)
            ids.append(draw.choice([each for each in allowed if each != EOS_ID]))
            matcher.accept(ids[-1])
        raise AssertionError(f"no end after {most} tokens: {self.text(ids[:300])!r}")

    def text(self, ids: list[int]) -> str:
        return b"".join(self._marks.get(each) or bytes([each]) for each in ids).decode("utf-8", "replace")

    def calls(self, text: str, functions: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """What the format's own parser reads."""
        tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in functions.items()]
        parser, parts = self.kind(tools), [text]
        if self.kind is HarmonyTools:
            before = HarmonyReasoning()
            parts = [each.text for each in [*before.feed(text), *before.finish()] if isinstance(each, Content)]
        found: list[Parsed] = [each for part in parts for each in parser.feed(part)]
        calls: list[tuple[str, str]] = []
        for each in [*found, *parser.finish()]:
            if isinstance(each, CallStart):
                calls.append((each.name, ""))
            elif isinstance(each, CallArguments):
                calls[-1] = (calls[-1][0], calls[-1][1] + each.text)
        return [(name, json.loads(arguments)) for name, arguments in calls]


FUNCTIONS = {"get_weather": WEATHER, "now": NOW}


def functions_of(name: str, library: type[GrammarLibrary]) -> dict[str, Any]:
    """With a pattern, or without where xgrammar refuses it."""
    if library is LlguidanceLibrary or name not in ("qwen3_coder", "glm4"):
        return FUNCTIONS
    return {
        "get_weather": {**WEATHER, "properties": {**PROPERTIES, "city": {"type": "string", "const": "Paris"}}},
        "now": NOW,
    }


def valid(name: str, value: dict[str, Any]) -> bool:
    if name == "now":
        return value == {}
    city, unit, days = value.pop("city", "Paris"), value.pop("unit", "celsius"), value.pop("days")
    fits = re.fullmatch("[A-Z][a-z]{1,6}", city) and unit in ("celsius", "fahrenheit")
    return bool(name == "get_weather" and fits and type(days) is int and 1 <= days <= 9 and not value)


@pytest.mark.parametrize("special", [pytest.param(False, marks=pytest.mark.slow), True], ids=["text", "tokens"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FORMATS)
def test_behind_a_calls_mark_a_hostile_model_can_only_write_valid_calls(
    tmp_path: Path, name: str, library: type[GrammarLibrary], special: bool
) -> None:
    model = Model(tmp_path, name, library, special=special)
    _, _, head, mark = FORMATS[name]
    start = model.start(tools_of(functions_of(name, library)))
    for seed in range(6):
        matcher = start.copy()
        assert model.writes(matcher, head + mark).startswith(head + mark), "a call may begin"
        text = head + mark + model.drawn(matcher, random.Random(seed))
        calls = model.calls(text, FUNCTIONS)
        assert calls and all(valid(*call) for call in calls), text


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_free_answer_stays_possible(tmp_path: Path, name: str, library: type[GrammarLibrary]) -> None:
    model = Model(tmp_path, name, library, special=True)
    for several in (True, False):
        start = model.start(tools_of(functions_of(name, library)), several)
        for text in ("", "It rains.", " \nIt is < 5 {1} [2] \n", "é", "<b"):
            told = ("<|channel|>final<|message|>" if name == "harmony" else "") + text
            assert model.writes(start.copy(), told) == f"{told} →"


#: Two calls as each format writes them, which the mark and what stands before it begin.
TWO = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n' * 2,
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>\n" * 2,
    "glm4": "<tool_call>now\n</tool_call>\n" * 2,
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]now[ARGS]{}" * 2,
    "deepseek_v3": DeepSeekV3.section[0]
    + "\n".join([f"{DeepSeekV3.call[0]}function{DeepSeekV3.separator}now\n```json\n{{}}\n```{DeepSeekV3.call[1]}"] * 2)
    + DeepSeekV3.section[1],
    "deepseek_v31": DeepSeekV31.section[0]
    + f"{DeepSeekV31.call[0]}now{DeepSeekV31.separator}{{}}{DeepSeekV31.call[1]}" * 2
    + DeepSeekV31.section[1],
    "kimi_k2": KimiK2.section[0]
    + "".join(f"{KimiK2.call[0]}functions.now:{at}{KimiK2.separator}{{}}{KimiK2.call[1]}" for at in (0, 1))
    + KimiK2.section[1],
    "harmony": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>" * 2,
    "llama3": '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
    "pythonic": "[now(), now()]",
}


@pytest.mark.parametrize("name", TWO)
def test_an_answer_has_two_calls_unless_the_client_wants_one_at_most(tmp_path: Path, name: str) -> None:
    model = Model(tmp_path, name, LlguidanceLibrary, special=True)
    tools, text = tools_of({"now": NOW}), TWO[name]
    assert model.calls(text, {"now": NOW}) == [("now", {})] * 2
    assert model.writes(model.start(tools), text) == f"{text} →"
    one = model.writes(model.start(tools, several=False), text)
    assert one != f"{text} →" and len(model.calls(one, {"now": NOW})) <= 1


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_of_a_mark_that_is_a_token_does_not_begin_a_call_that_is_free(tmp_path: Path, name: str) -> None:
    """A parser reads both alike: the text is refused, or begins a call as well."""
    kind, _, head, mark = FORMATS[name]
    model = Model(tmp_path, name, LlguidanceLibrary, special=True)
    matcher = model.start(tools_of(FUNCTIONS))
    model.writes(matcher, head)
    *most, last = mark.encode()
    for token in most:
        assert token in model.allowed(matcher)
        matcher.accept(token)
    assert (last in model.allowed(matcher)) == (mark not in kind.special_tokens)
    if mark not in kind.special_tokens:
        matcher.accept(last)
        assert EOS_ID not in model.allowed(matcher), "the call has begun"


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_that_is_not_strict_may_be_called_with_any_arguments(tmp_path: Path, name: str) -> None:
    model = Model(tmp_path, name, LlguidanceLibrary)
    tools = [*tools_of({"now": NOW}), *tools_of({"f": {"type": "object", "properties": {"a": {}}}}, strict=False)]
    calls = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "glm4": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "pythonic": "[f(a=1)]",
    }
    text = calls.get(name) or TWO[name].replace("now", "f", 1).replace("{}", '{"a": 1}', 1)
    assert model.writes(model.start(tools), text) == f"{text} →"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4"])
@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"minLength": 3, "maxLength": 5}, r"(?s).{3,5}"),
        ({"maxLength": 3}, r"(?s).{0,3}"),
        ({"pattern": "^a[0-9]$|^b", "maxLength": 4}, r"(?s)a[0-9]|b.{0,3}"),
        ({"pattern": "x[|]y", "maxLength": 9}, r"(?s).*x[|]y.*"),
        ({"const": "a < b"}, "a < b"),
    ],
)
def test_texts_without_quotes_are_held_to_their_pattern_and_length(
    tmp_path: Path, name: str, schema: dict[str, Any], fits: str
) -> None:
    functions = {"f": {"type": "object", "properties": {"t": {"type": "string", **schema}}, "required": ["t"]}}
    model = Model(tmp_path, name, LlguidanceLibrary)
    start = model.start(tools_of(functions), several=False)
    for seed in range(10):
        matcher = start.copy()
        model.writes(matcher, "<tool_call>")
        text = "<tool_call>" + model.drawn(matcher, random.Random(seed))
        [(_, arguments)] = model.calls(text, functions)
        value = arguments["t"]
        assert re.fullmatch(fits, value) and len(value) <= schema.get("maxLength", 5), text


def test_xgrammar_refuses_a_pattern_of_a_text_without_quotes_and_says_what_to_do() -> None:
    held = held_to(tools_of(FUNCTIONS), ToolChoice(), Qwen3Coder, "", True, None, None)
    spec = held.spec(None)
    assert spec is not None
    problem = XgrammarLibrary.problem(spec)
    assert problem is not None and "pattern" in problem and "generation.grammars=llguidance" in problem


def test_a_text_of_a_call_has_none_of_the_marks_at_which_its_parser_ends_it(tmp_path: Path) -> None:
    functions = {"f": {"type": "object", "properties": {"t": {"type": "string"}}}}
    model = Model(tmp_path, "qwen3_coder", LlguidanceLibrary)
    begin = "<tool_call>\n<function=f>\n<parameter=t>\na"
    for mark in ("<parameter=", "</function>", "</parameter>"):
        written = model.writes(model.start(tools_of(functions)), f"{begin} {mark}")
        assert written == f"{begin} {mark[:-1]}"
