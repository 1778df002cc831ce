"""The whole server in this process over a real engine, called without a socket: many calls a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener_server.app import create_app
from evener_server.body import BodyLimits

T = TypeVar("T")
PATIENCE = 120.0
JSON = (b"content-type", b"application/json")


@dataclass(frozen=True)
class Call:
    """One request as a server sees it.

    Attributes:
        chunks: (seconds before it, bytes) of its body.
        whole: whether the body ends; otherwise the client goes away after the last chunk.
        gone_after: the client goes away once so many messages of the answer were sent; None: it stays.
    """

    path: str
    body: bytes = b""
    method: str = "POST"
    headers: tuple[tuple[bytes, bytes], ...] = (JSON,)
    chunks: tuple[tuple[float, bytes], ...] | None = None
    whole: bool = True
    gone_after: int | None = None
    query: bytes = b""

    def __str__(self) -> str:
        shown = self.body if self.chunks is None else b"|".join(part for _, part in self.chunks)
        text = f"{self.method} {self.path[:80]!r} {self.headers!r}"[:300]
        return f"{text} {shown[:300]!r} ({len(shown)} bytes) whole={self.whole} gone_after={self.gone_after}"


@dataclass
class Answer:
    """What came back. ``status`` 0: nothing."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False


class InProcess:
    """An engine, the application over it, and an event loop that runs during calls."""

    def __init__(self, model: Path, settings: dict[str, Any], limits: BodyLimits) -> None:
        self.loop = asyncio.new_event_loop()
        config = from_overrides(str(model), settings)
        self.llm = self.run(AsyncLLM.start(config, mode="thread"))
        self.app: Any = self.run(self._create(limits))

    async def _create(self, limits: BodyLimits) -> Any:
        return create_app(self.llm, limits)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run until ``work`` is done."""
        return self.loop.run_until_complete(work)

    def calls(self, given: Sequence[Call]) -> list[Answer]:
        """All at the same time."""

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*(asyncio.wait_for(self.call(call), PATIENCE) for call in given))

        return self.run(all_of_them())

    async def call(self, call: Call) -> Answer:
        """One call; an exception that the application lets through is raised."""
        answer, gone, sent = Answer(), asyncio.Event(), 0
        left = list(call.chunks if call.chunks is not None else ((0.0, call.body),))

        async def receive() -> dict[str, Any]:
            if left:
                pause, part = left.pop(0)
                if pause:
                    await asyncio.sleep(pause)
                return {"type": "http.request", "body": part, "more_body": bool(left) or not call.whole}
            if call.whole:
                await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal sent
            sent += 1
            if call.gone_after is not None and sent > call.gone_after:
                gone.set()
                await asyncio.sleep(0)
                return
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")
                answer.ended = not message.get("more_body", False)

        application: Callable[..., Awaitable[None]] = self.app
        await application(self._scope(call), receive, send)
        return answer

    def _scope(self, call: Call) -> dict[str, Any]:
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": call.method, "scheme": "http", "path": call.path, "raw_path": call.path.encode("utf-8",
            "replace"),
            "root_path": "", "query_string": call.query, "headers": list(call.headers), "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }  # fmt: skip

    def at_rest(self) -> None:
        """Wait until nothing runs and nothing is held."""

        async def wait() -> None:
            # Blocks of a request that was aborted return with the step that was under way.
            for _ in range(int(PATIENCE / 0.01)):
                report = await self.llm.stats()
                held = self.llm.num_open, report.running, report.waiting, report.blocks_used
                if held == (0, 0, 0, 0):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(f"open, running, waiting, blocks: {held} never ended")

        self.run(wait())
        assert len(self.app.state.service.running) == 0

    def close(self) -> None:
        """Stop the engine."""
        self.run(self.llm.close())
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def answers(folder: Path, calls: Sequence[tuple[str, dict[str, Any]]], **keys: Any) -> list[httpx.Response]:
    """What a server of the model in ``folder`` answers to JSON bodies, one after another."""

    async def run() -> list[httpx.Response]:
        llm = await AsyncLLM.start(from_overrides(str(folder), keys), "thread")
        try:
            transport = httpx.ASGITransport(create_app(llm))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return [await client.post(path, json=body) for path, body in calls]
        finally:
            await llm.close()

    return asyncio.run(run())
