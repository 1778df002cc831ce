"""Packs the masks of a step into one array."""

from __future__ import annotations

from typing import Any

import numpy as np

from evener.engine.wire.plan import Plan, StepMasks


def pack_masks(plan: Plan, masks: StepMasks, into: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Write the ``masks`` of the rows ``plan.masked`` into an array int32 [samples or more, ceil(vocabulary / 32)],
    which is returned. Rows without a mask, or with an empty one, may take any id."""
    assert masks.plan == plan.id, f"plan {plan.id} waits for masks, and those of plan {masks.plan} came"
    rows, width = dict[int, Any](zip(plan.masked, masks.masks, strict=True)), into.strides[0]
    # One copy each: a mask has tens of kilobytes, and the device may wait for them.
    free, bits = b"\xff" * width, memoryview(into).cast("B")
    for row in range(len(plan.samples)):
        bits[row * width : (row + 1) * width] = rows.get(row) or free
    return into
