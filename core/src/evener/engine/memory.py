"""The memory plan: an estimate before weights are read, a measurement after warm-up. Bytes are those that providers
count."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from evener.contracts.device import MemoryInfo
from evener.loading.estimate import WeightEstimate


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device.

    Attributes:
        weights: what is held of them, second copies included; copies: those (a tied head that is packed differently).
        mapped: weights that stay pages of their files and do not count.
        tables: position tables, the engine's rows of requests, and what encoders' rows may take.
        workspace: activations and scratch of the largest step.
        state: the state pool; blocks: its blocks, block_bytes: bytes of one.
        free: what the device had before anything was allocated.
        problem: why it does not fit, and what to change; None if it fits.
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

    @property
    def total(self) -> int:
        """Everything."""
        return self.weights + self.tables + self.workspace + self.state

    def lines(self) -> list[str]:
        """For a person."""
        rows = {
            "weights": self.weights,
            "  second copies in it": self.copies,
            "tables": self.tables,
            "workspace": self.workspace,
            f"state ({self.blocks} blocks)": self.state,
            "total": self.total,
            "free": self.free,
            "mapped from files": self.mapped,
        }
        return [f"{name:<24}{_size(value):>12}" for name, value in rows.items() if value or name in ("total", "free")]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**dataclasses.asdict(self), "total": self.total}


def _size(count: int) -> str:
    """Bytes for a person."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class Demand:
    """What has to fit beside the state, and what the state is good for.

    Attributes:
        weights: as estimated from headers and packings.
        rows: bytes of the engine's device tables and of encoders' rows; workspace: bytes of the largest step's scratch.
        block_bytes: bytes of one block over all layers.
        useful: blocks that all slots can hold at once; least: blocks that one request of ``max_seq_len`` needs.
    """

    weights: WeightEstimate
    rows: int
    workspace: int
    block_bytes: int
    useful: int
    least: int
    max_seq_len: int
    dtype: str

    @property
    def fixed(self) -> int:
        """Bytes beside the state."""
        return self.weights.counted + self.rows + self.workspace


def plan_memory(demand: Demand, memory: MemoryInfo, kv_bytes: int | None, longest: int = 0) -> MemoryPlan:
    """Divide the memory; state gets ``kv_bytes``, or what is left when None, but no more than is useful.

    Args:
        longest: tokens of the longest request that the memory for state would hold.
    """
    left = memory.free - demand.fixed
    budget = left if kv_bytes is None else kv_bytes
    blocks = min(max(0, budget) // demand.block_bytes, demand.useful + 1)
    weights = demand.weights
    plan = MemoryPlan(
        weights=weights.counted, copies=weights.second_copies, mapped=weights.mapped, tables=demand.rows,
        workspace=demand.workspace, state=blocks * demand.block_bytes, blocks=blocks, block_bytes=demand.block_bytes,
        free=memory.free,
    )  # fmt: skip
    return dataclasses.replace(plan, problem=_problem(demand, memory, kv_bytes, plan, longest))


def _problem(demand: Demand, memory: MemoryInfo, kv_bytes: int | None, plan: MemoryPlan, longest: int) -> str | None:
    """Why it does not fit, with the numbers and what to change; None if it does."""
    weights, free = demand.weights, f"{_size(memory.free)} of {_size(memory.total)} are free"
    # Mapped weights may come and go with the page cache, but each step reads all of them.
    if weights.counted > memory.free or weights.counted + weights.mapped > memory.total:
        lighter = "dtype=bfloat16 halves them; " if demand.dtype == "float32" and not weights.mapped else ""
        return (
            f"the model does not fit: its weights take {_size(weights.counted + weights.mapped)} in {demand.dtype}, "
            f"and {free}; no key about state helps: {lighter}take a checkpoint that stores them in fewer bits, or a "
            "device with more memory (`evener doctor` lists what is here)"
        )
    left, need = memory.free - demand.fixed, (demand.least + 1) * demand.block_bytes
    if plan.blocks > demand.least and plan.state <= left:
        return None
    allowed = f" and infer.kv_memory allows {_size(kv_bytes)} for state" if kv_bytes is not None else ""
    advice = [f"infer.max_seq_len={longest} fits"] if longest > 1 else []
    if kv_bytes is not None and max(need, kv_bytes) > left:
        advice.append("lower infer.kv_memory" if kv_bytes > left >= need else "free memory elsewhere")
    elif kv_bytes is not None:
        advice.append(f"infer.kv_memory={-(-need >> 20)}MiB holds one")
    if demand.rows + demand.workspace > demand.weights.counted:
        advice.append("lower infer.max_reqs and infer.step_tokens, which size tables and workspace")
    return (
        f"the model does not fit: {_size(demand.fixed)} for weights, tables and workspace and {_size(need)} "
        f"for one request of infer.max_seq_len={demand.max_seq_len}, but {free}{allowed}; what to change: "
        + ", or ".join(advice or ["lower infer.max_reqs, infer.step_tokens or infer.max_seq_len"])
    )
