"""POST /v1/decisions over a fake engine: answers from the probabilities of labels, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}>"
PREDICATE = {"type": "predicate", "instructions": "Is it broken?"}
CHOICE = {"type": "choice", "name": "team", "instructions": "Who?", "choices": [{"value": "sales"}, {"value": True}]}
LEVELS = [{"label": "low", "description": "no harm"}, {"label": "middle"}, {"label": "high"}]
SCORE = {"type": "score", "name": "harm", "instructions": "How bad?", "levels": LEVELS}


@pytest.fixture
def api(make_api: Callable[..., Any], tmp_path: Path) -> Any:
    engine = FakeEngine(info_overrides={"max_model_len": 8192}, cached=3)
    return make_api(engine, model=write_tiny_tokenizer(tmp_path / "m", TEMPLATE))


def ask(api: Any, *questions: Any, **fields: Any) -> Any:
    body = {"model": "fake", "input": "The screen has a crack.", "questions": [*questions], **fields}
    return api.post("/v1/decisions", body)


def prompts(api: Any) -> list[str]:
    return [api.llm.tokenizer.decode(each.prompt, skip_special_tokens=False) for each in api.engine.sent]


def test_each_question_is_answered_with_the_probability_of_every_option(api: Any) -> None:
    answer = ask(api, PREDICATE, CHOICE, SCORE)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body.keys() == {"model", "answers", "usage"} and body["model"] == "fake"
    predicate, choice, score = body["answers"]
    asked = [each.sampling for each in api.engine.sent]
    assert [len(each.logprob_ids) for each in asked] == [2, 2, 3] and all(each.temperature == 0 for each in asked)
    assert predicate.keys() == {"type", "name", "probability"} and predicate["name"] is None
    assert 0 < predicate["probability"] < 1
    assert [each["value"] for each in choice["probabilities"]] == ["sales", True]
    best = max(choice["probabilities"], key=lambda each: each["probability"])
    assert (choice["choice"], choice["confidence"]) == (best["value"], best["probability"])
    levels = score["probabilities"]
    assert [(each["value"], each["label"]) for each in levels] == [(0, "low"), (1, "middle"), (2, "high")]
    assert score["score"] == pytest.approx(sum(each["value"] * each["probability"] for each in levels))
    for found in choice, score:
        assert math.fsum(each["probability"] for each in found["probabilities"]) == pytest.approx(1)
    length = sum(len(each.prompt) for each in api.engine.sent)
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (length, 3, length + 3)
    assert usage["input_tokens_details"]["cached_tokens"] == 9


def test_the_model_sees_the_input_the_question_and_a_label_for_each_option(api: Any) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = [{"role": "system", "content": "Judge."}, {"role": "user", "content": parts[:1]}]
    assert ask(api, {**SCORE, "instructions": parts}, input=said).status_code == 200
    (prompt,) = prompts(api)
    assert prompt.startswith("[system]Judge.\n[user]a\n[user]a\nb\n\nA: low (no harm)\nB: middle\nC: high\n")
    assert prompt.endswith("nothing else.\n>")
    labels = [api.llm.tokenizer.decode([token]) for token in api.engine.sent[0].sampling.logprob_ids]
    assert labels == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("questions", "param"),
    [
        ([], "questions"), ([{**PREDICATE, "type": "box"}], "questions[0].type"),
        ([PREDICATE, {**CHOICE, "choices": CHOICE["choices"][:1]}], "questions[1].choices"),
        ([{**CHOICE, "choices": [{"value": "true"}, {"value": True}]}], "questions[0]"),
        ([{**SCORE, "levels": [{"label": 5}, {"label": "a"}]}], "questions[0].levels[0].label"),
        ([{"type": "predicate"}], "questions[0].instructions"), ([PREDICATE] * 401, "questions"),
        ([{**CHOICE, "choices": [{"value": str(i)} for i in range(256)]}], "questions[0].choices"),
        # The tokenizer of this test has only letters.
        ([{**CHOICE, "choices": [{"value": str(i)} for i in range(53)]}], "questions"),
    ],
)  # fmt: skip
def test_wrong_questions_are_refused(api: Any, error: Callable[..., Any], questions: Any, param: str) -> None:
    answer = ask(api, *questions)
    assert answer.status_code == 400, answer.text
    assert error(answer)["param"] == param
    assert not api.engine.sent


def test_images_are_refused(api: Any, error: Callable[..., Any]) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
    found = error(ask(api, PREDICATE, input=[image]))
    assert found["param"] == "input[0]" and "text input only" in found["message"]


def test_items_of_kept_answers_are_refused_as_the_server_keeps_none_for_decisions(
    api: Any, error: Callable[..., Any]
) -> None:
    found = error(ask(api, PREDICATE, input=[{"type": "item_reference", "id": "msg_1"}]))
    assert found["param"] == "input[0].type" and "item_reference'" in found["message"]
    assert not found["message"].endswith("item_reference")


def test_a_model_that_always_reasons_first_says_so(
    make_api: Callable[..., Any], tmp_path: Path, error: Callable[..., Any]
) -> None:
    template = TEMPLATE.replace(">", "><think>\n") + "{# </think> #}"
    engine = FakeEngine(info_overrides={"max_model_len": 8192})
    api = make_api(engine, model=write_tiny_tokenizer(tmp_path / "m", template))
    found = error(ask(api, PREDICATE))
    assert found["param"] == "model" and "reasoning" in found["message"]
