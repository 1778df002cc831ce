"""Masks as one array for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evener.engine.wire.plan import Plan


def packed_masks(plan: Plan, masks: Sequence[bytes], vocab: int) -> np.ndarray[Any, Any]:
    """The ``masks`` of the rows ``plan.masked`` as int32 [samples, ceil(vocab / 32)]. Rows without a mask, or with an
    empty one, may take any id."""
    packed = np.full((len(plan.samples), -(-vocab // 32)), -1, dtype=np.int32)
    for row, bits in zip(plan.masked, masks, strict=True):
        if bits:
            packed[row] = np.frombuffer(bits, dtype="<i4")
    return packed
