"""The state provider "triton.latent": latents and rotated keys in pages, with attention in latent space."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionSpec, LatentProvider, Piece, StateSpec, StateStep
from evener_kernels_triton.arguments import check_state, check_step
from evener_kernels_triton.jit.latent import (
    latent_decode_kernel,
    latent_merge_kernel,
    latent_mixed_kernel,
    latent_one_kernel,
    latent_write_kernel,
)
from evener_kernels_triton.kernel import DTYPES, PRECISION
from evener_kernels_triton.tuning import (
    MAX_FEW_LATENT_SPLITS,
    MAX_LATENT_SPLITS,
    MIN_TILES,
    LatentTile,
    Tuning,
    power_of_two,
)

LATENT_LAYOUT = "triton.latent"
MAX_RANK = 512
FP8 = "float8_e4m3fn"
LOG2_E = math.log2(math.e)


class LatentViews:
    """One layer's pages.

    Attributes:
        rows: [blocks, block_size, rank + rope], the latent and then the rotated key. ``stride(0)`` is the distance
            between blocks.
        checked: names of the methods whose arguments were checked.
    """

    def __init__(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> None:
        self.storage, self.spec, self.block_size = storage, spec, block_size
        self.checked: set[str] = set()
        self.rank, self.rope = (t.shape[0] for t in spec.tensors)
        flat = storage[:, : block_size * spec.nbytes].view(getattr(torch, spec.tensors[0].dtype))
        self.rows = flat.unflatten(1, (block_size, self.rank + self.rope))

    @property
    def sizes(self) -> dict[str, int]:
        """Compile-time sizes of all kernels over these pages."""
        return {
            "PAGE": self.block_size, "RANK": self.rank, "ROPE": self.rope, "RP": max(16, power_of_two(self.rank)),
            "EP": max(16, power_of_two(self.rope)),
        }  # fmt: skip


@dataclass(frozen=True)
class LatentMeta:
    """One step of a group.

    Attributes:
        splits: splits of a request's keys; 0 unless every request has one query token.
        one: one request, whose parts ``latent_one_kernel`` makes.
        whole: every request is new, so no earlier state has to be read.
        runs: metadata and tokens of the requests that are not new, and of those that are; empty if all are alike.
    """

    step: StateStep
    attention: AttentionSpec
    splits: int
    tile: LatentTile
    whole: bool = False
    one: bool = False
    runs: tuple[tuple[LatentMeta, slice], ...] = ()


@dataclass(frozen=True)
class Parts:
    """Partial results of a split decode.

    Attributes:
        sums: float32 [T, heads, splits, rank].
        stats: float32 [T, heads, splits, 2]: of each split the maximum of its scores (base 2) and the sum of weights.
        tile: tokens per tile.
    """

    sums: torch.Tensor
    stats: torch.Tensor
    splits: int
    tile: int


class LatentState(LatentProvider):
    """Dense attention over latent state, with a kernel for decode steps and one for any mix of query lengths.

    ``short``: as of ``PagedState``.
    """

    name = LATENT_LAYOUT
    layout = LATENT_LAYOUT
    kinds = frozenset({"latent"})
    priority = 100
    graph = "uniform_decode"

    def __init__(self, tuning: Tuning, short: int = 0) -> None:
        self._tuning, self._short = tuning, short

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        if attention.top is not None:
            return "attends to every earlier token, not to selected ones"
        if attention.sinks or attention.softcap or attention.slopes:
            return "has neither sinks nor a soft cap nor slopes"
        latent, rope = spec.tensors
        if attention.dtype not in DTYPES or attention.dtype not in device.dtypes | device.emulated:
            return f"does not compute in {attention.dtype} here"
        if latent.dtype != rope.dtype or latent.dtype not in (attention.dtype, FP8):
            return f"stores {attention.dtype} or {FP8}, not {latent.dtype}/{rope.dtype}"
        if latent.dtype == FP8 and "fp8" not in device.features:
            return f"the device does not convert {FP8}"
        if latent.shape[0] > MAX_RANK:
            return f"latents are longer than {MAX_RANK}"
        # Compilers for matrix units that came before bfloat16 hold more of a tile at a time.
        lines = 32 if "bfloat16" in device.dtypes else 61
        if lines * (latent.shape[0] + rope.shape[0]) * _size(attention.dtype) > self._tuning.shared:
            return f"tiles of {attention.dtype} do not fit into {self._tuning.shared} bytes of shared memory"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (32, 16, 64, 128)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return spec.nbytes * block_size

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> LatentViews:
        return LatentViews(storage, spec, block_size)

    def capture_limits(self, spec: StateSpec, attention: AttentionSpec, requests: int) -> Sequence[int]:
        exact = spec.tensors[0].dtype == attention.dtype == "bfloat16"
        return (self._short,) if self._short and requests == 1 and exact else ()

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> LatentMeta:
        check_step(step)
        if step.max_query != 1 or step.tokens != step.requests:
            return self._prepare_mixed(step, attention, spec.tensors[0].dtype == attention.dtype)
        tile = self._tile(attention, 1)
        programs = step.requests * -(-attention.heads // tile.m)
        one = self.one_tile(tile) if step.requests == 1 else None
        splits = self._tuning.latent_splits(programs, step.requests, step.max_kv, one or tile)
        return LatentMeta(step, attention, splits, one or self._tile(attention, programs * splits), one=one is not None)

    def one_tile(self, tile: LatentTile) -> LatentTile | None:
        """Sizes for one request whose tiles are in registers: small ones, one for each program if there are enough
        programs. None for more lines than fit beside."""
        return LatentTile(tile.m, 16, 8 if tile.n > 16 else tile.warps, 1) if tile.m == 16 else None

    def _prepare_mixed(self, step: StateStep, attention: AttentionSpec, exact: bool) -> LatentMeta:
        """``exact``: state has the compute dtype, so the step's own tokens need not be read from it."""
        tile = self._tuning.latent_mixed_tile(_size(attention.dtype))
        pairs = list(zip(step.host_query_lens, step.host_kv_lens, strict=True))
        old = max((row + 1 for row, (count, length) in enumerate(pairs) if count != length), default=0)
        if not exact or old in (0, step.requests):
            return LatentMeta(step, attention, 0, tile, exact and not old)
        cut = sum(step.host_query_lens[:old])
        first, rest = step.rows(0, old), step.rows(old, step.requests)
        runs = (
            (LatentMeta(first, attention, 0, tile), slice(0, cut)),
            (LatentMeta(rest, attention, 0, tile, True), slice(cut, step.tokens)),
        )
        return LatentMeta(step, attention, 0, tile, runs=runs)

    def _tile(self, attention: AttentionSpec, programs: int) -> LatentTile:
        return self._tuning.latent_tile(attention.heads, _size(attention.dtype), programs)

    def write(self, views: LatentViews, meta: LatentMeta, *values: torch.Tensor) -> None:
        if "write" not in views.checked:
            check_state(views.spec, meta.attention, values=values, tokens=meta.step.tokens)
            views.checked.add("write")
        latent, rope = (t if t.stride(-1) == 1 else t.contiguous() for t in values)
        if latent.shape[0]:
            latent_write_kernel[(latent.shape[0],)](
                meta.step.slot_mapping, latent, rope, views.rows, latent.stride(0), rope.stride(0),
                views.rows.stride(0), **views.sizes, num_warps=1,
            )  # fmt: skip

    def attend(
        self, views: LatentViews, meta: LatentMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        out, parts = self.attend_parts(views, meta, query, False)
        return out if parts is None else self.merge(views, meta, parts, out)

    def merge(self, views: LatentViews, meta: LatentMeta, parts: Parts, out: torch.Tensor) -> torch.Tensor:
        """Merge the parts into ``out`` [T, heads, rank], and return it."""
        tokens, heads, rank = out.shape
        latent_merge_kernel[(tokens, heads)](
            parts.sums, parts.stats, meta.step.kv_lens, out, parts.splits, HEADS=heads, RANK=rank,
            RP=views.sizes["RP"], N=parts.tile, MIN_TILES=MIN_TILES, S=power_of_two(parts.splits),
            OVERLAP=self._tuning.overlap, num_warps=4 if parts.splits <= 16 else 16, **self._tuning.launch,
        )  # fmt: skip
        return out

    def attend_parts(
        self, views: LatentViews, meta: LatentMeta, query: torch.Tensor, early: bool
    ) -> tuple[torch.Tensor, Parts | None]:
        """Attention of query [T, heads, rank + rope]: returns the result [T, heads, rank], and None or
        the parts to merge into it. ``early``: the previous launch is a ``latent_query_kernel`` with LATE."""
        if "attend" not in views.checked:
            check_state(views.spec, meta.attention, query=query, tokens=meta.step.tokens)
            views.checked.add("attend")
        if query.stride(-1) != 1:
            query = query.contiguous()
        out = query.new_empty(query.shape[0], query.shape[1], views.rank)
        if not out.numel():
            return out, None
        if not meta.splits:
            self._mixed(views, meta, query, out)
            return out, None
        if meta.one:
            return out, self._one(views, meta, query, early)
        return out, self._decode(views, meta, query, out)

    def _one(self, views: LatentViews, meta: LatentMeta, query: torch.Tensor, early: bool) -> Parts:
        step, tile, splits, heads = meta.step, meta.tile, meta.splits, query.shape[1]
        sums = torch.empty(1, heads, splits, views.rank, dtype=torch.float32, device=query.device)
        stats = torch.empty(1, heads, splits, 2, dtype=torch.float32, device=query.device)
        latent_one_kernel[(-(-heads // tile.m), splits)](
            query, views.rows, step.block_table, step.kv_lens, sums, stats, query.stride(1), views.rows.stride(0),
            splits, meta.attention.scale * LOG2_E, HEADS=heads, M=tile.m, N=tile.n, MIN_TILES=MIN_TILES,
            PRECISION=PRECISION, EARLY=early, OVERLAP=self._tuning.overlap, num_warps=tile.warps,
            num_stages=tile.stages, **views.sizes, **self._tuning.launch,
        )  # fmt: skip
        return Parts(sums, stats, splits, tile.n)

    def _decode(self, views: LatentViews, meta: LatentMeta, query: torch.Tensor, out: torch.Tensor) -> Parts | None:
        step, tile, splits, (tokens, heads, rank) = meta.step, meta.tile, meta.splits, out.shape
        sums = stats = out
        if splits > 1:
            sums = torch.empty(tokens, heads, splits, rank, dtype=torch.float32, device=out.device)
            stats = torch.empty(tokens, heads, splits, 2, dtype=torch.float32, device=out.device)
        latent_decode_kernel[(-(-heads // tile.m), tokens, splits)](
            query, views.rows, step.block_table, step.kv_lens, out, sums, stats, query.stride(0), query.stride(1),
            step.block_table.stride(0), views.rows.stride(0), splits, meta.attention.scale * LOG2_E,
            HEADS=heads, M=tile.m, N=tile.n, MIN_TILES=MIN_TILES, SPLIT=splits > 1, PRECISION=PRECISION,
            OVERLAP=self._tuning.overlap, num_warps=tile.warps, num_stages=tile.stages, **views.sizes,
            **self._tuning.launch,
        )  # fmt: skip
        return Parts(sums, stats, splits, tile.n) if splits > 1 else None

    def _mixed(self, views: LatentViews, meta: LatentMeta, query: torch.Tensor, out: torch.Tensor) -> None:
        step, heads, tile = meta.step, out.shape[1], meta.tile
        together = min(heads, tile.m)
        tiles = step.tokens // (tile.m // together) + step.requests
        latent_mixed_kernel[(tiles, -(-heads // together))](
            query, views.rows, step.block_table, step.query_start, step.kv_lens, out, query.stride(0), query.stride(1),
            step.block_table.stride(0), views.rows.stride(0), step.requests, meta.attention.scale * LOG2_E,
            HEADS=heads, TOGETHER=together, M=tile.m, N=tile.n, PRECISION=PRECISION, num_warps=tile.warps,
            num_stages=tile.stages, **views.sizes,
        )  # fmt: skip

    def pieces(self, views: LatentViews, meta: LatentMeta, limit: int) -> Iterator[Piece]:
        step, size, start = meta.step, views.block_size, 0
        for row, (count, length) in enumerate(zip(step.host_query_lens, step.host_kv_lens, strict=True)):
            for first in range(0, length if count else 0, limit):
                stop = min(first + limit, length)
                blocks = step.block_table[row, first // size : -(-stop // size)].long()
                lines = views.rows[blocks].flatten(0, 1)[first % size :][: stop - first]
                yield Piece(start, start + count, length - count - first, lines.split([views.rank, views.rope], dim=1))
            start += count

    def copy_blocks(self, views: LatentViews, source: torch.Tensor, target: torch.Tensor) -> None:
        views.storage[target] = views.storage[source]

    def export_blocks(self, views: LatentViews, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.contiguous() for part in views.rows[blocks].split([views.rank, views.rope], dim=2))

    def import_blocks(self, views: LatentViews, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        views.rows[blocks] = torch.cat([v.to(views.rows.dtype) for v in values], dim=2)

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        # Splits only fill the device: tiles of heads times splits are at most two per unit, for every batch size.
        del max_kv
        full = 2 * self._tuning.units * self._tile(attention, 1).m
        lines = min(full, max(MAX_FEW_LATENT_SPLITS, MAX_LATENT_SPLITS * max_tokens) * attention.heads)
        return lines * (spec.tensors[0].shape[0] + 2) * 4


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
