"""Texts in the harmony format of gpt-oss as messages, in the form in which OpenAI's library for it writes them as JSON.

A message is ``<|start|>HEAD<|message|>TEXT`` and one of ``<|end|>``, ``<|call|>`` and ``<|return|>``. Its head has the
author, ``to=`` and a recipient, ``<|channel|>`` and a channel, and the type of the text.
"""

from __future__ import annotations

import re

from evener_generation.message_reader import Message

_MARKS = re.compile(r"(<\|(?:start|message|end|call|return)\|>)")
_CHANNEL, _TYPE, _TO = "<|channel|>", "<|constrain|>", "to="
_ROLES = ("system", "developer", "user", "assistant", "tool")


def harmony_messages(prompt: str, answer: str) -> tuple[list[Message], list[Message]]:
    """The messages of a prompt and of the answer to it."""
    reader = _Reader()
    reader.read(prompt)
    asked = reader.take()
    reader.read(answer)
    reader.end()
    return asked, reader.take()


class _Reader:
    """Reads one text after another; a message may begin in one and end in the next."""

    def __init__(self) -> None:
        self._found: list[Message] = []
        self._head, self._text = "", ""
        #: Whether the text of a message is read; else its head.
        self._inside = False
        #: Characters of the head that earlier texts had.
        self._known = 0

    def read(self, text: str) -> None:
        """Read the next text."""
        for part in _MARKS.split(text):
            if self._inside:
                self._read_text(part)
            else:
                self._read_head(part)

    def take(self) -> list[Message]:
        """The messages so far, and of an open one what it has of text; the rest of it will have the same head."""
        if self._inside and self._text:
            self._add()
        self._text, self._known = "", len(self._head)
        taken, self._found = self._found, []
        return taken

    def end(self) -> None:
        """No more text comes: a text that has no head is a message too."""
        told = self._head[self._known :]
        if not self._inside and told.strip() and _CHANNEL not in told and not told.startswith("<|start|>"):
            self._head, self._text = self._head[: self._known], told
            self._add()
            self._text = ""

    def _read_head(self, part: str) -> None:
        if part == "<|message|>":
            self._inside = True
        elif part == "<|start|>":
            self._head, self._known = part, 0
        elif not _MARKS.fullmatch(part):  # an end without a message says nothing
            self._head += part

    def _read_text(self, part: str) -> None:
        if part == "<|message|>" or not _MARKS.fullmatch(part):
            self._text += part
            return
        self._add()
        self._head, self._known, self._text, self._inside = "", 0, "", False
        if part == "<|start|>":  # the message before was cut off
            self._head = part

    def _add(self) -> None:
        self._found.append({**_head(self._head.removeprefix("<|start|>")), **_content(self._text), **_rest(self._head)})


def _content(text: str) -> Message:
    return {"content": [{"type": "text", "text": text}]}


def _head(head: str) -> Message:
    """The author. A tool is named by its name alone."""
    words = head.partition(_CHANNEL)[0].split() or ["assistant"]
    role, _, name = words[0].partition(":")
    if role in _ROLES:
        return {"role": role, "name": name or None}
    return {"role": "tool", "name": words[0]}


def _rest(head: str) -> Message:
    """Channel, recipient and the text's type, as far as they are given."""
    author, _, channel = head.replace(_TYPE, f" {_TYPE}").partition(_CHANNEL)
    words = channel.split()
    others = [word for word in words[1:] if not word.startswith(_TO)]
    recipients = [word.removeprefix(_TO) for word in (*author.split(), *words) if word.startswith(_TO)]
    found = {"channel": words[:1], "recipient": recipients, "content_type": others}
    return {name: each[0] for name, each in found.items() if each}
