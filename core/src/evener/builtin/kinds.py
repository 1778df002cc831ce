"""The built-in state kinds: which KV cache blocks are still needed. Packages add others with ``evener_state_kinds``."""

from __future__ import annotations

from evener.contracts.state import StateKind, StateSpec


class FullKind(StateKind):
    """Every earlier token is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        return 0


class LocalKind(StateKind):
    """Only the tokens that the next one attends to are read: the last ``window`` tokens, that one included, or its
    chunk."""

    def __init__(self, name: str) -> None:
        self.name = name

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        assert spec.window is not None, f"a {self.name} spec has a window"
        return max(0, int(spec.first_attended(computed))) // block_size


class RecurrentKind(StateKind):
    """One row of state for each block: it continues the row of the block before."""

    name = "recurrent"

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        return max(0, computed - 1) // block_size

    def needs(self, spec: StateSpec, column: int, last: int, block_size: int) -> bool:
        return column == last or self.reusable(spec, column, block_size)

    def reusable(self, spec: StateSpec, column: int, block_size: int) -> bool:
        return (column + 1) * block_size % (spec.every or block_size) == 0

    def live_blocks(self, spec: StateSpec, first: int, stop: int, block_size: int) -> int:
        apart = (spec.every or block_size) // block_size
        ends = {first, stop - 1}
        return stop // apart - first // apart + sum(not self.reusable(spec, column, block_size) for column in ends)


BUILTIN_KINDS: tuple[StateKind, ...] = (
    FullKind("full"),
    FullKind("latent"),
    FullKind("index"),
    LocalKind("window"),
    LocalKind("chunk"),
    RecurrentKind(),
)
