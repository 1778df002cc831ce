"""Prompts as embeddings: what ``torch.save`` writes is read without torch, and nothing else is."""

from __future__ import annotations

import base64
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.engine.wire.messages import NewRequest
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer
from evener_server.saved_tensor import read_matrix

WIDTH = 4


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def text(value: object) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else saved(value)).decode()


ROWS = torch.arange(12, dtype=torch.float32).reshape(3, WIDTH)


@pytest.mark.parametrize(
    "tensor",
    [ROWS, ROWS.bfloat16(), ROWS.half()[1:], ROWS.double(), torch.arange(12.0).reshape(WIDTH, 3).T,
     ROWS[:1].as_strided((1, WIDTH), (2**40, 1)), ROWS.clone().requires_grad_()],
    ids=["float32", "bfloat16", "part", "float64", "transposed", "one-row", "with-gradient"],
)  # fmt: skip
def test_a_saved_matrix_is_read(tensor: torch.Tensor) -> None:
    found = read_matrix(saved(tensor), 3, WIDTH)
    assert found.dtype == np.float32 and np.array_equal(found, tensor.detach().float().numpy())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (ROWS[:, :3], "shape"), (torch.zeros(4, WIDTH), "n from 1 to 3"), (torch.zeros(0, WIDTH), "shape"),
        (torch.zeros(WIDTH), "shape"), (torch.full((1, WIDTH), float("nan")), "not finite"),
        (torch.zeros(1, WIDTH, dtype=torch.int64), "LongStorage"), (ROWS.to_sparse(), "holds something else"),
        ({"rows": ROWS}, "opcode"), ([ROWS], "opcode"), ("text", "holds something else"),
        (torch.nn.Parameter(ROWS), "opcode"), (b"text", "not a tensor that torch.save has written"),
        (torch.ones(1, WIDTH).expand(3, WIDTH), r"contiguous\(\)"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_matrix(value if isinstance(value, bytes) else saved(value), 3, WIDTH)


def changed(name: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A saved tensor, of which one record has another content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(ROWS))) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        for each in old.namelist():
            new.writestr(each, content if each.endswith(name) else old.read(each))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed("data.pkl", b"cos\nsystem\n(S'true'\ntR."), "opcode STRING"),
        (changed("data.pkl", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."), "something else"),
        (changed("data.pkl", b"\x80\x02(t."), "something else"),
        (changed("data.pkl", b"\x85."), "damaged"),
        (changed("data.pkl", b"\x80\x02)." * 2000), "more than one tensor"),
        (changed("data/0", b"\0" * 8), "does not fit"),
        (changed("byteorder", b"big"), "little-endian"),
        (changed("data/0", b"\0" * 48, zipfile.ZIP_DEFLATED), "compressed"),
        (saved(ROWS)[:300], "not a tensor"),
    ],
)
def test_a_hostile_file_runs_nothing_and_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_matrix(data, 3, WIDTH)


@pytest.fixture
def rows_api(make_api: Any) -> Any:
    return make_api(FakeEngine(info_overrides={"hidden_size": WIDTH, "media_rows": 128}))


def requests(api: Any) -> list[NewRequest]:
    return [message for message in api.engine.sent if isinstance(message, NewRequest)]


def test_completions_of_embeddings_come_before_those_of_texts(rows_api: Any) -> None:
    answer = rows_api.complete(prompt="ab", prompt_embeds=[text(ROWS), text(ROWS[:2])]).json()
    assert len(answer["choices"]) == 3 and answer["usage"]["prompt_tokens"] == 3 + 2 + 2
    first, second, third = requests(rows_api)
    assert (first.prompt, second.prompt, third.prompt) == ([0] * 3, [0] * 2, [97, 98])
    assert np.array_equal(first.media[0].array(), ROWS.numpy()) and second.media[0].rows == 2 and not third.media
    assert rows_api.complete(prompt=..., prompt_embeds=text(ROWS)).status_code == 200
    assert rows_api.complete(prompt="ab", prompt_embeds=[]).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ..., "prompt_embeds": []}, "prompt"), ({"prompt_embeds": "?"}, "prompt_embeds[0]"),
        ({"prompt_embeds": ["aGk="]}, "prompt_embeds[0]"),
        ({"prompt_embeds": [text(torch.zeros(200, WIDTH))]}, "prompt_embeds[0]"),
        ({"prompt_embeds": [text(ROWS)], "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": [text(ROWS)], "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_embeds": [text(ROWS)], "prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_embeds": [text(ROWS)], "echo": True}, "echo"),
        ({"prompt_embeds": [text(ROWS)], "use_beam_search": True}, "use_beam_search"),
    ],
)  # fmt: skip
def test_embeddings_that_cannot_be_used_are_refused(
    rows_api: Any, error: Any, fields: dict[str, Any], param: str
) -> None:
    answer = rows_api.complete(**fields)
    assert answer.status_code == 400 and error(answer)["param"] == param
    assert not requests(rows_api)


def parts(*values: object) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "prompt_embeds", "data": text(each)}
        for each in values
    ]


def test_embeddings_stand_in_a_chat_where_their_part_does(rows_api: Any) -> None:
    messages = [{"role": "system", "content": parts(ROWS[:1])}, {"role": "user", "content": parts("a", ROWS, "b")}]
    assert rows_api.chat(messages=messages).status_code == 200
    (request,) = requests(rows_api)
    texts = [{"role": "system", "content": "\x01"}, {"role": "user", "content": "a\n\x02\nb"}]
    plain = rows_api.post("/tokenize", {"messages": texts}).json()["tokens"]
    system, user = plain.index(1), plain.index(2)
    expected = [*plain[:system], 0, *plain[system + 1 : user], 0, 0, 0, *plain[user + 1 :]]
    assert request.prompt == expected
    assert [(item.start, item.rows) for item in request.media] == [(system, 1), (user, 3)]
    assert np.array_equal(request.media[1].array(), ROWS.numpy())


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "prompt_embeds"}, "messages[0].content[0].data"),
        ({"type": "prompt_embeds", "data": "not base64!"}, "messages[0].content[0].data"),
        ({"type": "prompt_embeds", "data": "aGk="}, "messages[0].content[0].data"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused(rows_api: Any, error: Any, part: dict[str, Any], param: str) -> None:
    answer = rows_api.chat(messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400 and error(answer)["param"] == param


def test_rows_of_all_parts_fit_the_context_together(rows_api: Any, error: Any) -> None:
    content = parts(torch.zeros(100, WIDTH), torch.zeros(50, WIDTH))
    answer = rows_api.chat(messages=[{"role": "user", "content": content}])
    assert answer.status_code == 400 and "n from 1 to 28" in error(answer)["message"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_embeddings_stand_for_the_reasoning_of_an_earlier_answer(make_api: Any, tmp_path: Path, name: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning or '' }}{{ m.content }}{% endfor %}"
    engine = FakeEngine(info_overrides={"hidden_size": WIDTH, "media_rows": 128})
    api = make_api(engine, model=write_tiny_tokenizer(tmp_path, template))
    messages = [{"role": "assistant", "content": "b", name: {"type": "prompt_embeds", "data": text(ROWS)}}]
    answer = api.chat(messages=[*messages, {"role": "user", "content": "c"}])
    assert answer.status_code == 200, answer.text
    (request,) = requests(api)
    assert [(item.start, item.rows) for item in request.media] == [(0, 3)] and len(request.prompt) == 5
    assert answer.json()["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "prompt_embeds"}, "messages[0].reasoning.data"), (5, "messages[0].reasoning"),
        ({"type": "prompt_embeds", "data": "!!"}, "messages[0].reasoning.data"),
    ],
)  # fmt: skip
def test_reasoning_that_cannot_be_used_is_refused(rows_api: Any, error: Any, value: object, param: str) -> None:
    answer = rows_api.chat(messages=[{"role": "assistant", "content": "", "reasoning": value}])
    assert answer.status_code == 400 and error(answer)["param"] == param
