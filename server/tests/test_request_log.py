"""The log's line for each request, as JSON (``log.format=json``)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from evener import logs
from evener.config.schema import LogConfig
from evener_conformance.fake_engine import FakeEngine


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Any]:
    """The lines of requests so far, as a log shipper reads them."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    logs.set_up_logging(LogConfig(format="json", file=str(tmp_path / "log")), logging.WARNING)

    def read() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        return [line for line in found if line["logger"] == "evener_server.access"]

    yield read
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_its_id_tokens_reason_and_times(make_api: Any, lines: Any, stream: bool) -> None:
    api = make_api()
    body = {"model": "fake", "prompt": "hello", "max_tokens": 3, "stream": stream}
    answer = api.request("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"})
    (line,) = lines()
    assert answer.headers["x-request-id"] == line["request_id"] == "mine"
    expected = {
        "level": "info", "method": "POST", "path": "/v1/completions", "status": 200, "model": "fake",
        "prompt_tokens": 5, "completion_tokens": 3, "finish": "length",
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] and line["tokens_ms"] >= 0
    assert line["first_token_ms"] + line["tokens_ms"] <= line["ms"] + 1  # each is rounded
    assert line["id"].startswith("cmpl-") and "error" not in line and "end" not in line


def test_a_refused_request_has_the_reason_and_no_tokens(make_api: Any, lines: Any) -> None:
    api = make_api()
    answer = api.complete(max_tokens=-1)
    api.get("/v1/nothing")
    wrong, unknown = lines()
    assert wrong["status"] == 400 and wrong["request_id"] == answer.headers["x-request-id"]
    assert wrong["error"] == answer.json()["error"]["message"] and "prompt_tokens" not in wrong
    assert (unknown["status"], unknown["code"]) == (404, "unknown_url")


def test_a_request_that_the_engine_failed_has_the_reason(make_api: Any, lines: Any) -> None:
    api = make_api()
    api.engine.die("the worker was killed")
    api.run(api.llm.died.wait())
    api.complete()
    (line,) = lines()
    assert line["status"] == 503 and "the worker was killed" in line["error"]


def test_an_answer_that_broke_off_says_why(make_server: Any, http: httpx.Client, lines: Any, eventually: Any) -> None:
    server = make_server(FakeEngine(hold_after=2))
    body = {"model": "fake", "prompt": "hello", "max_tokens": 9, "stream": True}
    with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        events = response.iter_lines()
        next(events)
        server.engine.die("the kernel broke")
        assert any("the kernel broke" in event for event in events)
    eventually(lines)
    (line,) = lines()
    assert line["status"] == 200 and "the kernel broke" in line["end"]
    assert line["completion_tokens"] in (1, 2)  # the second may not have come before the end


def test_a_clients_long_words_are_cut_in_the_line(make_api: Any, lines: Any) -> None:
    api = make_api()
    api.complete(user="é" * 5000)
    api.get("/v1/" + "x" * 5000)
    said, asked = lines()
    assert said["user"] == "é" * 64 + "..." and asked["path"] == "/v1/" + "x" * 60 + "..."
    assert len(asked["error"]) <= 303
