"""Structured output over a real engine: whatever a model of random weights would like to say, the answer is valid."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI
from served import PATIENCE, Served, eventually, tiny_model

from evener import LLM, SamplingParams
from evener.contracts.grammar.library import GrammarSpec

TINY = ("load=dummy", "infer.kv_memory=4MiB", "infer.max_seq_len=4096", "infer.max_reqs=16", "infer.threads=1")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
NAMED: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served.warm(folder, *TINY) as found:
        yield found
        eventually(lambda: found.stats()["blocks_used"] == 0)
        assert found.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as found:
        yield found


def test_every_choice_of_a_chat_follows_its_schema_and_ends(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=NAMED, n=4, temperature=1, seed=3, max_tokens=900
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    documents = [json.loads(choice.message.content or "") for choice in answer.choices]
    for document in documents:
        jsonschema_rs.validate(SCHEMA, document)
    assert len({json.dumps(document) for document in documents}) > 1, "each sample has a state of its own"


def test_a_stream_adds_up_to_a_valid_document(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=NAMED, stream=True, temperature=1, seed=5, max_tokens=900
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_responses_follow_a_schema_too(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    answer = client.responses.create(model="tiny", input="hello", text=form, max_output_tokens=900)
    jsonschema_rs.validate(SCHEMA, json.loads(answer.output_text))


def test_regular_expressions_choices_and_grammars_hold_beside_free_requests(client: OpenAI, served: Served) -> None:
    def ask(**extra: Any) -> list[str]:
        body = {"model": "tiny", "prompt": "hello", "temperature": 1, "max_tokens": 60, "n": 3, **extra}
        answer = served.http.post("/v1/completions", json=body).raise_for_status().json()
        return [choice["text"] for choice in answer["choices"]]

    free = client.completions.create(model="tiny", prompt="x", max_tokens=400, stream=True, extra_body={
        "ignore_eos": True})  # fmt: skip
    next(iter(free))
    assert all(re.fullmatch("[0-9]{3}-[a-z]{2}", text) for text in ask(guided_regex="[0-9]{3}-[a-z]{2}"))
    assert set(ask(structured_outputs={"choice": ["yes", "no"]}, ignore_eos=True)) <= {"yes", "no"}
    assert set(ask(guided_grammar='start: "a" b\nb: "c" | "d"')) <= {"ac", "ad"}
    assert sum(len(chunk.choices[0].text) > 0 for chunk in free) > 0


def test_a_choice_of_forbidden_words_alone_is_a_400_that_says_so(served: Served) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "guided_choice": ["0"], "bad_words": ["0"]}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert "cannot follow its grammar any further" in answer.json()["error"]["message"]


#: The first ones have no schemas inside.
KINDS = (
    "null", "boolean", "integer", "number", "string", "enum", "const", "several types",
    "array", "prefixItems", "object", "named by pattern", "other properties", "anyOf", "oneOf", "allOf", "$ref",
)  # fmt: skip
LEAVES = KINDS[:8]


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of the kinds that the JSON schema test suite has, whose documents can be short."""
    kind = draw.choice(LEAVES if depth == 0 else KINDS)
    if kind == "enum":
        return {"enum": draw.sample(["a", "b", 1, 2.5, None, True, 'é\n"', [1], {"k": 0}], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(["x", 0, [1, "y"], {"a": None}])}
    if kind == "integer":
        low = draw.randint(-1000, 1000)
        return draw.choice([
            {"type": "integer"}, {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 99)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + draw.randint(2, 99)},
            {"type": "integer", "multipleOf": draw.randint(2, 7), "minimum": low, "maximum": low + 50},
        ])  # fmt: skip
    if kind == "string":
        most = draw.randint(0, 9)
        return draw.choice([
            {"type": "string", "maxLength": most}, {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])},
        ])  # fmt: skip
    if kind == "array":
        least = draw.randint(0, 2)
        return {"type": "array", "items": random_schema(draw, depth - 1), "minItems": least, "maxItems": least + 2}
    if kind == "several types":
        return {"type": draw.sample(["null", "boolean", "integer"], 2)}
    if kind == "prefixItems":
        first = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        rest = draw.choice([False, random_schema(draw, 0)])
        return {
            "type": "array",
            "prefixItems": first,
            "items": rest,
            "minItems": len(first),
            "maxItems": len(first) + 2,
        }
    if kind == "named by pattern":
        names = {draw.choice(["^x_[a-z]{1,3}$", "^[0-9]{2}$"]): random_schema(draw, depth - 1)}
        return {"type": "object", "patternProperties": names, "additionalProperties": False, "maxProperties": 3}
    if kind == "other properties":
        return {
            "type": "object", "properties": {"a": random_schema(draw, depth - 1)}, "required": ["a"],
            "additionalProperties": random_schema(draw, 0), "maxProperties": 3,
        }  # fmt: skip
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
    if kind == "oneOf":  # of unlike types: what fits both would fit none
        return {"oneOf": [{"type": "integer", "maximum": draw.randint(-9, 9)}, {"type": "string", "maxLength": 4},
                          {"type": "array", "items": random_schema(draw, depth - 1), "maxItems": 2}]}  # fmt: skip
    if kind == "allOf":
        low = draw.randint(-100, 100)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + draw.randint(0, 20)}]}
    if kind == "$ref":
        return {"$defs": {"d": random_schema(draw, 0)}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 3}
    if kind == "object":
        names = draw.sample(["a", "b", "c d", 'q"', "é"], draw.randint(0, 4))
        return {
            "type": "object", "properties": {name: random_schema(draw, depth - 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))), "additionalProperties": False,
        }  # fmt: skip
    return {"type": kind}


def with_own_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` without references: each would be to the root of the document."""
    text = json.dumps(schema)
    return (
        random_schema(random.Random(text), 1)
        if text.count('"$ref"') > 0 and not text.startswith('{"$defs"')
        else schema
    )


def run_schemas(folder: Path, first: int, count: int, depth: int = 2, **keys: Any) -> list[list[int]]:
    """Answers to random schemas, which must be documents of theirs. Only xgrammar may refuse some."""
    schemas = [with_own_definitions(random_schema(random.Random(seed))) for seed in range(first, first + count)]
    params = [
        SamplingParams(
            temperature=1.0, seed=first + i, max_tokens=4000,
            grammar=GrammarSpec(kind="json_schema", text=json.dumps(schema)),
        )
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    settings = dict(setting.split("=") for setting in TINY)
    with LLM(str(folder), **{**settings, "infer.depth": depth, **keys}) as llm:
        outputs = llm.generate(["hello"] * count, params, raise_on_error="generation.grammars" not in keys)
    refused = [output.error for output in outputs if output.error is not None]
    assert len(refused) < count / 2 and all("xgrammar does not hold documents to" in why for why in refused)
    answered = [(s, output.outputs[0]) for s, output in zip(schemas, outputs, strict=True) if output.error is None]
    for schema, output in answered:
        assert output.finish_reason == "stop", (schema, output)
        # The validator knows no numbers beyond those of float64, which JSON has.
        document = json.loads(output.text, parse_float=lambda text: min(max(float(text), -1e300), 1e300))
        jsonschema_rs.validate(schema, document)
    return [list(output.token_ids) for _, output in answered]


def test_answers_to_random_schemas_are_valid_documents_at_every_depth(folder: Path) -> None:
    assert run_schemas(folder, 0, 40) == run_schemas(folder, 0, 40, depth=1)


def test_drafts_change_no_token_of_answers_to_random_schemas(folder: Path) -> None:
    assert run_schemas(folder, 0, 6, **{"infer.drafter": "ngram", "infer.draft_tokens": 3}) == run_schemas(folder, 0, 6)


def test_answers_to_random_schemas_are_valid_documents_with_xgrammar_too(folder: Path) -> None:
    run_schemas(folder, 0, 12, **{"generation.grammars": "xgrammar", "infer.drafter": "ngram"})


@pytest.mark.slow
def test_answers_to_a_thousand_random_schemas_are_valid_documents(folder: Path) -> None:
    for first in range(1000, 2000, 100):
        run_schemas(folder, first, 100)


@pytest.mark.parametrize("depth", [1, 2])
def test_forbidden_pairs_of_tokens_never_come_and_change_nothing_before(folder: Path, depth: int) -> None:
    settings = dict(setting.split("=") for setting in TINY)
    common: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with LLM(str(folder), **{**settings, "infer.depth": str(depth)}) as llm:
        free = llm.generate(["hello"], SamplingParams(temperature=0.0, **common))[0].outputs[0].token_ids
        pairs = tuple(dict.fromkeys(pairwise(free[5:])))
        spec = GrammarSpec(kind="any", text="", forbidden=pairs)
        held = llm.generate(["hello"], SamplingParams(temperature=0.0, grammar=spec, **common))[0].outputs
        drawn = llm.generate(["hello"], SamplingParams(n=3, seed=1, top_k=2, grammar=spec, **common))[0].outputs
    first = next(i for i in range(1, 40) if (free[i - 1], free[i]) in pairs)
    assert held[0].token_ids[:first] == free[:first] and held[0].token_ids[first] != free[first]
    for output in (*held, *drawn):
        ids = output.token_ids
        assert len(ids) == 40 and output.finish_reason == "length"
        assert not set(pairwise(ids)) & set(pairs)


@pytest.mark.parametrize("depth", [1, 2])
def test_no_pair_of_tokens_comes_twice_counted_over_prompt_and_text(folder: Path, depth: int) -> None:
    settings = dict(setting.split("=") for setting in TINY)
    common: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    spec = GrammarSpec(kind="any", text="", no_repeat=(2, 0))
    with LLM(str(folder), **{**settings, "infer.depth": str(depth)}) as llm:
        prompt = llm.generate(["hello hello"], SamplingParams(temperature=0.0, **common))[0]
        held = llm.generate(["hello hello"], SamplingParams(temperature=0.0, grammar=spec, **common))[0].outputs
        drawn = llm.generate(["hello hello"], SamplingParams(n=3, seed=1, top_k=2, grammar=spec, **common))[0].outputs
    given, free = prompt.prompt_token_ids, prompt.outputs[0].token_ids
    whole = [*given, *free]
    first = next(i for i in range(len(given), len(whole)) if (whole[i - 1], whole[i]) in set(pairwise(whole[:i])))
    first -= len(given)
    assert held[0].token_ids[:first] == free[:first] and held[0].token_ids[first] != free[first]
    for output in (*held, *drawn):
        new = list(pairwise([*given[-1:], *output.token_ids]))
        assert len(new) == len(set(new)) == 40 and not set(new) & set(pairwise(given))


def test_a_bad_word_of_several_tokens_is_not_generated(client: OpenAI) -> None:
    def answer(**fields: Any) -> str:
        bias = {str(letter): 40 for letter in b"abc"}
        asked: dict[str, Any] = {"max_tokens": 60, "temperature": 1, "seed": 4, "logit_bias": bias}
        return client.completions.create(model="tiny", prompt="hello", **asked, extra_body=fields).choices[0].text

    assert "ab" in answer() and "ba" in answer()
    held = answer(bad_words=["ab"])
    assert "ab" not in held and "a" in held and "b" in held and set(held) <= set("abc")
    assert "a" not in answer(bad_words=["a"])
