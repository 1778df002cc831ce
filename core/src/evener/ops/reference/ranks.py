"""Ops of several ranks: each rank calls its communicator, at the same call site as the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from evener.contracts.communicator import Communicator
from evener.contracts.ops import OpFunction, Static, Use


def all_reduce(static: Static, use: Use) -> OpFunction:
    communicator: Communicator = static["communicator"]
    return communicator.all_reduce


def all_gather(static: Static, use: Use) -> OpFunction:
    communicator: Communicator = static["communicator"]
    columns, total = static["columns"], static["total"]

    def run(x: torch.Tensor) -> torch.Tensor:
        wide = F.pad(x, (0, columns - x.shape[1])) if x.shape[1] < columns else x
        return communicator.all_gather(wide)[:, :total]

    return run
