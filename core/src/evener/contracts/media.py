"""Media in prompts: rows that stand for tokens. Torch-free.

An item stands for some of a prompt's tokens: the model reads its rows where it would read their embeddings. The rows
are given, or an encoder makes them in the worker. The tokens' ids are placeholders, so whatever compares prompts (the
prefix cache, forks) compares items too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """Rows ``start`` to ``start + rows - 1`` of a prompt.

    Attributes:
        start, rows: which tokens it stands for.
        digest: of everything below; what has the same is the same.
        data, shape, dtype: an array in C order, as numpy names its type: the rows [rows, hidden] themselves, or what
            the encoder takes.
        encoder: name of one of the model's encoders; "" if the data are the rows.
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
        """Position behind its last row."""
        return self.start + self.rows

    @property
    def key(self) -> bytes:
        """What a block of state depends on if the item reaches into it."""
        return self.digest + self.start.to_bytes(8, "little") + self.rows.to_bytes(8, "little")

    def array(self) -> np.ndarray[Any, Any]:
        """The data, writable."""
        import numpy as np

        return np.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


def make_item(start: int, array: np.ndarray[Any, Any], rows: int | None = None, encoder: str = "") -> MediaItem:
    """An item of an array: of rows [n, hidden] float32, as long as embeddings after their scale, or of what ``encoder``
    takes."""
    import numpy as np

    array = np.ascontiguousarray(array)
    data, shape, dtype = array.tobytes(), list(array.shape), array.dtype.name
    digest = hashlib.sha256(repr((encoder, dtype, shape)).encode() + data).digest()
    return MediaItem(start, len(array) if rows is None else rows, digest, data, shape, dtype, encoder)


@dataclass(frozen=True)
class MediaPrompt:
    """Token ids, and the items that stand for some of them, in their order."""

    ids: list[int]
    media: Sequence[MediaItem]
