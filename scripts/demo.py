"""``make run``: serve a real model, ask it one question over HTTP as any OpenAI client would, show the answer, stop.

``--serve`` (``make serve``) only serves. The rest of the command line is passed to ``evener serve``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
from model_sources import SOURCES, models_root

#: Seconds: the first start compiles the CPU's kernels, which a loaded machine does slowly.
START_LIMIT = 300.0
#: Seconds between messages that the server is still starting.
PATIENCE = 5.0
STOP_LIMIT = 30.0
_DEFAULTS = "server.sampling_defaults"
_GREEDY = f"{_DEFAULTS}=temperature=0"


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Answer:
    """A streamed answer: seconds from the request to the first and last text; tokens as the server counts them."""

    first: float
    last: float
    tokens: int

    @property
    def speed(self) -> float | None:
        """Tokens per second after the first; None when there was only one."""
        return (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 and self.last > self.first else None


def main() -> int:
    """Run the demo; 0 if a question was answered and the server stopped cleanly."""
    parser = argparse.ArgumentParser(description="Serve a real model and ask it one question.")
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--serve", action="store_true", help="only serve, until interrupted")
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument("--model", help="a folder, a file or a name on a hub; default: SmolLM2, which make fetches")
    parser.add_argument("settings", nargs="*", help="key=value for evener serve")
    args = parser.parse_args()
    folder = models_root() / SOURCES["smollm2"].name
    if not args.model and not folder.is_dir():
        print(f"{folder} is not there; run 'make models ONLY=smollm2'", file=sys.stderr)
        return 1
    port = args.port or _free_port()
    command = serve_command(args.model or str(folder), port, args.settings, small=not args.model)
    if args.serve:
        os.execv(command[0], command)
    try:
        return run(command, f"http://127.0.0.1:{port}", args.prompt)
    except (DemoError, httpx.HTTPError) as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1


def serve_command(model: str, port: int, settings: list[str], small: bool) -> list[str]:
    """The command that serves ``model``. A ``small`` one answers sensibly only with its likeliest tokens."""
    own = [_GREEDY] if small and not any(each.startswith(f"{_DEFAULTS}=") for each in settings) else []
    evener = str(Path(sys.executable).with_name("evener"))
    return [evener, "serve", model, f"serve.port={port}", *own, *settings]


def run(command: list[str], url: str, prompt: str) -> int:
    """Start ``command``, which serves ``url``; ask, report, stop it; its exit status."""
    with server(command) as (process, log), httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        print(f"$ {' '.join([Path(command[0]).name, *command[1:]])}", flush=True)
        started = time.monotonic()
        _wait(client, process, log)
        print(f"ready after {time.monotonic() - started:.1f} s\n\n> {prompt}", flush=True)
        answer = ask(client, prompt)
        print(_summary(client.get("/version").raise_for_status().json(), answer), flush=True)
        return _stop(process, log)


@contextlib.contextmanager
def server(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The server's process and its log; killed if the block is left while it still runs."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process, log
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_LIMIT)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def ask(client: httpx.Client, prompt: str) -> Answer:
    """Ask one question, print the answer while it comes in, and return the times."""
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, last, tokens = time.monotonic(), 0.0, 0.0, 0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise DemoError(f"the server answered {response.status_code}: {response.read().decode()}")
        for event in events(response.iter_lines()):
            if "error" in event:
                raise DemoError(f"the server ended the answer: {event['error']['message']}")
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    last = time.monotonic() - start
                    first = first or last
                    print(text, end="", flush=True)
    print("\n", flush=True)
    if not tokens:
        raise DemoError("the stream carried no token and no usage; run 'make serve' and look at its log")
    return Answer(first, last, tokens)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON payloads of a server-sent event stream, up to ``[DONE]``.

    Raises:
        DemoError: the stream ended without ``[DONE]``.
    """
    for line in lines:
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        yield json.loads(payload)
    raise DemoError("the stream ended without [DONE]; run 'make serve' and look at its log")


def _summary(version: dict[str, Any], answer: Answer) -> str:
    speed = f"{answer.speed:.1f} tokens/s" if answer.speed else "one token"
    why = version["backend_reason"]
    return f"backend {version['backend']} ({why}) · first token after {answer.first * 1000:.0f} ms · {speed}"


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Return as soon as the server is ready."""
    started = time.monotonic()
    end, told = started + START_LIMIT, started + PATIENCE
    while (now := time.monotonic()) < end:
        if now > told:
            told = now + PATIENCE
            print(f"  starting for {now - started:.0f} s (the first start compiles kernels)", flush=True)
        if process.poll() is not None:
            raise DemoError(f"the server stopped at once with exit status {process.returncode}:\n{_tail(log)}")
        with contextlib.suppress(httpx.TransportError):  # it does not listen yet
            if client.get("/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise DemoError(f"the server is not ready after {START_LIMIT:.0f} s:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes], log: IO[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(STOP_LIMIT)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the server did not stop within {STOP_LIMIT:.0f} s of SIGTERM:\n{_tail(log)}") from None
    if status != 0:
        raise DemoError(f"the server stopped with exit status {status}:\n{_tail(log)}")
    return status


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-40:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    raise SystemExit(main())
