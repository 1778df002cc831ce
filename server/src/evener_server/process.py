"""The serving process: its socket, its signals, and how it ends.

The first SIGTERM or SIGINT drains: the socket closes, ``/ready`` says 503, running requests go on until they end or the
time limit ends them with a 503. The second one ends them at once. An engine that dies takes the process along, with
exit code 1, once its requests have their answers and whoever asks in the next seconds has heard why; with ``restart``
there is a new one instead, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from evener.async_llm import AsyncLLM
from evener.config import Config
from evener.errors import ConfigError
from evener_server.activity import Activity
from evener_server.app import create_app
from evener_server.service import Service

logger = logging.getLogger(__name__)

#: After the drain's limit: for the last bytes to reach clients, which some no longer read.
_GRACE_SECONDS = 5
#: Longer than clients keep idle connections, so that it is they who close them and no request is lost.
_KEEP_ALIVE_SECONDS = 65
_BACKLOG = 2048
#: For how long a server whose engine has died goes on to say so: ``/ready`` and new requests get a 503 with the reason.
_LAST_WORDS_SECONDS = 5.0
#: Exit code when the engine has died.
_DIED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Start = Callable[[Config], Coroutine[Any, Any, AsyncLLM]]


async def serve(config: Config, *, drain_timeout: float, start: Start | None = None, restart: bool = False) -> int:
    """Start the engine and serve it until a signal comes. Returns the exit code.

    Args:
        drain_timeout: seconds that running requests may go on after the first signal.
        start: makes the engine; default ``AsyncLLM.start``.
        restart: start again when the engine has died.

    A signal that comes while the engine starts ends the start, with exit code 128 + its number.

    Raises:
        ConfigError: the address cannot be used.
        EvenerError: whatever starting the engine raises.
    """
    last_words = 0.0 if restart else _LAST_WORDS_SECONDS
    while (code := await _serve(config, drain_timeout, start or start_engine, last_words)) is None and restart:
        logger.warning("the engine has died: starting again, because of --restart")
    return _DIED if code is None else code


async def _serve(config: Config, drain_timeout: float, start: Start, last_words: float) -> int | None:
    """One engine's life: the exit code; None when it has died."""
    # Before the weights are read: a wrong port is not worth that wait.
    listener = bind(config.serve.host, config.serve.port)
    with contextlib.closing(listener):
        llm = await _until_signal(start(config))
        if not isinstance(llm, AsyncLLM):
            logger.info("%s: stopped before the engine had started", llm.name)
            return 128 + llm
        try:
            await llm.warm_up_chat()
            return await _Serving(llm, config, listener, drain_timeout, last_words).run()
        finally:
            await llm.close()


async def _until_signal(starting: Coroutine[Any, Any, AsyncLLM]) -> AsyncLLM | signal.Signals:
    """The engine, or the signal that came first and ended the start."""
    loop, task, came = asyncio.get_running_loop(), asyncio.ensure_future(starting), list[int]()

    def stop(number: int) -> None:
        came.append(number)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not came:
            raise
        return signal.Signals(came[0])
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def start_engine(config: Config) -> AsyncLLM:
    """The engine in processes of its own, unless ``executor=inline`` asks for this one."""
    return await AsyncLLM.start(config, mode="thread" if config.executor == "inline" else "process")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        ConfigError: the name is unknown, or the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"serve.host={host} cannot be used: {error}; give an address of this machine") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def url(listener: socket.socket) -> str:
    """Where clients find the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with serve.port=NUMBER")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process with the signal instead of 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Serving:
    def __init__(
        self, llm: AsyncLLM, config: Config, listener: socket.socket, drain_timeout: float, last_words: float
    ) -> None:
        self._llm, self._config, self._listener, self._drain_timeout = llm, config, listener, drain_timeout
        self._last_words = last_words
        app = create_app(llm)
        self._service: Service = app.state.service
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(drain_timeout) + _GRACE_SECONDS,
            )
        )
        self._code: int | None = None
        self._dead = False
        self._watch: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._activity: asyncio.Task[None] | None = None

    async def run(self) -> int | None:
        loop = asyncio.get_running_loop()
        try:
            # Before it is announced: whoever waits for that line connects at once.
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._raise(error)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._watch = asyncio.ensure_future(self._stop_when_dead())
        self._announce()
        if self._config.log.interval > 0:
            self._activity = asyncio.ensure_future(Activity(self._service).run(self._config.log.interval))
        try:
            await asyncio.wait((self._task,))
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            for task in (self._task, self._draining, self._activity, self._watch):
                if task is not None:
                    task.cancel()
        if not self._task.cancelled():
            self._raise(self._task.exception())
        if self._dead:
            return None
        logger.info("stopped")
        return 0 if self._code is None else self._code

    async def _stop_when_dead(self) -> None:
        await self._llm.died.wait()
        logger.error("the engine has stopped: %s", self._llm.dead_reason)
        await asyncio.sleep(self._last_words)
        self._dead = self._server.should_exit = True

    def _announce(self) -> None:
        info = self._llm.info
        logger.info(
            "serving %s at %s on backend %s (%s)",
            info["served_name"], url(self._listener), info["backend"], info["backend_reason"],
        )  # fmt: skip

    def _raise(self, error: BaseException | None) -> None:
        if isinstance(error, OSError):
            raise _unusable(self._config.serve.host, self._config.serve.port, error) from error
        if error is not None:
            raise error

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is None:
            count = len(self._service.running)
            logger.info("%s: %d requests may run for %g s more; again to stop now", name, count, self._drain_timeout)
            self._server.should_exit = True
            self._draining = asyncio.ensure_future(self._drain())
            return
        logger.warning(
            "%s again: %d requests are ended", name, self._service.running.abort_all("the server was stopped")
        )
        self._code = 128 + number
        assert self._task is not None, "signals come while it runs"
        self._task.cancel()

    async def _drain(self) -> None:
        if not await self._llm.drain(self._drain_timeout):
            count = self._service.running.abort_all("the server is shutting down")
            logger.warning("%d requests did not end within %g s and are ended", count, self._drain_timeout)
