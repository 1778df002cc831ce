"""Prompts: made-up ones of fixed or random lengths, or those of a file."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("random", "csv", "sharegpt", "trace", "longbench")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant",
          "bard": "assistant", "assistant": "assistant", "system": "system"}  # fmt: skip

Message = dict[str, str]
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class PromptRequest:
    """One request: its prompt as token ids, as text or as messages, and how many new tokens it wants."""

    prompt: list[int] | str | list[Message]
    output_len: int

    @property
    def text(self) -> str:
        """The prompt in readable form."""
        if isinstance(self.prompt, str):
            return self.prompt
        if self.prompt and isinstance(self.prompt[0], dict):
            return "\n".join(message["content"] for message in self.messages)
        return " ".join(map(str, self.prompt))

    @property
    def messages(self) -> list[Message]:
        """The prompt as a chat."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [message for message in self.prompt if isinstance(message, dict)]


def conversations(kind: str, path: Path, column: int = 0, header: bool = True) -> list[list[Message]]:
    """The conversations of a file, without final answers.

    ``csv``: one prompt a row, in a column. ``sharegpt``: its JSON. ``trace``: JSON lines with ``message``.
    ``longbench``: the JSON of LongBench v2.

    Raises:
        SystemExit: the file cannot be read as ``kind``, or is empty.
    """
    read: Callable[[], Iterator[list[Message]]] = {
        "csv": lambda: _csv(path, column, header),
        "sharegpt": lambda: _sharegpt(path),
        "trace": lambda: _trace(path),
        "longbench": lambda: _longbench(path),
    }[kind]
    try:
        found = [_without_answer(talk) for talk in read()]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SystemExit(f"{path} cannot be read as {kind}: {type(error).__name__}: {error}") from error
    found = [talk for talk in found if talk]
    if not found:
        raise SystemExit(f"{path} has no prompt in it")
    return found


def _csv(path: Path, column: int, header: bool) -> Iterator[list[Message]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        if header:
            next(rows)
        for row in rows:
            yield [{"role": "user", "content": row[column]}]


def _sharegpt(path: Path) -> Iterator[list[Message]]:
    for talk in json.loads(path.read_text("utf-8")):
        yield [{"role": _ROLES[turn["from"]], "content": turn["value"]} for turn in talk["conversations"]]


def _trace(path: Path) -> Iterator[list[Message]]:
    for line in path.read_text("utf-8").splitlines():
        if line.strip():
            yield [{"role": turn["role"], "content": turn["content"]} for turn in json.loads(line)["message"]]


def _longbench(path: Path) -> Iterator[list[Message]]:
    for row in json.loads(path.read_text("utf-8")):
        choices = "\n".join(f"({letter}) {row[f'choice_{letter}']}" for letter in "ABCD")
        yield [{"role": "user", "content": f"{row['context']}\n\n{row['question']}\n{choices}"}]


def _without_answer(talk: list[Message]) -> list[Message]:
    return talk[:-1] if talk and talk[-1]["role"] == "assistant" else talk


def length(rng: random.Random, middle: int, spread: float) -> int:
    """A length within ``spread`` (0 to 1) of ``middle``."""
    return rng.randint(max(1, round(middle * (1 - spread))), max(1, round(middle * (1 + spread))))


def random_ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    """Random token ids that are not special tokens in the usual vocabularies."""
    return [rng.randrange(min(100, vocab - 1), vocab) for _ in range(count)]


def cut(talks: Sequence[list[Message]], start: int, size: int, encode: Encode, decode: Decode) -> str:
    """Text of ``size`` tokens from the contents of conversations, beginning with number ``start``."""
    ids: list[int] = []
    at = start
    while len(ids) < size:
        more = encode("\n".join(turn["content"] for turn in talks[at % len(talks)]))
        if not more and at - start >= len(talks):
            raise SystemExit("the data set has no text to cut prompts from")
        ids += more
        at += 1
    return decode(ids[:size])


def affixed(text: str, template: str | None) -> str:
    """``text`` in a prompt template, in place of ``%s``."""
    return text if template is None else template.replace("%s", text)


def body_of(ask: PromptRequest, chat: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """The request's body for chat completions or completions."""
    common = {**fields, "max_tokens": ask.output_len, "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        return {**common, "messages": ask.messages}
    return {**common, "prompt": ask.prompt if isinstance(ask.prompt, str) or _is_ids(ask.prompt) else ask.text}


def _is_ids(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
