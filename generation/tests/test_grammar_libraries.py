"""Grammars: texts of tokens that are drawn from the masks alone, and grammars that nobody should have to wait for."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from evener.contracts.grammar.library import GrammarLibrary, GrammarSpec, Matcher
from evener_conformance.tiny_tokenizer import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer
from evener_generation import xgrammar_grammars
from evener_generation.forbidden_tokens import ForbiddenTokens
from evener_generation.grammar_texts import MAX_CHARACTERS
from evener_generation.llguidance_grammars import LlguidanceLibrary
from evener_generation.xgrammar_grammars import XgrammarLibrary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return (folder / "tokenizer.json").read_text("utf-8")


@pytest.fixture(scope="module", params=[LlguidanceLibrary, XgrammarLibrary])
def library(request: pytest.FixtureRequest, tokenizer: str) -> GrammarLibrary:
    found: GrammarLibrary = request.param(tokenizer, VOCAB_SIZE)
    return found


def spec(kind: Any, text: Any) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text if isinstance(text, str) else json.dumps(text), ends=(EOS_ID,))


def allowed(matcher: Matcher) -> list[int]:
    """The ids of the mask."""
    bits = np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little")
    assert bits.size == -(-VOCAB_SIZE // 32) * 32
    found = [int(each) for each in np.flatnonzero(bits)]
    assert found and found[-1] < VOCAB_SIZE, "a text that can neither go on nor end"
    return found


def drawn(matcher: Matcher, draw: random.Random, most: int = 20_000) -> str:
    """A text of random allowed tokens, to its end."""
    ids: list[int] = []
    while len(ids) < most:
        token = draw.choice(allowed(matcher))
        if token == EOS_ID:
            return bytes(ids).decode("utf-8", "replace")  # as answers are; xgrammar allows halves of surrogate pairs
        matcher.accept(token)
        ids.append(token)
    raise AssertionError(f"no end after {most} tokens: {bytes(ids[:200])!r}")


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with the keywords that ``fits`` knows."""
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = draw.choice(leaves if depth > 2 else [*leaves, "object", "object", "array", "anyOf", "ref"])
    if kind == "object":
        names = draw.sample(["a", "b", "long name", 'quo"te', "é", "$x"], draw.randint(0, 4))
        required = [name for name in names if draw.random() < 0.6]
        properties = {name: random_schema(draw, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = draw.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(draw, depth + 1),
            "minItems": low,
            "maxItems": low + draw.randint(0, 3),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    if kind == "ref":
        return {"$ref": "#/$defs/leaf"}
    if kind == "enum":
        return {"enum": draw.sample(["x", "y z", 1, -2.5, True, None], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(["only", 7, False])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-c]{2,5}$", r"^\d{4}-\d{2}$", "^(yes|no)$"])}
    if kind == "string":
        low = draw.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 9)}
    if kind == "integer":
        low = draw.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
    return {"type": kind}


def fits(value: Any, schema: dict[str, Any], leaf: dict[str, Any]) -> bool:
    """Whether a document is valid."""
    if "$ref" in schema:
        return fits(value, leaf, leaf)
    if "anyOf" in schema:
        return any(fits(value, each, leaf) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in options)
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(fits(each, known[name], leaf) for name, each in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(fits(each, schema["items"], leaf) for each in value)
            )
        case "string":
            low, high = schema.get("minLength", 0), schema.get("maxLength", 1 << 30)
            return (
                isinstance(value, str)
                and low <= len(value) <= high
                and re.search(schema.get("pattern", ""), value) is not None
            )
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "number":
            return type(value) in (int, float)
        case "boolean":
            return isinstance(value, bool)
    return value is None


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_texts_of_random_allowed_tokens_fit_random_schemas_and_end(library: GrammarLibrary, count: int) -> None:
    for seed in range(count):
        draw = random.Random(seed)
        leaf = {"type": "integer", "minimum": 0, "maximum": 9}
        schema = random_schema(draw)
        text = drawn(library.compile(spec("json_schema", {**schema, "$defs": {"leaf": leaf}})), draw)
        assert fits(json.loads(text), schema, leaf), (seed, schema, text)


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[0-9]{3}-[a-z]{2}", r"[0-9]{3}-[a-z]{2}"),
        ("choice", ["yes", "no", 'a "quoted"\\\n text', "é"], 'yes|no|a "quoted"\\\\\\n text|é'),
        ("lark", 'start: "(" NUMBER ")" | "x" start\nNUMBER: /[0-9]{1,3}/', r"x*\([0-9]{1,3}\)"),
    ],
)
def test_texts_of_random_allowed_tokens_follow_other_grammars(
    library: GrammarLibrary, kind: str, text: Any, pattern: str
) -> None:
    draw, start = random.Random(1), library.compile(spec(kind, text))
    found = {drawn(start.copy(), draw) for _ in range(30)}
    assert all(re.fullmatch(pattern, each) for each in found) and len(found) > 1


def test_the_end_is_allowed_exactly_where_the_text_is_complete(library: GrammarLibrary) -> None:
    matcher = library.compile(spec("choice", ["ab", "abc"]))
    seen = []
    for token in b"abc":
        seen.append(allowed(matcher))
        matcher.accept(token)
    assert [*seen, allowed(matcher)] == [[97], [98], [99, EOS_ID], [EOS_ID]]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 287, 288, 289, 320])
def test_a_mask_has_a_bit_for_each_id_of_the_model(tmp_path: Path, vocab_size: int) -> None:
    tokenizer = (write_tiny_tokenizer(tmp_path) / "tokenizer.json").read_text("utf-8")
    matcher = LlguidanceLibrary(tokenizer, vocab_size).compile(spec("regex", ".*"))
    mask = matcher.mask()
    assert len(mask) == 4 * -(-vocab_size // 32) == len(matcher.copy().mask())
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any(), "an id without a token is allowed"


def test_a_copy_goes_its_own_way(library: GrammarLibrary) -> None:
    first = library.compile(spec("choice", ["ax", "by"]))
    second = first.copy()
    first.accept(ord("a"))
    second.accept(ord("b"))
    assert (allowed(first), allowed(second)) == ([ord("x")], [ord("y")])


def test_the_mask_of_a_step_is_not_copied_until_the_text_goes_on(library: GrammarLibrary) -> None:
    matcher = library.compile(spec("choice", ["ab", "cd"]))
    kept, (sent,) = matcher.mask(), matcher.masks([])
    assert isinstance(kept, bytes) and sent == kept
    other = matcher.copy()
    other.accept(ord("a"))
    assert other.masks([])[0] != sent == kept, "two texts share memory"
    matcher.accept(ord("c"))
    assert matcher.masks([])[0] == matcher.mask() != kept
    assert matcher.masks([ord("d")])[0] == matcher.mask(), "the mask behind a proposed token is written over it"


def test_a_wrong_token_is_found_at_the_next_mask(library: GrammarLibrary) -> None:
    matcher = library.compile(spec("choice", ["ab"]))
    matcher.accept(ord("z"))
    with pytest.raises(ValueError):
        matcher.mask()


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type": "string', "EOF|Unterminated"),
        ("json_schema", {"type": "strin"}, "strin"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"$ref": "#/$defs/absent"}, "absent"),
        ("json_schema", "1" * (MAX_CHARACTERS + 1), "characters"),
        ("regex", "(a", "unclosed|not closed"),
        ("regex", "a(?=b)", "look-around|Lookahead"),
        ("lark", "start: absent", "absent"),
        ("choice", [], "choices"),
        ("choice", [""], "choices"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(
    library: GrammarLibrary, kind: str, text: Any, said: str
) -> None:
    problem = library.problem(spec(kind, text))
    assert problem is not None and re.search(said, problem, re.IGNORECASE) and "\n" not in problem
    with pytest.raises(ValueError, match=said):
        library.compile(spec(kind, text))


@pytest.mark.parametrize(
    "text", ["(a{1000}){1000}", pytest.param("((a{100}){100}){100}", marks=pytest.mark.slow), "(.*a){200}b"]
)
def test_a_regular_expression_that_blows_up_ends_soon(library: GrammarLibrary, text: str) -> None:
    start = time.process_time()
    try:
        matcher = library.compile(spec("regex", text))
        for _ in range(20):
            matcher.mask()
            matcher.accept(ord("a"))
    except ValueError:
        pass  # refused; the time is what counts
    assert time.process_time() - start < 10


def test_a_schema_that_refers_to_itself_can_be_used(library: GrammarLibrary) -> None:
    tree = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    text = drawn(library.compile(spec("json_schema", tree)), random.Random(2))
    assert isinstance(json.loads(text), list)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"properties": {"a": {"type": "string"}}}, "properties"),
        ({"type": "object", "properties": {"a": {"oneOf": [{}, {}]}}}, "oneOf"),
        ({"anyOf": [{"type": "string"}], "maxLength": 3}, "maxLength"),
        ({"type": "integer", "enum": [1, "x"]}, "type"),
        ({"type": "integer", "enum": 5}, "type"),
        ({"type": ["string", "null"], "enum": ["x", None]}, "type"),
        ({"type": ["string", "null"], "maxLength": 3}, "maxLength"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "minLength"),
        ({"type": "string", "pattern": 'say "x"'}, "cannot escape"),
        ({"type": "array", "items": {"not": {}}}, "not"),
    ],
)
def test_keywords_that_xgrammar_would_ignore_are_refused_in_schemas_and_tags(schema: Any, said: str) -> None:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    for asked in (spec("json_schema", schema), spec("structural_tag", tag)):
        problem = XgrammarLibrary.problem(asked)
        assert problem is not None and said in problem and "generation.grammars=llguidance" in problem


def test_a_grammar_of_too_many_states_for_xgrammar_is_refused_before_a_model_compiles_it() -> None:
    ways = "|".join(f"[a-z]{{{count}}}[0-9]{{{count}}}" for count in range(1, 200))
    problem = XgrammarLibrary.problem(spec("regex", f"({ways}){{1,40}}"))
    assert problem is not None and re.search(r"it takes [\d.]+ MiB, and at most 4 MiB are allowed; use fewer", problem)
    form = {f"field {i}": {"type": ["string", "number", "boolean"][i % 3]} for i in range(200)}
    assert XgrammarLibrary.problem(spec("json_schema", {"type": "object", "properties": form})) is None


def test_a_grammar_that_takes_too_much_memory_with_a_models_tokens_is_not_kept(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xgrammar_grammars, "_MOST_BYTES", 1 << 20)
    library = XgrammarLibrary(tokenizer, VOCAB_SIZE)
    library.compile(spec("regex", "a"))
    with pytest.raises(ValueError, match=r"MiB, and at most 1 MiB are allowed"):
        library.compile(spec("regex", "|".join(f"[a-z]{{{count}}}[0-9]{{{count}}}" for count in range(1, 100))))


def test_a_text_ends_where_xgrammar_takes_too_long_for_a_step(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = XgrammarLibrary(tokenizer, VOCAB_SIZE).compile(spec("regex", "(.|a|.*){1,300}b"))
    assert matcher.mask()
    monkeypatch.setattr(xgrammar_grammars, "_MOST_SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"a step of it took more than 0\.01 s; make it simpler"):
        for _ in range(60):
            matcher.accept(ord("a"))
            matcher.mask()


def test_a_schema_that_nothing_fits_ends_its_text(tokenizer: str) -> None:
    matcher = XgrammarLibrary(tokenizer, VOCAB_SIZE).compile(spec("json_schema", {"$ref": "#"}))
    with pytest.raises(ValueError, match="no token may follow"):
        matcher.mask()


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_json_may_be_indented_but_has_no_empty_lines(tokenizer: str, indent: int | str | None) -> None:
    """A model that may write empty lines spends its tokens on them."""
    library = LlguidanceLibrary(tokenizer, VOCAB_SIZE)
    text = json.dumps({"a": [1, {"b": None}], "c": "x"}, indent=indent)
    for schema in ({"type": "object"}, {}):
        matcher = library.compile(spec("json_schema", schema))
        assert matcher.fitting(list(text.encode())) == len(text)
        assert matcher.fitting(list(b'{\n\n"a": 1}')) == 2
        assert matcher.fitting(list(b'{"a":   1}')) == 6


@pytest.mark.slow
def test_masks_of_a_text_of_limited_length_are_soon_made(smollm2_dir: Path) -> None:
    text = (smollm2_dir / "tokenizer.json").read_text("utf-8")
    words = json.loads(text)["model"]["vocab"]
    asked = replace(spec("json_schema", {"type": "string", "maxLength": 200}), ends=(2,))
    matcher = XgrammarLibrary(text, len(words)).compile(asked)
    began = time.thread_time()
    for token in ('"', *("Hello", "\u0120there", "\u0120friend") * 3):
        matcher.mask()
        matcher.accept(words[token])
    assert time.thread_time() - began < 0.5, "it was some 3 s with a choice between characters and escapes"


def test_structural_tags_hold_with_either_library_and_special_tokens_come_only_where_a_tag_names_them(
    library: GrammarLibrary,
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    start, draw = library.compile(spec("structural_tag", tag)), random.Random(1)
    for _ in range(20):
        text = drawn(start.copy(), draw)
        assert text.startswith("<f>") and text.endswith("</f>") and json.loads(text[3:-4])["a"] in (1, 2)


def test_no_forbidden_sequence_is_completed_whatever_came_before() -> None:
    draw = random.Random(3)
    for _ in range(60):
        ids = range(draw.randint(2, 4))
        sequences = [[draw.choice(ids) for _ in range(draw.randint(1, 5))] for _ in range(draw.randint(1, 6))]
        matcher: Matcher = ForbiddenTokens([*sequences, [7, 70]], 70)
        text: list[int] = []
        for _ in range(60):
            mask = np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little")
            found = [int(each) for each in np.flatnonzero(mask)]
            wrong = {
                each[-1] for each in sequences if len(each) <= len(text) + 1 and [*text, each[-1]][-len(each) :] == each
            }
            assert found == sorted(set(range(70)) - wrong), (sequences, text)
            text.append(draw.choice([each for each in found if each in ids] or found))
            copied = matcher.copy()
            matcher.accept(text[-1])
            copied.accept(69)
        assert len(text) == 60


def test_a_grammar_is_kept_to_without_its_forbidden_sequences(library: GrammarLibrary) -> None:
    forbidden = (tuple(b"ab"), tuple(b"c"))
    draw = random.Random(1)
    for kind, text in (("regex", "[a-d]{20}"), ("any", "")):
        matcher = library.compile(replace(spec(kind, text), forbidden=forbidden))
        ids: list[int] = []
        while len(ids) < 20:
            token = draw.choice([each for each in allowed(matcher) if each in set(b"abcd")])
            matcher.accept(token)
            ids.append(token)
        assert b"ab" not in bytes(ids) and b"c" not in bytes(ids) and b"a" in bytes(ids)
        assert EOS_ID in allowed(matcher)
    assert library.problem(replace(spec("any", ""), forbidden=forbidden)) is None


def test_a_grammar_whose_only_way_is_forbidden_says_so(library: GrammarLibrary) -> None:
    matcher = library.compile(replace(spec("regex", "abc"), forbidden=(tuple(b"abc"),)))
    for token in b"ab":
        assert allowed(matcher) == [token]
        matcher.accept(token)
    with pytest.raises(ValueError, match="forbidden word"):
        matcher.mask()
