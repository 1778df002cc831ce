"""Masks as one array for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def packed_masks(masks: Sequence[tuple[int, bytes]], rows: int, vocab: int) -> np.ndarray[Any, Any]:
    """The masks of ``Plan.masks`` as int32 [rows, ceil(vocab / 32)]; the other rows may take any id."""
    packed = np.full((rows, -(-vocab // 32)), -1, dtype=np.int32)
    for row, bits in masks:
        packed[row] = np.frombuffer(bits, dtype="<i4")
    return packed
