"""Provision: what a model demands of its device, how long its requests may be, and the plan that follows."""

from __future__ import annotations

from evener.config.resolve import ResolvedConfig
from evener.contracts.quant import DTYPE_BYTES
from evener.engine.assembly import Assembly
from evener.engine.memory import Demand, MemoryPlan, plan_memory
from evener.engine.state import StateManager
from evener.errors import MemoryPlanError
from evener.loading.estimate import estimate_weights


def provision(a: Assembly) -> tuple[ResolvedConfig, MemoryPlan]:
    """The memory plan, before a weight is read.

    Raises:
        MemoryPlanError: it does not fit; with the numbers and what to change.
    """
    config, plan = outline(a)
    if plan.problem is not None:
        raise MemoryPlanError("\n".join([plan.problem, *plan.lines()]))
    return config, plan


def outline(a: Assembly) -> tuple[ResolvedConfig, MemoryPlan]:
    """As ``provision``, but a model that does not fit is the plan's ``problem``. A longest request that nobody asked
    for is cut to what the state holds."""
    config, memory = a.config, a.device.memory()
    demand = _demand(a, config)
    left = memory.free - demand.fixed
    budget = left if config.kv_memory is None else min(left, config.kv_memory)
    held = budget // demand.block_bytes - 1
    length = _longest(a, config, held) if demand.least > held > 0 else 0
    if config.config.infer.max_seq_len == "auto" and length:
        config = config.with_value("infer.max_seq_len", length, "what the memory for state holds")
        demand = _demand(a, config)
    return config, plan_memory(demand, memory, config.kv_memory, length)


def _demand(a: Assembly, config: ResolvedConfig) -> Demand:
    groups, size = a.geometry.groups, a.geometry.block_size
    least = _blocks_for(a, config, config.max_seq_len)
    columns = -(-config.max_seq_len // size)
    attention = max(g.provider.workspace(g.spec, g.attention, config.step_tokens, config.max_seq_len) for g in groups)
    scratch = max(attention, a.resolver.workspace)
    weights = estimate_weights(
        a.build.weights,
        a.resolver.packings_by_layout,
        a.headers or None,
        a.scheme,
        mappable=a.device.capabilities.host_memory,
        copied=a.checkpoint.copied if a.headers else frozenset(),
    )
    media = int(a.media_rows * a.model.hidden_size * DTYPE_BYTES[config.dtype]) if a.model.encoders else 0
    return Demand(
        weights=weights,
        rows=(config.max_reqs + 1) * (4 * (config.max_seq_len + 1) + 36 + 4 * columns * len(groups)) + media,
        workspace=scratch + a.resolver.activations,
        block_bytes=max(1, a.geometry.block_bytes),
        useful=config.max_reqs * least,
        least=least,
        max_seq_len=config.max_seq_len,
        dtype=config.dtype,
    )


def _blocks_for(a: Assembly, config: ResolvedConfig, length: int) -> int:
    groups = a.geometry.groups
    state = StateManager(
        [g.spec for g in groups], a.kinds, a.geometry.block_size, 1, cuts=[g.cut for g in groups]
    )  # fmt: skip
    return state.blocks_for(length, min(config.step_tokens, length))


def _longest(a: Assembly, config: ResolvedConfig, blocks: int) -> int:
    """The longest request, in whole blocks, that ``blocks`` can hold; the need grows with the length."""
    size = a.geometry.block_size
    low, high = 1, -(-config.max_seq_len // size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _blocks_for(a, config, middle * size) <= blocks else (low, middle - 1)
    return low * size
