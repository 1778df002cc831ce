"""Masks behind proposed tokens: those of a copy that takes one token at a time, with no trace in the state."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from evener_constraints.no_repeats import NoRepeats, PromptSequences
from llguidance import LLParserLimits

from evener.contracts.grammar.library import GrammarSpec, Matcher
from evener_conformance.tiny_tokenizer import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer
from evener_generation import llguidance_grammars
from evener_generation.forbidden_tokens import ForbiddenTokens
from evener_generation.llguidance_grammars import LlguidanceLibrary
from evener_generation.proposed_tokens import masks_behind
from evener_generation.xgrammar_grammars import XgrammarLibrary

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "bc": {"enum": ["x", "yz"]}}, "required": ["bc"]}
REASONED = {"reasoning": {"begin": "", "end": "</t>", "budget": 12}, "format": {"type": "regex", "pattern": "[a-c]{9}"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return (write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json").read_text("utf-8")


@pytest.fixture(scope="module")
def library(tokenizer: str) -> LlguidanceLibrary:
    return LlguidanceLibrary(tokenizer, VOCAB_SIZE)


@pytest.fixture(scope="module")
def other(tokenizer: str) -> XgrammarLibrary:
    return XgrammarLibrary(tokenizer, VOCAB_SIZE)


def spec(kind: str, text: object, **fields: object) -> GrammarSpec:
    text = text if isinstance(text, str) else json.dumps(text)
    return GrammarSpec(kind=kind, text=text, ends=(EOS_ID,), **fields)  # type: ignore[arg-type]


def matchers(library: LlguidanceLibrary, other: XgrammarLibrary) -> dict[str, Matcher]:
    forbidden = (tuple(b"ab"), tuple(b"c"))
    return {
        "schema": library.compile(spec("json_schema", SCHEMA)),
        "schema of xgrammar": other.compile(spec("json_schema", SCHEMA)),
        "reasoning before xgrammar": other.compile(spec("structural_tag", REASONED)),
        "reasoning": library.compile(spec("structural_tag", REASONED)),
        "reasoning alone": library.compile(spec("structural_tag", {"reasoning": REASONED["reasoning"]})),
        "bad words": library.compile(spec("regex", "[a-d]{30}", forbidden=forbidden)),
        "bad words alone": library.compile(spec("any", "", forbidden=forbidden)),
        "no repeats": NoRepeats(PromptSequences((2, 3), list(b"abcabdd")), ForbiddenTokens(((1,),), VOCAB_SIZE, None)),
        "no repeats of a grammar": NoRepeats(
            PromptSequences((3, 0), list(b"aab")), library.compile(spec("regex", "[ab]{0,30}"))
        ),
    }


def drafts(matcher: Matcher, draw: random.Random) -> list[int]:
    """A few tokens, most of which may come."""
    ids: list[int] = []
    for _ in range(draw.randint(0, 5)):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little"))
        likely = [int(each) for each in allowed if chr(each) in 'abcd"{:x</t>']
        token = draw.choice(likely or list(map(int, allowed))) if draw.random() < 0.9 else draw.choice(b"abcz")
        if token == EOS_ID:  # nothing follows it, so it makes no difference whether it is proposed
            break
        ids.append(token)
        matcher.accept(token)
        try:
            matcher.mask()
        except ValueError:
            break
    return ids


@pytest.mark.parametrize(
    "name",
    ["schema", "schema of xgrammar", "reasoning before xgrammar", "reasoning", "reasoning alone", "bad words",
     "bad words alone", "no repeats", "no repeats of a grammar"],
)  # fmt: skip
def test_masks_behind_proposed_tokens_are_those_of_a_copy_and_change_nothing(
    library: LlguidanceLibrary, other: XgrammarLibrary, name: str
) -> None:
    start, longest = matchers(library, other)[name], 0
    for seed in range(12):
        matcher, draw = start.copy(), random.Random(seed)
        for _ in range(14):
            try:
                before = matcher.mask()
            except ValueError:
                break
            ids = drafts(matcher.copy(), draw)
            expected = masks_behind(matcher.copy(), ids)
            assert matcher.fitting(ids) >= len(expected) - 1
            assert matcher.masks(ids)[: len(expected)] == expected, (seed, ids)
            assert matcher.mask() == before
            longest = max(longest, len(expected))
            for token in ids[: draw.randint(0, max(len(expected) - 1, 0))]:
                matcher.accept(token)
    assert longest > 3


def test_reasoning_keeps_its_budget_when_several_tokens_come_at_once(library: LlguidanceLibrary) -> None:
    tag = {"reasoning": {"begin": "", "end": "</t>", "budget": 3}, "format": {"type": "regex", "pattern": "ab"}}
    matcher = library.compile(spec("structural_tag", tag))
    text = b"xyz</t>ab"
    assert len(matcher.masks(list(text))) == len(text) + 1
    assert len(matcher.masks(list(b"xyzw</t>"))) == 4, "the fourth token has to end it"
    for token in b"xyz</t>a":
        matcher.accept(token)
    assert np.flatnonzero(np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")) == [ord("b")]


def test_a_limit_behind_a_proposed_token_does_not_end_a_text_that_goes_another_way(
    library: LlguidanceLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Behind "xa" the library would have to look at more ways to go on than this limit allows.
    monkeypatch.setattr(llguidance_grammars, "_LIMITS", LLParserLimits(step_max_items=160))
    rules = [f'b{i}: "a" "{chr(98 + i % 20)}" | "a" "a" b{(i + 1) % 60}' for i in range(60)]
    ways = " | ".join(f'"a" b{i}' for i in range(60))
    matcher = library.compile(spec("lark", "\n".join(['start: "x" many | "y" "z"', f"many: {ways}", *rules])))
    assert matcher.fitting(list(b"xab")) < 3
    assert len(matcher.masks(list(b"xab"))) == 2
    matcher.accept(ord("y"))
    assert matcher.mask()[ord("z") >> 3] == 1 << (ord("z") & 7)


@pytest.mark.parametrize("name", ["schema", "reasoning", "reasoning alone"])
def test_forced_tokens_are_allowed_and_asking_for_them_does_not_change_the_state(
    library: LlguidanceLibrary, other: XgrammarLibrary, name: str
) -> None:
    draw, forced, first = random.Random(3), 0, matchers(library, other)[name]
    for _ in range(20):
        matcher = first.copy()
        for _ in range(16):
            tokens = matcher.forced()
            forced += len(tokens)
            assert matcher.forced() == tokens and len(matcher.masks(tokens)) >= len(tokens)
            assert matcher.fitting(tokens) == len(tokens)
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little"))
            token = int(draw.choice(list(allowed)))
            if token == EOS_ID:
                break
            matcher.accept(token)
    assert forced > 0


def test_the_name_of_a_property_is_forced_once_it_has_begun(library: LlguidanceLibrary) -> None:
    schema = {"type": "object", "properties": {"identification": {"type": "integer"}}, "additionalProperties": False,
              "required": ["identification"]}  # fmt: skip
    matcher = library.compile(spec("json_schema", schema))
    for token in b'{"':
        matcher.accept(token)
    assert bytes(matcher.forced()) == b'identification"'
    for token in b'identification": 1':
        matcher.accept(token)
    assert matcher.forced() == []


def test_the_end_of_reasoning_is_forced_when_its_budget_is_spent(library: LlguidanceLibrary) -> None:
    matcher = library.compile(spec("structural_tag", REASONED))
    for token in b"think think ":
        assert matcher.forced() == []
        matcher.accept(token)
    assert bytes(matcher.forced()) == b"</t>"
    matcher.accept(ord("<"))
    assert bytes(matcher.forced()) == b"/t>"
