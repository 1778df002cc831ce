"""POST /rerank and /score over a fake engine: forms of the fields, order, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.contracts.pooling import PoolingSettings
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

Make = Callable[..., Any]
TEMPLATE = "{% for m in messages if m.role in ('query', 'document') %}{{ m.content }}{% endfor %}"
PATHS = ["/rerank", "/v1/rerank", "/v2/rerank"]


@pytest.fixture
def api(make_api: Make, tmp_path: Path) -> Any:
    """The fake row begins with the prompt's length and its first token: their difference is the score."""
    settings = PoolingSettings(task="score", tokens=[1, 2], sigmoid=False)
    engine = FakeEngine(info_overrides={"pooling": settings, "hidden_size": 4})
    return make_api(engine, model=write_tiny_tokenizer(tmp_path / "model", TEMPLATE))


def score(query: str, document: str) -> float:
    return len(query + document) - ord(query[0])


@pytest.mark.parametrize("path", PATHS)
def test_documents_come_in_the_order_of_their_scores(api: Any, path: str) -> None:
    documents = ["bb", "dddd", "a"]
    found = api.post(path, {"model": "fake", "query": "q", "documents": documents})
    assert found.status_code == 200, found.text
    assert found.json()["results"] == [
        {"index": i, "document": {"text": documents[i]}, "relevance_score": score("q", documents[i])} for i in (1, 0, 2)
    ]
    assert found.json()["usage"] == {"prompt_tokens": 10, "total_tokens": 10}


def test_invocations_with_texts_to_compare_are_scores(api: Any) -> None:
    for path, body in ("/rerank", {"query": "q", "documents": ["bb"]}), ("/score", {"text_1": "q", "text_2": ["bb"]}):
        answers = [api.post(each, body).json() for each in (path, "/invocations")]
        assert [each.get("results", each.get("data")) for each in answers] == [
            answers[0].get("results", answers[0].get("data"))
        ] * 2
        assert answers[0].keys() == answers[1].keys() and "error" not in answers[0]


@pytest.mark.parametrize(("top_n", "count"), [(None, 3), (0, 3), (1, 1), (3, 3), (9, 3)])
def test_top_n_leaves_the_best(api: Any, top_n: int | None, count: int) -> None:
    body = {"query": "q", "documents": ["bb", "dddd", "a"], "top_n": top_n, "return_documents": False}
    results = api.post("/rerank", body).json()["results"]
    assert [each["index"] for each in results] == [1, 0, 2][:count]
    assert all(each.keys() == {"index", "relevance_score"} for each in results)


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("q", "a", [("q", "a")]),
        ("q", ["a", "bb"], [("q", "a"), ("q", "bb")]),
        (["q"], ["a", "bb"], [("q", "a"), ("q", "bb")]),
        (["q", "r"], ["a", "bb"], [("q", "a"), ("r", "bb")]),
    ],
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_all_forms_of_pairs_are_scored(
    api: Any, names: tuple[str, str], first: Any, second: Any, pairs: list[tuple[str, str]]
) -> None:
    for path in ("/score", "/v1/score"):
        found = api.post(path, dict(zip(names, (first, second), strict=True))).json()
        assert [each["score"] for each in found["data"]] == [score(*pair) for pair in pairs]
        assert found["object"] == "list" and found["model"] == "fake"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "q"}, "documents"),
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {"query": "q", "documents": [1]}, "documents"),
        ("/rerank", {"query": "q", "documents": [{"text": "a", "x": 1}]}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a"] * 2049}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "q", "documents": ["a"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "q", "documents": ["a"], "truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/rerank", {"query": "q", "documents": ["a" * 200], "max_tokens_per_doc": 150}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a"], "instruction": "be kind"}, "instruction"),
        ("/rerank", {"query": "q", "documents": ["a" * 200]}, "documents"),
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "data_2": "c"}, "data_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ],
)
def test_wrong_fields_are_named(
    api: Any, error: Callable[..., Any], path: str, body: dict[str, Any], param: str
) -> None:
    response = api.post(path, body)
    assert response.status_code == 400 and error(response)["param"] == param


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"max_tokens_per_doc": 3}, ("qqqq", "abc")),
        ({"max_tokens_per_doc": 3, "truncation_side": "left"}, ("qqqq", "fgh")),
        ({"max_tokens_per_query": 2}, ("qq", "abcdefgh")),
        ({"max_tokens_per_query": 0, "max_tokens_per_doc": 0}, ("qqqq", "abcdefgh")),
        ({"truncate_prompt_tokens": 12}, ("qqqq", "abcdefgh")),
        ({"truncate_prompt_tokens": 10}, ("qqqq", "abcdef")),
        ({"truncate_prompt_tokens": 10, "truncation_side": "left"}, ("qqqq", "cdefgh")),
        ({"truncate_prompt_tokens": 4}, ("qq", "ab")),
        ({"truncate_prompt_tokens": 6, "max_tokens_per_query": 1}, ("q", "abcde")),
    ],
)
def test_texts_are_shortened_to_what_the_request_leaves_of_them(
    api: Any, fields: dict[str, Any], read: tuple[str, str]
) -> None:
    for path, body in (
        ("/rerank", {"query": "qqqq", "documents": ["abcdefgh"]}),
        ("/score", {"text_1": "qqqq", "text_2": "abcdefgh"}),
    ):
        found = api.post(path, {**body, **fields})
        assert found.status_code == 200, found.text
        assert bytes(api.engine.sent[-1].prompt) == "".join(read).encode()


def test_a_pair_is_cut_to_the_context_and_its_template_is_not_cut(
    make_api: Make, error: Callable[..., Any], tmp_path: Path
) -> None:
    settings = PoolingSettings(task="score", tokens=[1, 2], sigmoid=False)
    engine = FakeEngine(info_overrides={"pooling": settings, "hidden_size": 4})
    api = make_api(engine, model=write_tiny_tokenizer(tmp_path / "model", TEMPLATE.replace("{{ m", "<{{ m")))
    body = {"query": "q" * 9, "documents": ["a" * 500]}
    assert api.post("/rerank", {**body, "truncate_prompt_tokens": -1}).status_code == 200
    prompt = bytes(api.engine.sent[-1].prompt)
    assert len(prompt) == 128 and prompt.startswith(b"<" + b"q" * 9 + b"<aaa")
    assert error(api.post("/rerank", {**body, "truncate_prompt_tokens": 1}))["param"] == "truncate_prompt_tokens"


def test_a_model_without_a_template_for_pairs_says_what_to_add(make_api: Make, error: Callable[..., Any]) -> None:
    engine = FakeEngine(info_overrides={"pooling": PoolingSettings(task="score"), "hidden_size": 4})
    response = make_api(engine).post("/rerank", {"query": "q", "documents": ["a"]})
    assert response.status_code == 400 and "roles query and document" in error(response)["message"]


def test_a_model_that_embeds_or_generates_scores_nothing(make_api: Make, error: Callable[..., Any]) -> None:
    embeds = FakeEngine(info_overrides={"pooling": PoolingSettings(), "hidden_size": 4})
    for engine in (embeds, FakeEngine()):
        response = make_api(engine).post("/score", {"text_1": "a", "text_2": "b"})
        assert response.status_code == 400 and error(response)["code"] == "unsupported_task"
        assert "infer.task=score" in error(response)["message"]


def test_a_model_that_scores_decides_nothing(api: Any, error: Callable[..., Any]) -> None:
    question = {"type": "predicate", "instructions": "Is it broken?"}
    response = api.post("/v1/decisions", {"input": "A crack.", "questions": [question]})
    assert response.status_code == 400 and error(response)["code"] == "unsupported_task"


def test_the_description_lists_the_endpoints_with_their_errors(api: Any) -> None:
    document = api.get("/openapi.json").json()
    for path in (*PATHS, "/score", "/v1/score"):
        assert {"400", "404", "413", "429", "503"} <= document["paths"][path]["post"]["responses"].keys()
    assert {"RerankBody", "ScoreBody"} <= document["components"]["schemas"].keys()
