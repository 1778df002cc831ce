"""Captures that all ranks of a group hold, or none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evener.contracts.communicator import Communicator
from evener.contracts.graph import GraphCapture, Replay
from evener.errors import EngineError


class JointCapture(GraphCapture):
    """Replays pad their rows and eager steps do not, so what ranks send each other would not match if one of them could
    not capture a step that the others replay. Where one cannot, it fails on each.

    Args:
        inner: how this rank's device captures.
        group: the ranks that share layers. Each captures the same segments in the same order.
        where: a device that the group sends from.
    """

    def __init__(self, inner: GraphCapture, group: Communicator, where: torch.device) -> None:
        self._inner, self._group, self._where = inner, group, where

    def capture(self, segment: Callable[[], None]) -> Replay:
        failure: EngineError | None = None
        try:
            replay = self._inner.capture(segment)
        except EngineError as error:
            failure = error
        each = self._group.all_gather(torch.tensor([failure is None], device=self._where), dim=0).tolist()
        if all(each):
            return replay
        raise failure or EngineError(f"rank {each.index(False)} of {self._group.size} cannot capture it")

    def release(self) -> None:
        self._inner.release()
