"""Both halves of the connector ``host+transfer`` on a rank."""

from __future__ import annotations

import pytest

from evener.contracts.connector import BlockMover, BlockMoves
from evener_kv.shared import SharedMover


class _Mover(BlockMover):
    def __init__(self, error: Exception | None = None) -> None:
        self.slabs, self.closed, self._error = 0, False, error

    def begin(self, moves: BlockMoves) -> None:
        del moves

    def finished(self) -> list[int]:
        return []

    def close(self) -> None:
        self.closed = True
        if self._error:
            raise self._error


def test_a_half_that_fails_at_its_end_does_not_keep_the_other_one_open() -> None:
    host, remote = _Mover(OSError("a file is gone")), _Mover()
    with pytest.raises(OSError, match="a file is gone"):
        SharedMover(host, remote).close()
    assert host.closed and remote.closed
