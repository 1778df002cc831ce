"""The built-in state kinds: which blocks are still needed. Others are added with the hook ``evener_state_kinds``."""

from __future__ import annotations

from evener.contracts.state import StateKind, StateSpec


class FullKind(StateKind):
    """Every earlier token is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        return 0


class WindowKind(StateKind):
    """Only the last ``window`` tokens are read, the current one included."""

    name = "window"

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        assert spec.window is not None, "a window spec has a window"
        return max(0, computed - spec.window + 1) // block_size


class RecurrentKind(StateKind):
    """A row of state goes on from the row at the end of the block before."""

    name = "recurrent"

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        return max(0, computed - 1) // block_size


BUILTIN_KINDS: tuple[StateKind, ...] = (
    FullKind("full"),
    FullKind("latent"),
    FullKind("index"),
    WindowKind(),
    RecurrentKind(),
)
