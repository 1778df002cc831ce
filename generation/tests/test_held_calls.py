"""Calls that are forced: texts drawn from the grammars of each format alone, read by that format's own parser."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from evener.contracts.generation.parsed import CallArguments, CallStart, Content, Parsed, Reasoning
from evener.contracts.generation.parsers import ToolParser
from evener.contracts.grammar.library import GrammarSpec, Matcher
from evener.contracts.writing import CallFormat, CallWriter
from evener_conformance.tiny_tokenizer import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer
from evener_generation.harmony import HarmonyReasoning, HarmonyTools
from evener_generation.llguidance_grammars import LlguidanceLibrary
from evener_generation.reasoning.tags import BracketThink, Think
from evener_generation.tools.json_calls import Hermes, Llama3, Mistral
from evener_generation.tools.parameters import Glm4, Qwen3Coder
from evener_generation.tools.pythonic import Pythonic
from evener_generation.tools.sections import DeepSeekV3, DeepSeekV31, KimiK2

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8, "pattern": "^[A-Z][a-z]{1,6}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "exact": {"type": "boolean"},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["days", "unit"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "integer", "minimum": 0, "maximum": 90}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
LOOSE = {"type": "object", "properties": {"a": {"enum": [1, "x", None]}, "b": {"type": "null"}}}
FUNCTIONS: Mapping[str, Mapping[str, Any]] = {"get_weather": WEATHER, "now": EMPTY, "a_b.c1": LOOSE}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FUNCTIONS.items()]
KINDS: list[tuple[type[ToolParser], str]] = [
    (Hermes, ""), (Llama3, ""), (Mistral, ""), (Mistral, "[ARGS]"), (Qwen3Coder, ""), (Glm4, ""), (DeepSeekV3, ""),
    (DeepSeekV31, ""), (KimiK2, ""), (Pythonic, ""), (HarmonyTools, ""),
]  # fmt: skip
IDS = [f"{kind.__name__}{template}" for kind, template in KINDS]


def closing(text: bytes) -> list[str]:
    """What may come next of the marks that close a free text."""
    marks = ["\n</parameter>", "</arg_value>", ">"]
    sizes = [max(size for size in range(len(mark)) if text.endswith(mark[:size].encode())) for mark in marks]
    return [mark[size] for mark, size in zip(marks, sizes, strict=True) if size == max(sizes)]


class Texts:
    """A library, and texts of tokens that its masks allow."""

    def __init__(self, folder: Path, special: Sequence[str] = (), *, flagged: bool = True) -> None:
        path = write_tiny_tokenizer(folder) / "tokenizer.json"
        if special:
            whole = tokenizers.Tokenizer.from_file(str(path))
            (whole.add_special_tokens if flagged else whole.add_tokens)(list(special))
            whole.save(str(path))
        self.tokens = tokenizers.Tokenizer.from_file(str(path))
        self.size = VOCAB_SIZE + len(special)
        self.library = LlguidanceLibrary(path.read_text("utf-8"), self.size)

    def start(self, tag: Mapping[str, Any]) -> Matcher:
        spec = GrammarSpec(kind="structural_tag", text=json.dumps(tag), ends=(EOS_ID,))
        assert LlguidanceLibrary.problem(spec) is None
        return self.library.compile(spec)

    def allowed(self, matcher: Matcher) -> list[int]:
        bits = np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little")
        assert len(bits) == 32 * -(-self.size // 32)
        found = [int(each) for each in np.flatnonzero(bits)]
        assert found and found[-1] < self.size
        return found

    def drawn(self, matcher: Matcher, draw: random.Random, most: int = 20_000) -> str:
        """A text of random allowed tokens to its end; where it may end, or close a text, it mostly does."""
        ids: list[int] = []
        while len(ids) < most:
            allowed = self.allowed(matcher)
            if EOS_ID in allowed and (len(allowed) == 1 or draw.random() < 0.7):
                return self.text(ids)
            # Free text would else go on for thousands of tokens.
            near = [ord(each) for each in closing(bytes(each % 256 for each in ids[-16:]))]
            near = [each for each in near if each in allowed and len(allowed) > 120]
            token = draw.choice(near if near and draw.random() < 0.9 else [i for i in allowed if i != EOS_ID])
            matcher.accept(token)
            ids.append(token)
        raise AssertionError(f"no end after {most} tokens: {self.text(ids[:200])!r}")

    def text(self, ids: Sequence[int]) -> str:
        raw = b"".join(bytes([each]) if each < 256 else self.tokens.id_to_token(each).encode() for each in ids)
        return raw.decode("utf-8", "replace")

    def accepts(self, matcher: Matcher, text: str) -> str:
        """The part of a text that the masks allow, and an arrow where it must end."""
        for at, token in enumerate(ids := self.tokens.encode(text, add_special_tokens=False).ids):
            if token not in self.allowed(matcher):
                return self.text(ids[:at])
            matcher.accept(token)
        return text + (" →" if EOS_ID in self.allowed(matcher) else "")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(tmp_path_factory.mktemp("plain"))


def writes(kind: type[ToolParser], template: str = "") -> CallFormat:
    assert issubclass(kind, CallWriter)
    return kind.call_format(FUNCTIONS, template)


def forced(written: CallFormat) -> dict[str, Any]:
    """One or more calls, and nothing else."""
    tags = {
        "type": "tags_with_separator", "tags": written.tags, "separator": written.separator or "",
        "at_least_one": True, "stop_after_first": written.separator is None,
    }  # fmt: skip
    around = [{"type": "const_string", "value": text} for text in (written.begin, written.end)]
    return {"format": {"type": "sequence", "elements": [around[0], tags, around[1]]}}


def read(kind: type[ToolParser], pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls."""
    parser, calls, content = kind(TOOLS), list[tuple[str, str]](), ""
    before = HarmonyReasoning() if kind is HarmonyTools else None
    found: list[Parsed] = []
    for piece in pieces:
        parts = [Content(piece)] if before is None else before.feed(piece)
        found += [event for part in parts if isinstance(part, Content) for event in parser.feed(part.text)]
    rest = [] if before is None else before.finish()
    found += [event for part in rest if isinstance(part, Content) for event in parser.feed(part.text)]
    for event in [*found, *parser.finish()]:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        elif isinstance(event, Content):
            content += event.text
    return content, calls


def valid(name: str, value: dict[str, Any]) -> bool:
    """Whether arguments fit their function's schema."""
    if name == "get_weather":
        city, days, place = value.pop("city", "Paris"), value.pop("days"), value.pop("where", {"lat": 0})
        fits = re.fullmatch("[A-Z][a-z]{1,6}", city) and type(days) is int and 1 <= days <= 9
        return bool(
            fits and value.pop("unit") in ("celsius", "fahrenheit") and type(value.pop("exact", True)) is bool
            and place.keys() == {"lat"} and 0 <= place["lat"] <= 90 and not value
        )  # fmt: skip
    if name == "a_b.c1":
        return value.pop("a", 1) in (1, "x", None) and value.pop("b", None) is None and not value
    return name == "now" and not value


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "template"), KINDS, ids=IDS)
def test_whatever_a_forced_answer_is_its_parser_reads_valid_calls(
    plain: Texts, kind: type[ToolParser], template: str, count: int
) -> None:
    start = plain.start(forced(writes(kind, template)))
    seen = set()
    for seed in range(count):
        text = plain.drawn(start.copy(), random.Random(seed))
        content, calls = read(kind, [text])
        assert calls and not content, text
        for name, arguments in calls:
            seen.add(name)
            assert valid(name, json.loads(arguments)), text
        if seed < 2:
            assert read(kind, list(text)) == (content, calls), "the same, however it is cut"
            half = random.Random(seed).randrange(len(text))
            assert read(kind, [text[:half], text[half:]]) == (content, calls)
    assert count < 100 or seen == set(FUNCTIONS)


@pytest.mark.parametrize(("kind", "template"), KINDS, ids=IDS)
def test_marks_that_are_special_tokens_are_written_as_these(
    tmp_path: Path, kind: type[ToolParser], template: str
) -> None:
    texts = Texts(tmp_path, kind.special_tokens)
    matcher, draw, ids = texts.start(forced(writes(kind, template))), random.Random(3), list[int]()
    while EOS_ID not in (allowed := texts.allowed(matcher)) and len(ids) < 5_000:
        ids.append(draw.choice(allowed))
        matcher.accept(ids[-1])
    text = texts.text(ids)
    content, calls = read(kind, [text])
    assert calls and not content
    # As text, no mark is written.
    as_text = "".join(chr(each) if each < 128 else "\n" for each in ids)
    assert not [mark for mark in kind.special_tokens if mark in as_text]
    used = [mark for mark in kind.special_tokens if mark in text]
    assert len([each for each in ids if each >= VOCAB_SIZE]) >= len(used)


def test_marks_that_are_tokens_of_their_own_are_written_as_these_though_they_are_not_special(tmp_path: Path) -> None:
    """As in the tokenizers of Qwen 2.5 and 3, whose marks the library does not take for text either."""
    texts = Texts(tmp_path, ["<tool_call>", "</tool_call>"], flagged=False)
    matcher, draw, ids = texts.start(forced(writes(Hermes))), random.Random(3), list[int]()
    while EOS_ID not in (allowed := texts.allowed(matcher)) and len(ids) < 5_000:
        ids.append(draw.choice(allowed))
        matcher.accept(ids[-1])
    content, calls = read(Hermes, [texts.text(ids)])
    assert calls and not content and ids[0] == VOCAB_SIZE and ids[-1] == VOCAB_SIZE + 1


@pytest.mark.parametrize("kind", [Hermes, Qwen3Coder, Glm4])
def test_in_free_text_a_call_that_has_begun_is_held_to_its_schema(plain: Texts, kind: type[ToolParser]) -> None:
    written = writes(kind)
    tag = {"type": "triggered_tags", "triggers": [written.trigger], "tags": written.tags}
    start = plain.start({"format": tag})
    assert plain.accepts(start.copy(), "No call < here.") == "No call < here. →"
    begin = written.tags[1]["begin"]
    assert plain.accepts(start.copy(), f"Well: {begin}x") == f"Well: {begin}"
    assert plain.accepts(start.copy(), f"Well: {written.trigger}zzz").endswith(str(written.trigger))
    text = f"Well: {begin}"
    matcher = start.copy()
    assert plain.accepts(matcher, text) == text
    call = plain.drawn(matcher, random.Random(1))
    assert [name for name, _ in read(kind, [text + call])[1]][:1] == ["now"]


def test_other_special_tokens_are_text_and_a_trigger_may_be_one(tmp_path: Path) -> None:
    texts = Texts(tmp_path, ("[TOOL_CALLS]", "<|other|>"))
    written = Mistral.call_format(FUNCTIONS, "[ARGS]")
    tag = {"type": "triggered_tags", "triggers": [written.trigger], "tags": written.tags}
    start = texts.start({"format": tag})
    assert texts.accepts(start.copy(), "a<|other|>b") == "a<|other|>b →"
    assert texts.accepts(start.copy(), "a[TOOL_CALLS]n") == "a[TOOL_CALLS]n"
    assert texts.accepts(start.copy(), "a[TOOL_CALLS]x") == "a[TOOL_CALLS]"
    assert texts.accepts(start.copy(), "a[TOOL_CALLS]now[ARGS]{}, and") == "a[TOOL_CALLS]now[ARGS]{}, and →"


JSON = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 99}}


@pytest.mark.parametrize(
    ("reasoning", "text", "allowed"),
    [
        ({"begin": "", "end": "</think>"}, "so { it is</think>12", "so { it is</think>12 →"),
        ({"begin": "", "end": "</think>"}, "so</think>x", "so</think>"),
        ({"begin": "<think>", "end": "</think>"}, "12", "12 →"),
        ({"begin": "<think>", "end": "</think>"}, "<think>a</think>7", "<think>a</think>7 →"),
        ({"begin": "<think>", "end": "</think>"}, "<tank>", "<t"),
        ({"begin": "", "end": "</think>", "budget": 3}, "abcd", "abc"),
        ({"begin": "", "end": "</think>", "budget": 3}, "abc</think>5", "abc</think>5 →"),
        ({"begin": "", "end": "</think>", "budget": 4}, "ab</", "ab</"),
        ({"begin": "", "end": "</think>", "budget": 4}, "ab</think>5", "ab</think>5 →"),
        ({"begin": "", "end": "</think>", "budget": 0}, "</think>5", "</think>5 →"),
    ],
)
def test_reasoning_may_stand_before_an_answer_that_is_held(
    plain: Texts, reasoning: dict[str, Any], text: str, allowed: str
) -> None:
    assert plain.accepts(plain.start({"format": JSON, "reasoning": reasoning}), text) == allowed


def test_reasoning_with_a_budget_may_stand_before_any_answer(plain: Texts) -> None:
    start = plain.start({"reasoning": {"begin": "", "end": "</think>", "budget": 2}})
    assert plain.accepts(start.copy(), "ab</think> anything") == "ab</think> anything →"
    assert plain.accepts(start.copy(), "abc") == "ab"
    assert EOS_ID not in plain.allowed(start), "reasoning does not end the text"


def test_a_copy_of_a_matcher_with_reasoning_goes_its_own_way(plain: Texts) -> None:
    first = plain.start({"format": JSON, "reasoning": {"begin": "", "end": "</think>", "budget": 5}})
    first.accept(ord("a"))
    second = first.copy()
    assert plain.accepts(first, "</think>") == "</think>"
    assert ord("x") in plain.allowed(second) and plain.allowed(first) == [*range(ord("0"), ord("9") + 1)]


@pytest.mark.parametrize("kind", [Think, BracketThink])
def test_where_the_prompt_has_closed_the_reasoning_there_is_none(kind: type[Think]) -> None:
    opened, free = kind.reasoning_format(f"…{kind.opening}\n"), kind.reasoning_format("assistant\n")
    assert opened is not None and (opened.begin, opened.end) == ("", kind.closing)
    assert free is not None and free.begin == kind.opening
    assert kind.reasoning_format(f"{kind.opening}\n\n{kind.closing}\n\n") is None


def test_harmony_reasons_on_a_channel_before_its_call(plain: Texts) -> None:
    form = HarmonyReasoning.reasoning_format("<|start|>assistant")
    assert form is not None
    tag = forced(writes(HarmonyTools)) | {"reasoning": {"begin": form.begin, "end": form.end, "budget": 4}}
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    matcher = plain.start(tag)
    assert plain.accepts(matcher, text) == text, "the budget of four bytes ends where its end has begun"
    assert [name for name, _ in read(HarmonyTools, [text + plain.drawn(matcher, random.Random(1))])[1]]


ANALYSIS = "<|channel|>analysis<|message|>"


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(tmp_path_factory.mktemp("harmony"), HarmonyReasoning.special_tokens)


def harmony_answers() -> Iterator[dict[str, Any]]:
    """Held to a schema, to calls, and to nothing but a budget."""
    final = {"type": "sequence", "elements": [{"type": "const_string", "value": "<|channel|>final<|message|>"}, JSON]}
    yield {"format": final}
    yield forced(writes(HarmonyTools))
    yield {"format": {"type": "or", "elements": [forced(writes(HarmonyTools))["format"], final]}}


@pytest.mark.parametrize(
    ("route", "allowed"),
    [
        ("hm<|end|><|start|>assistant", "hm<|end|><|start|>assistant"),
        ("hm<|end|><|start|>user", "hm<|end|><|start|>"),
        ("hm<|end|><|channel|>final<|message|>free", "hm<|end|>"),
        ("hm<|end|><|end|><|start|>assistant", "hm<|end|>"),
        ("hm<|end|> <|start|>assistant", "hm<|end|>"),
        ("hm<|end|><|start|>assistant to=functions.x", "hm<|end|><|start|>assistant"),
        ("hm<|end|><|start|>assistant<|channel|>analysis<|message|>", "hm<|end|><|start|>assistant<|channel|>"),
        ("hm<|end|><|start|>assistant<|channel|>commentary<|message|>free",
         "hm<|end|><|start|>assistant<|channel|>"),
        ("hm<|start|>assistant<|channel|>final<|message|>free", "hm"),
        ("hm<|channel|>final<|message|>free", "hm"),
        ("hm<|message|>free", "hm"),
        ("hm<|return|>", "hm"),
        ("hm<|call|>", "hm"),
        ("a <| b |> <|ending", "a <| b |> <|ending"),
    ],
)  # fmt: skip
def test_no_route_out_of_the_reasoning_of_harmony_leads_past_the_grammar(
    harmony: Texts, route: str, allowed: str
) -> None:
    form = HarmonyReasoning.reasoning_format("<|start|>assistant")
    assert form is not None
    for tag in harmony_answers():
        matcher = harmony.start({**tag, "reasoning": {"begin": form.begin, "end": form.end}})
        found = harmony.accepts(matcher, ANALYSIS + route)
        rest = found.removeprefix(ANALYSIS + allowed)
        # Where both answers are allowed, or calls only, the channel's name may begin.
        assert found.startswith(ANALYSIS + allowed) and rest in ("", "commentary"), found


@pytest.mark.parametrize("mark", HarmonyReasoning.special_tokens)
def test_reasoning_of_harmony_has_no_mark_as_text(harmony: Texts, mark: str) -> None:
    """The parser reads texts, so a mark in other tokens would be one."""
    form = HarmonyReasoning.reasoning_format("<|start|>assistant")
    assert form is not None
    for tag in harmony_answers():
        matcher = harmony.start({**tag, "reasoning": {"begin": form.begin, "end": form.end, "budget": 30}})
        assert harmony.accepts(matcher, ANALYSIS) == ANALYSIS
        for byte in mark[:-1].encode():
            assert byte in harmony.allowed(matcher)
            matcher.accept(byte)
        assert ord(">") not in harmony.allowed(matcher) and ord("x") in harmony.allowed(matcher)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_answers_of_harmony_are_reasoning_and_what_the_grammar_holds(harmony: Texts, seed: int) -> None:
    form, draw = HarmonyReasoning.reasoning_format("<|start|>assistant"), random.Random(seed)
    assert form is not None
    tag = [*harmony_answers()][seed % 3]
    matcher = harmony.start({**tag, "reasoning": {"begin": form.begin, "end": form.end, "budget": 20}})
    ids: list[int] = []
    while EOS_ID not in (allowed := harmony.allowed(matcher)) and len(ids) < 5_000:
        special = [each for each in allowed if each >= VOCAB_SIZE]
        ids.append(draw.choice(special if special and draw.random() < 0.5 else allowed))
        matcher.accept(ids[-1])
    parser = HarmonyReasoning("<|start|>assistant")
    found = [*parser.feed(harmony.text(ids)), *parser.finish()]
    content = "".join(each.text for each in found if isinstance(each, Content))
    assert re.fullmatch("[0-9]{1,2}", content) or read(HarmonyTools, [harmony.text(ids)])[1], harmony.text(ids)


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ([1], "JSON object"),
        ({"type": "tag", "begin": "a", "content": {"type": "what"}, "end": "b"}, "no format 'what'"),
        ({"type": "tag", "content": JSON, "end": "b"}, "begin"),
        ({"type": "sequence", "elements": []}, "no elements"),
        ({"type": "json_schema", "json_schema": 5}, "json_schema"),
        ({"type": "regex", "pattern": "(a"}, "unclosed"),
        ({"type": "triggered_tags", "triggers": ["<x>"], "tags": [{"begin": "<y>", "content": JSON, "end": ""}]},
         "no tag begins"),
        ({"reasoning": {"end": ""}}, "'end'"),
        ({"type": "grammar", "grammar": "root ::= ("}, "expect"),
    ],
)  # fmt: skip
def test_structural_tags_that_are_none_are_refused_with_the_reason(tag: Any, said: str) -> None:
    problem = LlguidanceLibrary.problem(GrammarSpec(kind="structural_tag", text=json.dumps(tag), ends=(EOS_ID,)))
    assert problem is not None and said.lower() in problem.lower()


def test_names_that_a_format_cannot_write_are_an_error() -> None:
    schema = {"type": "object", "properties": {"a>b": {"type": "string"}}}
    for kind in (Qwen3Coder, Glm4):
        with pytest.raises(ValueError, match="a>b"):
            kind.call_format({"f": schema}, "")
    with pytest.raises(ValueError, match="no name in Python"):
        Pythonic.call_format({"get-weather": EMPTY}, "")


def test_deeply_nested_tags_are_refused() -> None:
    tag: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(40):
        tag = {"type": "optional", "content": tag}
    problem = LlguidanceLibrary.problem(GrammarSpec(kind="structural_tag", text=json.dumps(tag)))
    assert problem is not None and "inside each other" in problem


@pytest.mark.parametrize(
    ("tag", "pattern"),
    [
        ({"type": "regex", "pattern": "a/b[0-9]{2}\\/"}, "a/b[0-9]{2}/"),
        ({"type": "grammar", "grammar": 'root ::= "x" y y\ny ::= [a-c]'}, "x[a-c]{2}"),
        ({"type": "grammar", "grammar": 'start: "x" Y\nY: /[a-c]/'}, "x[a-c]"),
        ({"type": "or", "elements": [{"type": "const_string", "value": "a\n"}, JSON]}, "a\n|[0-9]{1,2}"),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": [">", "!"]}, "(?s)<.*?[>!]"),
        ({"type": "tags_with_separator", "tags": [{"begin": "[", "content": JSON, "end": "]"}], "separator": ", "},
         r"(\[[0-9]+\](, \[[0-9]+\])*)?"),
    ],
)  # fmt: skip
def test_formats_of_structural_tags(plain: Texts, tag: dict[str, Any], pattern: str) -> None:
    start = plain.start({"format": tag})
    for seed in range(5):
        text = plain.drawn(start.copy(), random.Random(seed))
        assert re.fullmatch(pattern, text), text


def test_gbnf_is_read_where_lark_is(plain: Texts) -> None:
    spec = GrammarSpec(kind="lark", text='root ::= "yes" | "no"', ends=(EOS_ID,))
    assert LlguidanceLibrary.problem(spec) is None
    assert {plain.drawn(plain.library.compile(spec), random.Random(seed)) for seed in range(9)} == {"yes", "no"}


def test_reasoning_is_not_lost_on_the_way() -> None:
    found = [*HarmonyReasoning().feed("<|channel|>analysis<|message|>a<|end|>")]
    assert found == [Reasoning("a")]
