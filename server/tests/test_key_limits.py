"""API keys with names, priorities and limits: their file, what a limit refuses, who comes first, what is counted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.engine.wire.messages import NewRequest
from evener.errors import ConfigError
from evener_conformance.fake_engine import FakeEngine
from evener_server import process
from evener_server.api_keys import ADMIN_PATHS, ApiKeys, KeyReader
from evener_server.app import create_app
from evener_server.errors import ApiError
from evener_server.key_file import ApiKey, digest_of, read_key_file
from evener_server.key_use import Client, KeyUse
from evener_server.options import ServerOptions
from evener_server.tls import Tls

SHA = hashlib.sha256(b"sk-b").hexdigest()
YAML = f"""
keys:
  - name: team-a
    key: sk-a
    priority: 5
    requests_at_once: 2
    requests_per_minute: 60
    tokens_per_minute: 1000
  - name: team-b
    sha256: {SHA}
"""
LINES = '{"name": "team-a", "key": "sk-a", "priority": 5}\n\n{"name": "team-b", "sha256": "' + SHA + '"}\n'
TLS = Path(__file__).parent / "tls"
Ask = Callable[..., httpx.Response]


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def key(name: str, **fields: Any) -> ApiKey:
    return ApiKey(name=name, digest=digest_of(f"sk-{name}".encode()), **fields)


@pytest.fixture
def ask(api: Any) -> Iterator[Callable[..., Ask]]:
    """``ask(keys)(path, key=…)``: a server with these keys."""
    clients: list[httpx.AsyncClient] = []

    def make(keys: ApiKeys, options: ServerOptions | None = None) -> Ask:
        app = create_app(api.llm, keys=keys, options=options)
        clients.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test"))
        client = clients[-1]

        def request(path: str = "/v1/completions", key: str | None = None, method: str = "POST", **more: Any) -> Any:
            if method == "POST":
                more.setdefault("json", {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 2})
            headers = {**more.pop("headers", {}), **({} if key is None else {"authorization": f"Bearer sk-{key}"})}
            return api.run(client.request(method, path, headers=headers, **more))

        return request

    yield make
    for client in clients:
        api.run(client.aclose())


@pytest.mark.parametrize(("name", "text"), [("keys.yaml", YAML), ("keys.jsonl", LINES)])
def test_a_file_has_keys_with_names_priorities_and_limits(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    first, second = read_key_file(str(file))
    assert (first.name, first.digest, first.priority) == ("team-a", digest_of(b"sk-a"), 5)
    if name == "keys.yaml":
        limits = (first.requests_at_once, first.requests_per_minute, first.tokens_per_minute)
        assert limits == (2, 60, 1000)
    assert (second.name, second.digest, second.priority, second.tokens_per_minute) == (
        "team-b", digest_of(b"sk-b"), 0, None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("k.yaml", "- name: a\n  key: s3cret\n  prio: 3", "unknown field `prio`"),
        ("k.yaml", "- name: a\n  key: s3cret\n  priority: high", "key 1 cannot be used: Expected `int`, got `str`"),
        ("k.yaml", "- name: a\n  key: s3cret\n  priority: 101", "<= 100"),
        ("k.yaml", "- name: a\n  key: s3cret\n  requests_at_once: 0", ">= 1"),
        ("k.yaml", "- key: s3cret", "missing required field `name`"),
        ("k.yaml", "- name: a b\n  key: s3cret", "matching regex"),
        ("k.yaml", "- name: a", "needs a key or its sha256"),
        ("k.yaml", f"- name: a\n  key: s3cret\n  sha256: {SHA}", "and not both"),
        ("k.yaml", "- name: a\n  sha256: s3cret", "matching regex"),
        ("k.yaml", "- name: a\n  key: s3cret\n- name: a\n  key: other", "key 2 has the name or the key of an earlier"),
        ("k.yaml", "- name: a\n  key: s3cret\n- name: b\n  key: s3cret", "key 2 has the name or the key"),
        ("k.yaml", "- name: a\n  key: s3cret s", "has a space"),
        ("k.yaml", "- name: [s3cret", "line 2 is not YAML"),
        ("k.yaml", "s3cret", "is no list"),
        ("k.yaml", "[]", "has no key"),
        ("k.jsonl", '{"name": "a", "key": "s3cret"', "line 1 is not JSON"),
        ("k.jsonl", '\n{"name": "a", "key": "s3cret", "x": 1}', "line 2 cannot be used"),
    ],
)
def test_a_wrong_entry_is_an_error_that_does_not_show_the_key(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = tmp_path / name
    file.write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        read_key_file(str(file))
    assert says in str(caught.value) and "s3cret" not in str(caught.value), caught.value


def test_a_changed_file_is_read_again_and_a_wrong_one_keeps_the_earlier_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.jsonl"

    def write(text: str) -> None:
        # As an editor does: a new file in place of the old one.
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", file)

    write('{"name": "a", "key": "sk-a"}')
    reader = KeyReader(["fixed"], str(file), {})
    keys = ApiKeys(reader.read())
    use = keys.uses["a"]
    with caplog.at_level(logging.INFO):
        reader.read_changed(keys)
        assert caplog.text == ""
        write('{"name": "a", "key": "sk-a2"}\n{"name": "c", "key": "sk-c"}')
        reader.read_changed(keys)
        assert "the API keys were read again (number of keys: 3)" in caplog.text
    assert keys.find(b"sk-a") is None and keys.find(b"fixed") is not None
    assert keys.find(b"sk-a2") is not None and keys.find(b"sk-c") is not None
    assert keys.uses["a"] is use  # what a key has used is not forgotten
    for wrong in ('{"name": "a"}', "{", ""):
        caplog.clear()
        write(wrong)
        reader.read_changed(keys)
        reader.read_changed(keys)
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("the API keys stay as they were: server.api_key_file=") and len(keys) == 3
    file.unlink()
    reader.read_changed(keys)
    assert keys.find(b"sk-c") is not None


def test_the_server_looks_at_the_file_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a\n")
    reader = KeyReader([], str(file), {})
    keys = ApiKeys(reader.read())
    monkeypatch.setattr("evener_server.api_keys._WATCH_SECONDS", 0.001)

    async def run() -> None:
        watch = asyncio.ensure_future(reader.watch(keys))
        file.write_text("sk-b\nsk-c\n")
        while keys.find(b"sk-c") is None:
            await asyncio.sleep(0.001)
        watch.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert keys.find(b"sk-a") is None


def test_requests_a_minute_come_back_evenly() -> None:
    clock = Clock()
    use, limited = KeyUse(clock), key("a", requests_per_minute=3)
    for _ in range(3):
        use.begin(limited)
    with pytest.raises(ApiError) as refused:
        use.begin(limited)
    assert refused.value.status == 429 and refused.value.headers == {"Retry-After": "20"}
    assert "3 requests per minute" in refused.value.message
    clock.now += 19.9
    with pytest.raises(ApiError):
        use.begin(limited)
    clock.now += 0.2
    use.begin(limited)
    clock.now += 1000
    for _ in range(3):
        use.begin(limited)
    with pytest.raises(ApiError):
        use.begin(limited)
    assert use.requests == 7 and use.refused == {"requests_per_minute": 3}


def test_tokens_are_charged_when_they_are_known_and_what_was_too_much_comes_back_first() -> None:
    clock = Clock()
    use, limited = KeyUse(clock), key("a", tokens_per_minute=60)
    use.begin(limited)
    use.charge(90)
    with pytest.raises(ApiError) as refused:
        use.begin(limited)
    assert refused.value.headers == {"Retry-After": "31"}
    clock.now += 31
    use.begin(limited)


def test_requests_at_once_are_counted_while_they_run() -> None:
    use, limited = KeyUse(Clock()), key("a", requests_at_once=2)
    first, second = Client(limited, use), Client(limited, use)
    with first.answering():
        first.reserve()  # it goes on in the background
        first.reserve()
        assert use.open == 1
        use.begin(limited)
        with second.answering():
            with pytest.raises(ApiError, match="2 requests at once") as refused:
                use.begin(limited)
            assert refused.value.headers == {"Retry-After": "1"}
        use.begin(limited)
    assert use.open == 1
    first.release()
    first.release()
    assert use.open == 0


def test_a_limit_is_a_429_with_retry_after_in_the_format_of_the_api(ask: Any, error: Any) -> None:
    send = ask(ApiKeys([key("a", requests_per_minute=1), key("b")]))
    assert send(key="a").status_code == 200
    for path in ("/v1/completions", "/v1/messages"):
        refused = send(path, key="a")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) in (59, 60)
        body = refused.json()
        if path == "/v1/messages":
            assert body["type"] == "error" and body["error"]["type"] == "rate_limit_error"
        else:
            found = error(refused)
            assert (found["code"], found["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    # Other keys and requests that only read are not limited by it.
    assert send(key="b").status_code == 200
    assert send("/v1/models", key="a", method="GET").status_code == 200


def test_ksanallms_endpoints_refuse_keys_in_their_own_format(ask: Any) -> None:
    send = ask(ApiKeys([key("a")]))
    refused = send("/generate", json={"prompt": "a"})
    assert refused.status_code == 401 and set(refused.json()) == {"message", "code", "error"}
    packed = send("/forward", json=None, content=b"", headers={"content-type": "application/x-msgpack"})
    assert packed.status_code == 401 and msgspec.msgpack.decode(packed.content)["code"] == 401


def test_a_request_in_the_background_counts_and_is_charged(api: Any, ask: Any, eventually: Any) -> None:
    keys = ApiKeys([key("a", requests_at_once=1)])
    send = ask(keys)
    api.engine.hold()
    try:
        body = {"model": "fake", "input": "hi", "max_output_tokens": 3, "background": True}
        assert send("/v1/responses", key="a", json=body).status_code == 200
        while not api.engine.open_ids:
            api.run(asyncio.sleep(0.001))
        assert keys.uses["a"].open == 1
        assert send(key="a").status_code == 429
    finally:
        api.engine.release()
    while keys.uses["a"].open:
        api.run(asyncio.sleep(0.001))
    assert keys.uses["a"].tokens > 3
    assert send(key="a").status_code == 200


def test_only_an_admin_key_changes_what_the_server_serves(ask: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: boss, key: sk-boss, admin: true}\n- {name: a, key: sk-a}\n")
    options = ServerOptions(weights_folder=str(tmp_path), lora_folder=str(tmp_path))
    keys = ApiKeys([*read_key_file(str(file)), "sk-plain"])
    send = ask(keys, options)
    paths = {"/sleep", "/wake_up", "/update_weights", "/update_weights_from_disk", "/v1/load_lora_adapter",
             "/v1/unload_lora_adapter"}  # fmt: skip
    for path in paths:
        for name in ("a", "plain"):
            refused = send(path, name)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_needed", path
        assert send(path).status_code == 401
    assert keys.uses["a"].requests == 0
    # What the server then says is about the request.
    assert {path: send(f"{path}?unknown=1", "boss").status_code for path in paths} == dict.fromkeys(paths, 400)
    # A request that only reads needs no admin, and neither does a completion.
    assert send("/is_sleeping", "a", "GET").status_code == 200 and send(key="a").status_code == 200


def test_no_path_that_changes_what_is_served_was_forgotten(api: Any, tmp_path: Path) -> None:
    changing = create_app(api.llm, options=ServerOptions(weights_folder=str(tmp_path), lora_folder=str(tmp_path)))
    plain = create_app(api.llm)
    more = {route.path for route in changing.routes} - {route.path for route in plain.routes}
    assert more - {"/is_sleeping"} == ADMIN_PATHS


def test_without_keys_everybody_may_and_with_optional_ones_nobody_without(ask: Any, tmp_path: Path) -> None:
    options = ServerOptions(weights_folder=str(tmp_path))
    assert ask(ApiKeys(), options)("/update_weights").status_code == 400
    assert ask(ApiKeys([key("a")], strict=False), options)("/update_weights").status_code == 403


def test_metrics_and_the_log_name_keys(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    send = ask(ApiKeys([key("a", requests_per_minute=2), "sk-plain"]))
    with caplog.at_level(logging.INFO):
        send(key="a"), send(key="a"), send(key="a"), send(key="plain")
    assert "key=a" in caplog.text and "sk-a" not in caplog.text and "sk-plain" not in caplog.text
    text = send("/metrics", method="GET").text
    plain = f"key-{hashlib.sha256(b'sk-plain').hexdigest()[:8]}"
    for line in (
        'evener:api_key_requests_total{key="a"} 2.0', f'evener:api_key_requests_total{{key="{plain}"}} 1.0',
        'evener:api_key_tokens_total{key="a"} 10.0',
        'evener:api_key_refused_total{key="a",limit="requests_per_minute"} 1.0',
    ):  # fmt: skip
        assert line in text.splitlines(), text
    assert "sk-" not in text


PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [5], "max_tokens": 1}), ("/generate", {"input_tokens": [5], "stream": False}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ("/forward", {"requests": [{"input_tokens": [5], "request_target": [{"target_name": "layernorm"}]}]}),
    ("/v1/completions", {"prompt": [5], "max_tokens": 1, "use_beam_search": True, "n": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_requests_have_the_priority_of_their_key(api: Any, ask: Any, path: str, body: dict[str, Any]) -> None:
    send = ask(ApiKeys([key("a", priority=7), key("b", priority=-2)]))
    for name, priority in (("a", 7), ("b", -2)):
        before = len(api.engine.sent)
        assert send(path, key=name, json=body).status_code == 200
        sent = [message for message in api.engine.sent[before:] if isinstance(message, NewRequest)]
        assert sent and {message.priority for message in sent} == {priority}


def test_without_strict_keys_everybody_is_let_in_after_those_with_keys(api: Any, ask: Any) -> None:
    send = ask(ApiKeys([key("a", priority=-3), key("b")], strict=False))
    for name, priority in (("a", -3), ("b", 0), ("unknown", -4), (None, -4)):
        assert send(key=name).status_code == 200
        assert api.engine.sent[-1].priority == priority


def test_the_last_part_of_the_queue_is_kept_for_the_highest_priority(make_api: Any, error: Any) -> None:
    api = make_api(FakeEngine(info_overrides={"max_reqs": 2}), max_queue=16)
    api.engine.hold()
    app = create_app(api.llm, keys=ApiKeys([key("low"), key("high", priority=1)]))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def flood() -> None:
        def send(name: str, samples: int) -> Any:
            body = {"model": "fake", "prompt": [5], "max_tokens": 1, "n": samples}
            return client.post("/v1/completions", json=body, headers={"authorization": f"Bearer sk-{name}"})

        waiting = [asyncio.ensure_future(send("low", 8)) for _ in range(2)]
        while api.llm.num_open < 16:
            await asyncio.sleep(0.001)
        # Of the 18 places the last 2 are kept.
        refused = await send("low", 1)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert error(refused)["code"] == "overloaded" and "a higher priority" in refused.text
        waiting.append(asyncio.ensure_future(send("high", 2)))
        while api.llm.num_open < 18:
            await asyncio.sleep(0.001)
        full = await send("high", 1)
        assert full.status_code == 429 and "18 are allowed" in full.text
        api.engine.release()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200, 200]
        assert (await send("low", 1)).status_code == 200

    try:
        api.run(asyncio.wait_for(flood(), 60))
    finally:
        api.engine.release()
        api.run(client.aclose())


def test_other_sites_may_ask_only_if_the_operator_names_them(ask: Any) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    keys = ApiKeys([key("a")])
    without = ask(keys)
    assert without(method="OPTIONS", headers=asked).status_code == 401
    assert "access-control-allow-origin" not in without(key="a", headers={"origin": "https://app.example"}).headers
    send = ask(keys, ServerOptions(cors_origins="https://app.example, http://localhost:3000"))
    before = send(method="OPTIONS", headers=asked)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in before.headers["access-control-allow-headers"]
    answer = send(key="a", headers={"origin": "https://app.example"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in answer.headers
    # Without a key even they get no answer, and a page can read why.
    refused = send(headers={"origin": "https://app.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"
    other = send(method="OPTIONS", headers={**asked, "origin": "https://evil.example"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "origins", ["app.example", "https://app.example/", "https://app.example/path", "null", "https://*"]
)
def test_a_wrong_origin_is_told(origins: str) -> None:
    with pytest.raises(ConfigError, match=r"which is no origin; give SCHEME://HOST\[:PORT\]"):
        _ = ServerOptions(cors_origins=f"https://good.example,{origins}").origins


def serve_once(options: dict[str, Any], folder: Path, caplog: Any, talk: Callable[[str], Any]) -> None:
    """Run ``process.serve`` with a fake engine, ``talk`` to its URL, and end it as a supervisor does."""

    async def start(config: Any) -> AsyncLLM:
        llm = AsyncLLM(FakeEngine(), model_dir=folder)
        await llm.wait_ready()
        return llm

    async def run() -> None:
        config = from_overrides("/m", {"serve.port": 0, **options})
        serving = asyncio.ensure_future(process.serve(config, drain_timeout=1, start=start))
        while not (lines := [r.getMessage() for r in caplog.records if r.getMessage().startswith("serving ")]):
            assert not serving.done(), serving
            await asyncio.sleep(0.005)
        await talk(lines[0].split(" at ")[1].split(" ")[0])
        os.kill(os.getpid(), 15)
        assert await serving == 0

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(run(), 120))


def test_a_server_with_a_certificate_speaks_only_tls(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(url: str) -> None:
        assert url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(TLS / "localhost.crt"))
        async with httpx.AsyncClient(verify=trusted, trust_env=False, timeout=60) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
            body = {"model": "fake", "prompt": [5, 6], "max_tokens": 3, "stream": True}
            answer = await client.post(f"{url}/v1/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.HTTPError):
                await client.get(f"{url.replace('https', 'http')}/health")

    files = {"server.tls_cert": str(TLS / "localhost.crt"), "server.tls_key": str(TLS / "localhost.key")}
    serve_once(files, folder, caplog, talk)


def test_a_certificate_that_changes_is_served_without_a_restart_and_a_wrong_one_is_not(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener_server.tls._WATCH_SECONDS", 0.005)
    cert, private = tmp_path / "server.crt", tmp_path / "server.key"
    cert.write_bytes((TLS / "localhost.crt").read_bytes())
    private.write_bytes((TLS / "localhost.key").read_bytes())

    def says(text: str) -> bool:
        return any(text in record.getMessage() for record in caplog.records)

    async def alive(url: str, name: str) -> bool:
        trusted = ssl.create_default_context(cafile=str(TLS / name))
        try:
            async with httpx.AsyncClient(verify=trusted, trust_env=False, timeout=60) as client:
                return (await client.get(f"{url}/health")).status_code == 200
        except httpx.ConnectError:
            return False

    async def talk(url: str) -> None:
        assert await alive(url, "localhost.crt") and not await alive(url, "renewed.crt")
        cert.write_text("no certificate")
        while not says("the certificate stays as it was: server.tls_cert="):
            await asyncio.sleep(0.005)
        assert await alive(url, "localhost.crt")
        private.write_bytes((TLS / "renewed.key").read_bytes())
        cert.write_bytes((TLS / "renewed.crt").read_bytes())
        while not says("the certificate was read again"):
            await asyncio.sleep(0.005)
        assert await alive(url, "renewed.crt") and not await alive(url, "localhost.crt")

    serve_once({"server.tls_cert": str(cert), "server.tls_key": str(private)}, folder, caplog, talk)


def test_a_changed_certificate_is_given_to_the_context_by_the_thread_that_makes_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener_server.tls._WATCH_SECONDS", 0.005)
    cert, private = tmp_path / "server.crt", tmp_path / "server.key"
    cert.write_bytes((TLS / "localhost.crt").read_bytes())
    private.write_bytes((TLS / "localhost.key").read_bytes())
    tls, loaded = Tls(cert, private), list[threading.Thread]()

    class Context(ssl.SSLContext):
        def load_cert_chain(self, *files: Any, **more: Any) -> None:
            super().load_cert_chain(*files, **more)
            loaded.append(threading.current_thread())

    async def change() -> None:
        watch = asyncio.ensure_future(tls.watch(Context(ssl.PROTOCOL_TLS_SERVER)))
        private.write_bytes((TLS / "renewed.key").read_bytes())
        cert.write_bytes((TLS / "renewed.crt").read_bytes())
        while not loaded:
            await asyncio.sleep(0.005)
        watch.cancel()

    asyncio.run(asyncio.wait_for(change(), 60))
    assert loaded == [threading.current_thread()]


def test_clients_need_a_certificate_if_the_operator_says_who_signs_them(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(url: str) -> None:
        trusted = ssl.create_default_context(cafile=str(TLS / "localhost.crt"))
        async with httpx.AsyncClient(verify=trusted, trust_env=False, timeout=60) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(f"{url}/health")
        for name, lets_in in ("localhost", False), ("renewed", True):
            trusted = ssl.create_default_context(cafile=str(TLS / "localhost.crt"))
            trusted.load_cert_chain(TLS / f"{name}.crt", TLS / f"{name}.key")
            async with httpx.AsyncClient(verify=trusted, trust_env=False, timeout=60) as client:
                if lets_in:
                    assert (await client.get(f"{url}/health")).status_code == 200
                else:
                    with pytest.raises(httpx.HTTPError):
                        await client.get(f"{url}/health")

    files = {"server.tls_cert": str(TLS / "localhost.crt"), "server.tls_key": str(TLS / "localhost.key"),
             "server.tls_client_ca": str(TLS / "renewed.crt")}  # fmt: skip
    serve_once(files, folder, caplog, talk)


@pytest.mark.parametrize(
    ("cert", "private", "client_ca", "says"),
    [("localhost.crt", None, None, "set server.tls_key too"), (None, "localhost.key", None, "set server.tls_cert too"),
     ("localhost.crt", "localhost.crt", None, "cannot be used"), ("nowhere.crt", "localhost.key", None, "both in PEM"),
     (None, None, "localhost.crt", "server.tls_client_ca needs a server with TLS"),
     ("localhost.crt", "localhost.key", "localhost.key", "give certificates in PEM"),
     ("localhost.crt", "localhost.key", "nowhere.crt", "give certificates in PEM")],
)  # fmt: skip
def test_a_certificate_that_cannot_be_used_stops_serve_before_the_engine_starts(
    cert: str | None, private: str | None, client_ca: str | None, says: str
) -> None:
    async def start(config: Any) -> AsyncLLM:
        raise AssertionError("it must not start")

    files = {"tls_cert": cert, "tls_key": private, "tls_client_ca": client_ca}
    keys = {f"server.{name}": str(TLS / file) for name, file in files.items() if file is not None}
    config = from_overrides("/m", {"serve.port": 0, **keys})
    with pytest.raises(ConfigError, match=says):
        asyncio.run(process.serve(config, drain_timeout=0, start=start))


def test_a_key_file_of_json_lines_is_as_documented(tmp_path: Path) -> None:
    entry = {"name": "batch", "key": "sk-batch", "priority": -5, "requests_at_once": 4, "requests_per_minute": 120,
             "tokens_per_minute": 100_000}  # fmt: skip
    file = tmp_path / "keys.jsonl"
    file.write_text(json.dumps(entry))
    (found,) = read_key_file(str(file))
    assert found.tokens_per_minute == 100_000 and found.priority == -5
