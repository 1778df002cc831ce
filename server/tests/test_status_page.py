"""``GET /status``: JSON for programs, and a page for a browser."""

from __future__ import annotations

import json
import platform
import re
from typing import Any

import httpx
import pytest

from evener_conformance.fake_engine import FakeEngine
from evener_server.api_keys import ApiKeys
from evener_server.app import create_app
from evener_server.options import ServerOptions

#: What browsers send for a page.
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def test_it_says_what_runs_and_how_busy_it_is(make_api: Any) -> None:
    api = make_api(FakeEngine(info_overrides={"architecture": "LlamaForCausalLM", "max_reqs": 8, "device": "a card",
                                              "backend_version": "1.2"}), max_queue=4)  # fmt: skip
    api.complete(prompt="hello", max_tokens=3)
    api.engine.hold()
    stream = api.run(api.llm.submit([1, 2]))
    response = api.get("/status")
    assert response.headers["content-type"] == "application/json" and response.headers["cache-control"] == "no-store"
    found = response.json()
    assert (found["ready"], found["reason"]) == (True, None) and 0 <= found["uptime_seconds"] < 600
    assert found["model"] == {
        "name": "fake", "architecture": "LlamaForCausalLM", "dtype": "", "max_model_len": 128, "weights_version": "1",
        "asleep": False, "adapters": [], "adapter_count": 0,
    }  # fmt: skip
    assert found["backend"] == {
        "name": "fake", "version": "1.2", "reason": "asked for", "device": "a card", "ranks": 1,
    }  # fmt: skip
    assert found["requests"] == {
        "running": 1, "waiting": 0, "open": 0, "max_running": 8, "max_waiting": 4, "ended": {"length": 1},
        "preemptions": 0,
    }  # fmt: skip
    assert found["kv_cache"]["blocks"] == 100 and found["kv_cache"]["usage"] == found["kv_cache"]["blocks_used"] / 100
    assert found["tokens"] == {"prompt": 5, "generated": 3}
    assert found["versions"]["evener-server"] == "0.1.0" and found["versions"]["python"] == platform.python_version()
    api.engine.release()
    api.run(stream.aclose())


def test_it_answers_before_the_engine_is_ready_and_after_it_has_died(make_api: Any) -> None:
    api = make_api(FakeEngine(auto_ready=False), wait=False)
    found = api.get("/status").json()
    assert (found["ready"], found["reason"], found["model"], found["kv_cache"]) == (
        False, "the engine is starting", None, None,
    )  # fmt: skip
    api.engine.become_ready()
    api.run(api.llm.wait_ready())
    assert api.get("/status").json()["ready"]
    api.engine.die("the worker was killed")
    api.run(api.llm.died.wait())
    found = api.get("/status").json()
    assert not found["ready"] and "the worker was killed" in found["reason"] and found["model"]["name"] == "fake"
    assert found["requests"]["running"] is None


def test_its_size_does_not_depend_on_how_long_names_are_or_how_many(
    make_api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api(FakeEngine(info_overrides={"served_name": "m" * 5000, "backend_reason": "r" * 5000}))
    adapters = {f"{number}-{'a' * 5000}": "/adapter" for number in range(500)}
    monkeypatch.setattr(type(api.app.state.service), "adapters", adapters)
    response = api.get("/status")
    assert len(response.content) < 10_000 and response.json()["model"]["adapter_count"] == 500


@pytest.mark.parametrize(
    ("accept", "html"),
    [(BROWSER["accept"], True), ("*/*", False), ("", False), ("application/json", False),
     ("application/json, text/html", False), ("text/html;q=0.9, application/json", True), ("text/plain", False)],
)  # fmt: skip
def test_browsers_get_a_page_and_programs_get_json(api: Any, accept: str, html: bool) -> None:
    response, head = (api.request(method, "/status", headers={"accept": accept}) for method in ("GET", "HEAD"))
    kind = "text/html; charset=utf-8" if html else "application/json"
    assert response.headers["content-type"] == head.headers["content-type"] == kind and not head.content
    assert response.headers["vary"] == "Accept" and response.headers["x-content-type-options"] == "nosniff"


def test_the_page_has_the_policy_of_the_chat_and_runs_only_files_of_ours(api: Any) -> None:
    response = api.get("/status", headers=BROWSER)
    assert response.headers["content-security-policy"] == api.get("/").headers["content-security-policy"]
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|https?://", response.text)
    names = set(re.findall(r'(?:src|href)="([^"#]+)"', response.text))
    assert {"page/js/status.js", "page/style/status.css"} <= names
    assert [name for name in names if api.get(f"/{name}").status_code != 200] == []
    # The page itself has no data: it is the same for everybody.
    assert "fake" not in response.text


def test_the_log_is_not_full_of_a_page_that_asks_every_other_second(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "evener_server.access"):
        api.get("/status")
        api.get("/version")
    assert [message for message in caplog.messages if "request_id=" in message and "path=/status" in message] == []
    assert any("path=/version" in message for message in caplog.messages)


def test_without_pages_there_is_only_json(make_api: Any) -> None:
    api = make_api(options=ServerOptions(page=False))
    assert api.get("/status", headers=BROWSER).headers["content-type"] == "application/json"


def test_with_keys_the_page_needs_none_and_what_it_shows_does(api: Any) -> None:
    def ask(options: ServerOptions, method: str = "GET", **headers: str) -> httpx.Response:
        app = create_app(api.llm, keys=ApiKeys(["sk-1"]), options=options)

        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                return await client.request(method, "/status", headers=headers)

        found: httpx.Response = api.run(send())
        return found

    assert ask(ServerOptions(), **BROWSER).status_code == 200
    assert ask(ServerOptions()).status_code == ask(ServerOptions(page=False), **BROWSER).status_code == 401
    assert ask(ServerOptions(), authorization="Bearer sk-1").json()["ready"]
    assert "sk-1" not in json.dumps(ask(ServerOptions(), authorization="Bearer sk-1").json())
    assert ask(ServerOptions(), "POST", **BROWSER).status_code == 405
