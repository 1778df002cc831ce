"""The experts contract: routing gives logical ids, a device-side map gives physical slots.

Expert parallelism, spare copies and experts that are held elsewhere change the map, never the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ExpertMap:
    """Logical expert ids to physical slots.

    Attributes:
        slots: int32 [logical experts, copies]; -1 where there is no such copy on this rank.
        copies: int32 [logical experts], how many copies each has (0 = not resident).
    """

    slots: torch.Tensor
    copies: torch.Tensor

    def __call__(self, logical: torch.Tensor, salt: torch.Tensor) -> torch.Tensor:
        """Physical slots for logical ids [T, k]; ``salt`` int [T] spreads tokens over copies. -1 = not resident."""
        counts = self.copies[logical]
        pick = (salt[:, None] % counts.clamp(min=1)).to(logical.dtype)
        return self.slots[logical, pick]
