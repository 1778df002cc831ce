"""A pool of blocks whose places a test takes away."""

from __future__ import annotations

from evener.engine.controller.blocks import BlockPool


def take(pool: BlockPool, count: int) -> list[int]:
    """The ids of ``count`` blocks as large as a slab, each held once."""
    taken = pool.allocate_all([(count, pool.slab)])
    assert taken is not None, "so many are free"
    return taken[0]
