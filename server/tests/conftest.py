"""The application over a fake engine: in this process (``make_api``), and behind a real socket (``make_server``)."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import tokenizers
import uvicorn

from evener.async_llm import AsyncLLM
from evener.frontend.settings import FrontendSettings
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer
from evener_formats.chat.render import Renderer
from evener_server.app import create_app
from evener_server.body import BodyLimits
from evener_server.options import ServerOptions
from evener_server.process import bind

T = TypeVar("T")
#: A template of the kind of Qwen 3: tools as JSON, calls between tags, reasoning between others.
TOOLS_TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if open_think %}<think>
{% endif %}{% endif %}{# </think> #}"""
#: Seconds for whatever must happen some time; a machine with other work is slow.
PATIENCE = 120.0


class Api:
    """The application, called without a socket, on an event loop of its own."""

    def __init__(
        self, settings: FrontendSettings, engine: FakeEngine, limits: BodyLimits, max_queue: int | None, wait: bool,
        options: ServerOptions | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.options = engine, options
        self.loop = asyncio.new_event_loop()
        self.run(self._open(settings, limits, max_queue, wait))

    async def _open(self, settings: FrontendSettings, limits: BodyLimits, max_queue: int | None, wait: bool) -> None:
        self.llm = AsyncLLM(self.engine, settings=settings, max_queue=max_queue)
        if wait:
            await self.llm.wait_ready()
        self.app = create_app(self.llm, limits, options=self.options)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def request(self, method: str, path: str, **settings: Any) -> httpx.Response:
        return self.run(self.client.request(method, path, **settings))

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return self.request("GET", path, **settings)

    def chat(self, /, **fields: Any) -> httpx.Response:
        """A chat that says "hi"; ``fields`` added or, if they are ``...``, left out."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
        return self.post("/v1/chat/completions", {k: v for k, v in body.items() if v is not ...})

    def complete(self, /, **fields: Any) -> httpx.Response:
        """A completion of "hello"; ``fields`` as in ``chat``."""
        body = {"model": "fake", "prompt": "hello", "max_tokens": 4, **fields}
        return self.post("/v1/completions", {k: v for k, v in body.items() if v is not ...})

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self.llm.close())
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()


class LiveServer:
    """The application behind uvicorn on a free port, in a thread."""

    def __init__(self, folder: Path, engine: FakeEngine, limits: BodyLimits) -> None:
        self.engine = engine
        self._folder, self._limits = folder, limits
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(PATIENCE)

    async def _serve(self) -> None:
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.llm = AsyncLLM(self.engine, model_dir=self._folder)
        await self.llm.wait_ready()
        self.app = create_app(self.llm, self._limits)
        config = uvicorn.Config(
            self.app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        listener.listen()
        self._started.set()
        await self._server.serve(sockets=[listener])
        await self.llm.close()

    def idle(self) -> bool:
        """Nothing runs, and the engine holds nothing."""
        return not self.engine.open_ids and self.llm.num_open == 0 and len(self.app.state.service.running) == 0

    def close(self) -> None:
        self.engine.release()
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def eventually(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Wait until ``condition`` holds; fails after ``PATIENCE``."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.002)


def sse(response: httpx.Response) -> list[Any]:
    """The events of a stream; ``[DONE]`` stays text."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in response.text.split("\n\n") if line)
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    return dict(body["error"])


@pytest.fixture(name="sse")
def sse_fixture() -> Callable[[httpx.Response], list[Any]]:
    return sse


@pytest.fixture(name="error")
def error_fixture() -> Callable[[httpx.Response], dict[str, Any]]:
    return error


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., None]:
    return eventually


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """A client that waits, and asks no proxy."""
    with httpx.Client(timeout=PATIENCE, trust_env=False, verify=False) as client:
        yield client


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("model"))


class KeptRenderer(Renderer):
    """Its process outlives the servers that use it."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def renderer() -> Iterator[KeptRenderer]:
    kept = KeptRenderer()
    yield kept
    Renderer.close(kept)


@pytest.fixture(scope="module", autouse=True)
def one_renderer(renderer: KeptRenderer) -> Iterator[None]:
    """All servers render chats in one process: starting one for each took longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evener_formats.chat.templates.Renderer", lambda: renderer)
        yield


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    """For tests that leave nothing behind."""
    found = Api(FrontendSettings(model_dir=folder), FakeEngine(), BodyLimits(), None, True)
    yield found
    found.close()


@pytest.fixture
def make_api(folder: Path) -> Iterator[Callable[..., Api]]:
    made: list[Api] = []

    def make(
        engine: FakeEngine | None = None, *, limits: BodyLimits | None = None, max_queue: int | None = None,
        model: Path = folder, wait: bool = True, options: ServerOptions | None = None,
        options_of_packages: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any,
    ) -> Api:  # fmt: skip
        made.append(
            Api(
                FrontendSettings(model_dir=model, options=options_of_packages or {}, **settings),
                engine or FakeEngine(),
                limits or BodyLimits(),
                max_queue,
                wait,
                options,
            )
        )
        return made[-1]

    yield make
    for found in made:
        found.close()


@pytest.fixture
def make_server(folder: Path) -> Iterator[Callable[..., LiveServer]]:
    made: list[LiveServer] = []

    def make(engine: FakeEngine | None = None, limits: BodyLimits | None = None, model: Path = folder) -> LiveServer:
        made.append(LiveServer(model, engine or FakeEngine(), limits or BodyLimits()))
        return made[-1]

    yield make
    for found in made:
        found.close()


@pytest.fixture
def says(make_api: Callable[..., Api], tmp_path: Path) -> Callable[..., Api]:
    """A server whose model has tools and reasoning, and answers with the given text."""
    folder = write_tiny_tokenizer(tmp_path / "tools", TOOLS_TEMPLATE)
    encode = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode

    def make(text: str, model: Path = folder, options: ServerOptions | None = None, **settings: Any) -> Api:
        engine = FakeEngine(
            lambda request: [*encode(text, add_special_tokens=False).ids, 258],
            info_overrides={"max_model_len": 4096},
            **settings,
        )
        return make_api(engine, model=model, options=options)

    return make
