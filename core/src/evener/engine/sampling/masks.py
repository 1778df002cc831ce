"""Masks as one array for a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from evener.engine.wire.plan import Plan, StepMasks


def packed_masks(plan: Plan, masks: StepMasks, vocab: int) -> np.ndarray[Any, Any]:
    """The ``masks`` of the rows ``plan.masked`` as int32 [samples, ceil(vocab / 32)]. Rows without a mask, or with an
    empty one, may take any id."""
    assert masks.plan == plan.id, f"plan {plan.id} waits for masks, and those of plan {masks.plan} came"
    rows, free = dict(zip(plan.masked, masks.masks, strict=True)), b"\xff" * 4 * -(-vocab // 32)
    # One copy: a mask has tens of kilobytes, and the device may wait for them.
    packed = bytearray().join(rows.get(row) or free for row in range(len(plan.samples)))
    return np.frombuffer(packed, dtype="<i4").reshape(len(plan.samples), -1)
