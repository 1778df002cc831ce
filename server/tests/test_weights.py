"""Sleep, wake and new weights over HTTP: who may ask for them, what is refused, and what answers say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from evener.engine.wire.messages import Command
from evener_conformance.fake_engine import FakeEngine
from evener_server.api_keys import ApiKeys
from evener_server.app import create_app
from evener_server.key_file import ApiKey, digest_of
from evener_server.options import ServerOptions


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The operator's folder."""
    (tmp_path / "weights" / "step-1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "weights" / "out").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "weights"


@pytest.fixture
def serve(make_api: Callable[..., Any], weights: Path) -> Callable[..., Any]:
    def make(engine: FakeEngine | None = None) -> Any:
        return make_api(engine or FakeEngine(), options=ServerOptions(weights_folder=str(weights)))

    return make


def changes(api: Any) -> list[Command]:
    return [message for message in api.engine.sent if isinstance(message, Command)]


def update(api: Any, path: str, **fields: Any) -> httpx.Response:
    return api.post("/update_weights", {"model_path": path, **fields})  # type: ignore[no-any-return]


def test_a_server_that_sleeps_refuses_requests_until_it_is_woken(serve: Callable[..., Any], error: Any) -> None:
    api = serve()
    assert api.get("/is_sleeping").json() == {"is_sleeping": False, "weight_version": "1"}
    assert api.post("/sleep?level=1", {}).json() == {"is_sleeping": True}
    assert api.get("/is_sleeping").json()["is_sleeping"] is True
    for refused in (api.get("/ready"), api.chat(), api.complete()):
        assert refused.status_code == 503 and "asleep" in error(refused)["message"]
    assert api.get("/health").status_code == api.get("/metrics").status_code == 200
    assert api.post("/wake_up", {}).status_code == 200
    assert api.chat().status_code == api.get("/ready").status_code == 200
    assert [change.arguments[0] for change in changes(api)] == ["release", "load"]


@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_disk"])
def test_answers_name_the_version_of_their_weights(
    path: str, serve: Callable[..., Any], weights: Path, sse: Any
) -> None:
    api = serve()
    assert api.chat().headers["x-weight-version"] == api.complete().json()["weight_version"] == "1"
    first = api.post(path, {"model_path": "step-1"})
    assert first.json() == {"success": True, "message": "the weights are those of step-1", "weight_version": "2"}
    assert changes(api)[-1] == Command("weights", ["load", str(weights / "step-1")])
    named = api.post(path, {"model_path": str(weights / "step-1"), "weight_version": "step-1"})
    assert named.json()["weight_version"] == "step-1"
    chunks = sse(api.chat(stream=True))
    assert {chunk["weight_version"] for chunk in chunks[:-1]} == {"step-1"}
    assert api.get("/v1/models").headers["x-weight-version"] == "step-1"


def test_weights_that_the_engine_refuses_are_the_client_s_mistake(serve: Callable[..., Any], error: Any) -> None:
    api = serve()
    api.engine.weights_error = "model.norm.weight has another shape"
    refused = update(api, "step-1", weight_version="9")
    assert refused.status_code == 400 and error(refused)["param"] == "model_path"
    assert "another shape" in error(refused)["message"]
    assert api.chat().headers["x-weight-version"] == "1"
    api.engine.weights_error = None
    api.post("/sleep", {})
    api.engine.weights_error = "the folder is gone"
    stays = api.post("/wake_up", {})
    assert stays.status_code == 500 and "stays asleep: the folder is gone" in error(stays)["message"]
    assert api.get("/is_sleeping").json()["is_sleeping"] is True and api.chat().status_code == 503


@pytest.mark.parametrize("path", ["..", "nowhere", "/", "/etc", "out", "a\x00b", "x" * 4096, ""])
def test_only_folders_below_the_operator_s_are_read(path: str, serve: Callable[..., Any]) -> None:
    api = serve()
    refused = update(api, path)
    assert refused.status_code in (400, 404) and refused.json()["error"]["param"] == "model_path"
    assert changes(api) == []


@pytest.mark.parametrize("path", ["/sleep?level=3", "/sleep?mode=keep", "/sleep?timeout=-1", "/sleep?timeout=nan",
                                  "/sleep?timeout=x", "/wake_up?tags=weights"])  # fmt: skip
def test_parameters_that_would_change_nothing_are_refused(path: str, serve: Callable[..., Any]) -> None:
    api = serve()
    assert api.post(path, {}).status_code == 400 and changes(api) == []


@pytest.mark.parametrize("fields", [{"weight_version": "a\nb"}, {"weight_version": "x" * 129}, {"timeout": -1},
                                    {"timeout": 1e9}])  # fmt: skip
def test_fields_that_cannot_be_used_are_refused(fields: dict[str, Any], serve: Callable[..., Any]) -> None:
    api = serve()
    assert update(api, "step-1", **fields).status_code == 400 and changes(api) == []


def test_fields_without_effect_are_named(serve: Callable[..., Any]) -> None:
    answer = update(serve(), "step-1", load_format="auto")
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "load_format"


def test_new_weights_wait_for_the_answers_that_run(serve: Callable[..., Any], eventually: Any) -> None:
    engine = FakeEngine()
    api = serve(engine)
    engine.hold()

    async def run() -> tuple[httpx.Response, httpx.Response, int]:
        body = {"prompt": "hello", "max_tokens": 4}
        answer = asyncio.ensure_future(api.client.post("/v1/completions", json=body))
        while api.llm.num_open == 0:
            await asyncio.sleep(0.001)
        updated = asyncio.ensure_future(api.client.post("/update_weights", json={"model_path": "step-1"}))
        while api.llm.paused is None:
            await asyncio.sleep(0.001)
        assert changes(api) == []
        refused = await api.client.post("/v1/completions", json=body)
        engine.release()
        return await answer, await updated, refused.status_code

    answer, updated, refused = api.run(run())
    assert answer.status_code == 200 and answer.json()["weight_version"] == "1"
    assert updated.json()["weight_version"] == "2" and refused == 503


def test_without_the_operator_s_folder_there_are_no_such_routes(make_api: Callable[..., Any]) -> None:
    api = make_api()
    for path in ("/sleep", "/wake_up", "/update_weights", "/update_weights_from_disk"):
        assert api.post(path, {"model_path": "step-1"}).status_code == 404
    assert api.get("/is_sleeping").status_code == 404 and changes(api) == []
    answer = api.chat()
    assert "x-weight-version" not in answer.headers and "weight_version" not in answer.json()


def test_a_server_with_keys_does_it_only_for_admins(serve: Callable[..., Any], weights: Path) -> None:
    api = serve()
    keys = ApiKeys(["sk-1", ApiKey(name="boss", digest=digest_of(b"sk-2"), admin=True)])
    app = create_app(api.llm, keys=keys, options=ServerOptions(weights_folder=str(weights)))

    async def ask(path: str, **headers: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return (await client.post(path, json={"model_path": "step-1"}, headers=headers)).status_code

    assert [api.run(ask(path)) for path in ("/sleep", "/wake_up", "/update_weights")] == [401] * 3
    assert api.run(ask("/update_weights", authorization="Bearer sk-1")) == 403
    assert changes(api) == []
    assert api.run(ask("/update_weights", authorization="Bearer sk-2")) == 200
