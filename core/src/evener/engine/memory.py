"""The memory plan: an estimate before weights are read, a measurement after warm-up. Bytes are those that providers
count."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from evener.contracts.device import MemoryInfo
from evener.contracts.quant import DTYPE_BYTES
from evener.errors import MemoryPlanError
from evener.layers.builder import Builder
from evener.layers.declared import LinearWeight
from evener.loading.estimate import WeightEstimate

#: Tensors of hidden width that a forward pass of plain ops holds at once, and of the MLP's width.
_HIDDEN_COPIES, _INNER_COPIES, _STREAM_COPIES = 4, 3, 2


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device.

    Attributes:
        weights: what is held of them, second copies included; copies: those (a tied head that is packed differently).
        mapped: weights that stay pages of their files and do not count.
        tables: position tables and the engine's rows of requests.
        workspace: activations and scratch of the largest step.
        state: the state pool; blocks: its blocks, block_bytes: bytes of one.
        free: what the device had before anything was allocated.
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
        return [
            f"{name:<24}{_size(value):>12}" for name, value in rows.items() if value or name in ("total", "free")
        ]

    def to_json(self) -> dict[str, int]:
        """Plain data."""
        return {**dataclasses.asdict(self), "total": self.total}


def _size(count: int) -> str:
    """Bytes for a person."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def activation_bytes(build: Builder, step_tokens: int, rows: int, vocab: int) -> int:
    """Scratch of the largest step with plain ops: a few tensors of each width, the stream in float32, and the logits
    twice."""
    element = int(DTYPE_BYTES[build.dtype])
    linears = [w for w in build.weights if isinstance(w, LinearWeight) and w.rows != vocab]
    hidden = max((w.columns for w in linears), default=0)
    inner = max((w.rows for w in linears), default=0)
    step = (_HIDDEN_COPIES * hidden + _INNER_COPIES * inner) * element + _STREAM_COPIES * hidden * 4
    return step_tokens * step + rows * vocab * 8


@dataclass(frozen=True)
class Demand:
    """What has to fit beside the state, and what the state is good for.

    Attributes:
        weights: as estimated from headers and packings.
        rows: bytes of the engine's device tables; workspace: bytes of the largest step's scratch.
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

    @property
    def fixed(self) -> int:
        """Bytes beside the state."""
        return self.weights.counted + self.rows + self.workspace


def plan_memory(demand: Demand, memory: MemoryInfo, kv_bytes: int | None) -> MemoryPlan:
    """Divide the memory; state gets ``kv_bytes``, or what is left when None, but no more than is useful.

    Raises:
        MemoryPlanError: it does not fit; with the numbers and what to change.
    """
    left = memory.free - demand.fixed
    budget = left if kv_bytes is None else kv_bytes
    blocks = min(max(0, budget) // demand.block_bytes, demand.useful + 1)
    copies = sum(second.nbytes for second in demand.weights.second_copies)
    plan = MemoryPlan(
        weights=demand.weights.counted, copies=copies, mapped=demand.weights.mapped, tables=demand.rows,
        workspace=demand.workspace, state=blocks * demand.block_bytes, blocks=blocks, block_bytes=demand.block_bytes,
        free=memory.free,
    )  # fmt: skip
    if blocks < demand.least + 1 or plan.state > left:
        raise MemoryPlanError(_does_not_fit(demand, memory, kv_bytes) + "\n" + "\n".join(plan.lines()))
    return plan


def _does_not_fit(demand: Demand, memory: MemoryInfo, kv_bytes: int | None) -> str:
    need, length = (demand.least + 1) * demand.block_bytes, demand.max_seq_len
    allowed = f" and infer.kv_memory allows {_size(kv_bytes)} for state" if kv_bytes is not None else ""
    return (
        f"the model does not fit: {_size(demand.fixed)} for weights, tables and workspace and {_size(need)} "
        f"for one request of infer.max_seq_len={length}, but {_size(memory.free)} are free{allowed}; lower "
        f"infer.max_seq_len (try infer.max_seq_len={max(2, length // 2)}), infer.max_reqs or infer.step_tokens, or "
        "change infer.kv_memory"
    )
