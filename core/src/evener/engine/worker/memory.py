"""The whole memory plan of one device: what a start counts, how the rest is divided, and the error if it does not fit.

The byte counts come from other modules:

==============  ==============================================================================================
weights         ``loading.estimate``: from file headers and packings
workspace       ``resolution.footprint``: activations and kernels' scratch; ``StateProvider.workspace``
tables          this module: rows of requests in ``device_tables``, and rows of encoders
state           ``geometry``: bytes of one slab of the KV cache over all layers
free memory     the device
==============  ==============================================================================================

A start estimates the plan before a weight is read (``require_memory_plan``), agrees with the other ranks
(``min_across_ranks``), and where memory is given by default, corrects the blocks by what a warm-up leaves
(``measured_plan``).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from evener.config.resolve import ResolvedConfig
from evener.contracts.declared import Declared
from evener.contracts.device import MemoryInfo
from evener.contracts.quant import DTYPE_BYTES, Packing
from evener.engine.facts.memory_plan import MemoryPlan, in_gib
from evener.engine.inputs.device_tables import table_columns
from evener.engine.wire.slabs import find_kinds, slabs_needed
from evener.engine.worker.assembly import Assembly
from evener.errors import MemoryPlanError
from evener.loading.estimate import WeightEstimate, estimate_weights

log = logging.getLogger("evener.worker")
#: Share of the memory that was free at the start that nothing takes: allocators round up, and drivers keep some for
#: libraries, kernels and captured steps.
KEPT_FREE = 0.05


def require_memory_plan(a: Assembly) -> tuple[ResolvedConfig, MemoryPlan]:
    """The memory plan before a weight is read, and the configuration with the longest request that it allows. Logs
    where these differ from what was asked for.

    Raises:
        MemoryPlanError: it does not fit; with the numbers and what to change.
    """
    config, plan = estimate_memory_plan(a)
    if plan.problem is not None:
        raise MemoryPlanError("\n".join([plan.problem, *plan.lines()]))
    if (length := config.max_seq_len) < a.config.max_seq_len:
        log.warning("a request has at most %d tokens: %s", length, config.reasons["infer.max_seq_len"])
    asked = config.config.infer.kv_memory
    if isinstance(asked, int) and asked >= plan.state + plan.block_bytes:
        level, use = logging.WARNING if asked > plan.free else logging.INFO, (config.max_reqs, length)
        text = "infer.kv_memory is %s, but state gets %s: %d requests (infer.max_reqs) of %d tokens use no more"
        log.log(level, text, in_gib(asked), in_gib(plan.state), *use)
    return config, plan


def estimate_memory_plan(a: Assembly) -> tuple[ResolvedConfig, MemoryPlan]:
    """As ``require_memory_plan``, but a model that does not fit is the plan's ``problem``. With
    ``infer.max_seq_len=auto`` the longest request is cut to what the state holds."""
    config, memory = a.config, a.device.memory()
    demand = memory_demand(a, config)
    left = memory.free - demand.fixed
    budget = left if config.kv_memory is None else min(left, config.kv_memory)
    held = budget // demand.block_bytes - 1
    length = _longest_request(a, config, held) if demand.min_blocks > held > 0 else 0
    if config.config.infer.max_seq_len == "auto" and length:
        more = "a larger infer.kv_memory" if budget < left else "a device with more free memory"
        reason = f"the memory for state holds no more; {more} allows up to {config.max_seq_len}"
        config = config.with_value("infer.max_seq_len", length, reason)
        demand = memory_demand(a, config)
    return config, plan_memory(demand, memory, config.kv_memory, length)


def measured_plan(a: Assembly, plan: MemoryPlan, free: int) -> tuple[ResolvedConfig, MemoryPlan]:
    """The plan with what is ``free`` after a warm-up, and the configuration with the longest request that this holds.

    Raises:
        MemoryPlanError: it holds no request, or not one of ``infer.max_seq_len`` tokens, if that is set.
    """
    config, plan = a.config, _after_warm_up(plan, free)
    if _slabs_for(a, config, config.max_seq_len) < plan.blocks:
        return config, plan
    length = _longest_request(a, config, plan.blocks - 1)
    if config.config.infer.max_seq_len == "auto" and _slabs_for(a, config, length) < plan.blocks:
        return config.with_value("infer.max_seq_len", length, "what a warm-up left for state holds no more"), plan
    raise MemoryPlanError(
        f"a warm-up left {in_gib(free)}, of which the largest step takes {in_gib(plan.workspace)}: too little for the "
        f"state of one request of infer.max_seq_len={config.max_seq_len}; lower it, infer.step_tokens or infer.max_reqs"
    )


def _after_warm_up(plan: MemoryPlan, free: int) -> MemoryPlan:
    """``plan`` with as many blocks as fit into the bytes that are ``free`` after a warm-up, beside the workspace of the
    largest step; at most as many as were estimated."""
    left = free - plan.workspace - int(plan.free * KEPT_FREE)
    blocks = min(plan.blocks, max(0, left) // plan.block_bytes)
    if blocks < plan.blocks:
        log.info("state gets %d blocks instead of %d: a warm-up left %s", blocks, plan.blocks, in_gib(free))
    return plan.with_blocks(blocks)


def min_across_ranks(a: Assembly, config: ResolvedConfig, plan: MemoryPlan) -> tuple[ResolvedConfig, MemoryPlan]:
    """All ranks run the same plans: each takes the smallest of their longest requests and of their block counts."""
    length, blocks = a.ranks.min_across_ranks([config.max_seq_len, plan.blocks], a.device.torch_device)
    if length < config.max_seq_len:
        config = config.with_value("infer.max_seq_len", length, "what the memory for state holds on every rank")
    return config, plan.with_blocks(blocks)


@dataclass(frozen=True)
class MemoryDemand:
    """The memory that is needed beside the state, and how much state is useful.

    Attributes:
        weights: as estimated from headers and packings.
        rows: bytes of the engine's device tables and of encoders' rows.
        workspace: bytes of activations and scratch of the largest step.
        block_bytes: bytes of one slab over all layers. Slabs are named blocks here, as in ``MemoryPlan``, which is
            shown as JSON.
        max_useful_blocks: slabs that all slots can hold at once.
        min_blocks: slabs that one request of ``max_seq_len`` tokens needs.
        experts: bytes of each layer's experts on the device, in order.
        host, host_layers: as in ``MemoryPlan``; host_free: bytes that the host has free.
    """

    weights: WeightEstimate
    rows: int
    workspace: int
    block_bytes: int
    max_useful_blocks: int
    min_blocks: int
    max_seq_len: int
    dtype: str
    experts: tuple[int, ...] = ()
    host: int = 0
    host_layers: int = 0
    host_free: int = 0

    @property
    def fixed(self) -> int:
        """Bytes beside the state."""
        return self.weights.allocated + self.rows + self.workspace

    @property
    def least_state(self) -> int:
        """Bytes of state that one request of ``max_seq_len`` tokens needs."""
        return (self.min_blocks + 1) * self.block_bytes

    def layers_to_move(self, lacking: int) -> int | None:
        """The number of last layers whose experts take at least ``lacking`` bytes; None if all of them take less."""
        totals = accumulate(reversed(self.experts), initial=0)
        return next((count for count, total in enumerate(totals) if total >= lacking), None)


def plan_memory(demand: MemoryDemand, memory: MemoryInfo, kv_bytes: int | None, longest: int = 0) -> MemoryPlan:
    """Divide the memory; state gets ``kv_bytes``, or the rest when None, but no more than is useful.

    Args:
        longest: tokens of the longest request that the memory for state would hold.
    """
    budget = memory.free - demand.fixed if kv_bytes is None else kv_bytes
    weights = demand.weights
    plan = MemoryPlan(
        weights=weights.allocated, copies=weights.second_copies, mapped=weights.mapped, tables=demand.rows,
        workspace=demand.workspace, state=0, blocks=0, block_bytes=demand.block_bytes, free=memory.free,
        host=demand.host, host_layers=demand.host_layers,
    ).with_blocks(min(max(0, budget) // demand.block_bytes, demand.max_useful_blocks + 1))  # fmt: skip
    return replace(plan, problem=_problem(demand, memory, kv_bytes, plan, longest))


def memory_demand(a: Assembly, config: ResolvedConfig) -> MemoryDemand:
    """What ``config`` asks of the device of ``a``."""
    groups, size = a.geometry.groups, a.geometry.block_size
    min_blocks = _slabs_for(a, config, config.max_seq_len)
    columns = table_columns(-(-config.max_seq_len // size), len(groups), a.device.capabilities.alignment)
    attention = max(g.provider.workspace(g.spec, g.attention, config.step_tokens, config.max_seq_len) for g in groups)
    scratch = max(attention, a.resolver.footprint.workspace)
    here, placed = divide_weights(a)
    packings, mappable, place = a.resolver.packings_by_layout, a.device.capabilities.host_memory, a.placement
    weights = _estimate(a, here, packings, mappable)
    there = _estimate(a, placed, place.packings, mappable=True) if place else WeightEstimate(0, 0)
    if a.draft is not None:
        weights += _estimate(a.draft, a.draft.build.weights, packings, mappable)
    media = int(a.media_rows * a.model.hidden_size * DTYPE_BYTES[config.dtype]) if a.model.encoders else 0
    pooled = a.model.hidden_size if a.pooling is not None and a.pooling.pooling != "last" else 0
    # See ``DeviceTables``: captured steps have block tables of their own; 40 bytes are a request's sampling parameters.
    tables = 4 * columns * len(groups) * (2 if config.use_cuda_graph else 1)
    rows = (config.max_reqs + 1) * (4 * (config.max_seq_len + 1) + 40 + tables + 4 * pooled) + media
    return MemoryDemand(
        weights=weights, rows=rows, workspace=scratch + a.resolver.footprint.activations,
        block_bytes=max(1, a.geometry.block_bytes), max_useful_blocks=config.max_reqs * min_blocks,
        min_blocks=min_blocks, max_seq_len=config.max_seq_len, dtype=config.dtype,
        experts=() if mappable else _expert_bytes(a), host=there.allocated + there.mapped,
        host_layers=len(place.layers) if place else 0, host_free=place.free if place else 0,
    )  # fmt: skip


def _estimate(a: Assembly, declared: list[Declared], packings: Mapping[str, Packing], mappable: bool) -> WeightEstimate:
    """The bytes of these weights of a model."""
    copied = a.checkpoint.copied if a.headers else frozenset()
    return estimate_weights(declared, packings, a.headers or None, a.scheme, copied=copied, mappable=mappable)


def divide_weights(a: Assembly) -> tuple[list[Declared], list[Declared]]:
    """This rank's weights on the device, and those with a placement of their own."""
    return [w for w in a.build.weights if w.placement is None], [w for w in a.build.weights if w.placement is not None]


def _expert_bytes(a: Assembly) -> tuple[int, ...]:
    """Bytes of the stacks of each layer that has its experts on the device."""
    sites = [site.static for site in a.build.sites if site.op == "moe_block" and site.static["placement"] is None]
    packings = a.resolver.packings_by_layout
    return tuple(estimate_weights([s["gate_up"], s["down"]], packings, None).allocated for s in sites)


def _slabs_for(a: Assembly, config: ResolvedConfig, length: int) -> int:
    """Slabs that one request of ``length`` tokens needs."""
    specs, cuts = tuple(g.spec for g in a.geometry.groups), tuple(g.cut for g in a.geometry.groups)
    kinds, step_tokens = find_kinds(specs, a.kinds), min(config.step_tokens, length)
    return slabs_needed(specs, kinds, cuts, a.geometry.block_size, length, step_tokens)


def _longest_request(a: Assembly, config: ResolvedConfig, slabs: int) -> int:
    """The longest request, in whole blocks of tokens, that ``slabs`` can hold; the need grows with the length."""
    size = a.geometry.block_size
    counts = range(1, -(-config.max_seq_len // size) + 1)
    return max(1, bisect_right(counts, slabs, key=lambda count: _slabs_for(a, config, count * size))) * size


def _problem(
    demand: MemoryDemand, memory: MemoryInfo, kv_bytes: int | None, plan: MemoryPlan, longest: int
) -> str | None:
    """Why it does not fit, with the numbers and what to change; None if it does."""
    if demand.host > demand.host_free:
        return (f"the experts of {demand.host_layers} layers do not fit the host: they take {in_gib(demand.host)}, and "
                f"{in_gib(demand.host_free)} are free; lower infer.cpu_layer_num")  # fmt: skip
    weights, free = demand.weights, f"{in_gib(memory.free)} of {in_gib(memory.total)} are free"
    # Mapped weights may come and go with the page cache, but each step reads all of them.
    if weights.allocated > memory.free or weights.allocated + weights.mapped > memory.total:
        lighter = ["dtype=bfloat16 halves them"] if demand.dtype == "float32" and not weights.mapped else []
        ways = "; ".join([*_move_advice(demand, memory), *lighter, "take a checkpoint that stores them in fewer bits"])
        return (f"the model does not fit: its weights take {in_gib(weights.allocated + weights.mapped)} with "
                f"compute dtype {demand.dtype}, and {free}; no key about state helps: {ways}, or a device with more "
                "memory (`evener doctor` lists what is here)")  # fmt: skip
    if plan.blocks > demand.min_blocks and plan.state <= memory.free - demand.fixed:
        return None
    allowed = f" and infer.kv_memory allows {in_gib(kv_bytes)} for state" if kv_bytes is not None else ""
    ways = ", or ".join(_state_advice(demand, memory, kv_bytes, longest))
    return (f"the model does not fit: {in_gib(demand.fixed)} for weights, tables and workspace and "
            f"{in_gib(demand.least_state)} for one request of infer.max_seq_len={demand.max_seq_len}, but "
            f"{free}{allowed}; what to change: {ways}")  # fmt: skip


def _move_advice(demand: MemoryDemand, memory: MemoryInfo) -> list[str]:
    """That the experts of more layers can be on the host, if the device then has room for one request."""
    count = demand.layers_to_move(demand.fixed + demand.least_state - memory.free) or 0
    layers = demand.host_layers + count
    return [f"infer.cpu_layer_num={layers} keeps the experts of {layers} layers on the host"] if count else []


def _state_advice(demand: MemoryDemand, memory: MemoryInfo, kv_bytes: int | None, longest: int) -> list[str]:
    """What to change if the weights fit, but not one request beside them."""
    left, need = memory.free - demand.fixed, demand.least_state
    advice = [f"infer.max_seq_len={longest} fits"] if longest > 1 else []
    advice += _move_advice(demand, memory)
    if kv_bytes is not None and max(need, kv_bytes) > left:
        advice.append("lower infer.kv_memory" if kv_bytes > left >= need else "free memory elsewhere")
    elif kv_bytes is not None:
        advice.append(f"infer.kv_memory={-(-need >> 20)}MiB holds one")
    if demand.rows + demand.workspace > demand.weights.allocated:
        advice.append("lower infer.max_reqs and infer.step_tokens, which size tables and workspace")
    return advice or ["lower infer.max_reqs, infer.step_tokens or infer.max_seq_len"]
