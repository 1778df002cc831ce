"""Masks as one array for a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from evener.engine.wire.plan import Plan, StepMasks


def packed_masks(plan: Plan, masks: StepMasks, vocab: int) -> np.ndarray[Any, Any]:
    """The ``masks`` of the rows ``plan.masked`` as int32 [samples, ceil(vocab / 32)]. Rows without a mask, or with an
    empty one, may take any id."""
    assert masks.plan == plan.id, f"plan {plan.id} waits for masks, and those of plan {masks.plan} came"
    packed = np.full((len(plan.samples), -(-vocab // 32)), -1, dtype=np.int32)
    for row, bits in zip(plan.masked, masks.masks, strict=True):
        if bits:
            packed[row] = np.frombuffer(bits, dtype="<i4")
    return packed
