"""POST /v1/embeddings over a fake engine: forms of input and of vectors, usage, errors."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from evener.contracts.pooling import PoolingSettings
from evener_conformance.fake_engine import FakeEngine
from evener_server.vector_bytes import NumberType, item_size, vector_bytes

Make = Callable[..., Any]
HELLO, HI = list(b"hello"), list(b"hi")
#: The tokenizer's beginning of a text.
BOS = 256


def embeds(**settings: Any) -> FakeEngine:
    return FakeEngine(
        info_overrides={"pooling": PoolingSettings(**{"normalize": False, **settings}), "hidden_size": 4}, cached=1
    )


@pytest.fixture
def api(make_api: Make) -> Any:
    return make_api(embeds())


def embed(api: Any, value: Any, **fields: Any) -> Any:
    return api.post("/v1/embeddings", {"model": "fake", "input": value, **fields})


def vectors(response: Any) -> list[list[float]]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    assert all(each["object"] == "embedding" for each in data)
    return [each["embedding"] for each in data]


def test_all_forms_of_input_are_embedded_in_their_order(api: Any) -> None:
    tokens = api.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
    hello = [len(tokens), tokens[0], tokens[-1], 1]
    assert vectors(embed(api, "hello")) == vectors(embed(api, ["hello"])) == [hello]
    assert vectors(embed(api, [7, 8, 9])) == vectors(embed(api, [[7, 8, 9]])) == [[3, 7, 9, 1]]
    assert vectors(embed(api, ["hello", "hello"])) == [hello, hello]
    assert vectors(embed(api, [[7, 8], [5]])) == [[2, 7, 8, 1], [1, 5, 5, 1]]


def test_a_conversation_is_embedded_as_its_template_renders_it(api: Any, error: Callable[..., Any]) -> None:
    messages = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "a rug"}]

    def row(**fields: Any) -> list[float]:
        ids = api.post("/tokenize", {"messages": messages, **fields}).json()["tokens"]
        return [len(ids), ids[0], ids[-1], 1]

    def ask(**fields: Any) -> Any:
        return api.post("/v1/embeddings", {"model": "fake", "messages": messages, **fields})

    assert vectors(ask()) == [row(add_generation_prompt=False)]
    assert vectors(ask(add_generation_prompt=True)) == [row()] != vectors(ask())
    assert vectors(ask(truncate_prompt_tokens=3))[0][0] == 3
    assert ask().json()["usage"]["prompt_tokens"] == row(add_generation_prompt=False)[0]
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    assert error(ask(messages=[image]))["param"] == "messages"
    assert "context" in error(ask(messages=[{"role": "user", "content": "x" * 200}]))["message"]


def test_invocations_of_a_model_that_embeds_are_embeddings(api: Any) -> None:
    messages = [{"role": "user", "content": "a cat"}]
    for body in {"input": "hello"}, {"messages": messages}:
        same = [api.post(path, {"model": "fake", **body}) for path in ("/v1/embeddings", "/invocations")]
        assert vectors(same[0]) == vectors(same[1])
    assert api.post("/invocations", {"prompt": "hello"}).json()["error"]["code"] == "unsupported_task"


def test_the_answer_has_openais_fields_and_counts_only_prompts(api: Any) -> None:
    body = embed(api, [[7, 8], [5]]).json()
    assert (body["object"], body["model"]) == ("list", "fake") and body["id"].startswith("embd-")
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    counted = [line for line in api.get("/metrics").text.splitlines() if line.startswith("evener:generation_tokens")]
    assert [line.split()[-1] for line in counted if "_total" in line] == ["0.0"]


def test_base64_has_the_numbers_as_float32(api: Any) -> None:
    (text,) = vectors(embed(api, [7, 8], encoding_format="base64"))
    assert struct.unpack("<4f", base64.b64decode(str(text))) == (2, 7, 8, 1)


@pytest.mark.parametrize("order", ["little", "big", "native"])
@pytest.mark.parametrize(("kind", "item"), [("float32", "f4"), ("float16", "f2"), ("bfloat16", "u2")])
def test_base64_and_bytes_have_the_numbers_in_the_type_and_order_of_the_request(
    api: Any, kind: str, item: str, order: str
) -> None:
    asked = {"embed_dtype": kind, "endianness": order}
    texts = vectors(embed(api, [[7, 8], [5, 6, 9]], encoding_format="base64", **asked))
    stored = np.dtype(item).newbyteorder({"little": "<", "big": ">", "native": "="}[order])
    numbers = np.frombuffer(b"".join(base64.b64decode(str(text)) for text in texts), stored)
    # A bfloat16 is the upper half of a float32.
    values = (numbers.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat16" else numbers
    assert values.tolist() == [2, 7, 8, 1, 3, 5, 9, 1]
    answer = embed(api, [[7, 8], [5, 6, 9]], encoding_format="bytes_only", **asked)
    assert answer.content == numbers.tobytes() and answer.headers["content-type"] == "application/octet-stream"
    assert "metadata" not in answer.headers


def test_an_answer_in_bytes_says_in_a_header_where_each_vector_is(api: Any) -> None:
    answer = embed(api, [[7, 8], [5]], encoding_format="bytes", embed_dtype="float16")
    head = json.loads(answer.headers["metadata"])
    assert head["usage"] == {"prompt_tokens": 3, "total_tokens": 3} and head["model"] == "fake"
    assert head["data"] == [
        {"index": 0, "embed_dtype": "float16", "endianness": "little", "start": 0, "end": 8, "shape": [4]},
        {"index": 1, "embed_dtype": "float16", "endianness": "little", "start": 8, "end": 16, "shape": [4]},
    ]
    assert struct.unpack("<4e", answer.content[8:16]) == (1, 5, 5, 1)


def test_a_header_lists_no_more_vectors_than_clients_read_of_it(api: Any, error: Callable[..., Any]) -> None:
    most = embed(api, [[1]] * 512, encoding_format="bytes")
    assert most.status_code == 200 and len(most.headers["metadata"]) < 65_536
    found = error(embed(api, [[1]] * 513, encoding_format="bytes"))
    assert found["param"] == "encoding_format" and "send bytes_only" in found["message"]
    assert len(embed(api, [[1]] * 513, encoding_format="bytes_only").content) == 513 * 4 * 4


def test_the_type_of_numbers_that_are_written_as_text_is_named_as_unused(api: Any) -> None:
    answer = embed(api, [7], embed_dtype="float16", endianness="big")
    assert answer.headers["x-ignored-fields"] == "embed_dtype, endianness"


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_e4m3", "fp8_e5m2", "float16"])
def test_numbers_are_rounded_as_torch_rounds_them(kind: NumberType) -> None:
    torch = pytest.importorskip("torch")
    types = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
             "float16": torch.float16}  # fmt: skip
    # Each power of two that one of them has, and steps around it: halves between two numbers are among them.
    powers = np.ldexp(1.0, np.arange(-30, 20))[:, None]
    steps = np.concatenate([np.arange(0, 2, 1 / 64), np.arange(0, 2, 1 / 64) + 2**-20])
    values = np.append(powers * steps, [0.0, 448, 464, 57344, 61440, 61441, np.inf, np.nan]).astype(np.float32)
    if kind == "fp8_e4m3":  # beyond it, versions of torch differ
        values = values[~(values > 464)]
    values = np.concatenate([values, -values])
    expected = torch.from_numpy(values).to(types[kind])
    found = np.frombuffer(vector_bytes(values, kind, "native"), np.uint8).copy()
    read = torch.from_numpy(found).view(types[kind])
    assert torch.equal(read.float().nan_to_num(-12345.0), expected.float().nan_to_num(-12345.0))
    assert item_size(kind) == expected.element_size()


def test_numbers_beyond_a_type_without_infinity_are_its_largest() -> None:
    values = np.array([465, -1e9, np.inf], np.float32)
    assert vector_bytes(values, "fp8_e4m3", "big") == b"\x7e\xfe\x7e"
    assert vector_bytes(values, "fp8_e5m2", "big")[2:] == b"\x7c"


def test_vectors_are_cut_and_then_normalized(make_api: Make) -> None:
    api = make_api(embeds(normalize=True))
    (whole,), (cut,) = vectors(embed(api, [3, 4])), vectors(embed(api, [3, 4], dimensions=2))
    assert sum(x * x for x in whole) == pytest.approx(1) and sum(x * x for x in cut) == pytest.approx(1)
    assert cut == pytest.approx([2 / 13**0.5, 3 / 13**0.5])
    assert vectors(embed(api, [3, 4], normalize=False)) == [[2, 3, 4, 1]]


def test_long_texts_are_refused_or_cut_as_asked(api: Any, error: Callable[..., Any]) -> None:
    found = error(embed(api, [1] * 129))
    assert found["param"] == "input" and "the prompt has 129 tokens, which do not fit" in found["message"]
    assert vectors(embed(api, [1] * 128)) == [[128, 1, 1, 1]]
    assert vectors(embed(api, [*range(1, 130)], truncate_prompt_tokens=-1)) == [[128, 2, 129, 1]]
    assert vectors(embed(api, "hello", truncate_prompt_tokens=2)) == [[2, *b"lo", 1]]
    cut = embed(api, "hello", truncate_prompt_tokens=2, truncation_side="right", add_special_tokens=False)
    assert vectors(cut) == [[2, *b"he", 1]]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", None),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", 1]}, "input", "invalid_value"),
        ({"input": [[]]}, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": [999]}, "input", None),
        ({"input": None}, "input", None),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimensions": 5}, "dimensions", None),
        ({"encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"embed_dtype": "int8"}, "embed_dtype", "invalid_value"),
        ({"endianness": "middle"}, "endianness", "invalid_value"),
        ({"padding": "max_length"}, "padding", "unsupported_parameter"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
    ],
)
def test_wrong_fields_are_named(
    api: Any, error: Callable[..., Any], fields: dict[str, Any], param: str, code: str | None
) -> None:
    response = api.post("/v1/embeddings", {"input": "hello", **fields})
    found = error(response)
    assert response.status_code == 400 and found["param"] == param
    assert code is None or found["code"] == code


def test_another_model_is_a_404_and_fields_without_meaning_are_named(api: Any, error: Callable[..., Any]) -> None:
    response = embed(api, "hello", model="other")
    assert response.status_code == 404 and error(response)["code"] == "model_not_found"
    assert embed(api, "hello", temperature=1).headers["x-ignored-fields"] == "temperature"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ],
)
def test_a_server_that_embeds_generates_nothing(api: Any, path: str, body: dict[str, Any]) -> None:
    response = api.post(path, body)
    assert response.status_code == 400 and "this model embeds texts" in response.json()["error"]["message"]


def test_a_server_that_generates_embeds_nothing(make_api: Make, error: Callable[..., Any]) -> None:
    response = embed(make_api(), "hello")
    assert response.status_code == 400 and error(response)["code"] == "unsupported_task"
    assert "infer.task=embed" in error(response)["message"]


def test_a_client_that_leaves_aborts_all_of_its_texts(make_server: Make, http: Any, eventually: Any) -> None:
    engine = embeds()
    server = make_server(engine)
    engine.hold()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=1.0)
    with pytest.raises(openai.APITimeoutError):
        client.embeddings.create(model="fake", input=["a", "b", "c"])
    eventually(lambda: not engine.open_ids)


def test_a_full_queue_and_more_texts_than_ever_fit_have_their_own_errors(
    make_api: Make, error: Callable[..., Any]
) -> None:
    api = make_api(embeds(), max_queue=2)
    assert api.llm.info.max_reqs == 0
    response = embed(api, ["a", "b", "c"])
    assert response.status_code == 400 and error(response)["param"] == "input"
    assert len(vectors(embed(api, ["a", "b"]))) == 2


def test_the_description_lists_the_endpoint_with_its_errors(api: Any) -> None:
    document = api.get("/openapi.json").json()
    post = document["paths"]["/v1/embeddings"]["post"]
    assert {"400", "404", "413", "429", "503"} <= post["responses"].keys()
    schema = document["components"]["schemas"]["EmbeddingBody"]
    assert {"input", "encoding_format", "dimensions"} <= schema["properties"].keys()
