"""``evener serve`` as a process: signals, draining, exit codes."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from warm import warm

from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.errors import ConfigError
from evener_conformance.fake_engine import FakeEngine
from evener_server import process
from evener_server.command import main
from evener_server.connections import Listener
from evener_server.process import bind, url

#: The real process with a fake engine: it holds after three tokens of a request; a line on its standard input frees it.
PROGRAM = """
import asyncio, logging, sys, threading, warnings
from pathlib import Path
from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener_conformance.fake_engine import FakeEngine
from evener_server.process import serve

class Engine(FakeEngine):
    free = False
    def _step(self, running):
        if running.done >= 3 and not self.free:
            self._held = True
        else:
            super()._step(running)
    def listen(self):
        for line in sys.stdin:
            if line == "die\\n":
                return self.die("a worker was killed")
            self.free = True
            self.release()

async def start(config):
    engine = Engine()
    threading.Thread(target=engine.listen, daemon=True).start()
    llm = AsyncLLM(engine, model_dir=Path(config.model))
    await llm.wait_ready()
    return llm

warnings.simplefilter("ignore")
logging.basicConfig(level="INFO", stream=sys.stderr)
config = from_overrides(sys.argv[1], {"serve.port": 0})
restart = "restart" in sys.argv
sys.exit(asyncio.run(serve(config, drain_timeout=float(sys.argv[2]), start=start, restart=restart)))
"""


class Served:
    """The process, its URL, and its log so far."""

    def __init__(self, folder: Path, drain: float, *words: str) -> None:
        command = [str(warm() / "python"), "-c", PROGRAM, str(folder), str(drain), *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self.wait_for(r"serving fake at (http://127\.0\.0\.1:\d+) on backend fake").group(1)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.log.append(line)
                self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return re.search(pattern, "".join(self.log))

        with self._changed:
            assert self._changed.wait_for(found, 120), self.log
        match = found()
        assert match is not None
        return match

    def go_on(self, word: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(120)
        self._reader.join(120)
        for pipe in (self.process.stdin, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def serve(folder: Path) -> Iterator[Any]:
    made: list[Served] = []

    # A drain outlasts whatever a test does meanwhile on a busy machine.
    def start(drain: float = 120.0, *words: str) -> Served:
        made.append(Served(folder, drain, *words))
        return made[-1]

    yield start
    for served in made:
        served.close()


def _stream(http: httpx.Client, served: Served) -> Any:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 10, "stream": True}
    return http.stream("POST", f"{served.url}/v1/completions", json=body)


def test_sigterm_without_requests_ends_with_0(serve: Any, http: httpx.Client) -> None:
    served = serve()
    assert http.get(f"{served.url}/ready").status_code == 200
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(120) == 0


def test_a_process_with_a_key_in_its_environment_asks_for_it_and_does_not_log_it(
    serve: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENER_API_KEY", "sk-environ-51")
    served = serve()
    served.wait_for(r"requests need an API key \(number of keys: 1\)")
    assert http.get(f"{served.url}/ready").status_code == 200
    assert http.get(f"{served.url}/v1/models").status_code == 401
    headers = {"authorization": "Bearer sk-environ-51"}
    assert http.get(f"{served.url}/v1/models", headers=headers).status_code == 200
    assert "sk-environ-51" not in "".join(served.log)


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(serve: Any, http: httpx.Client) -> None:
    served = serve()
    with _stream(http, served) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        served.process.send_signal(signal.SIGTERM)
        served.wait_for("running requests have 120 s to finish")
        answer = http.get(f"{served.url}/ready")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is shutting down")
        refused = http.post(f"{served.url}/v1/completions", json={"prompt": "hello"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert http.get(f"{served.url}/health").status_code == 200
        served.go_on()
        *_, last = lines
    assert last == "data: [DONE]"
    assert served.process.wait(120) == 0
    with pytest.raises(httpx.ConnectError):
        http.get(f"{served.url}/ready")


def test_requests_exceeding_the_drain_timeout_are_aborted_with_a_reason(serve: Any, http: httpx.Client) -> None:
    served = serve(0.05)
    with _stream(http, served) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        *_, last = lines
    assert "shutting down" in last and '"error"' in last
    assert served.process.wait(120) == 0
    served.wait_for(
        "aborting 1 requests that did not finish within 0.05 s"
    )  # it may still be on its way through the pipe


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(serve: Any, http: httpx.Client, second: signal.Signals) -> None:
    served = serve()
    with _stream(http, served) as response:
        lines = response.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        served.wait_for("running requests have 120 s to finish")
        served.process.send_signal(second)
        assert served.process.wait(120) == 128 + second
        response.close()


def test_a_port_in_use_is_an_error_before_the_engine_starts(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}.*serve.port=NUMBER"):
            main([str(folder), f"serve.port={port}"])


def test_a_server_refuses_to_run_only_some_layers(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"infer\.layers=0-1,3 runs only some .* type evener bench-engine"):
        main([str(folder), "serve.port=0", "infer.layers=0-1,3"])


def test_binding_to_a_foreign_address_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"serve\.host=no such host"):
        bind("no such host", 0)


def test_the_url_of_an_ipv6_address_has_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "getsockname", lambda self: ("::1", 8000, 0, 0))
    with bind("127.0.0.1", 0) as listener:
        assert url(listener) == "http://[::1]:8000"


def test_an_ipv6_address_is_bound_where_the_machine_has_one() -> None:
    try:
        with socket.socket(socket.AF_INET6) as plain:
            plain.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with bind("::1", 0) as listener:
        assert url(listener).startswith("http://[::1]:")


def test_a_wrong_drain_timeout_or_key_is_an_error_that_names_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--drain-timeout -1"):
        main([str(folder), "--drain-timeout", "-1"])
    with pytest.raises(ConfigError, match=r"serve\.prot"):
        main([str(folder), "serve.prot=1"])


def test_an_engine_that_dies_ends_its_requests_with_the_reason_and_the_process_with_1(
    serve: Any, http: httpx.Client
) -> None:
    served = serve()
    with _stream(http, served) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        served.go_on("die")
        rest = list(lines)
    assert "a worker was killed" in "".join(rest)
    assert served.process.wait(120) == 1
    served.wait_for("the engine has stopped: a worker was killed")
    with pytest.raises(httpx.ConnectError):
        http.get(f"{served.url}/ready")


def test_with_restart_a_new_engine_follows_one_that_died(serve: Any) -> None:
    served = serve(120.0, "restart")
    served.go_on("die")
    served.wait_for("starting again")
    served.wait_for(r"(?s)starting again.*serving fake at http")
    assert served.process.poll() is None


def test_collections_while_it_serves_do_not_look_at_the_objects_of_its_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []

    async def start(config: Any) -> AsyncLLM:
        llm = AsyncLLM(FakeEngine(), model_dir=folder)
        await llm.wait_ready()
        gc.unfreeze()
        return llm

    async def run(run: Any) -> int:
        frozen.append(gc.get_freeze_count())
        return 0

    monkeypatch.setattr(process._ServerRun, "run", run)
    config = from_overrides(str(folder), {"serve.port": 0})
    assert asyncio.run(process.serve(config, drain_timeout=0, start=start)) == 0
    assert frozen[0] > 1000 and gc.get_freeze_count() == 0
