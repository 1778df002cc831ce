"""The page at three widths, light and dark: pictures for people, and what axe finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browser_page import BrowserPage
from playwright.sync_api import expect
from scripted_server import ScriptedServer

SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desk": (1440, 900)}

#: A name of the element that the keyboard is on.
FOCUSED = """() => {
    const found = document.activeElement;
    return found.id || found.getAttribute("aria-label") || found.className || found.tagName;
}"""


def check(page: BrowserPage) -> None:
    """What axe says of the page as it is now: nothing; and nothing is wider than the screen."""
    assert page.violations() == []
    for place in ("html", "#scroller"):
        wide = f"() => document.querySelector('{place}').scrollWidth - document.querySelector('{place}').clientWidth"
        assert page.evaluate(wide) <= 0, place


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_can_be_read_and_used_at_each_width(
    visit: Callable[..., BrowserPage], scripted: ScriptedServer, shots: Path, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    page = visit(scripted.url, width=width, height=height, scheme=scheme, touch=size == "phone")

    def look(name: str) -> None:
        page.page.wait_for_timeout(350)  # for what moves
        check(page)
        page.page.screenshot(path=shots / f"{size}-{scheme}-{name}.png")

    look("welcome")
    for text in ("How does an evener balance two horses of different strength?", "rich"):
        page.find("#message").fill(text)
        page.find(".send").click()
        page.wait_until_answered()
    expect(page.last.locator(".hljs-keyword").first).to_be_visible()
    page.last.locator("summary").click()
    look("answer")
    page.evaluate("() => document.querySelector('#scroller').scrollTo(0, 0)")
    look("question")
    if size == "phone":
        page.find("header .menu").click()
        look("conversations")
    page.find("#open-settings").click()
    look("settings")
    page.page.keyboard.press("Escape")
    page.find("#open-shortcuts").click()
    look("shortcuts")


@pytest.mark.parametrize("size", SIZES)
def test_it_can_be_read_in_chinese(
    visit: Callable[..., BrowserPage], scripted: ScriptedServer, shots: Path, size: str
) -> None:
    width, height = SIZES[size]
    page = visit(scripted.url, width=width, height=height, touch=size == "phone", locale="zh-CN")
    page.page.wait_for_timeout(350)
    check(page)
    page.page.screenshot(path=shots / f"{size}-chinese-welcome.png")
    if size == "phone":
        page.find("header .menu").click()
    page.find("#open-settings").click()
    page.page.wait_for_timeout(350)
    check(page)
    page.page.screenshot(path=shots / f"{size}-chinese-settings.png")


@pytest.mark.parametrize("size", ["phone", "desk"])
def test_errors_calls_and_edits_can_be_read_too(
    visit: Callable[..., BrowserPage], scripted: ScriptedServer, shots: Path, size: str
) -> None:
    width, height = SIZES[size]
    page = visit(scripted.url, width=width, height=height, touch=size == "phone", locale="zh-CN")
    page.allowed.append("status of 400")
    if size == "phone":
        page.find("header .menu").click()
    page.find("#open-settings").click()
    page.page.get_by_label("工具").fill('[{"type": "function", "function": {"name": "weather"}}]')
    page.page.keyboard.press("Escape")
    page.find("dialog").wait_for(state="detached")
    page.page.keyboard.press("Escape")
    for text in ("x" * 70000, "weather"):
        page.find("#message").fill(text)
        page.find(".send").click()
        page.wait_until_answered()
    page.page.wait_for_timeout(350)
    check(page)
    page.page.screenshot(path=shots / f"{size}-calls.png")
    page.messages.nth(2).hover()
    page.messages.nth(2).get_by_label("编辑").click()
    check(page)
    page.page.screenshot(path=shots / f"{size}-edit.png")


def test_the_keyboard_reaches_everything_in_order(page: BrowserPage) -> None:
    page.send("rich")
    # From the end of the page the next key press goes to its beginning.
    page.find(".send").focus()
    page.page.keyboard.press("Tab")
    reached: list[str] = []
    for _ in range(40):
        page.page.keyboard.press("Tab")
        name = page.evaluate(FOCUSED)
        if name in ("BODY", *reached[:1]):
            break  # once around
        reached.append(name)
        ring = page.evaluate("() => getComputedStyle(document.activeElement.closest('form') ?? document.activeElement)"
                             ".outlineStyle")  # fmt: skip
        assert ring in ("solid", "auto"), f"{name}: nobody sees that the keyboard is there"
    for wanted in ("skip", "new", "chat", "open-settings", "Answer again", "message"):
        assert wanted in reached, (wanted, reached)
    places = [reached.index(name) for name in ("new", "chat", "open-settings", "Answer again", "message")]
    assert places == sorted(places)
