"""The built-in state kinds: which blocks are still needed. Others are added with the hook ``evener_state_kinds``."""

from __future__ import annotations

from evener.contracts.state import StateKind, StateSpec


class FullKind(StateKind):
    """Every earlier token is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        return 0


class LocalKind(StateKind):
    """What the next token attends to is read, and nothing before it: the last ``window`` tokens, that one included, or
    the chunk that it lies in."""

    def __init__(self, name: str) -> None:
        self.name = name

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        assert spec.window is not None, f"a {self.name} spec has a window"
        return max(0, int(spec.first_seen(computed))) // block_size


class RecurrentKind(StateKind):
    """A row of state goes on from the row at the end of the block before."""

    name = "recurrent"

    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        return max(0, computed - 1) // block_size

    def needs(self, spec: StateSpec, column: int, last: int, block_size: int) -> bool:
        return column == last or self.reusable(spec, column, block_size)

    def reusable(self, spec: StateSpec, column: int, block_size: int) -> bool:
        return (column + 1) * block_size % (spec.every or block_size) == 0

    def held(self, spec: StateSpec, first: int, stop: int, block_size: int) -> int:
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
