"""The experts contract: routing gives logical expert ids, and a map on the device gives physical slots.

Expert parallelism, redundant copies and experts that are stored elsewhere change the map, never the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class ExpertMap(NamedTuple):
    """Logical expert ids to physical slots.

    Attributes:
        slots: int32 [logical experts, copies]; -1 if this rank has no such copy.
        copies: int32 [logical experts], number of copies of each (0: not on this rank).
    """

    slots: torch.Tensor
    copies: torch.Tensor

    def __call__(self, logical: torch.Tensor, salt: torch.Tensor) -> torch.Tensor:
        """Physical slots for logical ids [T, k], -1 for an expert that is not on this rank. ``salt``: int [T], spreads
        tokens over the copies."""
        return self.slots[logical, (salt[:, None] % self.copies[logical].clamp(min=1)).to(logical.dtype)]
