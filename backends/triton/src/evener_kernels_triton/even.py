"""Steps of one query for each request: which groups and steps ``even_kernel`` is for, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener_kernels_triton.prefill import LOG2_E, PoolLines, has_warpgroup_kernels
from evener_kernels_triton.tuning import EvenTile, Tuning, power_of_two

#: Steps of many key heads have even parts from fewer tokens on, divided by this. Steps on an H200, ms with splits and
#: with even parts: Qwen3-8B with 8 requests of 8,192 tokens 6.87 and 6.80, with 8 of 16,384 9.11 and 8.98, but with 4
#: of 8,192 5.63 and 5.72; Gemma 3 4B with 4 of 8,192 3.20 and 3.08.
SOONER = 8


@dataclass(frozen=True)
class EvenQueries:
    """The launch for a step.

    Attributes:
        scale: on scores, in units of base 2.
        programs: that run side by side.
        overlap: the kernel itself waits for the previous one; launch: extra arguments for that.
    """

    step: StateStep
    tile: EvenTile
    scale: float
    window: int
    programs: int
    overlap: bool
    launch: tuple[tuple[str, bool], ...]


def even_tile(tuning: Tuning, spec: StateSpec, attention: AttentionSpec, requests: int) -> EvenTile | None:
    """The sizes for captured steps of ``requests`` requests with long state; None where the kernel with splits serves
    long state too: the device or the group is not for this one, or the requests are so many that their keys need no
    parts."""
    if not has_warpgroup_kernels(tuning, spec, attention):
        return None
    kv_heads, d = spec.tensors[0].shape
    tile = tuning.even_tile(d)
    if tile is None or attention.heads // kv_heads > 64 or not 0 < requests * kv_heads <= tile.heads:
        return None
    return tile


def even_from(tuning: Tuning, tile: EvenTile, heads: int) -> int:
    """Tokens of the longest request from which steps of ``heads`` key heads of all requests are in even parts."""
    return tuning.even_from // SOONER if heads >= tile.many else tuning.even_from


def even_queries(tuning: Tuning, step: StateStep, spec: StateSpec, attention: AttentionSpec) -> EvenQueries | None:
    """None where the kernel with splits serves the step: ``even_tile`` has no sizes, states are short, or the launch is
    not captured (descriptors are made on the host, which takes longer than most steps)."""
    tile = even_tile(tuning, spec, attention, step.requests) if step.captured else None
    heads = step.requests * spec.tensors[0].shape[0]
    if tile is None or step.max_kv < even_from(tuning, tile, heads):
        return None
    programs, launch, scale = tuning.even_programs(heads), tuple(tuning.launch.items()), attention.scale * LOG2_E
    return EvenQueries(step, tile, scale, spec.window or 0, programs, tuning.overlap, launch)


def attend_evenly(
    even: EvenQueries, keys: PoolLines, values: PoolLines, page: int, kv_heads: int, query: torch.Tensor,
    out: torch.Tensor, arrived: torch.Tensor,
) -> None:  # fmt: skip
    """Attention of query [requests, heads, d] into ``out``.

    Args:
        page: tokens a page.
        arrived: int32 [requests * kv_heads], 0: counters.
    """
    (requests, heads, d), step, tile = query.shape, even.step, even.tile
    group = heads // kv_heads
    high = power_of_two(group)
    merged = max(2, min(16, 8192 // (high * d)))  # as many as registers hold
    parts = torch.empty(even.programs, 2, group, d, dtype=torch.float32, device=out.device)
    stats = torch.empty(even.programs, 2, group, 2, dtype=torch.float32, device=out.device)
    _kernel()[(even.programs,)](
        query, keys.desc, values.desc, out, parts, stats, arrived, step.block_table, step.kv_lens,
        step.block_table.stride(0), requests, keys.page, values.page, keys.count, values.count, query.stride(0),
        query.stride(1), even.scale, HEADS=heads, KV_HEADS=kv_heads, PAGE=page, WINDOW=even.window, D=d, N=tile.n,
        STAGES=tile.stages, LEAST=tile.least, MERGED=merged, HIGH=high, OVERLAP=even.overlap,
        num_warps=4, maxnreg=tile.registers, **dict(even.launch),
    )  # fmt: skip


def _kernel() -> Any:
    from evener_kernels_triton.jit.even_attention import even_kernel

    return even_kernel
