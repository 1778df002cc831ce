"""The page of /status in a browser: what it shows, how it follows the server, and how it asks for a key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from browser_page import BrowserPage
from playwright.sync_api import expect
from scripted_server import ScriptedServer

from evener_server.options import ServerOptions


def ask(server: ScriptedServer, **headers: str) -> None:
    body = {"model": "fake", "prompt": "count", "max_tokens": 8}
    with httpx.Client(trust_env=False, timeout=60, headers=headers) as client:
        assert client.post(f"{server.url}v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (820, "light"), (1440, "dark")])
def test_it_shows_the_server_at_each_width(
    visit: Callable[..., BrowserPage], scripted: ScriptedServer, shots: Path, width: int, scheme: str
) -> None:
    page = visit(f"{scripted.url}status", width=width, scheme=scheme, wait=False)
    expect(page.find("#state")).to_have_text("Ready")
    expect(page.find("#groups section")).to_have_count(6)
    expect(page.find("#groups")).to_contain_text("fake")
    assert page.violations() == []
    wide = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) <= 0
    page.page.screenshot(path=shots / f"status-{width}-{scheme}.png")


def test_it_follows_the_server_and_says_why_it_is_not_ready(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server()
    page = visit(f"{server.url}status", locale="zh-CN", wait=False)
    expect(page.find("#state")).to_have_text("就绪")
    ask(server)
    expect(page.find("#groups")).to_contain_text("已结束: length")
    server.engine.die("the worker was killed")
    expect(page.find("#state")).to_contain_text("the worker was killed")


def test_it_asks_for_a_key_and_takes_another_after_a_wrong_one(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server(keys=("sk-1",), options=ServerOptions())
    page = visit(f"{server.url}status", wait=False)
    page.allowed.append("status of 401")
    for key in ("wrong", "sk-1"):
        page.find("dialog input").fill(key)
        page.page.keyboard.press("Enter")
        if key == "wrong":
            expect(page.find("dialog .note.wrong")).to_be_visible()
    expect(page.find("#state")).to_have_text("Ready")
