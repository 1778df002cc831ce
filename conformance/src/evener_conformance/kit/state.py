"""Checks a state provider against the contract. Expected results are computed from plain lists of keys and values.

    report = check_provider(provider, device, dtype="float32")

Steps mix whole prompts, chunks, single tokens and padding rows, with one token less and more than a block. Blocks are
anywhere in the pool, and garbage where nothing was written. Table entries that must not be read name blocks of other
requests. Pages are longer than a block, and NaN lies behind queries. Without problems, every checked shape is correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from evener.contracts.device import Device
from evener.contracts.interfaces import required_interface
from evener.contracts.quantized.state import QuantizedState, unscaled
from evener.contracts.state import (
    AttentionProvider,
    AttentionSpec,
    IndexProvider,
    LatentProvider,
    SparseLatentProvider,
    StateProvider,
    StateSpec,
    StateStep,
)
from evener.ops.reference.state import ReferenceState
from evener.plugins.hook_check import check_supports
from evener_conformance.kit.compare import bitwise_equal, describe_scale_error, shares_memory
from evener_conformance.kit.composites import GARBAGE
from evener_conformance.kit.fallback_monitor import FallbackMonitor, HostCopyMonitor
from evener_conformance.kit.guards import GuardedMemory
from evener_conformance.kit.inputs import followed_by_nan
from evener_conformance.kit.naive_attention import attention
from evener_conformance.kit.outcome import format_backend_exception
from evener_conformance.kit.quantized import held, scales_of
from evener_conformance.kit.recurrent import recurrent_problems
from evener_conformance.kit.shapes import QUANTIZED, SHAPES, Shape

#: Steps of the schedule, a mixed one and one of single tokens, that also run under the profiler to find fallbacks.
_PROFILED_STEPS = (2, 3)
_TOLERANCE = {"float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}


def query_length_schedule(size: int) -> tuple[tuple[int, ...], ...]:
    """Query lengths of four requests in each step, for blocks of ``size``; 0: the request is not in the step."""
    return (
        (size - 1, size, size + 1, 0), (1, 1, 1, 2 * size + 2), (1, size + 4, 0, 1), (1, 1, 1, 1), (size, 1, 3, 1),
    )  # fmt: skip


@dataclass
class Report:
    """The result of a check.

    Attributes:
        checked: shapes that were computed.
        refused: shapes that the provider refuses, with its reason.
        problems: what is wrong, one text each.
    """

    checked: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def check_provider(
    provider: StateProvider, device: Device, dtype: str = "float32",
    shapes: Sequence[Shape] = (*SHAPES, *QUANTIZED), seed: int = 0, *,
    thorough: bool = False, watch: FallbackMonitor | None = None, recurrent: bool = True,
) -> Report:  # fmt: skip
    """Check a provider over many shapes.

    Args:
        thorough: check all block sizes that it offers, not only the preferred and the smallest; longer contexts.
        watch: records fallbacks to the host.
        recurrent: also check recurrent state, if the provider serves it.
    """
    report, watch = Report(), watch or FallbackMonitor(device)
    shapes = [shape for shape in shapes if unscaled(provider, shape.spec(dtype)) is None]
    known = {shape.spec(dtype).kind for shape in SHAPES} | {"recurrent"}
    report.problems += [f"the kit has no shapes of state kind {kind!r}" for kind in sorted(provider.kinds - known)]
    for shape in shapes:
        spec, how = shape.spec(dtype), shape.attention(dtype)
        # The reference is checked only for kinds that the backend's own providers do not serve.
        narrowed = type(provider) is ReferenceState and spec.kind in ReferenceState.kinds
        own = f"a provider of the backend's own serves {spec.kind}"
        reason: str | None = own if narrowed else f"no kind {spec.kind}"
        if spec.kind in provider.kinds:
            reason = check_supports(provider, provider.supports(spec, how, device.capabilities))
        if reason is not None:
            report.refused.append(f"{shape}: {reason}")
            continue
        if not isinstance(provider, needed := required_interface(spec, how)):
            report.problems.append(f"{shape}: supports accepts it, but the provider is no {needed.__name__}")
            report.checked.append(str(shape))
            continue
        offered = list(provider.block_sizes(spec))
        if math.gcd(*offered) != min(offered, default=-1):
            report.problems.append(f"{shape}: block_sizes are {offered}, and each must be a multiple of the smallest")
            report.checked.append(str(shape))
            continue
        for size in offered if thorough else dict.fromkeys((offered[0], min(offered))):
            cut = shape.for_block_size(size).spec(dtype)
            checked, found = _ProviderCheck(provider, device, cut, how, size, seed, watch), list[str]()
            try:
                found += checked.problems()
                if not found and shape.long:
                    found += checked.check_long_window(cut.window or 0)
                elif not found:
                    found += checked.scenarios(thorough)
            except Exception as error:  # raised by the provider: report it
                found.append(format_backend_exception(error))
            found += watch.memory.problems()
            report.problems += [f"{shape}, blocks of {size}: {p}" for p in found]
        report.checked.append(str(shape))
    if recurrent and "recurrent" in provider.kinds:
        checked_, refused, problems = recurrent_problems(provider, device, dtype, seed, watch)
        report.checked += checked_
        report.refused += refused
        report.problems += problems
    return report


def large_step(
    provider: StateProvider, device: Device, shape: Shape, dtype: str, seed: int, before: Sequence[int],
    counts: Sequence[int],
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """A function that runs one step, of requests with ``before`` tokens that add ``counts``: prepare, write, and the
    method that reads the state. Earlier state is garbage, because only memory is measured, not results."""
    spec = shape.spec(dtype)
    size = next(iter(provider.block_sizes(spec)))
    return _ProviderCheck(
        provider, device, spec, shape.attention(dtype), size, seed, FallbackMonitor(device, guards=False)
    ).prepare_large_step(before, counts)


class _Pool:
    """One layer's blocks, filled with garbage, in pages that are longer than a block."""

    def __init__(
        self, provider: StateProvider, device: Device, spec: StateSpec, size: int, blocks: int, memory: GuardedMemory
    ) -> None:
        alignment = device.capabilities.alignment
        self.used = provider.bytes_per_block(spec, size)
        page = 0 if provider.owns_memory else -(-self.used // alignment) * alignment + alignment
        self.storage = memory.copy(torch.full((blocks, page), GARBAGE, dtype=torch.uint8), "the state pool")
        scales = [scale.to(device.torch_device) for scale in scales_of(spec)]
        if scales:
            assert isinstance(provider, QuantizedState), "only its shapes are checked"
            self.views = provider.bind_scaled(self.storage, spec, size, scales)
        else:
            self.views = provider.bind(self.storage, spec, size)

    def problems(self) -> Iterator[str]:
        """Whether the provider wrote only inside its blocks, and allocated no other memory for state."""
        if self.storage.shape[1] and (self.storage[:, self.used :] != GARBAGE).any():
            yield f"it writes beyond the {self.used} bytes per block that bytes_per_block returned"
        if self.storage.shape[1]:
            views = [v for v in tree_leaves(self.views) if isinstance(v, torch.Tensor)]
            if sum(v.nbytes for v in views if not shares_memory(v, self.storage)) > self.used:
                yield "bind allocates memory of its own, which bytes_per_block does not count (see owns_memory)"


class _ProviderCheck:
    """One provider at one shape and block size."""

    def __init__(
        self, provider: StateProvider, device: Device, spec: StateSpec, how: AttentionSpec, size: int, seed: int,
        watch: FallbackMonitor,
    ) -> None:  # fmt: skip
        assert isinstance(provider, AttentionProvider | IndexProvider), "check_provider asks for the interface"
        self.provider, self.device, self.spec, self.attention, self.size = provider, device, spec, how, size
        self.where, self._watch, self._is_profiled = device.torch_device, watch, False
        self._memory = watch.memory
        self._schedule = query_length_schedule(size)
        self.dtype: torch.dtype = getattr(torch, how.dtype)
        self._ids = torch.int64 if device.capabilities.int64 else torch.int32
        self.noise = torch.Generator().manual_seed(seed + 7)
        requests = len(self._schedule[0])
        self.lengths = [0] * requests
        self.columns = -(-max(sum(step[r] for step in self._schedule) for r in range(requests)) // size)
        self.blocks = requests * self.columns + 4
        order = torch.randperm(self.blocks - 1, generator=self.noise)[: requests * self.columns] + 1
        self.table = order.to(torch.int32).view(requests, self.columns)
        self.history: list[list[list[torch.Tensor]]] = [[[] for _ in spec.tensors] for _ in range(requests)]
        self.sinks = self._random(how.heads) if how.sinks else None

    def _random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        made = (torch.randn(shape, generator=self.noise) * scale).to(self.dtype)
        return self._memory.copy(made, f"an input of {list(shape)}")

    def problems(self) -> Iterator[str]:
        """Run the schedule and yield all problems."""
        need, named = self.spec.nbytes * self.size, self.provider.bytes_per_block(self.spec, self.size)
        if named < need:
            yield f"bytes_per_block is {named}, but {self.size} tokens have {need} bytes"
            return
        if named > 2 * need + 4096:
            yield f"bytes_per_block is {named}, more than twice the {need} bytes of {self.size} tokens"
        self.pool = _Pool(self.provider, self.device, self.spec, self.size, self.blocks, self._memory)
        self.views = self.pool.views
        with torch.inference_mode():
            for number, counts in enumerate(self._schedule):
                self._is_profiled = number in _PROFILED_STEPS
                yield from (f"step {number}: {p}" for p in self._step(counts, 30.0 if number == 2 else 1.0))
            self._is_profiled = False
            yield from self._check_export(self.table, "export_blocks")
            yield from self._round_trip()
            yield from self._check_copy()
            yield from self._invariance()
        yield from self.pool.problems()

    def _layout(self, table: torch.Tensor, counts: Sequence[int], lengths: Sequence[int]) -> StateStep:
        """A step of the requests in ``table``, which have ``lengths`` tokens after it; the last row is padding in the
        null block. Table entries that must not be read name blocks of other requests."""
        counts, lengths = [*counts, 1], [*lengths, 1]
        table = torch.cat((table, torch.zeros(1, table.shape[1], dtype=torch.int32)))
        positions, slots, stale = [], [], table.flip(0)[:-1].roll(1, 1)
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for at in range(length - count, length):
                positions.append(at)
                slots.append(int(table[row, at // self.size]) * self.size + at % self.size)
        table = table.clone()
        for row, (count, length) in enumerate(zip(counts[:-1], lengths[:-1], strict=True)):
            # Blocks before the window were freed, and blocks after the last were never allocated.
            dead = max(0, self.spec.first_attended(length - count)) // self.size
            table[row, :dead] = stale[row, :dead]
            end = -(-length // self.size)
            table[row, end:] = stale[row, end:]
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]

        def put(name: str, values: Any) -> torch.Tensor:
            return self._memory.copy(torch.as_tensor(values, dtype=torch.int32), name)

        return StateStep(
            tokens=len(positions), requests=len(counts), max_query=max(counts), max_kv=max(lengths) + 3,
            query_start=put("query_start", starts), kv_lens=put("kv_lens", lengths),
            positions=put("positions", positions), slot_mapping=put("slot_mapping", slots),
            block_table=put("block_table", table), host_query_lens=counts, host_kv_lens=lengths,
        )  # fmt: skip

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Around one call of the provider."""
        with self._watch.profiled() if self._is_profiled else nullcontext(), self._watch():
            yield

    def _prepare(self, step: StateStep) -> Any:
        with HostCopyMonitor(self.device, self._memory):
            return self.provider.prepare(step, self.spec, self.attention, self.size)

    def _step(self, counts: Sequence[int], scale: float = 1.0) -> Iterator[str]:
        rows = [r for r, count in enumerate(counts) if count]
        counts = [counts[r] for r in rows]
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        step = self._layout(self.table[rows], counts, [self.lengths[r] for r in rows])
        values = [self._random(step.tokens, *t.shape) for t in self.spec.tensors]
        query = self._random(step.tokens, self.attention.heads, self.attention.head_dim, scale=scale)
        for kept, value in enumerate(values):
            for row, piece in zip(rows, value.cpu().split([*counts, 1]), strict=False):
                self.history[row][kept].append(held(piece, self.spec, kept))
        meta = self._prepare(step)
        yield from self._check_write(meta, values)
        if self.spec.kind == "index":
            yield from self._check_selection(meta, query, rows, counts)
            return
        if self.spec.kind == "latent" and self.attention.top is None:
            yield from self._check_pieces(meta, rows, counts)
        self.chosen = self._choose(rows, counts) if self.attention.top is not None else None
        asked, again = (followed_by_nan(query, sum(counts), self._memory, "the query") for _ in range(2))
        made = self._attend(self.views, meta, asked, self.chosen)
        if not bitwise_equal(asked, again):
            yield "attend changed its query"
        if shares_memory(made, asked):
            yield "attend returns the query's memory"
        got = self.device.readback(made).wait().clone()
        self.last = (rows, counts, query, got)
        tokens = [[torch.cat(written) for written in self.history[row]] for row in rows]
        yield from self._check_attention(rows, counts, tokens, query, got, self.chosen, scale)

    def _check_write(self, meta: Any, values: Sequence[torch.Tensor]) -> Iterator[str]:
        """Write values that are strided slices, as in a real layer, where one projection gives keys and values."""
        twice = [self._memory.copy(v.flatten(1).repeat(1, 2), "the values to write") for v in values]
        wide = [w[:, : v[0].numel()].unflatten(1, v.shape[1:]) for w, v in zip(twice, values, strict=True)]
        with self._watching():
            self.provider.write(self.views, meta, *wide)
        if not all(map(bitwise_equal, wide, values)):
            yield "write changed its inputs"

    def _check_attention(
        self, rows: Sequence[int], counts: Sequence[int], tokens: Sequence[Sequence[torch.Tensor]],
        query: torch.Tensor, got: torch.Tensor, chosen: torch.Tensor | None, scale: float = 1.0,
    ) -> Iterator[str]:  # fmt: skip
        """Attention against its definition, request by request."""
        relative, absolute = (limit * (50 if scale > 1 else 1) for limit in _TOLERANCE[self.attention.dtype])
        first = 0
        width = self.spec.tensors[0 if self.spec.kind == "latent" else 1].shape[-1]
        if got.shape != (len(query), self.attention.heads, width) or got.dtype != self.dtype:
            yield f"attend gives {got.dtype} {list(got.shape)}, not {self.dtype} {[*query.shape[:2], width]}"
            return
        for row, count, kept in zip(rows, counts, tokens, strict=True):
            mine = slice(first, first + count)
            named = None if chosen is None else chosen[mine]
            want = attention(self.spec, self.attention, kept, query[mine].cpu(), self.sinks, named)
            first += count
            have = got[mine].float()
            if not torch.allclose(have, want, rtol=relative, atol=absolute):
                off = float((have - want).abs().nan_to_num(torch.inf).max())
                like = describe_scale_error(have, want, relative)
                like = like or self._describe_other_scale(have, (relative, absolute), kept, query[mine].cpu(), named)
                yield f"request {row}, {count} of {len(kept[0])} tokens: attention is off by up to {off:.3g}{like}"

    def _describe_other_scale(
        self, have: torch.Tensor, close: tuple[float, float], kept: Sequence[torch.Tensor], query: torch.Tensor,
        named: torch.Tensor | None,
    ) -> str:  # fmt: skip
        """Text that names another scale of the scores for which the result would be correct, or nothing."""
        how = self.attention
        for scale, name in ((how.head_dim**-0.5, "head_dim ** -0.5"), (1.0, "1")):
            other = attention(self.spec, replace(how, scale=scale), kept, query, self.sinks, named)
            if torch.allclose(have, other, *close):
                return f"; it is right for scores scaled by {name}, but attention.scale is {how.scale:g}"
        return ""

    def scenarios(self, thorough: bool) -> Iterator[str]:
        """Steps over imported state: a long context, many requests, and only first tokens."""
        if self.spec.kind == "index" or self.attention.top is not None or self.size != min(
            self.provider.block_sizes(self.spec)
        ):  # fmt: skip
            return
        long, many = (5000, 200) if thorough else (1100, 67 if self.size <= 32 else 9)
        lengths = torch.randint(0, self.size + 20, (many,), generator=self.noise).tolist()
        with torch.inference_mode():
            yield from (f"a context of {long} tokens: {p}" for p in self._scenario([long, 2, long // 2], [1, 1, 3]))
            yield from (f"{many} requests: {p}" for p in self._scenario(lengths, [1] * many))
            yield from (f"first tokens: {p}" for p in self._scenario([0] * 3, [1, 1, 1]))

    def check_long_window(self, window: int) -> Iterator[str]:
        """Chunks and single tokens, shorter and longer than a long window."""
        before, counts = [window - 4, 0, 2 * window - 1, window], [9, window + 5, 1, 1]
        with torch.inference_mode():
            yield from (f"a window of {window} tokens: {p}" for p in self._scenario(before, counts))

    def _scenario(self, before: Sequence[int], counts: Sequence[int]) -> Iterator[str]:
        ends = [b + n for b, n in zip(before, counts, strict=True)]
        columns = -(-max(ends) // self.size)
        needed = [-(-end // self.size) for end in ends]
        blocks = sum(needed) + 2
        order = (torch.randperm(blocks - 1, generator=self.noise)[: sum(needed)] + 1).to(torch.int32).split(needed)
        table = torch.stack([torch.nn.functional.pad(o, (0, columns - len(o)), value=int(o[0])) for o in order])
        pool = _Pool(self.provider, self.device, self.spec, self.size, blocks, self._memory)
        tokens = [[self._random(end, *t.shape).cpu() for t in self.spec.tensors] for end in ends]
        kept_tokens = [[held(t, self.spec, kept) for kept, t in enumerate(each)] for each in tokens]
        for kept in range(len(self.spec.tensors)):
            # Tokens that are not written yet are garbage.
            parts = [t[kept].clone() for t in tokens]
            for part, b in zip(parts, before, strict=True):
                part[b:] = 1e3
            padded = [torch.cat((p, p.new_full((n * self.size - len(p), *p.shape[1:]), 1e3)))
                      for p, n in zip(parts, needed, strict=True)]  # fmt: skip
            if kept == 0:
                whole: list[list[torch.Tensor]] = [[] for _ in self.spec.tensors]
            whole[kept] = padded
        ids = torch.cat(list(order)).to(self._ids).to(self.where)
        values = [torch.cat(parts).unflatten(0, (-1, self.size)).to(self.where) for parts in whole]
        self.provider.import_blocks(pool.views, ids, values)
        step = self._layout(table, counts, ends)
        new = [torch.cat([t[kept][b:] for t, b in zip(tokens, before, strict=True)]) for kept in range(len(whole))]
        new = [torch.cat((n, n[:1])).to(self.where) for n in new]
        query = self._random(step.tokens, self.attention.heads, self.attention.head_dim)
        meta = self._prepare(step)
        with self._watching():
            self.provider.write(pool.views, meta, *new)
        got = self.device.readback(self._attend(pool.views, meta, query, None)).wait()
        found = list(self._check_attention(range(len(before)), counts, kept_tokens, query, got, None))
        yield from found[:2]

    def prepare_large_step(self, before: Sequence[int], counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        """See ``large_step``."""
        self.lengths = [b + n for b, n in zip(before, counts, strict=True)]
        columns, rows = -(-max(self.lengths) // self.size), range(len(counts))
        table = torch.arange(1, len(counts) * columns + 1, dtype=torch.int32).view(-1, columns)
        pool = _Pool(self.provider, self.device, self.spec, self.size, table.numel() + 2, self._memory)
        step = self._layout(table, counts, self.lengths)
        values = [self._random(step.tokens, *t.shape) for t in self.spec.tensors]
        query = self._random(step.tokens, self.attention.heads, self.attention.head_dim)
        weights = torch.randn(query.shape[:2], generator=self.noise).to(self.where)
        sparse = self.attention.top is not None and self.spec.kind != "index"
        chosen = self._choose(rows, counts).to(self.where) if sparse else None

        def run() -> torch.Tensor:
            meta = self.provider.prepare(step, self.spec, self.attention, self.size)
            self.provider.write(pool.views, meta, *values)
            if self.spec.kind == "index":
                return self._call_select(pool.views, meta, query, weights)
            return self._call_attend(pool.views, meta, query, chosen)

        return run

    def _attend(self, views: Any, meta: Any, query: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        with self._watching():
            return self._call_attend(views, meta, query, None if chosen is None else chosen.to(self.where))

    def _call_attend(self, views: Any, meta: Any, query: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        if chosen is not None:
            assert isinstance(self.provider, SparseLatentProvider)
            return self.provider.attend_chosen(views, meta, query, chosen)
        assert isinstance(self.provider, AttentionProvider)
        return self.provider.attend(views, meta, query, self.sinks)

    def _call_select(self, views: Any, meta: Any, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.provider, IndexProvider)
        return self.provider.select(views, meta, query, weights)

    def _choose(self, rows: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Random positions for each token, with its own; the padding row reads only its own."""
        picked = []
        for row, count in zip(rows, counts, strict=True):
            for at in range(self.lengths[row] - count, self.lengths[row]):
                others = torch.randperm(at, generator=self.noise)[: (self.attention.top or 0) - 1]
                picked.append(torch.cat((others, torch.tensor([at]))))
        picked.append(torch.tensor([0]))
        padded = [torch.nn.functional.pad(p, (0, (self.attention.top or 0) - len(p)), value=-1) for p in picked]
        return torch.stack(padded).to(torch.int32)

    def _check_pieces(self, meta: Any, rows: Sequence[int], counts: Sequence[int]) -> Iterator[str]:
        """Check that pieces have the whole state of every request, in order, within the limit, with right offsets."""
        found: dict[int, list[list[torch.Tensor]]] = {}
        starts = {sum(counts[:i]): row for i, row in enumerate(rows)}
        assert isinstance(self.provider, LatentProvider)
        for piece in self.provider.pieces(self.views, meta, 13):
            row = starts.get(piece.first)
            if row is None:  # the padding row's
                continue
            parts = found.setdefault(row, [[] for _ in piece.tensors])
            before = sum(len(p) for p in parts[0])
            if len(piece.tensors[0]) > 13 or piece.offset != self.lengths[row] - (piece.stop - piece.first) - before:
                yield f"request {row}: a piece is too long, or its offset is wrong"
            for part, tensor in zip(parts, piece.tensors, strict=True):
                part.append(tensor.cpu().clone())
        for row in rows:
            want = [torch.cat(parts) for parts in self.history[row]]
            have = [torch.cat(parts) for parts in found.get(row, [])]
            if len(have) != len(want) or not all(torch.equal(*pair) for pair in zip(have, want, strict=True)):
                yield f"request {row}: pieces do not have what was written"

    def _check_selection(
        self, meta: Any, query: torch.Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> Iterator[str]:
        """Check that the selected tokens have the highest scores; scores that differ by rounding may be swapped."""
        weights = torch.randn(query.shape[:2], generator=self.noise)
        with self._watching():
            made = self._call_select(self.views, meta, query, weights.to(self.where))
        got, at = self.device.readback(made).wait(), 0
        top = self.attention.top or 0
        for row, count in zip(rows, counts, strict=True):
            keys = torch.cat(self.history[row][0]).float()
            asked = query[at : at + count].cpu().float()
            every = (torch.einsum("qhd,kd->qhk", asked, keys).relu() * weights[at : at + count, :, None]).sum(1)
            for index in range(count):
                position = self.lengths[row] - count + index
                scores, most = every[index, : position + 1], min(top, position + 1)
                named = [n for n in got[at + index].tolist() if n >= 0]
                have = scores[[n for n in named if n <= position]].sort(descending=True).values
                best = scores.topk(most).values
                if len(have) != most or len(set(named)) != len(named) or not torch.allclose(have, best, atol=1e-3):
                    yield f"request {row}, position {position}: selected {named}, which are not the best {most}"
            at += count

    def _check_export(self, table: torch.Tensor, what: str) -> Iterator[str]:
        """Check that exported blocks have the tokens bit for bit."""
        blocks = table.flatten().to(self._ids).to(self.where)
        parts = [p.cpu() for p in self.provider.export_blocks(self.views, blocks)]
        for kept, (tensor, part) in enumerate(zip(self.spec.tensors, parts, strict=True)):
            wanted = (len(blocks), self.size, *tensor.shape)
            if tuple(part.shape) != wanted or part.dtype != self.dtype:
                yield f"{what}: {tensor.name} is {part.dtype} {tuple(part.shape)}, not {self.dtype} {wanted}"
                continue
            flat = part.unflatten(0, tuple(table.shape)).flatten(1, 2)
            for row, written in enumerate(self.history):
                if not torch.equal(flat[row, : self.lengths[row]], torch.cat(written[kept]).to(self.dtype)):
                    yield f"{what}: {tensor.name} of request {row} is not what was written"

    def _round_trip(self) -> Iterator[str]:
        """Import into another pool and export again: the same blocks, no other block changed, the same attention."""
        blocks = self.table.flatten().to(self._ids).to(self.where)
        parts = self.provider.export_blocks(self.views, blocks)
        other = _Pool(self.provider, self.device, self.spec, self.size, self.blocks, self._memory)
        turned = blocks.flip(0)
        self.provider.import_blocks(other.views, turned, parts)
        again = self.provider.export_blocks(other.views, turned)
        if not all(map(bitwise_equal, parts, again)):
            yield "import_blocks, then export_blocks: not the same"
        rest = [b for b in range(self.blocks) if b not in set(blocks.tolist())]
        if (other.storage[rest] != GARBAGE).any():
            yield "import_blocks wrote to blocks that it was not given"
        yield from (f"after import_blocks: {p}" for p in self._attend_again(other.views, self.table.flip(0, 1)))

    def _attend_again(self, views: Any, table: torch.Tensor) -> Iterator[str]:
        """Repeat the last step's attention over other blocks."""
        if self.spec.kind == "index":
            return
        rows, counts, query, had = self.last
        step = self._layout(table[rows], counts, [self.lengths[r] for r in rows])
        got = self.device.readback(self._attend(views, self._prepare(step), query.clone(), self.chosen)).wait()
        relative, absolute = _TOLERANCE[self.attention.dtype]
        if not torch.allclose(got[:-1].float(), had[:-1].float(), rtol=relative, atol=absolute):
            yield "attention differs from before"

    def _check_copy(self) -> Iterator[str]:
        """Check that copies are at their targets, and that requests can continue from them."""
        free = sorted(set(range(1, self.blocks)) - set(self.table.flatten().tolist()))[:2]
        source = self.table[0, : len(free)]
        target = torch.tensor(free[: len(source)])
        source_ids, target_ids = (ids.to(torch.int32).to(self.where) for ids in (source, target))
        self.provider.copy_blocks(self.views, source_ids, target_ids)
        moved = self.table.clone()
        moved[0, : len(source)] = target.to(torch.int32)
        yield from self._check_export(self.table, "copy_blocks changed its source")
        yield from self._check_export(moved, "copy_blocks")
        yield from (f"after copy_blocks: {p}" for p in self._attend_again(self.views, moved))

    def _invariance(self) -> Iterator[str]:
        """If batch invariance is claimed: a request alone must give the same bits as with other requests."""
        if not self.provider.batch_invariant or self.spec.kind == "index":
            return
        rows, counts, query, whole = self.last
        first = 0
        for row, count, asked, had in zip(
            rows, counts, query.split([*counts, 1]), whole.split([*counts, 1]), strict=False
        ):
            step = self._layout(self.table[[row]], [count], [self.lengths[row]])
            meta = self._prepare(step)
            padded = torch.cat((asked, asked[:1]))
            chosen = self.chosen
            if chosen is not None:
                chosen = torch.cat((chosen[first : first + count], chosen[-1:]))
            first += count
            got = self.device.readback(self._attend(self.views, meta, padded, chosen)).wait()
            if not torch.equal(got[:count], had):
                yield f"it claims batch invariance, but request {row} alone gives other bits"
