"""What passes between the address and a replica, and what happens if a replica is lost: without Ray."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from evener_deploy import retries
from evener_deploy.exchange import PREFIX_CHARS, Head, Question, ReplicaLost, ask, passed_on, prompt_prefix, replica_url
from evener_deploy.retries import begin

QUESTION = Question("POST", "/v1/completions", (("authorization", "Bearer key"),), b"{}", "p")
JSON = Head(200, (("content-type", "application/json"),))
STREAM = Head(200, (("content-type", "text/event-stream; charset=utf-8"),))


class Replicas:
    """Answers questions with one script after the other; an exception in a script is raised at its place."""

    def __init__(self, *scripts: list[Head | bytes | Exception]) -> None:
        self.scripts, self.asked, self.closed = list(scripts), 0, 0

    async def ask(self, question: Question) -> AsyncIterator[Head | bytes]:
        script = self.scripts[self.asked]
        self.asked += 1
        try:
            for part in script:
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed += 1


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSES", (0.0,) * 3)


async def test_a_request_goes_to_another_replica_as_long_as_its_body_has_not_begun() -> None:
    lost = ReplicaLost("killed")
    replicas = Replicas([lost], [STREAM, lost], [STREAM, b"one", b"two"])
    head, body = await begin(replicas.ask, QUESTION)
    assert head == STREAM and [piece async for piece in body] == [b"one", b"two"]
    assert replicas.asked == replicas.closed == 3


async def test_as_many_lost_replicas_as_there_are_pauses_are_an_error() -> None:
    replicas = Replicas(*[[ReplicaLost(f"number {n}")] for n in range(4)])
    with pytest.raises(ReplicaLost, match="number 2"):
        await begin(replicas.ask, QUESTION)
    assert replicas.asked == 3


async def test_a_stream_that_is_cut_ends_with_an_error_and_is_not_begun_again() -> None:
    replicas = Replicas([STREAM, b"data: one\n\n", ReplicaLost("killed")])
    _, body = await begin(replicas.ask, QUESTION)
    pieces = [piece async for piece in body]
    assert pieces[0] == b"data: one\n\n" and replicas.asked == 1
    error = json.loads(pieces[1].removeprefix(b"data: "))["error"]
    assert error["code"] == "replica_lost" and "killed" in error["message"]


async def test_an_answer_that_is_not_a_stream_breaks_off() -> None:
    _, body = await begin(Replicas([JSON, b'{"id', ReplicaLost("killed")]).ask, QUESTION)
    with pytest.raises(ReplicaLost):
        [piece async for piece in body]


async def test_an_answer_without_a_body_is_an_answer_and_other_errors_pass() -> None:
    head, body = await begin(Replicas([Head(204, ())]).ask, QUESTION)
    assert head.status == 204 and b"".join([piece async for piece in body]) == b""
    replicas = Replicas([ValueError("ours")])
    with pytest.raises(ValueError, match="ours"):
        await begin(replicas.ask, QUESTION)
    assert replicas.asked == replicas.closed == 1


async def test_closing_an_answer_closes_the_replica_s() -> None:
    replicas = Replicas([STREAM, b"one", b"two"])
    _, body = await begin(replicas.ask, QUESTION)
    assert await anext(body) == b"one"
    await body.aclose()  # type: ignore[attr-defined]
    assert replicas.closed == 1


async def answer(handler: Any) -> list[Head | bytes]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://replica") as client:
        return [part async for part in ask(client, QUESTION)]


async def test_an_answer_comes_back_without_the_headers_of_the_connection() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        headers = {"retry-after": "1", "connection": "close"}
        return httpx.Response(429, headers=headers, stream=httpx.ByteStream(b"busy"))

    head, *pieces = await answer(handler)
    assert isinstance(head, Head) and head.status == 429
    assert dict(head.headers) == {"retry-after": "1"} and b"".join(pieces) == b"busy"  # type: ignore[arg-type]
    assert seen[0].headers["authorization"] == "Bearer key" and seen[0].url.path == "/v1/completions"


async def test_a_server_that_is_gone_or_about_to_go_is_a_lost_replica() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ReplicaLost, match="does not answer: refused"):
        await answer(gone)
    with pytest.raises(ReplicaLost, match="503: shutting down"):
        await answer(lambda request: httpx.Response(503, text="shutting down"))


async def test_headers_pass_in_any_encoding() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, headers=[(b"x-name", "Zoë, 名".encode())], stream=httpx.ByteStream(b""))

    question = dataclasses.replace(QUESTION, headers=passed_on([(b"X-User", b"Jos\xe9"), (b"Host", b"address")]))
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://replica") as client:
        head, *_ = [part async for part in ask(client, question)]
    sent = dict(seen[0].headers.raw)
    assert sent[b"X-User"] == b"Jos\xe9" and sent[b"Host"] == b"replica"
    assert isinstance(head, Head) and dict(head.headers)["x-name"].encode("latin-1") == "Zoë, 名".encode()


@pytest.mark.parametrize(
    ("method", "path", "url"),
    [
        ("POST", "/v1/completions", "/v1/completions?a=%20b"),
        ("GET", "/v1/models/org/my model?", "/v1/models/org/my%20model%3F?a=%20b"),
        ("GET", "/v1/models/\n", "/v1/models/%0A?a=%20b"),
        ("GET", "/v1/completions", None),
        ("POST", "/v1/models/m", None),
        ("GET", "/v1/models/../../stats", None),
        ("GET", "/v1/models/./x", None),
        ("GET", "/v1/models//x", None),
        ("GET", "/v1/models/", None),
        ("GET", "/stats", None),
        ("GET", "//host/v1/models/m", None),
    ],
)
async def test_a_path_leads_to_nothing_else_on_a_replica_than_it_says(method: str, path: str, url: str | None) -> None:
    assert replica_url(method, path, "a=%20b") == url
    if url is not None:
        async with httpx.AsyncClient(base_url="http://replica") as client:
            asked = client.build_request(method, url).url
        assert asked.path == path and asked.host == "replica"


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        ({"prompt": "Hello"}, "Hello"),
        ({"prompt": [1, 22, 3]}, "1 22 3 "),
        ({"prompt": ["a", "b"]}, "ab"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "tool", "content": "ho"}]}, "userhitoolho"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "userhi"),
        ({"input": "text"}, "text"),
        ({"prompt": "x" * 50_000}, "x" * PREFIX_CHARS),
        ({"model": "m"}, ""),
        ([1, 2], ""),
    ],
)
def test_a_prompt_is_compared_by_how_it_begins(body: Any, prefix: str) -> None:
    assert prompt_prefix(json.dumps(body).encode()) == prefix


def test_a_body_that_is_not_json_has_no_prompt_and_is_left_to_the_replica() -> None:
    assert prompt_prefix(b"") == prompt_prefix(b"{") == prompt_prefix(b"\xff") == prompt_prefix(b"[" * 100_000) == ""
