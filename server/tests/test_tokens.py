"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from evener_conformance.fake_engine import FakeEngine

USER = [{"role": "user", "content": "hi"}]


def test_a_text_goes_to_tokens_and_back(api: Any) -> None:
    found = api.post("/tokenize", {"model": "fake", "prompt": "hé"}).json()
    assert found == {"count": 3, "max_model_len": 128, "tokens": found["tokens"], "token_strs": None}
    assert found["tokens"] == api.llm.tokenizer.encode("hé", True)
    back = api.post("/detokenize", {"model": "fake", "tokens": found["tokens"]})
    assert back.status_code == 200 and back.json() == {"prompt": "hé"}


def test_a_conversation_is_rendered_first(api: Any) -> None:
    found = api.post("/tokenize", {"messages": USER, "return_token_strs": True}).json()
    text = api.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text.startswith("<|im_start|>user\nhi") and text.endswith("<|im_start|>assistant\n")
    assert "".join(found["token_strs"]) == text.replace("\n", "Ċ") and found["count"] == len(found["tokens"])
    shorter = api.post("/tokenize", {"messages": USER, "add_generation_prompt": False}).json()
    assert shorter["count"] < found["count"]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt", "longer than the context"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x" * 100_000}]},
            "messages",
            "longer than the context",
        ),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt", "one text"),
        ("/tokenize", {}, "prompt", "must be provided"),
        ("/tokenize", {"prompt": 5}, "prompt", "must be a string"),
        ("/detokenize", {"tokens": [512]}, "tokens", "from 0 to 511"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than"),
        ("/detokenize", {"tokens": [1] * 129}, "tokens", "more than the context"),
        ("/detokenize", {"tokens": "a"}, "tokens", "list"),
    ],
)
def test_wrong_requests_say_what_is_wrong(
    api: Any, error: Callable[..., Any], path: str, body: Any, param: str, said: str
) -> None:
    response = api.post(path, body)
    assert response.status_code == 400, response.text
    assert error(response)["param"] == param and said in error(response)["message"]


def test_another_model_is_not_found(api: Any) -> None:
    assert api.post("/tokenize", {"model": "other", "prompt": "a"}).status_code == 404


def test_without_a_tokenizer_it_says_how_to_have_one(make_api: Any, tmp_path: Any, error: Callable[..., Any]) -> None:
    response = make_api(FakeEngine(), model=tmp_path).post("/tokenize", {"prompt": "a"})
    assert response.status_code == 400 and "tokenizer=FOLDER" in error(response)["message"]
