"""Media in prompts: rows that replace the embeddings of placeholder tokens. Torch-free.

An item covers some tokens of a prompt; the model reads the item's rows instead of their embeddings. The rows are given,
or an encoder computes them in the worker. The ids of these tokens are only placeholders, so code that compares prompts
(the prefix cache, forks) compares items too.

They are checked, planned and kept by a package that is pinned to its core's version. It announces the parts
(``Descriptor.media_parts``); without it, a request with media is refused:

- ``checks``: takes the items of a prompt, the width of the model's rows, and how many of them one step takes. Returns
  the items to send, or raises RequestError.
- ``planner``: an ``evener.engine.controller.media.Media``, constructed with the numbers of rows that a worker may keep
  and that one step may encode.
- ``rows``: what a worker keeps, constructed with the device, the model's encoders and the compute dtype. ``take`` does
  what a plan says and returns ``Step.embedding_overrides``; ``warm_up`` builds the encoders' kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """The tokens ``start`` to ``start + rows - 1`` of a prompt.

    Attributes:
        start, rows: the first token that it covers, and their number.
        digest: hash of the fields below; items with equal digests are equal.
        data, shape, dtype: an array in C order, dtype by numpy's name: the rows [rows, hidden] themselves, or the
            encoder's input.
        encoder: name of one of the model's encoders; "" if the array is the rows.
    """

    start: int
    rows: int
    digest: bytes
    data: bytes
    shape: list[int]
    dtype: str
    encoder: str = ""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.rows

    @property
    def key(self) -> bytes:
        """Part of the cache key of every block of state that has tokens of the item."""
        return self.digest + self.start.to_bytes(8, "little") + self.rows.to_bytes(8, "little")

    def array(self) -> np.ndarray[Any, Any]:
        """The array, a writable copy."""
        return np.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


def make_item(start: int, array: np.ndarray[Any, Any], rows: int | None = None, encoder: str = "") -> MediaItem:
    """An item from an array: rows [n, hidden] float32, which replace embeddings after the model's scale of embeddings,
    or the input of ``encoder``, with its number of ``rows``."""
    data, shape, dtype = array.tobytes(), list(array.shape), array.dtype.name
    digest = hashlib.sha256(repr((encoder, dtype, shape)).encode() + data).digest()
    return MediaItem(start, len(array) if rows is None else rows, digest, data, shape, dtype, encoder)


@dataclass(frozen=True)
class MediaPrompt:
    """Token ids, and the items that cover some of them, in order."""

    ids: list[int]
    media: Sequence[MediaItem]
