"""Health, readiness, request ids, and errors that are not the client's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from evener_conformance.fake_engine import FakeEngine


def test_the_model_is_listed_and_found_by_name(api: Any, error: Any) -> None:
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["fake"]
    assert api.get("/v1/models/fake").json() == listed["data"][0]
    response = api.get("/v1/models/org/other")
    assert response.status_code == 404 and error(response)["code"] == "model_not_found"


def test_a_name_with_slashes_is_found(make_api: Any) -> None:
    api = make_api(FakeEngine(info_overrides={"served_name": "org/name"}))
    assert api.get("/v1/models/org/name").status_code == 200
    assert api.chat(model="org/name").status_code == 200


def test_the_version_says_what_runs_and_why(api: Any) -> None:
    found = api.get("/version").json()
    manifest = found.pop("manifest")
    assert found == {"version": "0.1.0", "backend": "fake", "backend_reason": "asked for"}
    assert manifest.keys() == {"ops", "packings", "dequantized", "activations", "fallbacks", "notes"}


def test_unknown_urls_and_methods_have_openais_shape(api: Any, error: Any) -> None:
    missing = api.get("/v1/nothing")
    assert missing.status_code == 404 and error(missing)["code"] == "unknown_url"
    wrong = api.get("/v1/completions")
    assert wrong.status_code == 405 and error(wrong)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_the_description_has_a_schema_of_every_body(api: Any) -> None:
    document = api.get("/openapi.json").json()
    assert {"ChatBody", "CompletionBody", "Message"} <= set(document["components"]["schemas"])


def test_it_is_alive_but_not_ready_while_the_engine_starts(make_api: Any, error: Any) -> None:
    api = make_api(FakeEngine(auto_ready=False), wait=False)
    alive = api.get("/health")
    assert alive.status_code == 200
    assert alive.json() == {"status": "alive", "ready": False, "reason": "the engine is starting"}
    assert error(api.get("/ready"))["message"] == "the engine is starting"
    for response in (api.get("/v1/models"), api.chat(), api.complete(), api.get("/ready")):
        assert response.status_code == 503 and response.headers["retry-after"]
    assert api.get("/version").json()["backend"] is None
    api.engine.become_ready()
    api.run(api.llm.wait_ready())
    assert api.get("/ready").status_code == 200 and api.chat().status_code == 200
    assert api.get("/health").json() == {"status": "alive", "ready": True, "reason": None}


def test_it_is_alive_but_not_ready_when_the_engine_has_died(make_api: Any, error: Any, eventually: Any) -> None:
    api = make_api()
    api.engine.die("the worker was killed")
    api.run(_until_dead(api.llm))
    assert api.get("/health").status_code == 200 and api.request("HEAD", "/health").status_code == 200
    assert api.get("/ready").status_code == 503 and "the worker was killed" in api.get("/health").json()["reason"]
    assert "the worker was killed" in error(api.get("/ready"))["message"]
    for response in (api.chat(), api.complete(stream=True)):
        assert response.status_code == 503 and "the worker was killed" in error(response)["message"]


async def _until_dead(llm: Any) -> None:
    import asyncio

    while llm.alive:
        await asyncio.sleep(0.001)


def test_it_is_not_ready_while_it_drains(make_api: Any, error: Any) -> None:
    api = make_api()
    assert api.run(api.llm.drain(1))
    assert error(api.get("/ready"))["message"] == "the server is shutting down"
    assert api.chat().status_code == 503


def test_too_many_requests_are_a_429_that_says_when_to_come_back(make_api: Any, error: Any) -> None:
    api = make_api(max_queue=2)
    api.engine.hold()
    open_streams = [api.run(api.llm.submit([1])) for _ in range(2)]
    response = api.complete()
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert error(response)["type"] == "rate_limit_error" and error(response)["code"] == "overloaded"
    assert api.chat(stream=True).status_code == 429
    for stream in open_streams:
        api.run(stream.aclose())


def test_a_request_that_could_never_fit_is_a_400_not_a_429(make_api: Any, error: Any) -> None:
    api = make_api(max_queue=2)
    assert error(api.complete(n=3))["param"] == "n"
    assert error(api.complete(prompt=["a", "b", "c"]))["param"] == "prompt"
    assert api.complete(n=3).status_code == 400


class Failing(FakeEngine):
    """Fails every request after ``after`` tokens."""

    def __init__(self, after: int, status: int = 500) -> None:
        super().__init__(lambda request: request.prompt[:1] * after + [0])
        self._after, self._status = after, status

    def _step(self, running: Any) -> None:
        if running.done >= self._after:
            self._end(running.request.id, "error", "the kernel broke", self._status)
        else:
            super()._step(running)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [500, 503, 400])
def test_a_failure_before_the_first_token_has_its_own_status(
    make_api: Any, error: Any, stream: bool, status: int
) -> None:
    response = make_api(Failing(0, status)).chat(stream=stream)
    assert response.status_code == status and error(response)["message"] == "the kernel broke"


def test_a_failure_after_the_first_token_is_a_500_for_a_whole_answer(make_api: Any, error: Any) -> None:
    response = make_api(Failing(2)).complete(prompt=["a", "b"])
    assert response.status_code == 500 and error(response)["message"] == "the kernel broke"


def test_an_unforeseen_exception_is_a_500_in_the_log_and_tells_the_client_nothing(
    make_api: Any, error: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api()

    async def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(api.llm, "submit", broken)
    with caplog.at_level(logging.ERROR):
        response = api.complete(stream=True)
    assert response.status_code == 500 and error(response)["code"] == "internal_error"
    assert "secret" not in response.text and "secret" in caplog.text
    assert response.headers["x-request-id"] in caplog.text


def test_a_request_id_is_kept_and_otherwise_made(api: Any) -> None:
    assert api.get("/health", headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    made = api.get("/health").headers["x-request-id"]
    assert len(made) == 32
    for bad in ("two words", "x" * 129, "line\tbreak", ""):
        assert len(api.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]) == 32


def test_two_requests_may_carry_the_same_id(make_api: Any) -> None:
    api = make_api()

    async def both() -> list[Any]:
        import asyncio

        body = {"model": "fake", "prompt": "hello"}
        headers = {"x-request-id": "same"}
        return await asyncio.gather(*(api.client.post("/v1/completions", json=body, headers=headers) for _ in range(4)))

    assert [response.status_code for response in api.run(both())] == [200] * 4


def test_a_log_line_names_the_request_and_what_became_of_it(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "evener_server.access"):
        api.request(
            "POST", "/v1/completions", headers={"x-request-id": "abc"},
            json={"model": "fake", "prompt": "hello", "max_tokens": 2, "user": "eve\nrequest_id=forged"},
        )  # fmt: skip
    (line,) = caplog.messages
    parts = (
        "request_id=abc path=/v1/completions status=200 model=fake prompt_tokens=5 completion_tokens=2 finish=length"
    )
    for part in (*parts.split(), r"user='eve\nrequest_id=forged'", "id=cmpl-"):
        assert part in line
    assert "\n" not in line


def test_the_load_is_the_number_of_requests_that_run(make_api: Any) -> None:
    api = make_api()
    assert api.get("/load").json() == {"server_load": 0}

    async def loads() -> list[Any]:
        import asyncio

        api.engine.hold()
        task = asyncio.ensure_future(api.client.post("/v1/completions", json={"prompt": "hello"}))
        while not len(api.app.state.service.running):
            await asyncio.sleep(0)
        during = (await api.client.get("/load")).json()
        api.engine.release()
        await task
        return [during, (await api.client.get("/load")).json()]

    assert api.run(loads()) == [{"server_load": 1}, {"server_load": 0}]


def test_stats_say_how_busy_the_engine_is(make_api: Any, error: Any) -> None:
    api = make_api(FakeEngine(auto_ready=False), wait=False)
    assert api.get("/stats").status_code == 503
    api.engine.become_ready()
    api.run(api.llm.wait_ready())
    api.engine.hold()
    running = api.run(api.llm.submit("hello"))
    found = api.get("/stats").json()
    assert (found["running"], found["blocks_used"], found["waiting"]) == (1, 1, 0) and found["blocks"] > 1
    assert set(found) >= {"steps", "preemptions", "prefix_hits", "cached_tokens", "computed_tokens", "finished"}
    api.run(running.aclose())
    assert api.get("/stats").json()["blocks_used"] == 0
    api.engine.die("the worker was killed")
    response = api.get("/stats")
    assert response.status_code == 503 and "the worker was killed" in error(response)["message"]


def test_the_description_states_the_types_of_answers(api: Any) -> None:
    paths = api.get("/openapi.json").json()["paths"]

    def kinds(path: str, method: str = "post") -> set[str]:
        return set(paths[path][method]["responses"]["200"]["content"])

    for path in ("chat/completions", "completions", "responses", "messages"):
        assert kinds(f"/v1/{path}") == {"application/json", "text/event-stream"}
    assert kinds("/metrics", "get") == {"text/plain"}
    assert "503" in paths["/ready"]["get"]["responses"]
