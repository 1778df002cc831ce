"""The kind of state "whole": each token reads all tokens of its text, before and behind it, and nothing is kept.

So a text is computed in one step, takes no blocks of state, and is never in the prefix cache. With ``StateSpec.window``
= w, a token reads those at most w away from it on both sides.

A backend may serve this kind with kernels of its own: with a subclass of ``WholeTextProvider``. Torch-free.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from evener.contracts.state import StateKind, StateProvider, StateSpec

if TYPE_CHECKING:
    import torch

KIND = "whole"


class WholeText(StateKind):
    """No block is ever written, so none is held or found again."""

    name = KIND
    undivided = True

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        return 0

    def needs(self, spec: StateSpec, column: int, last: int, block_size: int) -> bool:
        return False

    def reusable(self, spec: StateSpec, column: int, block_size: int) -> bool:
        return False

    def live_blocks(self, spec: StateSpec, first: int, stop: int, block_size: int) -> int:
        return 0


class WholeTextProvider(StateProvider):
    """Attention within whole texts: the interface of the kind "whole"."""

    @abstractmethod
    def attend(self, meta: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of each text of the step over itself. All are [T, heads, head_dim], and so is the result."""
