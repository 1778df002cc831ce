"""What an answer has to be: every spelling reaches the engine as one grammar, and hostile grammars are a 400."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evener.contracts.grammar.library import GrammarSpec
from evener.engine.wire.messages import NewRequest
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import EOS_ID
from evener_server import grammar_check
from evener_server.grammar_check import GrammarChecks

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OBJECT = ("json_schema", '{"type":"object"}')
OF_SCHEMA = ("json_schema", json.dumps(SCHEMA))
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}
OF_TAG = ("structural_tag", json.dumps({"format": TAG}))
#: As vLLM and SGLang had it first.
EARLIER = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
OF_TRIGGERS = (
    "structural_tag", json.dumps({"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]}}),
)  # fmt: skip


@pytest.fixture(scope="module")
def checks() -> GrammarChecks:
    """One for all servers: a process is started for each grammar, not for each test."""
    return GrammarChecks()


@pytest.fixture
def asked(api: Any, checks: GrammarChecks) -> Any:
    """``asked(path, **fields)``: the grammar that the engine is asked for; None for none."""
    api.app.state.service.grammars = checks

    def ask(path: str, **fields: Any) -> GrammarSpec | None:
        before = len(api.engine.sent)
        response = api.post(path, fields)
        assert response.status_code == 200, response.text
        request = next(each for each in api.engine.sent[before:] if isinstance(each, NewRequest))
        return request.sampling.grammar

    return ask


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": NAMED}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"regex": "[0-9]+"}}, ("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, ("choice", '["yes", "n\\"o"]')),
        ({"structured_outputs": {"grammar": 'start: "a"+'}}, ("lark", 'start: "a"+')),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "[0-9]+"}, ("regex", "[0-9]+")),
        ({"guided_choice": ["yes"]}, ("choice", '["yes"]')),
        ({"guided_grammar": 'start: "a"+'}, ("lark", 'start: "a"+')),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, OF_TAG),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": TAG}}}, OF_TAG),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, OF_TAG),
        ({"response_format": {"type": "structural_tag", **EARLIER}}, OF_TRIGGERS),
        ({"structured_outputs": {"structural_tag": json.dumps(EARLIER)}}, OF_TRIGGERS),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_spelling_reaches_the_engine(asked: Any, path: str, fields: dict[str, Any], expected: Any) -> None:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    found = asked(path, max_tokens=4, **prompt, **fields)
    assert (found and (found.kind, found.text)) == expected
    assert found is None or found.ends == (EOS_ID,)


def test_responses_and_messages_have_their_own_spellings(asked: Any) -> None:
    form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    found = asked("/v1/responses", input="hi", max_output_tokens=16, text=form)
    assert found is not None and (found.kind, found.text) == OF_SCHEMA
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "hi"}]
    found = asked("/v1/messages", messages=messages, max_tokens=16, output_config=form)
    assert found is not None and (found.kind, found.text) == OF_SCHEMA


#: 2,000 definitions, each of which refers to the next: the compiler's stack overflows.
DEEP = {
    "$defs": {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(2000)},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_json": {"type": "no such type"}}, "guided_json cannot be used: Invalid type: no such type"),
        pytest.param({"guided_regex": "(?=a)b"}, "guided_regex cannot be used: ", marks=pytest.mark.slow),
        ({"guided_grammar": "nothing"}, "guided_grammar cannot be used: "),
        pytest.param(
            {"structured_outputs": {"regex": "("}}, "structured_outputs cannot be used: ", marks=pytest.mark.slow
        ),
        (
            {"guided_json": json.dumps(DEEP)},
            "guided_json cannot be used: compiling it failed: it may be nested too deeply",
        ),
        ({"guided_choice": ["x" * (1 << 18)]}, "guided_choice has a grammar of 262148 characters; at most 262144 are"),
    ],
    ids=["type", "look-ahead", "lark", "bracket", "deep", "long"],
)
def test_a_grammar_that_cannot_be_used_is_a_400_that_says_why(
    make_api: Any, error: Any, fields: dict[str, Any], says: str
) -> None:
    api = make_api(FakeEngine(script=lambda request: pytest.fail("the engine was asked")))
    response = api.complete(**fields)
    assert response.status_code == 400 and error(response)["param"] == next(iter(fields))
    assert error(response)["message"].startswith(says)


@pytest.mark.parametrize(("limit", "says"), [("CPU_SECONDS", "takes more than 0 s"), ("SECONDS", "longer than 0.01 s")])
def test_a_grammar_that_takes_too_long_is_given_up(
    make_api: Any, error: Any, monkeypatch: pytest.MonkeyPatch, limit: str, says: str
) -> None:
    api = make_api()
    slow = "import time; time.sleep(600)" if limit == "SECONDS" else "while True: pass"
    monkeypatch.setattr(grammar_check, "_PROGRAM", ("-c", f"{_LIMITED[limit]}\n{slow}"))
    monkeypatch.setattr(grammar_check, limit, 0 if limit == "CPU_SECONDS" else 0.01)
    response = api.complete(guided_regex="a")
    assert response.status_code == 400 and says in error(response)["message"]


_LIMITED = {"SECONDS": "", "CPU_SECONDS": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))"}


def test_the_library_that_the_operator_names_judges_grammars(make_api: Any, error: Any, warm_children: None) -> None:
    api = make_api()
    api.app.state.service.grammars = GrammarChecks("xgrammar")
    response = api.complete(guided_json={"type": "array", "uniqueItems": True})
    assert response.status_code == 400
    assert "xgrammar does not hold documents to 'uniqueItems' here" in error(response)["message"]


def test_a_verdict_is_kept(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api = make_api()
    assert api.complete(guided_regex="a").status_code == 200
    monkeypatch.setattr(grammar_check, "_PROGRAM", ("-c", "raise SystemExit(3)"))
    assert api.complete(guided_regex="a").status_code == 200
    assert api.complete(guided_regex="b").status_code == 400


def test_without_a_library_the_answer_says_what_to_install(make_api: Any, error: Any) -> None:
    api = make_api()
    api.app.state.service.grammars._library = None
    response = api.chat(response_format={"type": "json_object"})
    assert response.status_code == 400 and 'pip install "evener[serve]"' in error(response)["message"]


def test_an_exception_in_the_library_is_not_a_good_grammar(
    make_api: Any, error: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "class Library:\n    @classmethod\n    def problem(cls, spec):\n        raise KeyError\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    api = make_api()
    api.app.state.service.grammars._library = "broken:Library"
    response = api.complete(guided_regex="a")
    assert response.status_code == 400 and "compiling it failed" in error(response)["message"]
