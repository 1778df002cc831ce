"""Servers with API keys: who gets in, what the others are told, and that no key is shown."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from evener.config import from_overrides
from evener.errors import ConfigError
from evener_server import process
from evener_server.api_keys import ApiKeys, KeyReader
from evener_server.app import create_app

KEY, OTHER = "sk-first-4f0c", "sk-second-91ab"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 2}
Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(api: Any) -> Iterator[Ask]:
    """Asks a server with two keys."""
    app = create_app(api.llm, keys=ApiKeys([KEY, OTHER]))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    def request(path: str = "/v1/completions", method: str = "POST", **settings: Any) -> httpx.Response:
        if method == "POST":
            settings.setdefault("json", BODY)
        return api.run(client.request(method, path, **settings))  # type: ignore[no-any-return]

    yield request
    api.run(client.aclose())


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {OTHER} "}, {"x-api-key": KEY},
     {"authorization": "Bearer wrong", "x-api-key": OTHER}],
)  # fmt: skip
def test_a_request_with_one_of_the_keys_is_answered(ask: Ask, headers: dict[str, str]) -> None:
    response = ask(headers=headers)
    assert response.status_code == 200 and response.json()["choices"]


@pytest.mark.parametrize(
    "value",
    ["Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY.upper()}", f"Bearer {KEY} {OTHER}",
     f"Bearer {KEY},{OTHER}", "Bearer k\xe9y"],
)  # fmt: skip
def test_a_wrong_key_is_openai_s_401_and_is_not_repeated(ask: Ask, error: Any, value: str) -> None:
    response = ask(headers={"authorization": value.encode("latin-1")})
    found = error(response)
    assert (response.status_code, found["type"], found["param"]) == (401, "invalid_request_error", None)
    assert found["code"] == "invalid_api_key" and found["message"].startswith("Incorrect API key provided")
    assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]
    assert value.partition(" ")[2] not in found["message"]


@pytest.mark.parametrize("headers", [{}, {"authorization": f"Basic {KEY}"}, {"authorization": "Bearer "},
                                     {"authorization": KEY}, {"x-api-key": ""}])  # fmt: skip
def test_without_a_key_the_401_says_how_to_send_one(ask: Ask, error: Any, headers: dict[str, str]) -> None:
    response = ask(headers=headers)
    assert response.status_code == 401 and error(response)["code"] is None
    assert "You didn't provide an API key. Send it in the header Authorization: Bearer KEY" in response.text


def test_every_path_needs_a_key_but_those_of_monitoring(ask: Ask, api: Any) -> None:
    paths = {"/openapi.json", "/unknown", "http://test//health", "/health/", "/HEALTH"}
    paths |= {re.sub(r"{.*}", "x", route.path) for route in api.app.routes}
    assert {"/health", "/v1/models", "/v1/messages/count_tokens", "/stats", "/tokenize"} <= paths
    free = {path for path in paths if ask(path, "GET").status_code != 401}
    # People load the page before they type their key.
    assert free == {"/health", "/ready", "/metrics", "/"}
    assert {path for path in paths if ask(path, "POST").status_code != 401} == free


def test_a_refused_request_s_body_is_not_read(ask: Ask) -> None:
    async def parts() -> Any:
        pytest.fail("the body was read")
        yield b""

    assert ask(content=parts(), json=None).status_code == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_messages_answer_a_wrong_key_in_anthropic_s_format(ask: Ask, path: str) -> None:
    response = ask(path, headers={"x-api-key": "wrong"})
    assert response.status_code == 401 and response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "authentication_error"


def test_the_official_client_sends_its_key_and_raises_its_own_error(api: Any) -> None:
    app = create_app(api.llm, keys=ApiKeys([KEY]))

    async def talk(key: str) -> None:
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        said: Any = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, max_retries=0, http_client=http) as one:
            await one.chat.completions.create(**said)

    api.run(talk(KEY))
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        api.run(talk("wrong"))


def test_a_server_without_keys_asks_for_none(api: Any) -> None:
    assert api.complete().status_code == 200
    assert api.request("POST", "/v1/completions", json=BODY, headers={"authorization": "Bearer x"}).status_code == 200


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = ApiKeys([f"key{i}" for i in range(8)])
    for asked, found in ((b"key0", True), (b"key7", True), (b"k", False), (b"x" * 5000, False)):
        compared.clear()
        assert (keys.find(asked) is not None) is found
        # Digests have one length, so the time does not tell a key's length either.
        assert compared == [(32, 32)] * 8


def test_the_log_has_the_reason_of_a_401_and_no_key(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        ask(headers={"authorization": f"Bearer {KEY}"})
        ask(headers={"authorization": "Bearer sk-wrong-77"})
    assert "status=401" in caplog.text and "code=invalid_api_key" in caplog.text
    assert KEY not in caplog.text and "sk-wrong-77" not in caplog.text


def test_keys_come_from_the_list_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\n  in-file-1\nin-file-2\r\n")
    keys = ApiKeys(KeyReader(["listed"], str(file), {"EVENER_API_KEY": "in-environ"}).read())
    assert len(keys) == 4
    assert all(keys.find(key) for key in (b"listed", b"in-file-1", b"in-file-2", b"in-environ"))
    assert not keys.find(b"") and not keys.find(b"# of the team")
    assert KeyReader([], None, {}).read() == []


@pytest.mark.parametrize(
    ("listed", "environ", "said"),
    [
        (["good", ""], {}, r"serve\.api_keys: key 2 is empty"),
        (["s3cret key"], {}, r"serve\.api_keys: key 1 has a space"),
        (["s3cret\u00e9"], {}, r"serve\.api_keys: key 1 has .* a letter outside ASCII"),
        ([], {"EVENER_API_KEY": ""}, "EVENER_API_KEY is empty"),
        ([], {"EVENER_API_KEY": "s3cret\n"}, "EVENER_API_KEY has .* a control character"),
    ],
)
def test_a_key_that_nobody_can_send_is_an_error_that_does_not_show_it(
    listed: list[str], environ: Mapping[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        KeyReader(listed, None, environ).read()
    assert "s3cret" not in str(caught.value) and "1 or more visible ASCII characters" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"# none yet\n", "has no key; write one on each line"),
        (b"good\ns3cret key\n", "line 2 has a space"),
        (b"s3cret\xff", "cannot be read: it is not UTF-8"),
        (b"s3cret" * 200_000, "has more than 1048576 bytes"),
        (None, "is not a file"),
    ],
)
def test_a_wrong_key_file_is_an_error_that_shows_nothing_of_it(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"server.api_key_file=.*{said}") as caught:
        KeyReader([], str(file), {}).read()
    assert "s3cret" not in str(caught.value)


def test_a_wrong_key_stops_serve_before_the_engine_starts_and_a_right_one_stays_in_the_front_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Started(Exception):
        pass

    async def start(config: Any) -> Any:
        assert KEY not in repr(config) and config.serve.api_keys == ()
        raise Started

    monkeypatch.delenv("EVENER_API_KEY", raising=False)
    for key, raised in ((KEY, Started), ("a b", ConfigError)):
        config = from_overrides("/m", {"serve.api_keys": [key], "serve.port": 0})
        with pytest.raises(raised):
            asyncio.run(process.serve(config, drain_timeout=0, start=start))
