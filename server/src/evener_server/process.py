"""The serving process: its socket, its signals, and how it ends.

The first SIGTERM or SIGINT drains: ``/ready`` and new requests get a 503, and running requests continue until they end
or the time limit ends them with a 503; then the socket closes. A second signal ends them at once. If the engine dies,
its requests get errors, the server answers 503 with the reason for a few more seconds, and the process ends with exit
code 1; with ``restart`` a new engine starts at once instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from importlib_metadata import version

from evener.async_llm import AsyncLLM
from evener.config import Config
from evener.errors import ConfigError
from evener_server.api_keys import ApiKeys, KeyReader
from evener_server.app import create_app
from evener_server.collector import objects_frozen
from evener_server.connections import AcceptErrors, Listener, Protocol, max_connections
from evener_server.grammar_check import GrammarChecks
from evener_server.ksanallm.plugin_file import unused_file
from evener_server.options import ServerOptions
from evener_server.sampling_defaults import read_defaults
from evener_server.service import Service
from evener_server.stats_logger import StatsLogger
from evener_server.tls import Tls
from evener_server.trace_settings import open_traces

if TYPE_CHECKING:
    from evener_server.request_traces import Traces

logger = logging.getLogger(__name__)

#: After the drain's limit, for the last bytes to reach clients; some clients no longer read.
_GRACE_SECONDS = 5
#: Longer than clients keep idle connections: so the client closes them, and no request is lost.
_KEEP_ALIVE_SECONDS = 65
_BACKLOG = 2048
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
#: How long a server whose engine has died still answers ``/ready`` and new requests with a 503 and the reason.
_DEAD_GRACE_SECONDS = 5.0
#: Exit code if the engine has died.
_EXIT_ENGINE_DEAD = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Start = Callable[[Config], Coroutine[Any, Any, AsyncLLM]]


async def serve(config: Config, *, drain_timeout: float, start: Start | None = None, restart: bool = False) -> int:
    """Start the engine and serve it until a signal comes. Returns the exit code.

    Args:
        drain_timeout: seconds that running requests may continue after the first signal.
        start: creates the engine; default ``AsyncLLM.start``.
        restart: start again if the engine dies.

    A signal during the engine's start ends the start, with exit code 128 + its number.

    Raises:
        ConfigError: the address or an API key cannot be used.
        EvenerError: the engine does not start.
    """
    dead_grace = 0.0 if restart else _DEAD_GRACE_SECONDS
    while (code := await _serve(config, drain_timeout, start or start_engine, dead_grace)) is None and restart:
        logger.warning("the engine has died: starting again, because of --restart")
    return _EXIT_ENGINE_DEAD if code is None else code


async def _serve(config: Config, drain_timeout: float, start: Start, dead_grace: float) -> int | None:
    """Start one engine and serve it. Returns the exit code; None if the engine died."""
    # Before the weights are read, so that a wrong key or port is an error at once.
    if config.infer.layers:
        raise ConfigError(f"infer.layers={','.join(config.infer.layers)} runs only some of the model's layers, whose "
                          "text is not the model's, so it is not served: leave it out; to time layers, type "
                          "evener bench-engine")  # fmt: skip
    options = ServerOptions.of(config.options)
    options.check_names(config)
    options.check_numbers()
    read_defaults(options.sampling_defaults)
    reader = KeyReader(config.serve.api_keys, options.api_key_file, os.environ)
    keys = ApiKeys(reader.read(), options.api_key_strict)
    tls = Tls.of(options)
    _ = options.origins
    template = options.read_chat_template()
    # The engine and its processes have no use for the keys.
    config = dataclasses.replace(config, serve=dataclasses.replace(config.serve, api_keys=()))
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(contextlib.closing(bind(config.serve.host, config.serve.port)))
        traces = open_traces(options.otlp_endpoint, version("evener-server"), os.environ)
        if traces is not None:
            ends.callback(traces.close)
        llm = await _until_signal(start(config))
        if not isinstance(llm, AsyncLLM):
            logger.info("%s: stopped before the engine had started", llm.name)
            return 128 + llm
        try:
            assert llm.chat is not None, "the engine is ready"
            if template is not None:
                llm.chat.templates = {"default": template}
            # Otherwise the first chat would wait for the process that renders them.
            await asyncio.to_thread(llm.chat.warm_up)
            ends.enter_context(objects_frozen())
            if (unused := unused_file(config)) is not None:
                logger.warning("%s", unused)
            run = _ServerRun(llm, config, listener, drain_timeout, dead_grace, keys, traces, tls)
            watch = asyncio.ensure_future(reader.watch(keys))
            try:
                return await run.run()
            finally:
                watch.cancel()
        finally:
            await llm.close()


async def _until_signal(starting: Coroutine[Any, Any, AsyncLLM]) -> AsyncLLM | signal.Signals:
    """The engine, or the signal that ended its start."""
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
    """The engine in its own processes, or in this one with ``executor=inline``."""
    return await AsyncLLM.start(config, mode="thread" if config.executor == "inline" else "process")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        ConfigError: the host name is unknown, or the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = Listener(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"serve.host={host} cannot be used: {error}; give an address of this machine") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def allowed_hosts(config: Config) -> tuple[str, ...] | None:
    """The names that a request's ``Host`` may have; None: any."""
    names = config.serve.allowed_hosts or (_LOOPBACK if config.serve.host in (*_LOOPBACK, "::1") else ("*",))
    return None if "*" in names else names


def url(listener: socket.socket, scheme: str = "http") -> str:
    """The server's URL."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with serve.port=NUMBER")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process with the signal instead of exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ServerRun:
    def __init__(
        self, llm: AsyncLLM, config: Config, listener: socket.socket, drain_timeout: float, dead_grace: float,
        keys: ApiKeys, traces: Traces | None, tls: Tls | None,
    ) -> None:  # fmt: skip
        self._llm, self._config, self._listener, self._drain_timeout = llm, config, listener, drain_timeout
        self._dead_grace = dead_grace
        options = ServerOptions.of(config.options)
        app = create_app(llm, hosts=allowed_hosts(config), options=options, keys=keys, traces=traces)
        self._keys, self._tls = keys, tls
        self._scheme = "http" if tls is None else "https"
        protocol = type("_Protocol", (Protocol,), {"connection_limit": max_connections(config.serve.max_connections)})
        self._service: Service = app.state.service
        self._service.grammars = GrammarChecks(config.options.get("generation", {}).get("grammars"))
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                http=protocol,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                **({} if tls is None else tls.settings),
            )
        )
        self._server.config.load()
        self._code: int | None = None
        self._dead = False
        self._watch: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._activity: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def run(self) -> int | None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptErrors())
        try:
            # Before the log line: clients that wait for that line connect at once.
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._raise(error)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._watch = asyncio.ensure_future(self._stop_when_engine_dead())
        self._announce()
        if self._config.log.interval > 0:
            self._activity = asyncio.ensure_future(StatsLogger(self._service).run(self._config.log.interval))
        if self._tls is not None and (context := self._server.config.ssl) is not None:
            self._renewal = asyncio.ensure_future(self._tls.watch(context))
        try:
            await asyncio.wait((self._task,))
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            for task in (self._task, self._draining, self._activity, self._watch, self._renewal):
                if task is not None:
                    task.cancel()
        if not self._task.cancelled():
            self._raise(self._task.exception())
        if self._dead:
            return None
        logger.info("stopped")
        return 0 if self._code is None else self._code

    async def _stop_when_engine_dead(self) -> None:
        await self._llm.died.wait()
        logger.error("the engine has stopped: %s", self._llm.dead_reason)
        await asyncio.sleep(self._dead_grace)
        self._dead = self._server.should_exit = True

    def _announce(self) -> None:
        info = self._llm.info
        assert info is not None, "it was waited for"
        logger.info(
            "serving %s at %s on backend %s (%s)",
            info.served_name, url(self._listener, self._scheme), info.backend, info.backend_reason,
        )  # fmt: skip
        if self._service.options.page:
            logger.info("for people: a chat in the browser at %s/", url(self._listener, self._scheme))
        if self._keys:
            need = "need an API key" if self._keys.strict else "with an API key come first"
            logger.info("requests %s (number of keys: %d)", need, len(self._keys))

    def _raise(self, error: BaseException | None) -> None:
        if isinstance(error, OSError):
            raise _unusable(self._config.serve.host, self._config.serve.port, error) from error
        if error is not None:
            raise error

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is None:
            count = len(self._service.running)
            logger.info(
                "%s: %d running requests have %g s to finish; send it again to stop now",
                name, count, self._drain_timeout,
            )  # fmt: skip
            self._draining = asyncio.ensure_future(self._drain())
            return
        logger.warning(
            "%s again: aborting %d requests", name, self._service.running.abort_all("the server was stopped")
        )
        self._code = 128 + number
        assert self._task is not None, "signals come while it runs"
        self._task.cancel()

    async def _drain(self) -> None:
        if not await self._llm.drain(self._drain_timeout):
            count = self._service.running.abort_all("the server is shutting down")
            logger.warning("aborting %d requests that did not finish within %g s", count, self._drain_timeout)
        self._server.should_exit = True
