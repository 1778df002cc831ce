"""What vLLM's API can say of tokens and do to prompts, over HTTP."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from evener_pooling import rows
from msgspec.structs import replace

from evener.engine.wire.messages import NewRequest
from evener.errors import ConfigError
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import EOS_ID, write_tiny_tokenizer
from evener_generation.llguidance_grammars import LlguidanceLibrary
from evener_server import logprobs
from evener_server.fill_in_middle import SPELLINGS
from evener_server.options import ServerOptions
from evener_server.structured import only_ids


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def prompts(api: Any) -> list[list[int]]:
    return [list(message.prompt) for message in api.engine.sent if isinstance(message, NewRequest)]


def test_a_completion_returns_the_ids_of_its_prompt_and_its_answer(api: Any, sse: Any) -> None:
    asked: dict[str, Any] = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 3, "return_token_ids": True}
    choices = api.complete(**asked).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98]] * 2 + [[120, 121, 122]] * 2
    assert [choice["token_ids"] for choice in choices] == [[97, 98, 97]] * 2 + [[120, 121, 122]] * 2
    chunks = [event["choices"][0] for event in sse(api.complete(**asked, stream=True))[:-1]]
    for whole in choices:
        mine = [chunk for chunk in chunks if chunk["index"] == whole["index"]]
        assert flat(chunk["token_ids"] for chunk in mine) == whole["token_ids"]
        ids = [chunk.get("prompt_token_ids") for chunk in mine]
        assert ids == [whole["prompt_token_ids"]] + [None] * (len(mine) - 1)


def test_an_echoed_prompt_is_not_among_the_ids_of_the_answer(api: Any, sse: Any) -> None:
    asked: dict[str, Any] = {"prompt": "ab", "max_tokens": 2, "echo": True, "logprobs": 0, "return_token_ids": True}
    (choice,) = api.complete(**asked).json()["choices"]
    assert choice["text"] == "abab" and choice["token_ids"] == [97, 98]
    chunks = [event["choices"][0] for event in sse(api.complete(**asked, stream=True))[:-1]]
    assert flat(chunk["token_ids"] for chunk in chunks) == [97, 98]


def test_a_chat_returns_the_ids_of_its_prompt_and_its_answer(api: Any, sse: Any) -> None:
    body = api.chat(return_token_ids=True, n=2).json()
    ids = api.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert body["prompt_token_ids"] == ids and [c["token_ids"] for c in body["choices"]] == [ids[:4]] * 2
    events = sse(api.chat(return_token_ids=True, stream=True))[:-1]
    assert [event.get("prompt_token_ids") for event in events] == [ids] + [None] * (len(events) - 1)
    assert flat(event["choices"][0].get("token_ids", []) for event in events) == ids[:4]
    plain = api.chat().json()
    assert plain["prompt_token_ids"] is None and plain["choices"][0]["token_ids"] is None


def test_a_chat_can_be_sent_with_the_tokens_that_another_server_made_of_it(api: Any, sse: Any, error: Any) -> None:
    given = {"kv_transfer_params": {"prompt_token_ids": list(b"other"), "remote_host": "a"}, "return_token_ids": True}
    answer = api.chat(**given)
    assert answer.headers["x-ignored-fields"] == "kv_transfer_params.remote_host"
    body = answer.json()
    assert body["prompt_token_ids"] == list(b"other") and body["choices"][0]["message"]["content"] == "othe"
    first, *_ = sse(api.chat(**given, stream=True))
    assert first["prompt_token_ids"] == list(b"other")
    for ids in ([], [-1], ["a"], [1 << 40]):
        refused = api.chat(kv_transfer_params={"prompt_token_ids": ids})
        assert refused.status_code == 400 and error(refused)["param"].startswith("kv_transfer_params.prompt_token_ids")
    batch = {"messages": [[{"role": "user", "content": "hi"}]], **given}
    assert error(api.post("/v1/chat/completions/batch", batch))["param"] == "kv_transfer_params"


def test_tokens_can_be_named_by_their_ids(api: Any) -> None:
    asked = {"logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 1, "prompt": "a"}
    logprobs = api.complete(**asked).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97"]
    assert all(key.startswith("token_id:") for key in logprobs["top_logprobs"][0])
    content = api.chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert all(entry["token"].startswith("token_id:") for entry in content["content"])


@pytest.mark.parametrize("count", [0, 2])
def test_log_probabilities_of_the_prompt_are_returned_beside_the_answer(api: Any, count: int) -> None:
    (choice,) = api.complete(prompt="abc", prompt_logprobs=count, max_tokens=1).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == 2 and choice["text"] == "a"
    for token, entry in zip((98, 99), others, strict=True):
        assert str(token) in entry and len(entry) == max(count, 1)
        assert entry[str(token)] == {**entry[str(token)], "logprob": -0.5, "decoded_token": chr(token)}
        known = sorted(value["rank"] for value in entry.values() if value["rank"] is not None)
        assert known == list(range(1, count + 1))
    chat = api.chat(prompt_logprobs=count, return_token_ids=True).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) and chat["prompt_logprobs"][0] is None


def test_log_probabilities_of_the_prompt_are_not_streamed(api: Any, error: Any) -> None:
    for send in (api.chat, api.complete):
        response = send(prompt_logprobs=1, stream=True)
        assert response.status_code == 400 and error(response)["param"] == "prompt_logprobs"
        assert send(prompt_logprobs=-1).status_code == 400


def test_prompt_logprobs_may_be_a_switch(api: Any) -> None:
    def shown(value: object) -> Any:
        return api.complete(prompt="abc", prompt_logprobs=value, max_tokens=1).json()["choices"][0]["prompt_logprobs"]

    assert shown(True) == shown(1) and len(shown(True)) == 3
    assert shown(False) is shown(None) is None


def test_a_long_prompt_is_cut_at_the_side_that_was_asked_for(make_api: Any) -> None:
    api = make_api()
    api.complete(prompt="abcdef", truncate_prompt_tokens=2)
    api.complete(prompt="abcdef", truncate_prompt_tokens=2, truncation_side="right")
    api.complete(prompt=[5, 6, 7], truncate_prompt_tokens=2)
    api.complete(prompt="abc", truncate_prompt_tokens=100)
    assert prompts(api) == [[101, 102], [97, 98], [6, 7], [97, 98, 99]]


def test_minus_one_leaves_what_fits_beside_the_answer(make_api: Any, error: Any) -> None:
    api = make_api()
    assert api.complete(prompt="x" * 1000, truncate_prompt_tokens=-1, max_tokens=10).status_code == 200
    long = [{"role": "user", "content": "x" * 1000}]
    assert api.chat(messages=long, truncate_prompt_tokens=-1, max_tokens=...).status_code == 200
    assert [len(ids) for ids in prompts(api)] == [118, 127]
    assert api.llm.tokenizer.decode(prompts(api)[1]).endswith("assistant\n")
    refused = api.complete(truncate_prompt_tokens=129)
    assert refused.status_code == 400 and "the context of 128 tokens" in error(refused)["message"]
    assert api.complete(truncate_prompt_tokens=0).status_code == 400
    assert api.complete(prompt="x" * 1000).status_code == 400
    assert api.chat(messages=long, add_special_tokens=False).status_code == 400


def test_the_time_to_tokenize_and_cut_a_prompt_counts(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api = make_api()
    encode = api.llm.tokenizer.encode

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return encode(*args, **kwargs)

    monkeypatch.setattr(api.llm.tokenizer, "encode", slowly)
    assert api.chat(truncate_prompt_tokens=10, max_time=30).status_code == 200
    assert api.complete(truncate_prompt_tokens=10, max_time=30).status_code == 200
    left = [message.max_time for message in api.engine.sent if isinstance(message, NewRequest)]
    assert len(left) == 2 and max(left) < 29.81


def test_a_deadline_that_passed_before_the_engine_was_asked_is_missed_and_nothing_is_generated(
    make_api: Any, error: Any
) -> None:
    api = make_api()
    for ask in (api.chat, api.complete):
        for fields in ({}, {"truncate_prompt_tokens": 10}):
            missed = ask(max_time=1e-9, **fields)
            assert (missed.status_code, error(missed)["code"]) == (504, "deadline_exceeded"), fields
    assert not any(isinstance(message, NewRequest) for message in api.engine.sent)


def test_special_tokens_are_added_and_shown_as_asked(make_api: Any, tmp_path: Path) -> None:
    model = write_tiny_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    library.save(str(model / "tokenizer.json"))
    api = make_api(model=model)
    for fields in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        api.complete(prompt="ab", **fields)
    assert prompts(api) == [[256, 97, 98], [97, 98], [256, 97, 98]]
    assert api.chat(add_special_tokens=True).status_code == 200 and prompts(api)[-1][0] == 256
    hidden, shown = (api.complete(prompt=[257, 97], skip_special_tokens=skip).json() for skip in (True, False))
    assert hidden["choices"][0]["text"] == "aa" and shown["choices"][0]["text"] == "<|im_start|>a<|im_start|>a"


def test_a_stop_string_is_kept_in_the_text_if_asked_for(api: Any) -> None:
    asked = {"prompt": "abcd", "max_tokens": 9, "stop": "bc"}
    assert api.complete(**asked).json()["choices"][0]["text"] == "a"
    assert api.complete(**asked, include_stop_str_in_output=True).json()["choices"][0]["text"] == "abc"


def test_a_chat_can_begin_with_the_message_that_it_continues(api: Any, sse: Any) -> None:
    said: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    asked: dict[str, Any] = {"messages": said, "add_generation_prompt": False, "continue_final_message": True}
    plain = api.chat(**asked).json()["choices"][0]["message"]["content"]
    assert api.chat(**asked, echo=True).json()["choices"][0]["message"]["content"] == "Well, " + plain
    events = sse(api.chat(**asked, echo=True, stream=True))[:-1]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "Well, " + plain
    said[1]["content"] = [{"type": "text", "text": "Well"}, {"type": "text", "text": ", "}]
    in_parts = api.chat(messages=said, echo=True).json()["choices"][0]["message"]["content"]
    assert in_parts.startswith("Well, ") and "type" not in in_parts[:12]
    assert api.chat(echo=True).json()["choices"][0]["message"] == api.chat().json()["choices"][0]["message"]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.marks[0])
def test_a_model_for_code_fills_the_gap_before_a_suffix(make_api: Any, tmp_path: Path, spelling: Any) -> None:
    model = write_tiny_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    library.add_special_tokens(list(spelling.marks))
    library.save(str(model / "tokenizer.json"))
    api = make_api(FakeEngine(), model=model)
    assert api.complete(prompt="def f(", suffix="): pass", max_tokens=1).status_code == 200
    text = api.llm.tokenizer.decode(prompts(api)[0], skip_special_tokens=False)
    marks = sorted(spelling.marks, key=text.index)
    assert marks == list(spelling.marks) and text.startswith(marks[0])
    for mark in marks:
        text = text.replace(mark, "|")
    assert text in ("|def f(|): pass|", "|): pass|def f(")


def test_a_suffix_is_refused_where_it_cannot_be_used(api: Any, error: Any) -> None:
    response = api.complete(suffix="x")
    assert response.status_code == 400 and "no tokens to fill in the middle" in error(response)["message"]
    assert "prompt as text" in error(api.complete(prompt=[97], suffix="x"))["message"]
    assert error(api.complete(suffix="x", echo=True))["param"] == "echo"
    assert api.complete(suffix="").status_code == 200


def test_tokens_are_shown_as_the_vocabulary_writes_them(api: Any) -> None:
    found = api.post("/tokenize", {"prompt": "a é", "return_token_strs": True}).json()
    assert found["token_strs"] == ["a", "Ġ", "Ã", "©"]


def test_requests_find_the_model_under_its_aliases(make_api: Any) -> None:
    api = make_api()
    api.app.state.service.options = ServerOptions.of({"server": {"model_aliases": "gpt-4o, mine ,,gpt-4o"}})
    for name in ("gpt-4o", "mine", "fake"):
        body = api.complete(model=name)
        assert body.status_code == 200 and body.json()["model"] == "fake"
        assert api.get(f"/v1/models/{name}").json()["id"] == name
    assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["fake", "gpt-4o", "mine"]
    assert api.complete(model="gpt-4").status_code == 404
    assert EOS_ID not in prompts(api)[0]


def test_log_probabilities_of_named_tokens_take_the_place_of_the_likeliest(api: Any, sse: Any) -> None:
    asked: dict[str, Any] = {"logprob_token_ids": [100, 97, 100], "return_tokens_as_token_ids": True}
    (choice,) = api.complete(prompt="ab", max_tokens=2, logprobs=5, **asked).json()["choices"]
    first, second = choice["logprobs"]["top_logprobs"]
    assert first == {"token_id:97": -0.5, "token_id:100": -1.0}
    assert second == {"token_id:98": -0.5, "token_id:97": -2.0, "token_id:100": -1.0}
    whole = api.chat(logprobs=True, max_tokens=2, **asked).json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in whole] == [3, 3]
    events = sse(api.chat(logprobs=True, max_tokens=2, stream=True, **asked))[:-1]
    shown = [event["choices"][0]["logprobs"] for event in events]
    assert flat(each["content"] for each in shown if each) == whole
    requests = [message for message in api.engine.sent if isinstance(message, NewRequest)][-3:]
    assert [(r.sampling.logprobs, r.sampling.logprob_ids) for r in requests] == [(0, [100, 97])] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [5], "logprobs": 0, "use_beam_search": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [512], "logprobs": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 257, "logprobs": 0}, "logprob_token_ids"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_tokens_that_cannot_be_named_are_refused(api: Any, error: Any, fields: dict[str, Any], param: str) -> None:
    response = api.complete(**fields)
    assert response.status_code == 400 and error(response)["param"] == param


def test_allowed_tokens_are_a_grammar_that_only_they_end(make_api: Any, folder: Path) -> None:
    api = make_api()
    assert api.complete(allowed_token_ids=[99, 98, 99, EOS_ID]).status_code == 200
    assert api.complete(allowed_token_ids=[]).status_code == 200
    held, free = (message.sampling.grammar for message in api.engine.sent if isinstance(message, NewRequest))
    assert free is None
    library = LlguidanceLibrary((folder / "tokenizer.json").read_text("utf-8"), 512)
    matcher = library.compile(replace(held, ends=(EOS_ID,)))
    allowed = sorted({98, 99, EOS_ID})
    for _ in range(3):
        assert ids_of(matcher.mask()) == allowed
        matcher.accept(98)
    other = library.compile(replace(only_ids([98]), ends=(EOS_ID,)))
    other.accept(98)
    assert ids_of(other.mask()) == [98]


def ids_of(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def test_the_whole_vocabulary_is_returned_where_the_operator_allows_it(make_api: Any, sse: Any) -> None:
    api = make_api(options=ServerOptions(max_logprobs=-1))
    size = api.engine.info.vocab_size
    (choice,) = api.complete(prompt="ab", max_tokens=2, logprobs=-1, prompt_logprobs=-1).json()["choices"]
    # Tokens that are written alike, as those without text, share a key.
    assert [len(each) >= 256 for each in choice["logprobs"]["top_logprobs"]] == [True, True]
    first, second = choice["prompt_logprobs"]
    assert first is None and len(second) == size and second["98"]["rank"] == 1
    body = api.chat(logprobs=True, top_logprobs=-1, prompt_logprobs=-1, max_tokens=1).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == size and entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    assert [len(each) for each in body["prompt_logprobs"][1:]] == [size] * (len(body["prompt_logprobs"]) - 1)
    events = sse(api.chat(logprobs=True, top_logprobs=-1, max_tokens=1, stream=True))[:-1]
    entries = [each for event in events for each in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [len(each["top_logprobs"]) for each in entries] == [size]
    generated = api.post("/generate", {"prompt": "ab", "stream": False, "sampling_config": {"logprobs": -1}}).json()
    assert {len(each) for each in generated["logprobs"][0]} == {size}


def test_a_vocabulary_of_many_tokens_is_written_in_a_thread_with_the_same_answer(make_api: Any, sse: Any) -> None:
    size = 3000
    api = make_api(FakeEngine(info_overrides={"vocab_size": size}), options=ServerOptions(max_logprobs=size))
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": -1, "max_tokens": 1}
    (entry,) = api.chat(**asked, prompt_logprobs=size).json()["choices"][0]["logprobs"]["content"]
    found = [each["logprob"] for each in entry["top_logprobs"]]
    assert len(found) == size and found == sorted(found, reverse=True)
    (few,) = api.chat(**{**asked, "top_logprobs": 20}).json()["choices"][0]["logprobs"]["content"]
    assert few["top_logprobs"] == entry["top_logprobs"][:20]
    (choice,) = api.complete(prompt="ab", max_tokens=1, logprobs=size, stream=False).json()["choices"]
    streamed = sse(api.complete(prompt="ab", max_tokens=1, logprobs=size, stream=True))[0]["choices"][0]
    assert streamed["logprobs"] == choice["logprobs"] and len(choice["logprobs"]["top_logprobs"]) == 1


def test_the_operator_s_limit_of_log_probabilities_holds_for_every_endpoint(make_api: Any, error: Any) -> None:
    api = make_api(options=ServerOptions(max_logprobs=5))
    answers = {
        "top_logprobs": api.chat(logprobs=True, top_logprobs=6),
        "logprobs": api.complete(logprobs=6),
        "prompt_logprobs": api.complete(prompt_logprobs=6),
    }
    for name, response in answers.items():
        assert response.status_code == 400 and error(response)["param"] == name
        assert "at most 5" in error(response)["message"] and "server.max_logprobs=6" in error(response)["message"]
    refused = api.post("/generate", {"prompt": "a", "sampling_config": {"logprobs": 6}})
    assert refused.status_code == 400 and "at most 5" in refused.json()["message"]
    assert api.complete(logprobs=5).status_code == 200
    with pytest.raises(ConfigError, match=r"server\.max_logprobs is -2; give 0 or more, or -1"):
        ServerOptions(max_logprobs=-2).check_numbers()


def test_the_prompts_and_choices_of_a_request_share_the_room_for_log_probabilities(
    make_api: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, most = 3000, 43
    monkeypatch.setattr(rows, "MAX_LOGPROB_ENTRIES", most * size)
    api = make_api(FakeEngine(info_overrides={"vocab_size": size}), options=ServerOptions(max_logprobs=-1))
    long, words = "a" * (most // 2 + 1), {"role": "user", "content": "a" * (most // 2 + 1)}
    for fields in ({"prompt": [long, long]}, {"prompt": long, "n": 2}):
        refused = api.complete(**fields, max_tokens=1, prompt_logprobs=-1)
        assert refused.status_code == 400 and error(refused)["param"] == "prompt_logprobs"
    refused = api.complete(prompt=["a", "b"], max_tokens=most // 2 + 1, logprobs=-1)
    assert refused.status_code == 400 and error(refused)["param"] == "logprobs"
    batch = {"messages": [[words]] * 2, "max_tokens": 1, "prompt_logprobs": -1}
    refused = api.post("/v1/chat/completions/batch", batch)
    assert refused.status_code == 400 and error(refused)["param"] == "prompt_logprobs"
    assert api.complete(prompt=["a", "b"], max_tokens=1, logprobs=-1, prompt_logprobs=-1).status_code == 200


def test_an_echoed_prompt_has_the_whole_vocabulary_beside_fewer_of_its_own_field(make_api: Any) -> None:
    api = make_api(options=ServerOptions(max_logprobs=-1))
    asked: dict[str, Any] = {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": -1}
    (alone,) = api.complete(**asked).json()["choices"]
    (both,) = api.complete(**asked, prompt_logprobs=5).json()["choices"]
    assert both["logprobs"] == alone["logprobs"] and len(both["prompt_logprobs"][1]) == 5


def test_every_endpoint_writes_a_whole_vocabulary_in_a_thread(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size, threads = 3000, list[str]()
    api = make_api(FakeEngine(info_overrides={"vocab_size": size}), options=ServerOptions(max_logprobs=-1))
    ranked = logprobs.ranked

    def watched(entry: dict[int, float], count: int) -> list[tuple[int, float]]:
        threads.append(threading.current_thread().name)
        return ranked(entry, count)

    monkeypatch.setattr(logprobs, "ranked", watched)
    chat = {"messages": [[{"role": "user", "content": "ab"}]], "max_tokens": 1, "logprobs": True, "top_logprobs": -1}
    (choice,) = api.post("/v1/chat/completions/batch", {**chat, "prompt_logprobs": -1}).json()["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == size
    body = api.post("/v1/responses", {"input": "ab", "top_logprobs": -1, "max_output_tokens": 4}).json()
    assert body["top_logprobs"] == -1
    assert len(threads) >= 4 and all(name.startswith("asyncio_") for name in threads)
    config = {"logprobs": -1, "max_new_tokens": 2}
    sent = {"prompt": "ab", "stream": False, "sampling_config": config}
    found = api.post("/generate", sent).json()["logprobs"][0]
    content, headers = msgspec.msgpack.encode(sent), {"content-type": "application/x-msgpack"}
    packed = api.request("POST", "/generate", content=content, headers=headers)
    assert [len(each) for each in found] == [size, size] and found[0] == sorted(found[0], key=lambda pair: -pair[1])
    assert msgspec.msgpack.decode(packed.content)["logprobs"][0] == found
