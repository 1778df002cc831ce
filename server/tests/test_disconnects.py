"""Clients that go away, over real sockets: nothing of theirs goes on running."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import httpx
import pytest

from evener.engine.wire.messages import NewRequest
from evener_conformance.fake_engine import FakeEngine
from evener_server.body import BodyLimits

LONG = 100_000


class PausesAfter(FakeEngine):
    """Holds itself when a request has got ``tokens`` tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__(info_overrides={"max_model_len": 2 * LONG})
        self._tokens = tokens

    def _step(self, running: Any) -> None:
        if running.done >= self._tokens:
            self._held = True
        else:
            super()._step(running)


def _request(port: int, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = {"model": "fake", "prompt": "hello", "max_tokens": LONG, **body}
    raw = json.dumps({key: value for key, value in content.items() if value is not ...}).encode()
    lines = (f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {len(raw)}", "", ""]).encode() + raw


def _open(port: int, body: dict[str, Any], **settings: Any) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(_request(port, body, **settings))
    return client


def _read_until(client: socket.socket, text: bytes) -> bytes:
    """What came until ``text``: headers and events arrive in as many pieces as the network likes."""
    client.settimeout(60)
    seen = b""
    while text not in seen:
        piece = client.recv(65536)
        assert piece, f"the server closed the connection after {seen!r}"
        seen += piece
    return seen


CHAT: dict[str, Any] = {"prompt": ..., "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", ["a", "b", "c"]], ids=["one prompt", "three prompts"])
def test_a_client_that_leaves_before_the_first_token_ends_its_request(
    make_server: Any, eventually: Any, stream: bool, prompt: Any
) -> None:
    engine = FakeEngine(info_overrides={"max_model_len": 2 * LONG})
    engine.hold()
    server = make_server(engine)
    with _open(server.port, {"stream": stream, "prompt": prompt, "n": 2}):
        eventually(lambda: len(engine.open_ids) == (2 if prompt == "hello" else 6), "all samples run")
    eventually(server.idle, "an idle server")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_the_middle_ends_its_request(make_server: Any, eventually: Any, stream: bool) -> None:
    engine = PausesAfter(3)
    server = make_server(engine)
    with _open(server.port, {"stream": stream}) as client:
        eventually(lambda: engine._held, "three tokens")
        if stream:
            _read_until(client, b"text_completion")
    eventually(server.idle, "an idle server")


def test_half_closed_connection_counts_as_disconnect(make_server: Any, eventually: Any) -> None:
    engine = FakeEngine(info_overrides={"max_model_len": 2 * LONG})
    engine.hold()
    server = make_server(engine)
    with _open(server.port, {"stream": True}) as client:
        eventually(lambda: engine.open_ids, "a running request")
        client.shutdown(socket.SHUT_WR)
        eventually(server.idle, "an idle server")


def test_a_client_that_leaves_before_its_body_ends_leaves_nothing(
    make_server: Any, eventually: Any, http: httpx.Client
) -> None:
    server = make_server()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(_request(server.port, {})[:-10])
    assert http.get(f"{server.url}/health").status_code == 200
    eventually(server.idle, "an idle server")
    assert not any(isinstance(message, NewRequest) for message in server.engine.sent)


def test_a_body_that_never_ends_is_a_408(make_server: Any) -> None:
    server = make_server(limits=BodyLimits(timeout=0.05))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(_request(server.port, {})[:-10])
        assert b" 408 " in _read_until(client, b"\r\n").split(b"\r\n", 1)[0]


def test_a_large_body_is_a_413_that_the_client_can_read(make_server: Any, http: httpx.Client) -> None:
    server = make_server(limits=BodyLimits(max_bytes=1 << 20))
    response = http.post(f"{server.url}/v1/completions", json={"model": "fake", "prompt": "a" * (3 << 20)})
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


def test_a_failure_after_the_first_token_ends_the_stream_with_an_error_event(
    make_server: Any, eventually: Any, http: httpx.Client
) -> None:
    engine = PausesAfter(3)
    server = make_server(engine)
    with http.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"model": "fake", "prompt": "hello", "max_tokens": 9, "stream": True},
    ) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        assert "hel"[0] in json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        eventually(lambda: engine._held, "three tokens")
        engine.fail(engine.open_ids[0], "the kernel broke")
        *_, last = lines
    found = json.loads(last.removeprefix("data: "))
    assert found["error"]["message"] == "the kernel broke" and found["error"]["code"] == "engine_error"
    eventually(server.idle, "an idle server")


def test_a_dead_engine_ends_running_requests_with_its_reason(make_server: Any, eventually: Any) -> None:
    engine = FakeEngine(info_overrides={"max_model_len": 2 * LONG})
    engine.hold()
    server = make_server(engine)

    async def clients() -> list[httpx.Response]:
        body = {"model": "fake", "prompt": "hello", "max_tokens": LONG}
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
            posts = [
                asyncio.ensure_future(client.post("/v1/completions", json={**body, "stream": i % 2 == 0}))
                for i in range(4)
            ]
            while len(engine.open_ids) < 4:
                await asyncio.sleep(0.002)
            engine.die("the worker was killed")
            answers = await asyncio.gather(*posts)
            return [*answers, await client.get("/ready"), await client.get("/health")]

    *answers, ready, health = asyncio.run(clients())
    assert [answer.status_code for answer in answers] == [503] * 4
    assert all("the worker was killed" in answer.json()["error"]["message"] for answer in answers)
    assert ready.status_code == 503 and health.status_code == 200
    eventually(server.idle, "an idle server")


class Paced(FakeEngine):
    """Gives the loop time between steps, so that long requests are still running when their clients leave."""

    def receive(self, timeout: float | None) -> Any:
        events = super().receive(timeout)
        if self.open_ids:
            with self._changed:
                self._changed.wait(0.002)
        return events


async def _client(port: int, dice: random.Random) -> str | None:
    """One client: stays to the end, or leaves at a random place. Its answer if it stayed."""
    stays = dice.random() < 0.3
    stream = dice.random() < 0.6
    chat = dice.random() < 0.5
    body: dict[str, Any] = {"stream": stream, "max_tokens": 5 if stays else LONG, "n": dice.choice([1, 1, 2])}
    if chat:
        body |= {**CHAT, "ignore_eos": True}
    raw = _request(port, body, "/v1/chat/completions" if chat else "/v1/completions")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if not stays and dice.random() < 0.15:
            writer.write(raw[: dice.randrange(1, len(raw))])
            await writer.drain()
            return None
        writer.write(raw)
        await writer.drain()
        if not stays:
            if stream:
                await reader.read(dice.randrange(1, 4000))
            elif dice.random() < 0.5:
                await asyncio.sleep(dice.random() / 20)
            return None
        status = await reader.readline()
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        if stream:
            rest = await reader.readuntil(b"data: [DONE]\n\n")
        else:
            size = int(headers.split(b"content-length: ")[1].split(b"\r\n")[0])
            rest = await reader.readexactly(size)
        assert b" 200 " in status, (status, rest)
        return rest.decode()
    finally:
        if dice.random() < 0.5:
            writer.transport.abort()
        writer.close()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_64_clients_with_random_disconnects_leave_no_open_request(
    make_server: Any, eventually: Any, http: httpx.Client, seed: int
) -> None:
    engine = Paced(info_overrides={"max_model_len": 2 * LONG})
    server = make_server(engine)
    dice = random.Random(seed)

    async def clients() -> list[str | None]:
        return await asyncio.gather(*(_client(server.port, random.Random(dice.random())) for _ in range(64)))

    answers = asyncio.run(clients())
    assert any(answers) and not all(answers)
    assert all("length" in answer for answer in answers if answer)
    eventually(server.idle, "an idle server")
    assert http.get(f"{server.url}/ready").status_code == 200
