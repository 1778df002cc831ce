"""How answers look in ``evener chat``: lines as they come, or Markdown that is drawn while it grows."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)

#: What goes on with a list, or may once more of it is there.
_GOES_ON = re.compile(r"[ \t]|[-*+]( |$)|\d+([.)] |[.)]?$)")


class Screen(ABC):
    """Shows one answer at a time."""

    @abstractmethod
    def begin(self) -> None:
        """An answer follows."""

    @abstractmethod
    def add(self, text: str) -> None:
        """The next piece of it."""

    @abstractmethod
    def end(self) -> None:
        """It is over, or was stopped."""


class PlainScreen(Screen):
    """The text itself, for pipes and for those who like it."""

    def __init__(self) -> None:
        self._last = "\n"

    def begin(self) -> None:
        self._last = "\n"

    def add(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last = text[-1:] or self._last

    def end(self) -> None:
        if self._last != "\n":
            self.add("\n")


class MarkdownScreen(Screen):
    """Finished blocks are printed once and scroll away; only the block that still grows is drawn again and again."""

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
        done, self._text = split_blocks(self._text + text)
        if done:
            self._console.print(Markdown(done))
        self._live.update(Markdown(self._text))

    def end(self) -> None:
        assert self._live is not None, "begin comes first"
        self._live.stop()
        if self._text.strip():
            self._console.print(Markdown(self._text))
        self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """Markdown as finished blocks and the rest, cut at the last empty line that is outside a fence of code and that no
    list goes on after."""
    cut = 0
    for match in re.finditer(r"\n[ \t]*\n", text):
        begun = text[match.end() :]
        fenced = len(_FENCE.findall(text[: match.start()])) % 2
        if begun and not fenced and not _GOES_ON.match(begun):
            cut = match.end()
    return text[:cut], text[cut:]
