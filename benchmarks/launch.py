"""Processes that a benchmark starts and stops: engines of ``engines``, and servers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from workload import Job

HERE = Path(__file__).resolve().parent
_START_SECONDS = 300.0


class EngineChild:
    """One engine in its own process: ``engines.py NAME`` with the interpreter that has it.

    Args:
        name: a key of ``engines.ENGINES``.
        settings: further ``KEY=VALUE`` for the engine.

    Attributes:
        label: its name and version, as it reports them.
        ready_s: seconds from process start to ready.
    """

    def __init__(self, name: str, model: str, dtype: str, threads: int, settings: Sequence[str] = ()) -> None:
        self.name = name
        given = {"model": str(model), "dtype": dtype, "threads": threads, "settings": list(settings)}
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [interpreter(name), str(HERE / "engines.py"), name, json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self.label = str(self._answer()["label"])
        self.ready_s = round(time.perf_counter() - began, 2)

    def run(self, job: Job) -> tuple[float, float]:
        """(seconds until every request has its first token, seconds in total)."""
        answer = self.answer(job)
        return float(answer["first_s"]), float(answer["total_s"])

    def answer(self, job: Job) -> dict[str, Any]:
        """``first_s`` and ``total_s`` as of ``run``, and ``processor_s``: of both; None of a server."""
        assert self._process.stdin is not None
        print(json.dumps(job.to_json()), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended (exit status {self._process.wait()}); see its message above")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: Where ``make llamacpp`` puts llama.cpp's own environment.
_LLAMACPP = Path.home() / ".cache/evener/llamacpp"


def interpreter(engine: str) -> str:
    """The Python that has an engine: ``EVENER_BENCH_PYTHON_<ENGINE>``, what ``make llamacpp`` made, or this one."""
    named = os.environ.get("EVENER_BENCH_PYTHON_" + engine.upper().replace("-", "_"))
    made = Path(os.environ.get("LLAMACPP", _LLAMACPP)) / "bin/python"
    if named is None and engine == "llamacpp" and made.exists():
        return str(made)
    return named or sys.executable


@dataclass(frozen=True)
class Server:
    """A server that takes requests.

    Attributes:
        url: where.
        model: the model's name there.
        label: what it is.
        pid: its process, if it is ours.
        past_eos: request fields that make it continue after the end token.
    """

    url: str
    model: str
    label: str
    pid: int = 0
    past_eos: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get_json(url: str, timeout: float = 10.0, key: str = "") -> dict[str, Any]:
    """GET, never through a proxy; with an API key if there is one."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with opener.open(asked, timeout=timeout) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@contextmanager
def running(command: Sequence[str], url: str, probe: str, env: dict[str, str] | None = None) -> Iterator[int]:
    """Start a server and wait until it answers ``GET probe``; yields its process id, and ends it after the block."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(env or {})}
        )
        try:
            _wait(process, url + probe, log)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise SystemExit(f"the server has ended (exit status {process.returncode}):\n{log.read()[-4000:]}")
        try:
            get_json(url)
        except (urllib.error.URLError, OSError, ValueError):
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"the server was not ready after {_START_SECONDS:g} s: {url}")


@contextmanager
def evener_server(model: str, settings: Sequence[str] = (), key: str = "") -> Iterator[Server]:
    """``evener serve MODEL`` on a free port; ``key`` is one of its API keys, if it has any."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [interpreter("evener"), "-m", "evener", "serve", str(model), f"serve.port={port}", *settings]
    with running(command, url, "/ready") as pid:
        version = get_json(f"{url}/version", key=key)
        label = f"evener {version['version']} serve on {version['backend']}"
        yield Server(url, str(get_json(f"{url}/v1/models", key=key)["data"][0]["id"]), label, pid)


@contextmanager
def llamacpp_server(model: str, gguf: Path, threads: int) -> Iterator[Server]:
    """llama-cpp-python's own server, from the environment that has it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        interpreter("llamacpp"), "-m", "llama_cpp.server", "--model", str(gguf), "--port", str(port), "--host",
        "127.0.0.1", "--n_ctx", "8192", "--n_threads", str(threads), "--n_threads_batch", str(threads),
        "--model_alias", Path(model).name, "--interrupt_requests", "false",  # else a new request ends the last
    ]  # fmt: skip
    with running(command, url, "/v1/models") as pid:
        # It cannot ignore the end token; random prompts seldom reach it, and usage counts the real tokens.
        yield Server(url, Path(model).name, f"llama-cpp-python server {gguf.name}", pid, {})


@contextmanager
def transformers_server(model: str, threads: int) -> Iterator[Server]:
    """``transformers serve``, one request at a time: its continuous batching never answers on a CPU (5.x)."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        interpreter("transformers"), "-m", "transformers.cli.transformers", "serve", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--attn-implementation", "sdpa",
    ]  # fmt: skip
    env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with running(command, url, "/health", env) as pid:
        # It has no ignore_eos; no token has the id -1.
        config = json.dumps({"eos_token_id": -1, "pad_token_id": 0, "do_sample": False})
        label = "transformers serve"
        yield Server(url, str(model), label, pid, {"generation_config": config})


@contextmanager
def start_server(engine: str, args: Any) -> Iterator[Server]:
    """The server of ``--engine engine`` with the options of ``serving.py``; one at ``--base-url`` is left running."""
    threads = args.threads or len(os.sched_getaffinity(0))
    if engine == "openai-url":
        url = args.base_url.rstrip("/").removesuffix("/v1")
        name = args.served_model_name or str(get_json(f"{url}/v1/models")["data"][0]["id"])
        yield Server(url, name, f"{name} at {url}")
        return
    if engine == "evener":
        settings = [f"infer.threads={threads}", *args.set]
        with evener_server(args.model, settings) as server:
            yield server
    elif engine == "llamacpp":
        with llamacpp_server(args.model, args.gguf, threads) as server:
            yield server
    else:
        with transformers_server(args.model, threads) as server:
            yield server
