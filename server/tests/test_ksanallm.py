"""KsanaLLM's /generate and /forward over a fake engine: fields, forms of answers, JSON and msgpack, errors."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from evener.config.resolve import ResolvedValue
from evener.contracts.media import MediaItem
from evener.engine.wire.messages import NewRequest
from evener.errors import RequestError
from evener_conformance.fake_engine import FakeEngine
from evener_server.body import BodyLimits
from evener_server.client_http import Server
from evener_server.ksanallm.generate import is_due
from evener_server.options import ServerOptions

Make = Callable[..., Any]
HIDDEN = 4
MSGPACK = {"content-type": "application/x-msgpack"}


@pytest.fixture
def api(make_api: Make) -> Any:
    return make_api(FakeEngine(info_overrides={"hidden_size": HIDDEN, "media_rows": 64}))


def last(api: Any) -> NewRequest:
    found = [message for message in api.engine.sent if isinstance(message, NewRequest)]
    return found[-1]  # type: ignore[no-any-return]


def packed(api: Any, path: str, body: Any) -> Any:
    return api.request("POST", path, content=msgspec.msgpack.encode(body), headers=MSGPACK)


def forward(api: Any, *targets: dict[str, Any], **prompt: Any) -> Any:
    prompt = prompt or {"input_tokens": [5, 6, 7, 8]}
    return api.post("/forward", {"requests": [{**prompt, "request_target": list(targets)}]})


def tensor(target: Any) -> Any:
    """As KsanaLLM's client reads it."""
    found = target["tensor"]
    assert found["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(found["data"]), dtype=np.float32).reshape(found["shape"])


def wrong(response: Any) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"message", "code", "error"} and body["code"] == response.status_code
    assert body["error"]["message"] == body["message"]
    return dict(body["error"])


def test_a_whole_answer_has_the_fields_of_ksanallm(api: Any) -> None:
    body = {"input_tokens": [104, 105, 106], "sampling_config": {"max_new_tokens": 3, "logprobs": 2}, "stream": False}
    answer = api.post("/generate", body).json()
    assert answer["texts"] == ["hij"] and answer["output_token_ids"] == [[104, 105, 106]]
    assert answer["input_token_ids"] == [104, 105, 106]
    assert [[len(pair) for pair in token] for token in answer["logprobs"][0]] == [[2, 2]] * 3
    assert [token[0][0] for token in answer["logprobs"][0]] == [104, 105, 106]
    assert answer["logprobs"][0][0][0][1] == -0.5


def test_a_stream_is_the_default_and_each_piece_has_all_so_far(api: Any) -> None:
    response = api.post("/generate", {"prompt": "hello", "sampling_config": {"max_new_tokens": 4}})
    # The whole is no JSON: a program that goes by the type must not read it as such.
    assert response.headers["content-type"] == "application/octet-stream"
    *pieces, end = response.content.split(b"\0")
    answers = [json.loads(piece) for piece in pieces]
    assert end == b"" and answers
    texts = [answer["texts"][0] for answer in answers]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(answers[-1]["output_token_ids"][0]) == 4 and answers[-1]["logprobs"] == []


def test_the_pieces_of_a_stream_grow_in_number_slower_than_its_tokens() -> None:
    sent, pieces = 0, []
    for tokens in range(1, 100_001):
        if is_due(tokens, sent):
            sent = tokens
            pieces.append(tokens)
    # Each of the first tokens, and so many for each doubling: all pieces together are no square of the length.
    assert pieces[:200] == list(range(1, 201)) and len(pieces) < 256 * 10
    assert sum(pieces) < 300 * 100_000


def test_msgpack_asks_and_answers_the_same(api: Any) -> None:
    body = {"prompt": "hello", "sampling_config": {"max_new_tokens": 3}, "stream": False}
    response = packed(api, "/generate", body)
    assert response.headers["content-type"] == "application/x-msgpack"
    assert msgspec.msgpack.decode(response.content) == api.post("/generate", body).json()
    targets = [{"target_name": "layernorm"}, {"target_name": "logits"}]
    asked = {"requests": [{"input_tokens": [5, 6, 300], "request_target": targets}]}
    found = msgspec.msgpack.decode(packed(api, "/forward", asked).content)
    plain = api.post("/forward", asked).json()
    for one, other in zip(found["responses"][0]["response"], plain["responses"][0]["response"], strict=True):
        assert isinstance(one["tensor"]["data"], bytes) and one["tensor"]["data"].decode() == other["tensor"]["data"]
    wrong_one = packed(api, "/forward", {"requests": []})
    assert wrong_one.status_code == 400 and wrong_one.headers["content-type"] == "application/x-msgpack"
    assert msgspec.msgpack.decode(wrong_one.content)["error"]["param"] == "requests"


def test_a_stream_in_msgpack_is_one_object_after_another(api: Any) -> None:
    body = {"input_tokens": [7, 8], "sampling_config": {"max_new_tokens": 3}}
    content = packed(api, "/generate", body).content
    whole = {"texts": ["\x07\x08\x07"], "output_token_ids": [[7, 8, 7]], "logprobs": [], "input_token_ids": [7, 8]}
    assert content.endswith(msgspec.msgpack.encode(whole))


def test_sampling_has_ksanallms_names_and_defaults(api: Any) -> None:
    def sent(**config: Any) -> NewRequest:
        body = {"prompt": "hello", "sampling_config": config, "stream": False}
        response = api.post("/generate", body)
        assert response.status_code == 200, response.text
        return last(api)

    # Greedy unless topk says otherwise, and as long as the context.
    found = sent()
    assert found.sampling.temperature == 0 and len(found.prompt) + found.max_tokens == 128
    assert sent(temperature=0.7, topk=1).sampling.temperature == 0
    found = sent(temperature=0.7, topk=5, topp=0.0, repetition_penalty=1.1, max_new_tokens=3, seed=4)
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.top_p) == (0.7, 5, 1.0)
    assert (found.sampling.repetition_penalty, found.sampling.seed, found.max_tokens) == (1.1, 4, 3)
    assert sent(topk=0, topp=0.5).sampling.top_p == 0.5
    assert sent(topk=5, do_sample=False).sampling.temperature == 0
    found = sent(stop_token_ids=[9, 11], no_repeat_ngram_size=0, max_new_tokens=-1)
    assert {9, 11, 258} <= set(found.stop_token_ids) and len(found.prompt) + found.max_tokens == 128
    assert 258 not in sent(ignore_eos=True).stop_token_ids


def test_the_operators_default_bounds_requests_that_name_no_number_of_new_tokens(make_api: Make) -> None:
    config = {"request.max_new_tokens": ResolvedValue(5, "as asked")}
    api = make_api(FakeEngine(info_overrides={"config": config}), max_tokens=5)

    def new_tokens(**sampling: Any) -> int:
        body = {"input_tokens": [7, 8], "sampling_config": sampling, "stream": False}
        assert api.post("/generate", body).status_code == 200
        return last(api).max_tokens

    assert new_tokens() == 5
    assert (new_tokens(max_new_tokens=3), new_tokens(max_new_tokens=-1)) == (3, 126)


def test_the_description_names_the_types_and_the_form_of_answers(api: Any) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    generate, forward = (paths[path]["post"]["responses"]["200"]["content"] for path in ("/generate", "/forward"))
    assert generate.keys() == {"application/json", "application/x-msgpack", "application/octet-stream"}
    assert forward.keys() == {"application/json", "application/x-msgpack"}
    answer = api.post("/generate", {"prompt": "a", "stream": False, "sampling_config": {"max_new_tokens": 1}}).json()
    assert answer.keys() == set(generate["application/json"]["schema"]["required"])
    assert set(forward["application/json"]["schema"]["required"]) == {"responses", "message", "code"}


def test_several_texts_and_stop_strings(api: Any) -> None:
    config = {"num_return_sequences": 2, "max_new_tokens": 5, "stop_strings": ["l"]}
    body = {"input_tokens": [*b"hello"], "sampling_config": config, "stream": False}
    assert api.post("/generate", body).json()["texts"] == ["he", "he"]


def test_a_regular_expression_and_the_model_go_to_the_engine(api: Any) -> None:
    body = {"prompt": "a", "structured_output_regex": "[ab]+", "stream": False, "model_name": "fake"}
    config = {"sampling_config": {"max_new_tokens": 2}}
    assert api.post("/generate", {**body, **config}).status_code == 200
    grammar = last(api).sampling.grammar
    assert grammar is not None and (grammar.kind, grammar.text) == ("regex", "[ab]+")
    assert wrong(api.post("/generate", {"prompt": "a", "model_name": "other"}))["code"] == "model_not_found"


def test_sizes_of_sequences_that_do_not_come_again_go_to_the_engine_with_and_without_a_grammar(api: Any) -> None:
    config = {"sampling_config": {"max_new_tokens": 2, "no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 2}}
    for fields, kind in (({}, "any"), ({"structured_output_regex": "[ab]+"}, "regex")):
        assert api.post("/generate", {"prompt": "a", "stream": False, **config, **fields}).status_code == 200
        grammar = last(api).sampling.grammar
        assert grammar is not None and (grammar.kind, grammar.no_repeat) == (kind, (3, 2))
    body = {"prompt": "a", "stream": False, "sampling_config": {"no_repeat_ngram_size": 0, "max_new_tokens": 1}}
    assert api.post("/generate", body).status_code == 200 and last(api).sampling.grammar is None


def test_rows_replace_the_embeddings_of_tokens(api: Any) -> None:
    rows = {"pos": [3, 1], "embeddings": [[1.0] * HIDDEN, [2.0] * 2 * HIDDEN]}
    body = {"input_tokens": [1, 2, 3, 4, 5], "input_refit_embedding": rows, "stream": False}
    assert api.post("/generate", {**body, "sampling_config": {"max_new_tokens": 1}}).status_code == 200

    def check(items: list[MediaItem]) -> None:
        assert [(item.start, item.rows) for item in items] == [(1, 2), (3, 1)]
        assert items[0].array().tolist() == [[2.0] * HIDDEN] * 2

    check(last(api).media)
    prompt = {"input_tokens": [1, 2, 3, 4, 5], "input_refit_embedding": rows}
    assert forward(api, {"target_name": "layernorm"}, **prompt).status_code == 200
    check(last(api).media)


def test_hidden_states_and_logits_come_as_tensors(api: Any) -> None:
    targets = [
        {"target_name": "layernorm", "slice_pos": [[0, 0], [-2, -1]], "token_reduce_mode": "GATHER_ALL"},
        {"target_name": "transformer", "token_id": [6, 8], "token_reduce_mode": "GATHER_ALL"},
        {"target_name": "logits", "slice_pos": [[3, 3]], "token_reduce_mode": "GATHER_ALL"},
        {"target_name": "transformer"},
    ]
    body = forward(api, *targets).json()
    assert (body["message"], body["code"]) == ("", 0)
    (answer,) = body["responses"]
    assert answer["input_token_ids"] == [5, 6, 7, 8]
    assert [each["target_name"] for each in answer["response"]] == [each["target_name"] for each in targets]
    layernorm, transformer, logits, everything = map(tensor, answer["response"])
    assert layernorm.tolist() == [[at] * HIDDEN for at in (0, 2, 3)]
    assert transformer.tolist() == [[at] * HIDDEN for at in (1, 3)]
    assert logits.shape == (1, 512) and everything.shape == (4, HIDDEN)
    kinds = [each.sampling.prompt_outputs.kind for each in api.engine.sent if isinstance(each, NewRequest)]
    assert kinds == ["normed", "hidden", "logits", "hidden"]


def test_probabilities_are_those_of_the_following_tokens(api: Any) -> None:
    target = {"target_name": "logits", "slice_pos": [[0, 1]], "token_reduce_mode": "GATHER_TOKEN_ID"}
    (answer,) = forward(api, target).json()["responses"]
    assert tensor(answer["response"][0]).tolist() == pytest.approx([math.exp(-0.5)] * 2)
    # It is the default for logits, of all tokens that have a next one.
    (answer,) = forward(api, {"target_name": "logits"}).json()["responses"]
    assert tensor(answer["response"][0]).shape == (3,)
    (answer,) = forward(api, {"target_name": "logits"}, input_tokens=[5]).json()["responses"]
    assert tensor(answer["response"][0]).shape == (0,)


def test_several_prompts_are_answered_in_their_order(api: Any) -> None:
    target = [{"target_name": "layernorm", "slice_pos": [[0, 0]]}]
    prompts = [{"prompt": "hello", "request_target": target}, {"input_tokens": [3], "request_target": target}]
    body = api.post("/forward", {"requests": prompts}).json()
    tokens = api.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
    assert [each["input_token_ids"] for each in body["responses"]] == [tokens, [3]]
    assert api.llm.num_open == 0


def test_clients_that_name_no_content_type_send_json_unless_they_are_pages(api: Any) -> None:
    content = b'{"prompt": "a", "stream": false, "sampling_config": {"max_new_tokens": 1}}'
    assert api.request("POST", "/generate", content=content).status_code == 200
    page = api.request("POST", "/generate", content=content, headers={"origin": "https://elsewhere.example"})
    assert page.status_code == 415 and wrong(page)["code"] == "unsupported_media_type"
    text = api.request("POST", "/generate", content=content, headers={"content-type": "text/plain"})
    assert text.status_code == 415


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "prompt", "send a text, or token ids as input_tokens"),
        ({"input_tokens": []}, "input_tokens", "input_tokens"),
        ({"input_tokens": [600]}, "prompt", "out of vocabulary"),
        ({"input_tokens": [1] * 128}, "input_tokens", "do not fit the context of 128"),
        ({"prompt": "a", "sampling_config": {"topk": -2}}, "sampling_config.topk", "sampling_config.topk is -2"),
        ({"prompt": "a", "sampling_config": {"top_k": 2}}, "sampling_config.top_k", "not a field of this API"),
        ({"prompt": "a", "sampling_config": {"max_new_tokens": 0}}, "sampling_config.max_new_tokens", "or -1"),
        ({"prompt": "a", "sampling_config": {"no_repeat_ngram_size": 65}}, "sampling_config.no_repeat_ngram_size",
         "64"),
        ({"prompt": "a", "sampling_config": {"encoder_no_repeat_ngram_size": -1}},
         "sampling_config.encoder_no_repeat_ngram_size", "0"),
        ({"prompt": "a", "stream": False, "sampling_config": {"no_repeat_ngram_size": 2, "num_beams": 2}},
         "sampling_config.no_repeat_ngram_size", "leave one of them out"),
        ({"prompt": "a", "sampling_config": {"num_beams": 2}}, "stream", "send stream=false"),
        ({"prompt": "a", "sampling_config": {"num_beams": 2, "num_return_sequences": 3}},
         "sampling_config.num_return_sequences", "send as many beams"),
        ({"prompt": "a", "messages": []}, "messages", "/v1/chat/completions"),
        ({"prompt": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "send fewer tokens"),
        ({"prompt": "a", "input_refit_embedding": {"pos": [1]}}, "input_refit_embedding", "send one for each"),
        ({"input_tokens": [1, 2], "input_refit_embedding": {"pos": [0], "embeddings": [[1.0]]}},
         "input_refit_embedding.embeddings[0]", "a row of this model has 4"),
        ({"input_tokens": [1, 2], "input_refit_embedding": {"pos": [1], "embeddings": [[1e39] * 4]}},
         "input_refit_embedding.embeddings[0]", "too large for float32"),
        ({"input_tokens": [1, 2], "input_refit_embedding": {"pos": [1], "embeddings": [[1.0] * 8]}},
         "input_refit_embedding.embeddings[0]", "do not fit into the prompt's 2 tokens"),
    ],
)  # fmt: skip
def test_a_wrong_request_to_generate_says_what_to_send(api: Any, fields: Any, param: str, says: str) -> None:
    response = api.post("/generate", fields)
    found = wrong(response)
    assert response.status_code == 400 and found["param"] == param and says in found["message"], found


@pytest.mark.parametrize(
    ("target", "param", "says"),
    [
        ({"target_name": "other"}, ".target_name", "'transformer', 'layernorm' or 'logits'"),
        ({"target_name": "layernorm", "token_reduce_mode": "GATHER_TOKEN_ID"}, ".token_reduce_mode", "GATHER_ALL"),
        ({"target_name": "layernorm", "token_reduce_mode": "ALL"}, ".token_reduce_mode", "GATHER_ALL"),
        ({"target_name": "layernorm", "slice_pos": [[0, 4]]}, ".slice_pos", "has 4 tokens: send [first, last]"),
        ({"target_name": "layernorm", "slice_pos": [[2, 1]]}, ".slice_pos", "within it"),
        ({"target_name": "layernorm", "slice_pos": [[-5, 1]]}, ".slice_pos", "within it"),
        ({"target_name": "layernorm", "slice_pos": [[0, 2], [2, 3]]}, ".slice_pos", "send ascending ranges"),
        ({"target_name": "layernorm", "slice_pos": [[0]]}, ".slice_pos[0]", "at least 2 items"),
        ({"target_name": "layernorm", "slice_pos": [[0, 1]], "token_id": [5]}, ".token_id", "slice_pos"),
        ({"target_name": "logits", "token_id": [5]}, ".token_id", "GATHER_TOKEN_ID"),
        ({"target_name": "logits", "slice_pos": [[0, 3]]}, ".slice_pos", "send -2 or less"),
        ({"target_name": "logits", "slice_pos": [[0, -1]]}, ".slice_pos", "send -2 or less"),
    ],
)
def test_a_wrong_target_says_what_to_send(api: Any, target: Any, param: str, says: str) -> None:
    response = forward(api, target)
    found = wrong(response)
    assert response.status_code == 400 and says in found["message"], found
    assert found["param"] == f"requests[0].request_target[0]{param}"
    assert not [message for message in api.engine.sent if isinstance(message, NewRequest)]


def test_numbers_are_counted_before_anything_is_computed(make_api: Make) -> None:
    engine = FakeEngine(info_overrides={"hidden_size": HIDDEN})
    api = make_api(engine, options=ServerOptions(forward_bytes=4 * 4 * HIDDEN))
    assert forward(api, {"target_name": "layernorm"}).status_code == 200
    for target in ({"target_name": "logits", "token_reduce_mode": "GATHER_ALL"},), ({"target_name": "layernorm"},) * 2:
        before = len(engine.sent)
        found = wrong(forward(api, *target))
        assert found["code"] == "too_large" and "server.forward_bytes" in found["message"]
        assert len(engine.sent) == before


def test_more_targets_than_ever_fit_are_refused(make_api: Make) -> None:
    api = make_api(FakeEngine(info_overrides={"hidden_size": HIDDEN, "max_reqs": 2}), max_queue=1)
    found = wrong(forward(api, *[{"target_name": "layernorm"}] * 4))
    assert found["param"] == "requests" and "at most 3 are taken" in found["message"]


LISTS = b"\xdc\x07\xd0" + b"\x90" * 2000


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"", 400, "truncated"),
        (b"\x81", 400, "truncated"),
        (b"\x01", 400, "it must be an object"),
        (b"\xc1", 400, "no number, text, list or object"),
        (b"\x81\xa1a\xcd\x01", 400, "or is cut off"),
        (b"\x81\xa6prompt\xdb\xff\xff\xff\xff", 400, "truncated"),
        (b"\x81\xa1\xff\x01", 400, "not valid msgpack"),
        (b"\x81\x01\x02", 400, "a key of an object is no text"),
        (b"\x81\x90\x02", 400, "not valid msgpack"),
        (b"\x81\xa6prompt\xc4\x01a", 400, "it has bytes"),
        (b"\x81\xa6prompt\xd4\x01a", 400, "no number, text, list or object"),
        (b"\x81\xa6prompt" + b"\x91" * 90 + b"\x01", 400, "nested"),
        (b"\x81\xa6prompt" + LISTS, 400, "more than 1000 strings, objects and lists"),
        (b"\x81\xa6prompt\xdd\x00\x00\x40\x00" + b"\x01" * 0x4000, 413, "larger than 16000 bytes"),
    ],
)
def test_hostile_msgpack_is_refused(make_api: Make, content: bytes, status: int, says: str) -> None:
    api = make_api(limits=BodyLimits(max_values=1000, max_items=4000))
    response = api.request("POST", "/generate", content=content, headers=MSGPACK)
    found = msgspec.msgpack.decode(response.content)
    assert response.status_code == status and says in found["message"], found


def test_every_kind_of_value_of_msgpack_is_counted(api: Any) -> None:
    values = [0, 127, 128, 255, 256, 65536, 2**40, -1, -40, -200, -40000, -(2**40), 1.5, True, False, None, "a",
              "a" * 40, "a" * 300, "a" * 70000, [], [1] * 20,
              [[]] * 70000, {}, {"k": 1}, {str(i): i for i in range(9)}]  # fmt: skip
    api.post("/generate", {})
    response = packed(api, "/generate", {"prompt": "a", "sampling_config": {"max_new_tokens": 1}, "ignored": values})
    assert response.status_code == 200 and response.headers["x-ignored-fields"] == "ignored"


def test_the_client_sends_its_key_and_shows_what_is_refused() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers["authorization"] != "Bearer sk-a":
            return httpx.Response(401, json={"error": {"message": "Incorrect API key provided"}})
        if request.url.path == "/odd":
            return httpx.Response(502, text="<html>no</html>")
        assert request.headers["content-type"] == "application/x-msgpack"
        return httpx.Response(200, content=msgspec.msgpack.encode({"got": msgspec.msgpack.decode(request.content)}))

    cases = (("sk-a", "/generate", None), ("sk-b", "/generate", "401: Incorrect"), ("sk-a", "/odd", "502"))
    for key, path, says in cases:
        with Server("http://test/v1", key) as server:
            client = httpx.Client(transport=httpx.MockTransport(answer), headers=server._client.headers)
            server._client.close()
            server._client = client
            if says is None:
                assert server.post(path, {"a": 1}, packed=True) == {"got": {"a": 1}}
                continue
            with pytest.raises(RequestError, match=says):
                server.post(path, {"a": 1}, packed=True)
