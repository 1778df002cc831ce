"""Prompts, and parts of conversations, that are rows of embeddings instead of text: ``prompt_embeds`` of vLLM's API.

The rows are a tensor [n, hidden] that ``torch.save`` has written, in base64. The model reads them instead of the
embeddings of n tokens. They are untrusted input: see ``saved_tensor``.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from typing import TYPE_CHECKING, Any

from evener.contracts.media import MediaPrompt, make_item
from evener.errors import RequestError
from evener.frontend.tokenizer import Tokenizer
from evener_server.messages import replaced_parts
from evener_server.saved_tensor import read_matrix

if TYPE_CHECKING:
    import numpy as np

#: Stands for a row among the token ids of a prompt.
_PLACE = 0


def decode_rows(data: str, place: str, width: int, most: int) -> np.ndarray[Any, Any]:
    """The rows [n, ``width``] float32 of the field ``place``, at most ``most``.

    Raises:
        RequestError: they cannot be used.
    """
    try:
        return read_matrix(base64.b64decode(data, validate=True), most, width)
    except binascii.Error as error:
        raise RequestError(f"{place} is not valid base64: {error}", place) from error
    except ValueError as error:
        how = "send base64 of what torch.save writes for one tensor"
        raise RequestError(f"{place} cannot be read: {error}; {how}", place) from error


def prompt_of_rows(rows: np.ndarray[Any, Any]) -> MediaPrompt:
    """A prompt of nothing but rows."""
    return MediaPrompt([_PLACE] * len(rows), [make_item(0, rows)])


class RowParts:
    """The parts of one conversation that are rows. The chat template sees a mark in place of each.

    Args:
        width: numbers of a row.
        most: rows that all parts may have together.
    """

    def __init__(self, width: int, most: int) -> None:
        self._width, self._left = width, most
        self._rows: list[np.ndarray[Any, Any]] = []
        # Nobody can write a mark into a text without knowing it.
        self._secret = secrets.token_hex(16)

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with a text in place of each part that is rows.

        Raises:
            RequestError: rows cannot be used; ``param`` is their path.
        """
        found = replaced_parts(messages, "prompt_embeds", self._part)
        for i, message in enumerate(found):
            given = message.get("reasoning"), message.get("reasoning_content")
            for name, rows in zip(("reasoning", "reasoning_content"), given, strict=True):
                if isinstance(rows, dict):
                    # Where both names have the same, a template shows one of them.
                    again = name == "reasoning_content" and rows is given[0]
                    path = f"messages[{i}].{name}"
                    message[name] = message["reasoning"] if again else self._part(rows, path)["text"]
        return found

    def _part(self, part: dict[str, Any], place: str) -> dict[str, Any]:
        rows = decode_rows(part["data"], f"{place}.data", self._width, self._left)
        self._left -= len(rows)
        self._rows.append(rows)
        return {"type": "text", "text": f"<rows-{self._secret}-{len(self._rows) - 1}>"}

    def prompt(self, text: str, tokenizer: Tokenizer) -> MediaPrompt:
        """The rendered conversation as token ids and rows. The texts between rows are tokenized on their own.

        Raises:
            RequestError: the chat template does not show each part once.
        """
        texts = re.split(rf"<rows-{self._secret}-(\d+)>", text)
        shown = [int(number) for number in texts[1::2]]
        if sorted(shown) != list(range(len(self._rows))):
            message = "the chat template does not show every part of type prompt_embeds once; send text, or completions"
            raise RequestError(message, "messages")
        ids, items = tokenizer.encode(texts[0], add_special_tokens=False), []
        for number, after in zip(shown, texts[2::2], strict=True):
            items.append(make_item(len(ids), self._rows[number]))
            ids = [*ids, *[_PLACE] * len(self._rows[number]), *tokenizer.encode(after, add_special_tokens=False)]
        return MediaPrompt(ids, items)
