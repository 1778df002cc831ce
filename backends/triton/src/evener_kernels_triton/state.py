"""The state provider "triton.paged": keys and values in pages. Kernels read all lengths and tables on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.quantized.state import QuantizedState
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateStep
from evener.state_pages.elements import dequantize, quantize
from evener_kernels_triton.arguments import check_state, check_step
from evener_kernels_triton.even import EvenQueries, attend_evenly, even_from, even_queries, even_tile
from evener_kernels_triton.jit.attention import decode_kernel, mixed_kernel
from evener_kernels_triton.jit.heads import write_kernel
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.kernel import DTYPES, PRECISION
from evener_kernels_triton.prefill import LongQueries, PoolLines, attend_long, copies_can_read, long_queries, pool_lines
from evener_kernels_triton.primitives import rows_of
from evener_kernels_triton.rounded import RoundedRows, element_constants, round_rows, rounded_room
from evener_kernels_triton.stored import KINDS, StoredMatrix
from evener_kernels_triton.tuning import MAX_SPLITS, MIN_TILES, Tuning, memoized, power_of_two

LAYOUT = "triton.paged"
MAX_HEAD_DIM = 512
_LOG2_E = math.log2(math.e)


class PagedViews:
    """One layer's pages.

    Attributes:
        keys: [blocks, kv_heads, block_size, head_dim]; values: the same with value_dim. float8 is held as uint8.
        kind: of elements, a value of ``stored.KINDS``; "" if state is not quantized.
        key_scales, value_scales: float32 [kv_heads] of quantized state; without, keys and values, which kernels then do
            not read as scales.
        key_page, value_page: elements from one block to the next; value_dim: length of a value.
        checked: names of the methods whose arguments were checked.
    """

    def __init__(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor] = ()
    ) -> None:
        key, value = spec.tensors
        self.storage, self.spec, self.block_size = storage, spec, block_size
        self.checked: set[str] = set()
        self.kind = KINDS[key.dtype] if scales else ""
        held = "uint8" if scales and key.dtype != "int8" else key.dtype
        dtype, cut = getattr(torch, held), block_size * key.nbytes
        (heads, d), dv = key.shape, value.shape[1]
        self.value_dim = dv
        self.keys = storage[:, :cut].view(dtype).unflatten(1, (heads, block_size, d))
        rest = storage[:, cut : cut + block_size * value.nbytes]
        self.values = rest.view(dtype).unflatten(1, (heads, block_size, dv))
        self.key_scales: torch.Tensor
        self.value_scales: torch.Tensor
        self.key_scales, self.value_scales = scales or (self.keys, self.values)
        self.key_page, self.value_page = self.keys.stride(0), self.values.stride(0)
        self._lines: dict[int, tuple[PoolLines | None, PoolLines | None]] = {}

    def lines(self, most: int) -> tuple[PoolLines | None, PoolLines | None]:
        """Keys and values as ``attend_long`` and ``attend_evenly`` take them, for tiles of ``most`` keys."""
        if most not in self._lines:
            self._lines[most] = pool_lines(self.keys, most), pool_lines(self.values, most)
        return self._lines[most]


@dataclass(frozen=True)
class Decode:
    """The launch of a step in which every request has one query token.

    Attributes:
        launches: without sinks, and with sinks.
        early: whether the next launch is let in before this one computes.
        grid: programs: requests, tiles of heads, splits of a request's keys.
        heads: query heads; value: length of a value.
        even: the launch of the kernel for long states, where it is for this step and pages can be copied.
    """

    launches: tuple[PreparedLaunch, PreparedLaunch]
    grid: tuple[int, int, int]
    early: bool
    heads: int
    value: int
    even: EvenQueries | None = None


@dataclass(frozen=True)
class PagedMeta:
    """One step of a group. ``decode`` is None unless every request has one query token; ``slopes`` float32 [heads];
    ``table_row``: elements from one row of the block table to the next. ``long``: (optional) the requests with long
    queries, which come last; ``decode`` is then for those before them."""

    step: StateStep
    attention: AttentionSpec
    decode: Decode | None
    slopes: torch.Tensor | None
    table_row: int
    long: LongQueries | None = None


class PagedState(AttentionProvider, QuantizedState):
    """Attention over pages [kv_heads, block_size, head_dim]. One kernel writes, one attends.

    ``short``: a kernel of another package is for steps of one request with fewer tokens, so that these are captured
    apart; 0: there is none.
    """

    name = LAYOUT
    layout = LAYOUT
    kinds = frozenset({"full", "window", "chunk"})
    priority = 100
    graph = "any"
    scaled = frozenset(KINDS)

    def __init__(self, tuning: Tuning, short: int = 0) -> None:
        self._tuning, self._short = tuning, short
        self._slopes: dict[tuple[tuple[float, ...], torch.device], torch.Tensor] = {}

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        if spec.per != "token" or len(spec.tensors) != 2:
            return "stores one key and one value per token, nothing else"
        if attention.algorithm != "softmax":
            return f"does not compute {attention.algorithm}"
        key, value = spec.tensors
        if key.dtype != value.dtype:
            return f"stores keys and values in one dtype, not {key.dtype} and {value.dtype}"
        if {key.wide or key.dtype, value.wide or value.dtype} != {attention.dtype} or attention.dtype not in DTYPES:
            return f"stores keys and values in the compute dtype, not {key.dtype}/{value.dtype} for {attention.dtype}"
        if attention.dtype not in device.dtypes | device.emulated:
            return f"the device does not compute in {attention.dtype}"
        if max(key.shape[1], value.shape[1]) > MAX_HEAD_DIM:
            return f"heads are longer than {MAX_HEAD_DIM}"
        if attention.heads % key.shape[0]:
            return f"{attention.heads} query heads are not a multiple of {key.shape[0]} key heads"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (32, 16, 64, 128)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return spec.nbytes * block_size

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> PagedViews:
        return PagedViews(storage, spec, block_size)

    def bind_scaled(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor]
    ) -> PagedViews:
        return PagedViews(storage, spec, block_size, scales)

    def capture_limits(self, spec: StateSpec, attention: AttentionSpec, requests: int) -> Sequence[int]:
        tile = even_tile(self._tuning, spec, attention, requests)
        long = [] if tile is None else [even_from(self._tuning, tile, requests * spec.tensors[0].shape[0])]
        short = requests == 1 and self._short and spec.kind == "full" and not spec.tensors[0].wide
        return *([self._short] if short else []), *long

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> PagedMeta:
        check_step(step)
        slopes, row = self._slopes_on(step.kv_lens.device, attention), step.block_table.stride(0)
        if step.max_query != 1 or step.tokens != step.requests:
            # The launch for long queries counts their tiles on the host, so it cannot be captured.
            long = None if step.captured else long_queries(self._tuning, step, spec, attention)
            decode = None
            if long is not None and long.before:
                decode = self._decode_of(step.rows(0, long.before), spec, attention, block_size)
            return PagedMeta(step, attention, decode, slopes, row, long)
        decode = self._decode_of(step, spec, attention, block_size)
        return PagedMeta(step, attention, decode, slopes, row)

    def _decode_of(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Decode:
        key, value = spec.tensors
        tile = self._tuning.decode_tile(max(power_of_two(t.shape[1]) for t in (key, value)), _size(attention.dtype))[0]
        longest = step.max_kv if spec.window is None else min(step.max_kv, spec.window + tile)
        splits = self._tuning.splits(step.requests * key.shape[0], longest, tile)
        # All programs run at the same time, and products of one token ask for their weights before they wait.
        early = step.requests == 1 and key.shape[0] * splits <= self._tuning.units
        launches, tiles = _decode_launches(self._tuning, spec, attention, block_size, splits, early)
        even = even_queries(self._tuning, step, spec, attention)
        return Decode(launches, (step.requests, tiles, splits), early, attention.heads, value.shape[1], even)

    def _slopes_on(self, where: torch.device, attention: AttentionSpec) -> torch.Tensor | None:
        """Made once, because a captured step cannot copy from the host."""
        if attention.slopes is None:
            return None
        key = attention.slopes, where
        if key not in self._slopes:
            self._slopes[key] = torch.tensor(attention.slopes, dtype=torch.float32, device=where)
        return self._slopes[key]

    def write(self, views: PagedViews, meta: PagedMeta, *values: torch.Tensor) -> None:
        if "write" not in views.checked:
            check_state(views.spec, meta.attention, values=values, tokens=meta.step.tokens)
            views.checked.add("write")
        key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in values)
        tokens, heads, d = key.shape
        dv = value.shape[2]
        if not tokens:
            return
        write_kernel[(tokens, -(-heads // 4))](
            meta.step.slot_mapping, key, value, views.keys, views.values, views.key_scales, views.value_scales,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1), views.keys.stride(0),
            views.values.stride(0), heads,
            PAGE=views.block_size, D=d, DV=dv, DP=power_of_two(max(d, dv)), H=4, KIND=views.kind, num_warps=1,
        )  # fmt: skip

    def attend(
        self, views: PagedViews, meta: PagedMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        query = self._checked(views, meta, query)
        tokens, heads, _ = query.shape
        out = torch.empty(tokens, heads, views.value_dim, dtype=query.dtype, device=query.device)
        if not tokens:
            return out
        if meta.long is not None:
            keys, values = views.lines(meta.long.tile.n)
            if keys is None or values is None or not copies_can_read(query):
                self._mixed(views, meta, query, sinks, out)
                return out
            if meta.decode is not None:
                self._decode(views, meta, query, sinks, out)
            first, kv_heads = meta.long.before, views.keys.shape[1]
            attend_long(meta.long, keys, values, views.block_size, kv_heads, query[first:], out[first:],
                        self._tuning.arrivals.of(out.device, 1))  # fmt: skip
        elif meta.decode is not None:
            self._decode(views, meta, query, sinks, out)
        else:
            self._mixed(views, meta, query, sinks, out)
        return out

    def attend_rounded(
        self, views: PagedViews, meta: PagedMeta, query: torch.Tensor, sinks: torch.Tensor | None, weight: StoredMatrix
    ) -> RoundedRows:
        """What ``attend`` gives, rounded as ``round_rows`` does for a product with ``weight``. To float8 most decode
        steps do it in one launch, if scales are fixed or each head has one; exact divisions to int8 would slow it."""
        decode, how = meta.decode, weight.activation
        assert how is not None, "asked of weights whose products are rounded"
        inside = weight.form.kind == "e4m3" and how.group in (-1, views.value_dim)
        if not inside or decode is None or decode.even is not None or meta.long is not None or not len(query):
            return round_rows(self._tuning, self.attend(views, meta, query, sinks).flatten(1), weight)
        made = rounded_room(self._tuning, weight, len(query), weight.shape[1], query.device)
        self._decode(views, meta, self._checked(views, meta, query), sinks, made.elements, made)
        return made

    @staticmethod
    def _checked(views: PagedViews, meta: PagedMeta, query: torch.Tensor) -> torch.Tensor:
        """The queries in rows; their shape is checked once."""
        if "attend" not in views.checked:
            check_state(views.spec, meta.attention, query=query, tokens=meta.step.tokens)
            views.checked.add("attend")
        return rows_of(query)

    def _decode(
        self, views: PagedViews, meta: PagedMeta, query: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor,
        made: RoundedRows | None = None,
    ) -> None:  # fmt: skip
        step, decode = meta.step, meta.decode
        assert decode is not None, "called for decode steps only"
        requests, tiles, splits = decode.grid
        if decode.even is not None:
            keys, values = views.lines(decode.even.tile.n)
            if keys is not None and values is not None:
                kv_heads = views.keys.shape[1]
                arrived = self._tuning.arrivals.of(out.device, requests * kv_heads)
                attend_evenly(decode.even, keys, values, views.block_size, kv_heads, query, out, arrived)
                return
        parts = stats = arrived = out
        if splits > 1:
            where = out.device
            parts = torch.empty(requests, decode.heads, splits, decode.value, dtype=torch.float32, device=where)
            stats = torch.empty(requests, decode.heads, splits, 2, dtype=torch.float32, device=where)
            arrived = self._tuning.arrivals.of(where, requests * tiles)
        row, head, _ = query.stride()
        launches = decode.launches
        if made is not None:
            how = views.spec, meta.attention, views.block_size, splits, decode.early, "e4m3", made.group < 0
            launches, _ = _decode_launches(self._tuning, *how)
        launches[sinks is not None](
            decode.grid, query, views.keys, views.values, step.block_table, step.kv_lens,
            sinks if sinks is not None else out, meta.slopes if meta.slopes is not None else out, out, parts, stats,
            arrived, views.key_scales, views.value_scales, out if made is None else made.scales, len(out), row, head,
            meta.table_row, views.key_page, views.value_page,
        )  # fmt: skip

    def _mixed(
        self, views: PagedViews, meta: PagedMeta, query: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        step = meta.step
        common = _common(self._tuning, views.spec, meta.attention, views.block_size, sinks is not None)
        heads, kv_heads = common["HEADS"], common["KV_HEADS"]
        group = heads // kv_heads
        m, n, warps, stages = self._tuning.mixed_tile(max(common["DP"], common["DVP"]), group, query.element_size())
        tiles = step.tokens // (m // group) + step.requests
        mixed_kernel[(tiles, kv_heads)](
            query, views.keys, views.values, step.block_table, step.query_start, step.kv_lens,
            sinks if sinks is not None else out, meta.slopes if meta.slopes is not None else out, out,
            views.key_scales, views.value_scales,
            query.stride(0), query.stride(1), meta.table_row, views.key_page, views.value_page, step.requests,
            M=m, N=n, num_warps=warps, num_stages=stages, **common,
        )  # fmt: skip

    def copy_blocks(self, views: PagedViews, source: torch.Tensor, target: torch.Tensor) -> None:
        views.storage[target] = views.storage[source]

    def export_blocks(self, views: PagedViews, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = tuple(part[blocks].transpose(1, 2).contiguous() for part in (views.keys, views.values))
        if not views.kind:
            return parts
        stored, wide = (getattr(torch, str(name)) for name in (views.spec.tensors[0].dtype, views.spec.tensors[0].wide))
        scales = views.key_scales, views.value_scales
        return tuple(dequantize(part.view(stored), s).to(wide) for part, s in zip(parts, scales, strict=True))

    def import_blocks(self, views: PagedViews, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        if views.kind:
            stored, scales = getattr(torch, views.spec.tensors[0].dtype), (views.key_scales, views.value_scales)
            values = [quantize(v, scale, stored) for v, scale in zip(values, scales, strict=True)]
        for part, value in zip((views.keys, views.values), values, strict=True):
            part[blocks] = (value.view(part.dtype) if views.kind else value.to(part.dtype)).transpose(1, 2)

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        # Splits only fill the device: programs times splits are bounded for every batch size.
        del max_tokens, max_kv
        key, value = spec.tensors
        group = attention.heads // key.shape[0]
        return 8 * self._tuning.units * group * (value.shape[1] + 2) * 4


def _common(tuning: Tuning, spec: StateSpec, attention: AttentionSpec, block_size: int, sinks: bool) -> dict[str, Any]:
    """Arguments of both kernels that are the same in every step."""
    key, value = spec.tensors
    (kv_heads, d), dv = key.shape, value.shape[1]
    return {
        "scale": attention.scale * _LOG2_E, "cap": (attention.softcap or 1.0) * _LOG2_E, "HEADS": attention.heads,
        "KV_HEADS": kv_heads, "PAGE": block_size, "WINDOW": spec.window or 0, "CHUNKED": spec.kind == "chunk",
        "CAP": bool(attention.softcap), "SINKS": sinks, "SLOPES": attention.slopes is not None, "D": d, "DV": dv,
        "DP": max(16, power_of_two(d)), "DVP": max(16, power_of_two(dv)), "PRECISION": PRECISION,
        "KIND": KINDS[key.dtype] if key.wide else "", "PTX": tuning.ptx,
    }  # fmt: skip


@memoized
def _decode_launches(
    tuning: Tuning, spec: StateSpec, attention: AttentionSpec, block_size: int, splits: int, early: bool,
    rounding: str = "", fixed: bool = False,
) -> tuple[tuple[PreparedLaunch, PreparedLaunch], int]:  # fmt: skip
    """The launches without and with sinks, and the number of tiles of heads. ``rounding``: the kind of element that
    results are rounded to, with a ``fixed`` scale or with one for each head; "": they are not rounded."""
    (kv_heads, d), dv = spec.tensors[0].shape, spec.tensors[1].shape[1]
    group = attention.heads // kv_heads
    n, warps, stages = tuning.decode_tile(max(16, power_of_two(d), power_of_two(dv)), _size(attention.dtype))
    if 1 < splits < MAX_SPLITS:
        # Short loops: one more program per unit hides more latency than a third tile in flight. 64 requests of 648
        # tokens, 32 heads on 4: 29 µs instead of 34.
        stages = min(stages, 2)
    m = max(16, min(64, power_of_two(group)))
    sizes = {
        "SPLITS": splits, "M": m, "N": n, "MIN_TILES": MIN_TILES, "OVERLAP": tuning.overlap, "EARLY": early,
        "num_warps": warps, "num_stages": stages, "ROUND": rounding, "FIXED": fixed,
        "CAST": element_constants(tuning, rounding)["CAST"], **tuning.launch,
    }  # fmt: skip
    without, given = (
        PreparedLaunch(decode_kernel, **_common(tuning, spec, attention, block_size, sinks), **sizes)
        for sinks in (False, True)
    )
    return (without, given), kv_heads * -(-group // m)


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
