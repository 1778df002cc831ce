"""A conversation on the page: sending, streaming, stopping, branches, and what is kept."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser_page import BrowserPage
from playwright.sync_api import Route, expect
from scripted_server import ScriptedServer

from evener_server.options import ServerOptions


def test_a_message_is_answered_and_enter_sends_while_shift_enter_begins_a_line(page: BrowserPage) -> None:
    page.find("#message").focus()
    page.page.keyboard.type("first")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("second")
    assert page.messages.count() == 0
    page.page.keyboard.press("Enter")
    expect(page.messages).to_have_count(2)
    page.wait_until_answered()
    assert page.said()[0] == "first\nsecond"
    assert page.find("#message").input_value() == "" and "tokens" in page.last.inner_text()


def test_enter_belongs_to_the_input_method_while_a_word_is_composed(page: BrowserPage) -> None:
    page.find("#message").fill("ni hao")
    page.evaluate(
        "() => document.querySelector('#message').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    assert page.messages.count() == 0 and page.find("#message").input_value() == "ni hao"


def test_an_answer_is_shown_while_it_comes_and_can_be_stopped(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server()
    page = visit(server.url)
    server.engine.hold()
    page.send("long", wait=False)
    expect(page.find(".stop")).to_be_visible()
    expect(page.find(".wait")).to_be_visible()
    assert page.find(".send").is_hidden()
    _some_steps(server)
    expect(page.last).to_contain_text("A sentence that goes on.")
    assert server.engine.open_ids
    page.find(".stop").click()
    page.wait_until_answered()
    _until(lambda: not server.engine.open_ids)
    assert "Stopped" in page.last.inner_text() and len(page.last.inner_text()) < 9000
    # The conversation goes on from there.
    server.engine.release()
    page.send("count")
    assert "three four" in page.said()[-1]


def _some_steps(server: ScriptedServer) -> None:
    """Let the engine go on for a moment; afterwards the answer is still incomplete."""
    server.engine._steps_left, server.engine._held = 20, False
    with server.engine._changed:
        server.engine._changed.notify_all()


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_escape_stops_before_the_first_word_and_the_question_is_not_sent_again(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server()
    page = visit(server.url)
    server.engine.hold()
    page.send("long", wait=False)
    expect(page.find(".stop")).to_be_visible()
    page.page.keyboard.press("Escape")
    page.wait_until_answered()
    assert page.said()[-1] == "Stopped"
    server.engine.release()
    sent = _bodies(page)
    page.send("count")
    assert [each["content"] for each in sent[0]["messages"]] == ["count"]


def _bodies(page: BrowserPage) -> list[dict[str, Any]]:
    """The requests of chats from now on."""
    found: list[dict[str, Any]] = []
    page.page.on("request", lambda r: found.append(r.post_data_json) if r.url.endswith("/chat/completions") else None)
    return found


def test_answering_again_adds_a_version_and_both_can_be_read(page: BrowserPage) -> None:
    page.send("count")
    page.last.get_by_label("Answer again").click()
    expect(page.last.locator(".count")).to_have_text("2/2")
    page.wait_until_answered()
    assert page.messages.count() == 2
    page.last.get_by_label("Previous version").click()
    expect(page.last.locator(".count")).to_have_text("1/2")
    assert "three four" in page.said()[-1]


def test_an_edited_message_begins_a_branch_and_the_old_one_is_kept(page: BrowserPage) -> None:
    page.send("count")
    page.send("hello")
    first = page.messages.first
    first.hover()
    first.get_by_label("Edit").click()
    field = first.locator("textarea")
    assert field.input_value() == "count"
    field.fill("weather?")
    sent = _bodies(page)
    field.press("Enter")
    expect(page.messages).to_have_count(2)
    page.wait_until_answered()
    assert page.said() == ["weather?", "You said: weather?"]
    assert [each["content"] for each in sent[0]["messages"]] == ["weather?"]
    page.messages.first.get_by_label("Previous version").click()
    expect(page.messages).to_have_count(4)
    assert page.said()[2] == "hello"


def test_escape_leaves_an_edit_and_the_arrow_key_begins_one(page: BrowserPage) -> None:
    page.send("count")
    page.find("#message").press("ArrowUp")
    expect(page.find(".editor textarea")).to_be_focused()
    page.page.keyboard.press("Escape")
    expect(page.find(".editor")).to_have_count(0)
    assert page.said()[0] == "count"


def test_a_conversation_is_there_again_after_a_reload_in_its_branch(page: BrowserPage) -> None:
    page.send("count")
    page.send("rich")
    before = page.said()
    page.page.reload()
    expect(page.messages).to_have_count(4)
    expect(page.last.locator(".coloured .hljs-keyword").first).to_be_visible()
    expect(page.last.locator(".katex").first).to_be_attached()
    assert page.said()[0] == before[0] and "Evening a load" in page.said()[3]


def test_an_answer_that_came_when_the_page_was_closed_was_stopped(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server()
    page = visit(server.url)
    server.engine.hold()
    page.send("long", wait=False)
    expect(page.find(".chat")).to_have_text(["long"])
    page.page.reload()
    _until(lambda: not server.engine.open_ids)
    expect(page.last).to_contain_text("Stopped")
    server.engine.release()
    page.last.get_by_label("Answer again").click()
    page.wait_until_answered()
    assert page.said()[-1].startswith("A sentence that goes on.")


def test_conversations_are_listed_opened_renamed_and_deleted(page: BrowserPage) -> None:
    page.send("first one")
    page.page.keyboard.press("Alt+n")
    expect(page.messages).to_have_count(0)
    page.send("second one")
    expect(page.find(".chat")).to_have_text(["second one", "first one"])
    page.find(".chat").nth(1).click()
    expect(page.find(".chat[aria-current]")).to_have_text("first one")
    assert page.said()[0] == "first one"
    page.find(".chats li").nth(1).hover()
    page.page.get_by_label("Rename: first one").click()
    page.find("dialog input").fill("My notes")
    page.page.keyboard.press("Enter")
    expect(page.find(".chat[aria-current]")).to_have_text("My notes")
    expect(page.find("#title")).to_have_text("My notes")
    page.find(".chats li.current").hover()
    page.page.get_by_label("Delete: My notes").click()
    page.find("dialog .danger").click()
    expect(page.find(".chat")).to_have_text(["second one"])
    expect(page.messages).to_have_count(0)
    page.page.reload()
    expect(page.find(".chat")).to_have_text(["second one"])


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server()
    page = visit(server.url)
    server.engine.hold()
    page.send("long", wait=False)
    page.find(".chats li").hover()
    page.page.get_by_label("Delete: long").click()
    page.find("dialog .danger").click()
    _until(lambda: not server.engine.open_ids)
    expect(page.find(".chat")).to_have_count(0)
    page.page.reload()
    expect(page.find(".none")).to_be_visible()


def test_an_answer_goes_on_while_another_conversation_is_read(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server()
    page = visit(server.url)
    server.engine.hold()
    page.send("count", wait=False)
    page.find("#new").click()
    expect(page.messages).to_have_count(0)
    server.engine.release()
    page.wait_until_answered()
    page.find(".chat").click()
    expect(page.last).to_contain_text("nine ten")


def test_conversations_go_to_a_file_and_come_back(page: BrowserPage, tmp_path: Path) -> None:
    page.send("count")
    page.page.keyboard.press("Alt+Comma")
    with page.page.expect_download() as found:
        page.page.get_by_role("button", name="Export").click()
    path = tmp_path / "file.json"
    found.value.save_as(path)
    page.page.get_by_role("button", name="Delete all conversations").click()
    page.find("dialog.small .danger").click()
    expect(page.find(".chat")).to_have_count(0)
    page.find("dialog input[type=file]").set_input_files(path)
    expect(page.find(".chat")).to_have_text(["count"])
    page.find("dialog input[type=file]").set_input_files({"name": "x.json", "mimeType": "", "buffer": b'{"a": 1}'})
    expect(page.find("#alert")).to_contain_text("not a file of conversations")
    page.page.keyboard.press("Escape")
    page.find(".chat").click()
    expect(page.messages).to_have_count(2)
    assert "three four" in page.said()[1]


def test_the_server_s_own_text_is_shown_when_it_refuses(page: BrowserPage) -> None:
    page.allowed.append("status of 400")
    page.send("x" * 70000)
    expect(page.last.locator(".note.wrong")).to_contain_text("context")
    page.send("count")
    assert "three four" in page.said()[-1]


def test_a_failure_in_the_middle_of_a_stream_keeps_what_came(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server()
    page = visit(server.url)
    server.engine.hold()
    page.send("long", wait=False)
    _some_steps(server)
    expect(page.last).to_contain_text("A sentence that goes on.")
    server.engine.fail(server.engine.open_ids[0], "the kernel broke")
    page.wait_until_answered()
    expect(page.last.locator(".note.wrong")).to_have_text("the kernel broke")
    assert "A sentence that goes on." in page.last.inner_text()


def test_a_server_that_is_gone_is_said_so(page: BrowserPage) -> None:
    page.allowed.append("ERR_FAILED")
    page.page.route("**/v1/chat/completions", lambda route: route.abort())
    page.send("hello")
    expect(page.last.locator(".note.wrong")).to_have_text("The server does not answer. Is it running?")


def test_settings_are_sent_kept_and_checked(page: BrowserPage) -> None:
    page.find("#open-settings").click()
    page.page.get_by_label("Temperature").fill("0.3")
    page.page.get_by_label("Top k").fill("7")
    page.page.get_by_label("Instructions").fill("Be brief.")
    page.page.get_by_label("Most tokens").fill("-3")
    page.page.get_by_label("Reasoning").select_option("off")
    expect(page.find("dialog .wrong:not(:empty)")).to_have_text("Not in its range: 1 to 10000000")
    page.page.keyboard.press("Escape")
    expect(page.find("dialog")).to_have_count(0)
    page.page.reload()
    page.wait_until_connected()
    sent = _bodies(page)
    page.send("count")
    body = sent[0]
    assert (body["temperature"], body["top_k"], body["enable_thinking"]) == (0.3, 7, False)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert not {"max_tokens", "seed", "top_p", "tools"} & set(body) and body["model"] == "fake"


def test_reasoning_is_folded_and_opens(page: BrowserPage) -> None:
    page.send("rich")
    reasoning = page.last.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None and "overview" not in page.last.inner_text()
    reasoning.locator("summary").click()
    expect(reasoning).to_contain_text("The reader wants an overview.")
    sent = _bodies(page)
    page.send("count")
    assert "overview" not in json.dumps(sent[0]["messages"])


def test_tools_are_called_shown_and_get_the_results_that_people_type(page: BrowserPage) -> None:
    page.find("#open-settings").click()
    tools = page.page.get_by_label("Tools")
    tools.fill("{not json")
    page.page.get_by_label("Instructions").click()
    expect(page.find("dialog .wrong:not(:empty)")).to_have_text("Not a JSON list of functions")
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools.fill(json.dumps([{"type": "function", "function": function}]))
    page.page.keyboard.press("Escape")
    page.find("dialog").wait_for(state="detached")
    page.send("weather")
    expect(page.last.locator(".tool-card")).to_contain_text("Calls weather")
    expect(page.last.locator(".tool-card pre")).to_have_text('{\n  "city": "Paris"\n}')
    sent = _bodies(page)
    page.last.locator(".results textarea").fill("18 degrees")
    page.last.get_by_role("button", name="Send results").click()
    expect(page.messages).to_have_count(4)
    page.wait_until_answered()
    assert [each["role"] for each in sent[0]["messages"]] == ["user", "assistant", "tool"]
    call = sent[0]["messages"][1]["tool_calls"][0]
    assert sent[0]["messages"][2] == {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"}
    assert page.said()[2].endswith("18 degrees") and "18 degrees" in page.said()[3]


def test_images_are_taken_only_by_a_model_that_takes_them(page: BrowserPage) -> None:
    assert page.find(".attach").is_hidden()

    def with_images(route: Route) -> None:
        listed = route.fetch().json()
        listed["data"][0]["input_modalities"] = ["text", "image"]
        route.fulfill(json=listed)

    page.page.route("**/v1/models", with_images)
    page.page.reload()
    expect(page.find(".attach")).to_be_visible()
    picture = page.evaluate("""async () => {
        const canvas = new OffscreenCanvas(3000, 1000);
        canvas.getContext("2d").fillRect(0, 0, 10, 10);
        return [...new Uint8Array(await (await canvas.convertToBlob()).arrayBuffer())];
    }""")
    page.find("#composer input[type=file]").set_input_files(
        [{"name": "a.png", "mimeType": "image/png", "buffer": bytes(picture)},
         {"name": "b.png", "mimeType": "image/png", "buffer": b"no image"}]
    )  # fmt: skip
    page.allowed.append("could not be decoded|InvalidStateError")
    expect(page.find("#alert")).to_contain_text("“b.png” cannot be read as an image.")
    expect(page.find("#composer .picture")).to_have_count(1)
    page.allowed.append("status of 400")  # the fake model behind it takes none
    sent = _bodies(page)
    page.send("What is it?")
    parts = sent[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"]
    assert parts[0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    shown = "document.querySelector('article img')"
    assert page.evaluate(f"() => [{shown}.naturalWidth, {shown}.naturalHeight]") == [1568, 523]
    assert page.find("#composer .picture").count() == 0


def test_a_server_with_keys_asks_for_one_and_the_tab_keeps_it(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server(keys=("sk-right",))
    page = visit(server.url, wait=False)
    page.allowed.append("status of 401")
    field = page.find("dialog input[type=password]")
    field.fill("sk-wrong")
    page.page.keyboard.press("Enter")
    expect(page.find("dialog .note.wrong")).to_have_text("The server does not know this key.")
    page.find("dialog input[type=password]").fill("sk-right")
    page.page.keyboard.press("Enter")
    expect(page.find("#context")).to_contain_text("tokens of context")
    page.send("count")
    assert "three four" in page.said()[-1]
    page.page.reload()
    expect(page.find("#context")).to_contain_text("tokens of context")
    assert page.evaluate("() => JSON.stringify(localStorage)").count("sk-right") == 0


def test_it_works_behind_a_path_of_a_proxy(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server(options=ServerOptions(root_path="/llm"))
    page = visit(f"{server.url}llm/")
    page.send("rich")
    expect(page.last.locator(".katex").first).to_be_attached()


def test_it_works_over_plain_http_from_another_machine(
    visit: Callable[..., BrowserPage], scripted: ScriptedServer, far: str
) -> None:
    page = visit(scripted.url.replace("127.0.0.1", far))
    assert page.evaluate("() => [isSecureContext, typeof navigator.clipboard]") == [False, "undefined"]
    page.send("rich")
    page.last.locator(".copy-code").click()
    expect(page.last.locator(".copy-code")).to_have_text("Copied")
    page.page.reload()
    expect(page.messages).to_have_count(2)


def test_keys_open_what_the_list_of_shortcuts_says(page: BrowserPage) -> None:
    page.find("#title").click()
    page.page.keyboard.press("?")
    expect(page.find("dialog h2")).to_have_text("Keyboard shortcuts")
    assert page.find("dialog kbd").count() >= 9
    page.page.keyboard.press("Escape")
    expect(page.find("dialog")).to_have_count(0)
    page.page.keyboard.press("/")
    expect(page.find("#message")).to_be_focused()
    page.page.keyboard.type("?/")
    assert page.find("#message").input_value() == "?/" and page.find("dialog").count() == 0
    page.page.keyboard.press("Alt+b")
    expect(page.find("#sidebar")).to_be_hidden()
    page.page.keyboard.press("Alt+b")
    expect(page.find("#sidebar")).to_be_visible()


def test_the_language_is_the_browser_s_and_can_be_switched(
    visit: Callable[..., BrowserPage], scripted: ScriptedServer
) -> None:
    page = visit(scripted.url, locale="zh-CN")
    expect(page.find("#welcome h2")).to_have_text("有什么可以帮您？")
    assert page.evaluate("() => document.documentElement.lang") == "zh"
    page.send("count")
    assert page.last.get_by_label("重新回答").is_visible()
    page.find("#switch-language").click()
    expect(page.last.get_by_label("Answer again")).to_be_visible()
    page.page.reload()
    expect(page.find("#new")).to_have_text("New conversation")


def test_colours_are_the_system_s_and_can_be_switched(
    visit: Callable[..., BrowserPage], scripted: ScriptedServer
) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    page = visit(scripted.url, scheme="dark")
    dark = page.evaluate(ground)
    page.find("#switch-theme").click()
    light = page.evaluate(ground)
    assert dark != light
    page.page.reload()
    assert page.evaluate(ground) == light
    assert visit(scripted.url, scheme="dark").evaluate(ground) == dark


def test_code_is_copied_and_answers_too(page: BrowserPage) -> None:
    page.send("rich")
    page.last.locator(".copy-code").click()
    expect(page.last.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()").startswith("def balanced(")
    page.last.locator(".foot").get_by_label("Copy").click()
    expect(page.last.locator(".copied")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()").startswith("## Evening a load")


def test_reading_what_came_before_is_not_disturbed_by_what_comes(
    visit: Callable[..., BrowserPage], make_server: Callable[..., ScriptedServer]
) -> None:
    server = make_server()
    page = visit(server.url, height=500)
    page.send("rich")
    server.engine.hold()
    page.send("long", wait=False)
    top = "() => document.querySelector('#scroller').scrollTop"
    assert page.evaluate(top) > 200
    page.find("#scroller").hover()
    page.page.mouse.wheel(0, -5000)
    expect(page.find("#down")).to_be_visible()
    _some_steps(server)
    expect(page.last).to_contain_text("A sentence that goes on.")
    server.engine.release()
    page.wait_until_answered()
    assert page.evaluate(top) == 0
    page.find("#down").click()
    expect(page.find("#down")).to_be_hidden()
    assert page.evaluate(top) > 1000


def test_without_a_lasting_store_the_page_says_so_and_works(
    visit: Callable[..., BrowserPage], scripted: ScriptedServer
) -> None:
    page = visit(scripted.url)
    page.allowed += ["conversations are not kept", "settings (are not kept|were not read)"]
    page.page.add_init_script("""
        const refuse = () => { throw new DOMException("forbidden here", "SecurityError"); };
        IDBFactory.prototype.open = refuse;
        for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, { get: refuse });
    """)
    page.page.reload()
    expect(page.find("#alert")).to_contain_text("keeps no data")
    page.wait_until_connected()
    page.send("count")
    expect(page.find(".chat")).to_have_text(["count"])
    page.find("#switch-language").click()
    expect(page.find("#new")).to_have_text("新建对话")


def test_screen_readers_are_told_of_the_beginning_and_the_end(page: BrowserPage) -> None:
    page.evaluate("""() => {
        const status = document.querySelector("#status");
        window.heard = [];
        new MutationObserver(() => heard.push(status.textContent)).observe(status, { childList: true });
    }""")
    page.send("count")
    expect(page.find("#status")).to_have_text("The answer is complete.")
    assert page.evaluate("() => heard") == ["Answering…", "The answer is complete."]
    assert re.fullmatch("You|Assistant", page.messages.first.locator("h2").first.inner_text())
