"""The page in headless Chromium; ``make test-page`` runs these tests and installs what they need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM

if CHROMIUM is None:
    pytest.exit("these tests need Chromium: apt-get install chromium, or set CHROMIUM=/path/to/it", returncode=2)

from browser_page import BrowserPage
from playwright.sync_api import Browser, sync_playwright
from scripted_server import ScriptedServer

#: A name of this machine that browsers trust as little as any other machine.
FAR = "evener.test"


@pytest.fixture(scope="session")
def far() -> str:
    return FAR


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # Inside a container Chromium's own sandbox has no rights.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    arguments.append(f"--host-resolver-rules=MAP {FAR} 127.0.0.1")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedServer]:
    """A server for tests that leave it as it was."""
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def make_server() -> Iterator[Callable[..., ScriptedServer]]:
    made: list[ScriptedServer] = []

    def make(**settings: object) -> ScriptedServer:
        made.append(ScriptedServer(**settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., BrowserPage]]:
    """Opens the page of a server in a browser of its own. At the end, nothing may have gone wrong in it."""
    made: list[BrowserPage] = []

    def open_page(url: str, **settings: object) -> BrowserPage:
        made.append(BrowserPage(browser, url, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield open_page
    for page in made:
        page.close()


@pytest.fixture
def page(visit: Callable[..., BrowserPage], scripted: ScriptedServer) -> BrowserPage:
    return visit(scripted.url)


@pytest.fixture(scope="session")
def shots() -> Path:
    """Where pictures of the page go, for people to look at."""
    folder = Path(os.environ.get("SHOTS", "outputs/page"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
