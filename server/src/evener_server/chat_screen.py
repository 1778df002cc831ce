"""How ``evener chat`` shows answers: as plain text, or as Markdown that is formatted while it streams."""

from __future__ import annotations

import re
import sys
import termios
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

#: Control characters but tab and line feed: a terminal takes what follows them for commands.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)

#: Text after an empty line that continues a list, or may do so when more of it has come.
_LIST_CONTINUES = re.compile(r"[ \t]|[-*+]( |$)|\d+([.)] |[.)]?$)")


class Screen(ABC):
    """Shows one answer at a time."""

    @abstractmethod
    def begin(self) -> None:
        """An answer begins."""

    @abstractmethod
    def add(self, text: str) -> None:
        """Show the next piece of the answer."""

    @abstractmethod
    def end(self) -> None:
        """The answer has ended, or was stopped."""


class PlainScreen(Screen):
    """The unformatted text."""

    def __init__(self) -> None:
        self._last = "\n"

    def begin(self) -> None:
        self._last = "\n"

    def add(self, text: str) -> None:
        # A file or a pipe gets the text as it is.
        sys.stdout.write(_CONTROL.sub("", text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
        self._last = text[-1:] or self._last

    def end(self) -> None:
        if self._last != "\n":
            self.add("\n")


class MarkdownScreen(Screen):
    """Formatted Markdown. A finished block is printed once; only the last, unfinished block is drawn again."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._text = ""

    def begin(self) -> None:
        self._text = ""
        self._live = Live(console=self._console, refresh_per_second=12, vertical_overflow="ellipsis", transient=True)
        self._live.start()

    def add(self, text: str) -> None:
        assert self._live is not None, "begin comes first"
        done, self._text = split_blocks(self._text + _CONTROL.sub("", text))
        if done:
            self._console.print(Markdown(done))
        self._live.update(Markdown(self._text))

    def end(self) -> None:
        assert self._live is not None, "begin comes first"
        self._live.stop()
        if self._text.strip():
            self._console.print(Markdown(self._text))
        self._live = None


@contextmanager
def without_echo(file: TextIO) -> Iterator[None]:
    """A context in which a terminal does not show what is typed. Otherwise the ``^C`` of a Ctrl-C moves the cursor, and
    the block that is drawn again lands in the wrong place. Nothing changes if ``file`` is no terminal."""
    if not file.isatty():
        yield
        return
    before = termios.tcgetattr(file)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(file, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def split_blocks(text: str) -> tuple[str, str]:
    """Markdown as finished blocks and the rest. The cut is the last empty line that is outside a code block and is not
    followed by more of a list."""
    cut = 0
    for match in re.finditer(r"\n[ \t]*\n", text):
        begun = text[match.end() :]
        fenced = len(_FENCE.findall(text[: match.start()])) % 2
        if begun and not fenced and not _LIST_CONTINUES.match(begun):
            cut = match.end()
    return text[:cut], text[cut:]
