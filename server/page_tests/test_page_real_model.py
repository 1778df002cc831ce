"""The page with `evener serve` and a real model behind it."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from browser_page import BrowserPage
from demo import START_LIMIT, server
from model_sources import SOURCES, models_root


def test_a_real_model_answers_on_the_page(visit: Callable[..., BrowserPage], tmp_path: Path) -> None:
    folder = models_root() / SOURCES["smollm2"].name
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("evener")), "serve", str(folder), f"serve.port={port}"]
    url = f"http://127.0.0.1:{port}/"
    with server(command) as (process, _log), httpx.Client(base_url=url, trust_env=False) as client:
        end = time.monotonic() + START_LIMIT
        while not ready(client):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        page = visit(url)
        page.find("#open-settings").click()
        page.page.get_by_label("Temperature").fill("0")
        page.page.keyboard.press("Escape")
        page.find("dialog").wait_for(state="detached")
        page.send("What is the capital of France? Answer in one sentence.")
        assert "Paris" in page.said()[-1] and "tokens/s" in page.last.inner_text()
        # Before the server, whose end the page would notice.
        page.page.goto("about:blank")


def ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):  # it does not listen yet
        return client.get("/ready").status_code == 200
    return False
