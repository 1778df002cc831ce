"""What a model or a file of others contains: shown, and nothing else."""

from __future__ import annotations

import json
import time

import pytest
from browser_page import BrowserPage
from playwright.sync_api import expect
from scripted_server import ANSWERS, HOSTILE

#: Whatever runs or loads by itself, or may send something.
ACTIVE = "script, iframe, object, embed, form, input, svg:not(.icon):not(:has(path)), video, audio, link, meta, style"


def test_a_hostile_answer_does_nothing(page: BrowserPage) -> None:
    page.send("hostile")
    expect(page.last).to_contain_text("end of it")
    page.page.wait_for_timeout(300)
    assert page.evaluate("() => window.broken") is None
    assert page.last.locator(".markdown").locator(ACTIVE).count() == 0
    assert page.last.locator(".markdown img").count() == 0
    attributes = page.last.locator(".markdown *").evaluate_all(
        "all => all.flatMap(each => each.getAttributeNames().filter(name => name.startsWith('on')))"
    )
    links = page.last.locator(".markdown a[href]").evaluate_all("all => all.map(each => each.href)")
    assert attributes == [] and links == ["https://evil.example/pixel.png"]
    # Its HTML is shown as text.
    assert "<script>window.broken = 1</script>" in page.last.inner_text()
    assert page.find("#composer").is_visible()
    assert page.problems == [], "nothing even tried what the policy forbids"


def test_links_open_elsewhere_and_say_where_they_lead(page: BrowserPage) -> None:
    page.send("rich")
    link = page.last.get_by_role("link", name="the manual")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow" and link.get_attribute("target") == "_blank"
    assert link.get_attribute("title") == "https://example.org/manual"


def test_a_persons_message_is_shown_as_text(page: BrowserPage) -> None:
    page.send(HOSTILE)
    assert page.messages.first.locator(".said").inner_text().strip() == HOSTILE.strip()
    assert page.messages.first.locator(".said *").count() == 0


def test_the_policy_refuses_what_would_get_past_us(page: BrowserPage) -> None:
    page.allowed += ["Content Security Policy", "TrustedHTML", "Refused", "violates"]
    made = """() => {
        try { document.body.innerHTML = "<b>x</b>"; return "made"; } catch (error) { return error.name; }
    }"""
    assert page.evaluate(made) == "TypeError"
    assert page.evaluate("() => fetch('https://evil.example/').then(() => 'sent', () => 'refused')") == "refused"
    loaded = """() => new Promise(done => {
        const image = new Image(); image.onload = () => done("loaded"); image.onerror = () => done("refused");
        image.src = "https://evil.example/a.png"; })"""
    assert page.evaluate(loaded) == "refused"
    # Chromium lists what it refused to send, too.
    page.elsewhere.clear()


@pytest.mark.parametrize("text", [
    ANSWERS["quotes"], "[" * 50000, "*" * 50000 + "a", "`" * 40001 + "a", "\\[" * 40000, "$" * 40001, "<" * 50000,
    "| a " * 10000 + "\n" + "| - " * 10000 + "\n" + "| b " * 10000, "![" * 20000, "_a" * 20000, "$x " * 20000,
    "- " * 20000, "\\(" * 40000,
])  # fmt: skip
def test_markdown_that_is_made_to_be_slow_is_shown_in_time(page: BrowserPage, text: str) -> None:
    page.allowed.append("shown as plain text")
    show = """async text => {
        const { MarkdownView } = await import("/page/js/markdown.js");
        const root = document.createElement("div");
        const began = performance.now();
        new MarkdownView(root, name => name).show(text, true);
        return [performance.now() - began, root.textContent.length];
    }"""
    spent, shown = page.evaluate(show, text)
    assert shown > 0
    assert spent < 10_000, f"{spent:.0f} ms"


def test_a_file_of_conversations_cannot_bring_anything_but_text(page: BrowserPage) -> None:
    message = {"id": "a", "parent": None, "role": "user", "content": "<img src=x onerror=window.broken=1>",
               "images": ["https://evil.example/a.png", "data:image/svg+xml;base64,AAAA", "javascript:1"]}  # fmt: skip
    answer = {"id": "b", "parent": "a", "role": "assistant", "content": HOSTILE, "created": 2, "more": {"x": 1},
              "calls": [{"id": 1, "name": "<b>x</b>", "arguments": "<script>"}], "error": "<b>e</b>"}  # fmt: skip
    whole = {"id": "../../x", "title": "<b>title</b>", "head": "b", "messages": [message, answer], "updated": 5}
    file = json.dumps({"format": "evener-conversations", "version": 1, "conversations": [whole]}).encode()
    page.find("#open-settings").click()
    page.find("dialog input[type=file]").set_input_files({"name": "x.json", "mimeType": "", "buffer": file})
    expect(page.find(".chat")).to_have_text(["<b>title</b>"])
    page.page.keyboard.press("Escape")
    page.find("dialog").wait_for(state="detached")
    page.find(".chat").click()
    expect(page.messages).to_have_count(2)
    page.page.wait_for_timeout(200)
    assert page.evaluate("() => window.broken") is None and page.find("article img").count() == 0
    assert page.evaluate("() => document.querySelectorAll('article b').length") == 0


@pytest.mark.parametrize("broken", [
    "", "[]", "null", '{"format": "evener-conversations"}',
    '{"format": FORMAT, "conversations": [{"messages": [{"role": "system", "id": "a", "parent": null}]}]}',
    '{"format": FORMAT, "conversations": [{"messages": [{"role": "user", "id": "a", "parent": "a"}]}]}',
    '{"format": FORMAT, "conversations": [null]}',
])  # fmt: skip
def test_a_file_that_is_none_is_refused_whole(page: BrowserPage, broken: str) -> None:
    broken = broken.replace("FORMAT", '"evener-conversations"')
    read = """async text => {
        const { fromFile } = await import("/page/js/transfer.js");
        try { return fromFile(text).length; } catch (error) { return error.name; }
    }"""
    assert page.evaluate(read, broken) in ("Error", "SyntaxError", "TypeError")


def test_the_store_keeps_two_hundred_conversations(page: BrowserPage) -> None:
    fill = """async () => {
        const { openStore, MAX_CONVERSATIONS } = await import("/page/js/store.js");
        const store = await openStore();
        for (let i = 0; i < MAX_CONVERSATIONS + 5; i++) {
            await store.put({ id: `c${i}`, title: `${i}`, updated: i, messages: [] });
        }
        const listed = await store.list();
        return [listed.length, listed[0].id, listed.at(-1).id, await store.get("c0") === undefined];
    }"""
    began = time.monotonic()
    assert page.evaluate(fill) == [200, "c204", "c5", True]
    assert time.monotonic() - began < 30
