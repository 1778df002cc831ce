"""The memory plan of one device as data. ``engine.worker.memory`` makes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device.

    Attributes:
        weights: in memory, second copies included; copies: those second copies (a tied head that is packed
            differently).
        mapped: weights that stay pages of their files and do not count.
        tables: position tables, the engine's rows of requests, and rows of encoders.
        workspace: activations and scratch of the largest step.
        state: the KV cache's pool; blocks: its slabs, the null slab included; block_bytes: bytes of one slab.
        free: what the device had before anything was allocated.
        problem: why it does not fit, and what to change; None if it fits.
        host, host_layers: bytes of the experts that the host computes, and of how many layers; not in ``total``.
    """

    weights: int
    copies: int
    mapped: int
    tables: int
    workspace: int
    state: int
    blocks: int
    block_bytes: int
    free: int
    problem: str | None = None
    host: int = 0
    host_layers: int = 0

    @property
    def total(self) -> int:
        """Bytes of everything that counts."""
        return self.weights + self.tables + self.workspace + self.state

    def with_blocks(self, blocks: int) -> MemoryPlan:
        """The same plan with another number of blocks."""
        return replace(self, blocks=blocks, state=blocks * self.block_bytes)

    def lines(self) -> list[str]:
        """A table for a person."""
        rows = {
            "weights": self.weights, "  second copies in it": self.copies, "tables": self.tables,
            "workspace": self.workspace, f"state ({self.blocks} blocks)": self.state, "total": self.total,
            "free": self.free, "mapped from files": self.mapped,
            f"experts on the host: {self.host_layers} layers,": self.host,
        }  # fmt: skip
        return [f"{k:<23} {in_gib(value):>12}" for k, value in rows.items() if value or k in ("total", "free")]

    def to_json(self) -> dict[str, Any]:
        """Plain data, to be shown."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory(MemoryPlan):
    """The plan of a device that has loaded its weights, and what these take: ``measured_weights`` bytes of memory,
    ``measured_mapped`` bytes of files, and ``measured_host`` bytes of the host, of experts that it computes."""

    measured_weights: int
    measured_mapped: int
    measured_host: int


def in_gib(count: int) -> str:
    """Bytes for a person, in GiB, or in MiB below one."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
