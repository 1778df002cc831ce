"""Long queries over pages: for which groups and steps ``prefill_kernel`` is, and its launch.

Decoding requests that come first in such a step go to the kernel for one token a request, the rest to this one: a tile
of 128 queries would have one line for each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener_kernels_triton.tuning import LongTile, Tuning

#: Numbers of a line of shared memory, as in ``prefill_kernel``.
LINE = 64
#: From this version on the compiler has what the kernel is written with.
_SINCE = (3, 6)
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class LongQueries:
    """The requests of a step that the kernel serves.

    Attributes:
        step: of these requests alone.
        before: tokens of the step before theirs, one of each request.
        scale: on scores, in units of base 2.
        tiles: of queries; programs: that run side by side.
    """

    step: StateStep
    before: int
    tile: LongTile
    scale: float
    window: int
    tiles: int
    programs: int


def long_queries(tuning: Tuning, step: StateStep, spec: StateSpec, attention: AttentionSpec) -> LongQueries | None:
    """None where the kernel for any mix serves the step: the device or the group is not for this one, or the queries
    are too short."""
    tile = _tile_of(tuning, spec, attention)
    if tile is None:
        return None
    first = next((row for row, count in enumerate(step.host_query_lens) if count > 1), None)
    if first is None or step.tokens - first < tile.least * (step.requests - first):
        return None
    long = step.rows(first, step.requests) if first else step
    tiles = sum(-(-count // tile.m) for count in long.host_query_lens)
    return LongQueries(long, first, tile, attention.scale * LOG2_E, spec.window or 0, tiles, tuning.units)


def _tile_of(tuning: Tuning, spec: StateSpec, attention: AttentionSpec) -> LongTile | None:
    """Sizes for a group; None if the kernel does not compute it."""
    return tuning.long_tile(spec.tensors[0].shape[1]) if has_warpgroup_kernels(tuning, spec, attention) else None


def compiler_has_warpgroups() -> bool:
    """Whether the compiler has what kernels for warp groups are written with."""
    return tuple(map(int, triton.__version__.split(".")[:2])) >= _SINCE


def has_warpgroup_kernels(tuning: Tuning, spec: StateSpec, attention: AttentionSpec) -> bool:
    """Whether the kernels of this module and of ``even.py`` compute a group, some sizes of heads apart."""
    if not tuning.warpgroups or not compiler_has_warpgroups():
        return False
    (_, d), (_, dv) = (tensor.shape for tensor in spec.tensors)
    plain = not (attention.softcap or attention.sinks) and attention.slopes is None and attention.scale > 0
    plain = plain and not any(tensor.wide for tensor in spec.tensors)
    return d == dv and spec.kind != "chunk" and plain and attention.dtype in ("bfloat16", "float16")


@dataclass(frozen=True)
class PoolLines:
    """The keys or the values of a layer as lines of as many numbers as a head has, which are copied in boxes.

    Attributes:
        desc: for the kernel; page: lines from page to page; count: lines in all.
    """

    desc: Any
    page: int
    count: int


def pool_lines(part: torch.Tensor, most: int) -> PoolLines | None:
    """Of [blocks, kv_heads, block_size, d], with up to ``most`` tokens a box; None if pages do not begin at a line, or
    where no copy can begin."""
    blocks, heads, size, d = part.shape
    page = part.stride(0) // d
    count = (blocks - 1) * page + heads * size
    if part.stride(0) % d or part.data_ptr() % 16 or size % 8 or count >= 1 << 31:
        return None
    lines = part.as_strided((count, d), (d, 1))
    return PoolLines(_descriptor(lines, min(size, most), LINE), page, count)


def copies_can_read(query: torch.Tensor) -> bool:
    """Whether heads lie side by side, and tokens where a copy can begin."""
    size = query.element_size()
    return query.stride(1) == query.shape[2] and not (query.data_ptr() | query.stride(0) * size) % 16


def attend_long(
    long: LongQueries, keys: PoolLines, values: PoolLines, page: int, kv_heads: int, query: torch.Tensor,
    out: torch.Tensor, taken: torch.Tensor,
) -> None:  # fmt: skip
    """Attention of query [tokens, heads, d], those of ``long`` alone, into ``out``.

    Args:
        page: tokens a page.
        taken: int32, 0: a counter.
    """
    (heads, d), step, tile = query.shape[1:], long.step, long.tile
    half = tile.m // 2
    pieces = long.tiles * heads
    _kernel()[(min(pieces, long.programs),)](
        _descriptor(query.flatten(1), half, d), keys.desc, values.desc, _descriptor(out.flatten(1), half, d), out,
        taken, step.block_table, step.query_start, step.kv_lens, step.block_table.stride(0), step.requests, pieces,
        keys.page, values.page, keys.count, values.count, out.stride(0), long.scale,
        HEADS=heads, KV_HEADS=kv_heads, PAGE=page, WINDOW=long.window, D=d, M=tile.m, N=tile.n, STAGES=tile.stages,
        num_warps=4,
    )  # fmt: skip


def _kernel() -> Any:
    from evener_kernels_triton.jit.prefill_attention import prefill_kernel

    return prefill_kernel


@cache
def _gluon() -> tuple[Any, Any]:
    """The class of descriptors, and how a box lies in shared memory. Older compilers have neither."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, NVMMASharedLayout(128, 16, 2)


def _descriptor(rows: torch.Tensor, height: int, width: int) -> Any:
    """Of [rows, columns], in boxes."""
    kind, layout = _gluon()
    return kind(rows, list(rows.shape), list(rows.stride()), [height, width], layout)
