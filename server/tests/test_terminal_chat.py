"""``evener chat``: the requests it sends, the text it shows, and how it stops."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evener.cli.main import main
from evener.engine.wire.messages import NewRequest
from evener.errors import EngineDeadError, EngineError, RequestError
from evener.sampling_params import SamplingParams
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import EOS_ID as EOS
from evener_server.chat_command import Conversation
from evener_server.chat_models import ChatModel, LocalModel, Messages, RemoteModel
from evener_server.chat_screen import MarkdownScreen, PlainScreen, split_blocks, without_echo


class Scripted(ChatModel):
    """Notes what it is asked; answers "a", "b" and the question, or raises what the question names."""

    name = "scripted"

    def __init__(self) -> None:
        self.asked: list[Messages] = []

    async def answer(self, messages: Messages) -> AsyncIterator[str]:
        self.asked.append([dict(message) for message in messages])
        word = messages[-1]["content"]
        yield "a"
        if word == "fail":
            raise RequestError("too long")
        if word == "die":
            raise EngineDeadError("gone")
        yield f"b {word}"

    async def close(self) -> None:
        return None


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    found = asyncio.new_event_loop()
    yield found
    found.run_until_complete(found.shutdown_default_executor())
    found.close()


def talk(model: ChatModel, loop: asyncio.AbstractEventLoop, *lines: str, system: str | None = None) -> int:
    return Conversation(model, PlainScreen(), loop, system).run(io.StringIO("".join(f"{x}\n" for x in lines)).readline)


def roles(messages: Messages) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_each_question_goes_with_all_that_was_said(loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = Scripted()
    assert talk(model, loop, "one", "", "two", system="be brief") == 0
    assert roles(model.asked[1]) == [
        ("system", "be brief"), ("user", "one"), ("assistant", "ab one"), ("user", "two"),
    ]  # fmt: skip
    assert capsys.readouterr().out == "ab one\nab two\n"


def test_commands_change_the_conversation_and_are_not_sent(loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = Scripted()
    lines = (
        "one",
        "/reset",
        "/system be kind",
        "two",
        "/system",
        "/help",
        "/nothing",
        "/etc/passwd?",
        "/exit",
        "never",
    )
    assert talk(model, loop, *lines) == 0
    assert [roles(asked) for asked in model.asked[1:]] == [
        [("system", "be kind"), ("user", "two")],
        [("user", "two"), ("assistant", "ab two"), ("user", "/etc/passwd?")],
    ]
    errors = capsys.readouterr().err
    assert "unknown command /nothing" in errors and errors.count("/reset: new conversation") == 2


def test_a_question_that_fails_is_forgotten_and_the_talk_goes_on(loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = Scripted()
    assert talk(model, loop, "fail", "on") == 0
    assert roles(model.asked[1]) == [("user", "on")]
    assert capsys.readouterr().err == "error: too long\n"
    assert talk(model, loop, "on", "fail") == 1


def test_an_engine_that_is_gone_ends_the_talk(loop: Any) -> None:
    with pytest.raises(EngineDeadError, match="gone"):
        talk(Scripted(), loop, "die", "never")


def test_a_model_in_this_process_answers_and_gets_the_options(
    make_api: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    api = make_api(FakeEngine(lambda request: [*b"Hello.", EOS]))
    params = SamplingParams(max_tokens=40, temperature=0.25)
    assert talk(LocalModel(api.llm, params), api.loop, "hi") == 0
    (sent,) = [m for m in api.engine.sent if isinstance(m, NewRequest)]
    assert (sent.max_tokens, sent.sampling.temperature) == (40, 0.25)
    assert capsys.readouterr().out == "Hello.\n"


def remote(url: str, name: str | None = None, **fields: Any) -> RemoteModel:
    return RemoteModel(url, name, fields)


def test_a_server_answers_and_its_first_model_is_taken(make_server: Any, loop: Any, capsys: Any) -> None:
    server = make_server(FakeEngine(lambda request: [*"Grüße".encode(), EOS]))
    model = remote(server.url + "/v1/", max_tokens=30, top_k=5)
    loop.run_until_complete(model.open())
    assert model.name == "fake" and talk(model, loop, "hi") == 0
    (sent,) = [m for m in server.engine.sent if isinstance(m, NewRequest)]
    assert (sent.max_tokens, sent.sampling.top_k) == (30, 5) and capsys.readouterr().out == "Grüße\n"
    loop.run_until_complete(model.close())


def test_an_error_of_the_server_is_shown_in_its_own_words(make_server: Any, loop: Any, capsys: Any) -> None:
    model = remote(make_server().url, "other")
    assert talk(model, loop, "hi") == 1
    assert "the server answers 404: model 'other' does not exist here" in capsys.readouterr().err
    loop.run_until_complete(model.close())


def test_an_answer_that_breaks_off_is_an_error_and_not_an_answer(make_server: Any, loop: Any, capsys: Any) -> None:
    server = make_server(FakeEngine(hold_after=2))
    model = remote(server.url, "fake")

    async def ask() -> list[str]:
        pieces = []
        async for piece in model.answer([{"role": "user", "content": "hi"}]):
            pieces.append(piece)
            if len(pieces) == 1:
                server.engine.fail(server.engine.open_ids[0], "out of luck")
        return pieces

    with pytest.raises(EngineError, match="out of luck"):
        loop.run_until_complete(ask())
    loop.run_until_complete(model.close())


def test_a_server_that_is_not_there_is_said_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9/v1 does not answer" in capsys.readouterr().err


def test_keys_make_no_sense_for_a_server_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://x", "name", "infer.max_reqs=3"]) == 2
    assert "not 'infer.max_reqs=3'" in capsys.readouterr().err


def test_lines_from_a_pipe_are_messages_and_plain_text_comes_back(make_server: Any) -> None:
    server = make_server(FakeEngine(lambda request: [*b"**Hello.**", EOS]))
    done = subprocess.run(
        [sys.executable, "-m", "evener", "chat", "--url", server.url, "--max-tokens", "30"],
        input="one\ntwo\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "**Hello.**\n**Hello.**\n", "")


class Terminal:
    """``evener chat`` on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._side, theirs = pty.openpty()
        command = [sys.executable, "-m", "evener", "chat", "--url", url, "--max-tokens", "60"]
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        # A session with this terminal, so that Ctrl-C is a signal to it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import os, sys, fcntl, termios; os.setsid(); "
             "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])", *command],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environ,
        )  # fmt: skip
        os.close(theirs)
        self.text, self._changed = "", threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._side, 4096)
            except OSError:  # the program has ended
                return
            with self._changed:
                self.text += part.decode(errors="replace")
                self._changed.notify_all()

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def wait_for(self, part: str, times: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.text.count(part) >= times, 120), self.text

    def close(self) -> int:
        code = self.process.wait(120)
        self._reader.join()
        os.close(self._side)
        return code


def test_ctrl_c_stops_the_answer_and_not_the_program(make_server: Any, eventually: Any) -> None:
    server = make_server(FakeEngine(lambda request: [*b"Hello.", EOS], hold_after=2))
    terminal = Terminal(server.url)
    terminal.wait_for("> ")
    terminal.type("hi\r")
    terminal.wait_for("He")
    terminal.type("\x03")
    terminal.wait_for("> ", 2)
    eventually(lambda: not server.engine.open_ids, "the request was given up")
    server.engine.release()
    terminal.type("again\r")
    terminal.wait_for("Hello.")
    terminal.wait_for("> ", 3)
    terminal.type("/exit\r")
    assert terminal.close() == 0
    sent = [m for m in server.engine.sent if isinstance(m, NewRequest)]
    # The text before the stop is part of the conversation.
    assert len(sent) == 2 and b"He" in bytes(token for token in sent[1].prompt if token < 256)


def shown(*pieces: str) -> str:
    out = io.StringIO()
    screen = MarkdownScreen(Console(file=out, width=60, force_terminal=False))
    screen.begin()
    for piece in pieces:
        screen.add(piece)
    screen.end()
    return out.getvalue()


def test_markdown_that_came_in_pieces_looks_as_if_it_came_whole() -> None:
    text = "# Title\n\nSome *words*.\n\n- one\n\n- two\n\n```python\nx = 1\n\ny = 2\n```\n\nThe **end**\n"
    lines = [line.strip() for line in shown(*text).split("\n") if line.strip()]
    assert lines == [line.strip() for line in shown(text).split("\n") if line.strip()]
    assert "Title" in "".join(lines) and "Some words." in lines and "The end" in lines and "y = 2" in lines


def test_an_answer_cannot_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "a\x1b]0;title\x07 b\x1b[2J \x9b31m c\r\td\n"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown(*hostile)) and "[2J" in shown(hostile)
    for terminal, expected in ((True, "a]0;title b[2J 31m c\td\n"), (False, hostile)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=terminal: answer)
        screen = PlainScreen()
        screen.add(hostile)
        screen.end()
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n- a\n\n- b", ""),
        ("one\n\n1", ""),
        ("- a\n\n  more", ""),
        ("- a\n\nend", "- a\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nend", "```\na\n\nb\n```\n\n"),
        ("a\n\nb\n \nc", "a\n\nb\n \n"),
    ],
)
def test_a_block_is_finished_when_nothing_can_be_added_to_it(text: str, done: str) -> None:
    assert split_blocks(text) == (done, text[len(done) :])


def test_a_terminal_shows_nothing_that_is_typed_while_an_answer_streams() -> None:
    ours, theirs = os.openpty()
    with open(theirs, encoding="utf-8") as terminal, open(ours, "rb", buffering=0) as screen:
        with without_echo(terminal):
            assert not termios.tcgetattr(terminal)[3] & termios.ECHO
        assert termios.tcgetattr(terminal)[3] & termios.ECHO
        assert screen.isatty()


def test_without_a_terminal_nothing_changes(tmp_path: Path) -> None:
    with (tmp_path / "input").open("w+") as file, without_echo(file):
        file.write("x")
