"""Modules of the page by themselves, in the browser that they are made for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from browser_page import BrowserPage

READ = """async ([pieces]) => {
    const { readEvents } = await import("/page/js/events.js");
    const bytes = pieces.map(piece => Uint8Array.from(piece));
    const stream = new ReadableStream({ start(c) { bytes.forEach(each => c.enqueue(each)); c.close(); } });
    const found = [];
    try {
        for await (const event of readEvents(stream)) found.push(event);
    } catch (error) {
        found.push(error.message);
    }
    return found;
}"""


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_however_their_bytes_come(page: BrowserPage, size: int) -> None:
    lines = 'data: {"a": "é你"}\r\n\r\n: a comment\n\nevent: x\ndata:{"b":2}\n\ndata: [DONE]\n\ndata: {"c":3}\n\n'
    text = lines.encode()
    pieces = [list(text[i : i + size]) for i in range(0, len(text), size)]
    assert page.evaluate(READ, [pieces]) == [{"a": "é你"}, {"b": 2}]


def test_a_stream_that_ends_early_is_an_error(page: BrowserPage) -> None:
    assert page.evaluate(READ, [[list(b'data: {"a":1}\n\n')]]) == [{"a": 1}, "the stream ended early"]


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def test_an_answer_grows_by_its_chunks(page: BrowserPage) -> None:
    chunks = [
        chunk(role="assistant", content=""), chunk(reasoning_content="I ", reasoning="I "), chunk(reasoning="think"),
        chunk(content="Yes"), chunk(content="."),
        chunk(tool_calls=[{"index": 1, "id": "b", "function": {"name": "second", "arguments": ""}}]),
        chunk(tool_calls=[{"index": 0, "id": "a", "function": {"name": "first", "arguments": '{"x"'}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}]),
        chunk(tool_calls=[{"index": 10**9, "id": "c", "function": {"name": "far"}}]),
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"completion_tokens": 12}, "model": "m"},
    ]  # fmt: skip
    found = page.evaluate("""async chunks => {
        const { addChunk } = await import("/page/js/answer.js");
        const message = { content: "" };
        for (const chunk of chunks) addChunk(message, chunk);
        return message;
    }""", chunks)  # fmt: skip
    assert found == {
        "content": "Yes.", "reasoning": "I think", "finish": "tool_calls", "tokens": 12, "model": "m",
        "calls": [{"id": "a", "name": "first", "arguments": '{"x":1}'}, {"id": "b", "name": "second", "arguments": ""}],
    }  # fmt: skip


def test_branches_of_a_conversation_keep_what_was_said(page: BrowserPage) -> None:
    found = page.evaluate("""async () => {
        const c = await import("/page/js/conversation.js");
        const talk = c.newConversation();
        const texts = () => c.path(talk).map(each => each.content);
        const q1 = c.append(talk, null, { role: "user", content: "q1" });
        const a1 = c.append(talk, q1.id, { role: "assistant", content: "a1" });
        const q2 = c.append(talk, a1.id, { role: "user", content: "q2" });
        c.append(talk, q2.id, { role: "assistant", content: "a2" });
        const first = texts();
        const b1 = c.append(talk, q1.id, { role: "assistant", content: "b1" });
        const second = texts();
        c.show(talk, a1.id);
        return [first, second, texts(), c.siblings(talk, b1).length, talk.title];
    }""")
    assert found == [["q1", "a1", "q2", "a2"], ["q1", "b1"], ["q1", "a1", "q2", "a2"], 2, "q1"]


def test_a_request_has_images_calls_and_results_and_leaves_out_what_had_no_answer(page: BrowserPage) -> None:
    messages = [
        {"role": "user", "content": "broken"}, {"role": "assistant", "content": "", "error": "x"},
        {"role": "user", "content": "see", "images": ["data:image/png;base64,AA=="]},
        {"role": "assistant", "content": "", "calls": [{"id": "1", "name": "f", "arguments": "{}"}], "reasoning": "r"},
        {"role": "tool", "content": "42", "call": "1", "name": "f"},
    ]  # fmt: skip
    found = page.evaluate("""async messages => {
        const { toRequest } = await import("/page/js/conversation.js");
        return toRequest(messages, " be kind ");
    }""", messages)  # fmt: skip
    assert found == [
        {"role": "system", "content": " be kind "},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                                     {"type": "text", "text": "see"}]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("$x^2$ b", ["$x^2$", "x^2", False]), ("$$a$$", ["$$a$$", "a", True]), (r"\(a\) b", [r"\(a\)", "a", False]),
        (r"\[a" + "\n" + r"b\]", [r"\[a" + "\nb" + r"\]", "a\nb", True]), ("$5 and $6", None), ("$ a$", None),
        ("$a$5", None), ("$", None), ("$$", None), (r"$a\$b$", [r"$a\$b$", r"a\$b", False]), ("$a\nb$", None),
        ("x$a$", None), ("$" + "a" * 5000 + "$", None),
    ],
)  # fmt: skip
def test_formulas_are_told_from_money(page: BrowserPage, source: str, expected: Any) -> None:
    found = page.evaluate("""async source => {
        const found = (await import("/page/js/math.js")).formulaAt(source);
        return found && [found.raw, found.text, found.display];
    }""", source)  # fmt: skip
    assert found == expected


def test_blocks_that_do_not_change_are_left_alone(page: BrowserPage) -> None:
    found = page.evaluate("""async () => {
        const { MarkdownView } = await import("/page/js/markdown.js");
        const root = document.createElement("div"), view = new MarkdownView(root, name => name);
        view.show("# One\\n\\nTwo", false);
        const [first, second] = root.children;
        view.show("# One\\n\\nTwo goes on\\n\\n```py\\nx = 1", false);
        const code = root.querySelector("pre").textContent;
        return [root.children[0] === first, root.children[1] === second, root.children.length, code];
    }""")
    assert found == [True, False, 3, "x = 1\n"]


@pytest.mark.parametrize(
    ("chosen", "preferred", "expected"),
    [("", ["zh-CN", "en"], "zh"), ("", ["fr", "zh-TW"], "zh"), ("", ["fr"], "en"), ("", [], "en"),
     ("en", ["zh"], "en")],
)  # fmt: skip
def test_the_language_is_chosen(page: BrowserPage, chosen: str, preferred: list[str], expected: str) -> None:
    choose = "async ([a, b]) => (await import('/page/js/texts.js')).languageOf(a, b)"
    assert page.evaluate(choose, [chosen, preferred]) == expected


def test_settings_that_cannot_be_used_are_left_out(page: BrowserPage) -> None:
    values = {"temperature": "0", "top_p": "0", "top_k": "1.5", "seed": "x", "max_tokens": "5", "thinking": "on",
              "tools": json.dumps([{"type": "function"}])}  # fmt: skip
    found = page.evaluate("""async values => {
        const { NUMBERS, requestFields } = await import("/page/js/settings.js");
        const empty = Object.fromEntries(Object.keys(NUMBERS).map(name => [name, ""]));
        return requestFields({ ...empty, ...values });
    }""", values)  # fmt: skip
    assert found == {"temperature": 0, "max_tokens": 5, "enable_thinking": True}
