"""One request cannot take the server: bodies, texts and connections have limits."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import types
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from evener.config import from_overrides
from evener.frontend.tokenizer import Tokenizer
from evener_formats.chat.render import Renderer
from evener_formats.tokenizers.vocabulary import FastVocabulary
from evener_server import body, protocol
from evener_server.app import create_app
from evener_server.body import BodyLimits
from evener_server.connections import AcceptErrors, Protocol
from evener_server.process import allowed_hosts, bind

JSON = {"content-type": "application/json"}
#: Enough for an ordinary request, and small enough for a test.
SMALL = BodyLimits(max_values=50, max_items=60)


def post(api: Any, path: str, raw: bytes) -> Any:
    return api.request("POST", path, content=raw, headers=JSON)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "fake", "messages": [' + b",".join([b"{}"] * 60) + b"]}",
        b'{"model": "fake", "messages": [{"role": "user", "content": [' + b",".join([b"{}"] * 60) + b"]}]}",
        b"{" + b",".join(b'"k%d": 1' % i for i in range(60)) + b"}",
        b'{"model": "fake", "prompt": [' + b",".join([b'"a"'] * 60) + b"]}",
        b'{"model": "fake", "prompt": [' + b",".join([b"1"] * 70) + b"]}",
        b'{"model": "fake", "prompt": "a \\" b \\\\", "x": [' + b",".join([b"[]"] * 60) + b"]}",
    ],
    ids=["messages", "parts", "keys", "prompts", "ids", "escapes"],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(
    make_api: Any, error: Any, raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api(limits=SMALL)
    monkeypatch.setattr(body.msgspec.json, "decode", lambda raw: pytest.fail("the body was decoded"))
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = post(api, path, raw)
        assert response.status_code == 400
        assert error(response)["code"] == "too_many_values"


def test_marks_of_json_in_a_text_are_not_counted(make_api: Any) -> None:
    api = make_api(limits=SMALL)
    assert api.complete(prompt='{[,"\\' * 20).status_code == 200


def test_an_object_with_too_many_fields_is_refused_before_it_is_checked(
    make_api: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "MAX_KEYS", 20)
    response = make_api().complete(**{f"k{i}": 1 for i in range(30)})
    assert (response.status_code, error(response)["code"]) == (400, "too_many_values")


@pytest.mark.parametrize("field", ["messages", "content", "tool_calls", "stop_token_ids"])
def test_only_the_first_wrong_item_is_described(field: str) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    wrong: list[Any] = ["x"] * 100
    if field == "messages":
        messages = wrong
    elif field != "stop_token_ids":
        messages[0][field] = wrong
    fields = {"model": "m", "messages": messages, **({field: wrong} if field == "stop_token_ids" else {})}
    with pytest.raises(protocol.ValidationError) as caught:
        protocol.ChatBody.model_validate(fields)
    assert caught.value.error_count() == 1


def test_a_body_that_comes_too_slowly_closes_its_connection(make_api: Any, error: Any) -> None:
    async def parts() -> Any:
        yield b"{"
        await api.hang

    api = make_api(limits=BodyLimits(timeout=0.01))
    api.hang = api.loop.create_future()
    response = api.request("POST", "/v1/completions", content=parts(), headers=JSON)
    assert (response.status_code, error(response)["code"]) == (408, "timeout")
    assert response.headers["connection"] == "close"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    make_api: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api()
    monkeypatch.setattr(FastVocabulary, "encode", lambda *_: pytest.fail("the text was tokenized"))
    monkeypatch.setattr(Renderer, "render", lambda *_: pytest.fail("the template was rendered"))
    text = "a" * (int(api.llm.info.max_model_len * api.llm.tokenizer.most_bytes) + 1)
    parts = [{"role": "user", "content": [{"type": "text", "text": text[i::2]} for i in range(2)]}]
    for response in (api.complete(prompt=text), api.chat(messages=parts)):
        assert (response.status_code, error(response)["code"]) == (400, "context_length_exceeded")


def test_of_a_long_text_only_the_beginning_is_tokenized(
    make_api: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api()
    limit, tokenizer = api.llm.info.max_model_len, api.llm.tokenizer
    # With one long token in the vocabulary, the number of bytes refuses little.
    tokenizer.most_bytes = 100
    sizes: list[int] = []
    encode = FastVocabulary.encode

    def count(self: FastVocabulary, text: str, special: bool) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, special)

    monkeypatch.setattr(FastVocabulary, "encode", count)
    response = api.complete(prompt="1" * (90 * limit))
    assert (response.status_code, error(response)["code"]) == (400, "context_length_exceeded")
    assert sum(sizes) < 8 * limit


class PanicException(BaseException):
    """As the tokenizer library's own, which is no ``Exception``."""


def test_a_panic_of_the_tokenizer_is_an_error_of_its_request(
    make_api: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api()

    def panic(*_: Any, **__: Any) -> None:
        raise PanicException("index out of bounds")

    assert api.llm.tokenizer.most_bytes
    library = types.SimpleNamespace(encode_batch_fast=panic, encode=panic)
    with monkeypatch.context() as patch:
        patch.setattr(api.llm.tokenizer._vocabulary, "_library", library)
        for response in (api.complete(), api.complete(prompt="hello " * 40), api.chat()):
            assert response.status_code == 400 and "tokenizer failed" in error(response)["message"]
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "token_bytes", lambda *_: FastVocabulary.decode(broken, [1]))
        broken = object.__new__(FastVocabulary)
        broken._library = types.SimpleNamespace(decode=panic)
        assert api.complete().status_code == 500
        assert api.complete(stream=True).status_code == 500
    assert api.complete().status_code == 200


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 900 + "]" * 900, "1" * 100_000, "[" * 5000 + "]" * 5000])
def test_hostile_arguments_of_a_tool_call_are_a_400(make_api: Any, error: Any, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "hi"}]
    response = make_api().chat(messages=messages)
    assert response.status_code in ((200, 400) if arguments.count("[") == 900 else (400,)), response.text


def test_a_stopped_renderer_costs_one_request_its_own_deadline(make_api: Any, error: Any) -> None:
    api = make_api()
    renderer = api.llm.chat._renderer
    renderer.start()
    renderer._process.send_signal(signal.SIGSTOP)
    response = api.chat(max_time=0.05)
    assert (response.status_code, error(response)["code"]) == (504, "deadline_exceeded")
    assert api.chat().status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:1", 200), ("[::1]:21002", 200), ("evil.example", 403),
     ("evil.example:21002", 403), ("localhost.evil.example", 403), ("::1", 403)],
)  # fmt: skip
def test_a_server_on_loopback_checks_the_host(make_api: Any, host: str, status: int) -> None:
    api = make_api()
    app = create_app(api.llm, hosts=allowed_hosts(from_overrides("m", {})))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    assert api.run(client.get("/health", headers={"host": host})).status_code == status
    api.run(client.aclose())


@pytest.mark.parametrize(
    ("keys", "hosts"),
    [
        ({"serve.host": "0.0.0.0"}, None),
        ({"serve.allowed_hosts": "*"}, None),
        ({"serve.host": "0.0.0.0", "serve.allowed_hosts": "a,b"}, ("a", "b")),
    ],
)
def test_which_hosts_are_allowed_is_a_key(keys: dict[str, Any], hosts: Any) -> None:
    assert allowed_hosts(from_overrides("m", keys)) == hosts


async def serve_bytes(protocol: type[Protocol], *parts: bytes, before: int = 0) -> bytes:
    """Everything that a connection answers to ``parts``, until it is closed."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Response(b"hello")(scope, receive, send)

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", http=protocol, timeout_keep_alive=1)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(before)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.writelines(parts)
    answer = await reader.read()
    for each in (writer, *(other for _, other in others)):
        each.close()
        await each.wait_closed()
    server.close()
    return answer


LINE = b"GET / HTTP/1.1\r\n"


@pytest.mark.parametrize("end", [b"", b"\r\nhost: a\r\n\r\n"], ids=["open", "whole"])
async def test_a_header_that_is_too_large_is_refused_also_if_it_comes_at_once(end: bytes) -> None:
    small = type("Small", (Protocol,), {"header_bytes": 1000})
    large = b"x: " + b"y" * 2000 + end
    assert (await serve_bytes(small, LINE, large)).startswith(b"HTTP/1.1 431")
    assert (await serve_bytes(small, LINE + large)).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("cut", range(1, 5))
async def test_a_large_body_is_no_header_wherever_reads_end(cut: int) -> None:
    small = type("Small", (Protocol,), {"header_bytes": 1000})
    head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 5000\r\n\r\n"
    assert b"hello" in await serve_bytes(small, head[:-cut], head[-cut:] + b"z" * 5000)


@pytest.mark.parametrize("parts", [(), (LINE,), (LINE + b"host: a\r\n\r\n" + LINE,)], ids=["none", "first", "second"])
async def test_a_header_that_comes_too_slowly_is_refused(parts: tuple[bytes, ...]) -> None:
    hasty = type("Hasty", (Protocol,), {"header_timeout": 0.05})
    answer = await serve_bytes(hasty, *parts)
    assert b"HTTP/1.1 408" in answer and answer.count(b"hello") == (len(parts) and b"host" in parts[0])


async def test_connections_over_the_limit_are_refused() -> None:
    few = type("Few", (Protocol,), {"connection_limit": 2})
    assert (await serve_bytes(few, before=2)).startswith(b"HTTP/1.1 503")


async def test_without_free_descriptors_accepting_pauses_and_logs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    accept = socket.socket.accept

    def fail(self: socket.socket) -> Any:
        calls.append(1)
        if len(calls) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail)
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.01)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors())
    listener = bind("127.0.0.1", 0)
    server = await loop.create_server(asyncio.Protocol, sock=listener, backlog=2048)
    _, writer = await asyncio.open_connection(*listener.getsockname())
    while len(calls) < 3:
        await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "no connection is accepted for now: Too many open files; raise the limit with ulimit -n"
    ]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    writer.close()
    await writer.wait_closed()
    server.close()
