"""One browser window with the page in it, in words of what people do."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Locator, Request, expect
from scripted_server import PATIENCE

_MS = PATIENCE * 1000
_RUN_AXE = """async () => {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    return found.violations.map(each => `${each.impact}: ${each.id}: ${each.nodes.map(n => n.target).join(" ")}`);
}"""


class BrowserPage:
    """See the module's docstring.

    Attributes:
        page: Playwright's page.
        allowed: patterns of what the browser's console may complain about.
    """

    def __init__(
        self, browser: Browser, url: str, *, width: int = 1440, height: int = 900, scheme: str = "light",
        locale: str = "en-US", touch: bool = False, wait: bool = True,
    ) -> None:  # fmt: skip
        self._origin = urlsplit(url).netloc
        self._context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, locale=locale, has_touch=touch,  # type: ignore[arg-type]
            permissions=["clipboard-read", "clipboard-write"], accept_downloads=True,
        )  # fmt: skip
        self._context.set_default_timeout(_MS)
        expect.set_options(timeout=_MS)
        self.page = self._context.new_page()
        self.allowed: list[str] = []
        self.problems: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"{error}\n{error.stack}"))
        self.page.on("request", self._on_request)
        self.page.goto(url)
        if wait:
            self.wait_until_connected()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self._origin:
            self.elsewhere.append(request.url)

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def wait_until_connected(self) -> None:
        """The page knows the model of its server."""
        expect(self.find("#context")).to_contain_text(re.compile(r"\d"))

    @property
    def messages(self) -> Locator:
        return self.find("#thread > article")

    @property
    def last(self) -> Locator:
        return self.messages.last

    def send(self, text: str, *, wait: bool = True) -> None:
        """Type a message, send it and wait for the whole answer."""
        count = self.messages.count()
        self.find("#message").fill(text)
        self.page.keyboard.press("Enter")
        expect(self.messages).to_have_count(count + 2)
        if wait:
            self.wait_until_answered()

    def wait_until_answered(self) -> None:
        expect(self.find(".send")).to_be_visible()
        expect(self.find("article.running")).to_have_count(0)

    def said(self) -> list[str]:
        """The texts of all messages that are shown."""
        return [each.strip() for each in self.find("#thread > article > .body").all_inner_texts()]

    def evaluate(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def violations(self) -> list[str]:
        """What axe finds wrong in the page as it is now. ``AXE`` is the path of its file."""
        self.page.evaluate(Path(os.environ["AXE"]).read_text("utf-8") + "; undefined")
        return list(self.page.evaluate(_RUN_AXE))

    def close(self) -> None:
        wrong = [each for each in self.problems if not any(re.search(p, each) for p in self.allowed)]
        self._context.close()
        assert wrong == []
        assert self.elsewhere == [], "the page asked another server"
