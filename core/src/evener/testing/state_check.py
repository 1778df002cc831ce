"""Checking a state provider against the contract, with attention computed from plain lists of keys and values.

    report = check_provider(provider, device, dtype="float32")

Steps mix whole prompts, chunks, single tokens and padding rows; blocks lie anywhere in the pool; the null block is
filled with garbage. Without problems, everything that it accepts is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evener.contracts.device import Device
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec, StateStep, StateTensor

_CLOSE = {"float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}
#: Query lengths of the requests in each step; 0 takes no part.
_SCRIPT: tuple[tuple[int, ...], ...] = ((5, 37, 1, 0), (1, 1, 1, 18), (1, 20, 0, 1), (1, 1, 1, 1), (16, 1, 3, 1))


@dataclass(frozen=True)
class Shape:
    """One kind of layer. A latent layer's ``value_dim`` is the rank, and ``top`` makes it sparse; an index layer has
    one key and ``top``."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kind: str = ""
    top: int | None = None

    def spec(self, dtype: str) -> StateSpec:
        """As a layer declares it."""
        if self.kind == "latent":
            rope = StateTensor("rope", (self.head_dim - self.value_dim,), dtype)
            return StateSpec("latent", (StateTensor("latent", (self.value_dim,), dtype), rope))
        if self.kind == "index":
            return StateSpec("index", (StateTensor("key", (self.head_dim,), dtype),))
        tensors = (
            StateTensor("key", (self.kv_heads, self.head_dim), dtype),
            StateTensor("value", (self.kv_heads, self.value_dim), dtype),
        )
        return StateSpec(self.kind or ("full" if self.window is None else "window"), tensors, window=self.window)

    def attention(self, dtype: str) -> AttentionSpec:
        """How it reads."""
        return AttentionSpec(self.heads, self.head_dim, self.head_dim**-0.5, self.softcap, self.sinks, dtype, self.top)


SHAPES = (
    Shape(9, 3, 64, 64), Shape(4, 4, 16, 16), Shape(2, 1, 80, 80), Shape(4, 2, 32, 16), Shape(6, 2, 10, 10),
    Shape(4, 1, 32, 32, window=7), Shape(4, 2, 16, 16, window=24, softcap=5.0), Shape(2, 1, 256, 256),
    Shape(4, 1, 32, 32, window=7, kind="chunk"), Shape(4, 2, 16, 16, window=24, kind="chunk", sinks=True),
    Shape(4, 2, 16, 16, sinks=True), Shape(5, 1, 42, 32, kind="latent"), Shape(3, 1, 24, 16, kind="latent", top=9),
    Shape(6, 1, 18, 18, kind="index", top=7),
)  # fmt: skip


@dataclass
class Report:
    """What was found.

    Attributes:
        checked, refused: shapes that were computed, and those that the provider declined, with its reason.
        problems: everything that is wrong.
    """

    checked: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def check_provider(
    provider: StateProvider, device: Device, dtype: str = "float32", shapes: Sequence[Shape] = SHAPES
) -> Report:
    """Check a provider over many shapes and all block sizes that it offers (the first three)."""
    report = Report()
    for shape in shapes:
        spec, attention = shape.spec(dtype), shape.attention(dtype)
        if spec.kind not in provider.kinds:
            report.refused.append(f"{shape}: no kind {spec.kind}")
            continue
        reason = provider.supports(spec, attention, device.capabilities)
        if reason is not None:
            report.refused.append(f"{shape}: {reason}")
            continue
        for size in list(provider.block_sizes(spec))[:3]:
            found = list(_Checked(provider, device, spec, attention, size).problems())
            report.problems += [f"{shape}, blocks of {size}: {p}" for p in found]
        report.checked.append(str(shape))
    return report


class _Checked:
    """One provider at one shape and block size."""

    def __init__(
        self, provider: StateProvider, device: Device, spec: StateSpec, attention: AttentionSpec, size: int
    ) -> None:
        self.provider, self.device, self.spec, self.attention, self.size = provider, device, spec, attention, size
        self.where = device.torch_device
        self.dtype: torch.dtype = getattr(torch, attention.dtype)
        self.noise = torch.Generator().manual_seed(7)
        requests = len(_SCRIPT[0])
        self.lengths = [0] * requests
        self.columns = -(-max(sum(step[r] for step in _SCRIPT) for r in range(requests)) // size)
        self.blocks = requests * self.columns + 4
        order = torch.randperm(self.blocks - 1, generator=self.noise)[: requests * self.columns] + 1
        self.table = order.to(torch.int32).view(requests, self.columns)
        self.history: list[list[list[torch.Tensor]]] = [[[] for _ in spec.tensors] for _ in range(requests)]
        self.page = -(-provider.bytes_per_block(spec, size) // 64) * 64
        self.storage = torch.zeros(self.blocks, self.page, dtype=torch.uint8, device=self.where)
        self.sinks = self._random(attention.heads) if attention.sinks else None

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.noise).to(self.dtype).to(self.where)

    def problems(self) -> Iterator[str]:
        """All of them."""
        if self.page < self.spec.nbytes * self.size:
            yield f"bytes_per_block is {self.page}, but {self.size} tokens have {self.spec.nbytes * self.size} bytes"
            return
        self.views = self.provider.bind(self.storage, self.spec, self.size)
        self._fill_null_block()
        for number, counts in enumerate(_SCRIPT):
            yield from (f"step {number}: {p}" for p in self._step(counts))
        yield from self._exported(self.table, "export_blocks")
        yield from self._round_trip()
        yield from self._copied()
        yield from self._invariance()

    def _fill_null_block(self) -> None:
        """Finite garbage, as padding leaves it."""
        tensors = [
            torch.full((1, self.size, *t.shape), 1e4, dtype=self.dtype, device=self.where) for t in self.spec.tensors
        ]
        self.provider.import_blocks(self.views, torch.zeros(1, dtype=torch.int64, device=self.where), tensors)

    def _layout(self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int]) -> StateStep:
        """A step of these requests, ``lengths`` tokens long after it; behind them a padding row in the null block."""
        counts, lengths = [*counts, 1], [*lengths, 1]
        table = torch.cat((self.table[list(rows)], torch.zeros(1, self.columns, dtype=torch.int32)))
        positions, slots = [], []
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for at in range(length - count, length):
                positions.append(at)
                slots.append(int(table[row, at // self.size]) * self.size + at % self.size)
        if self.spec.window is not None:  # blocks that a window has passed are given back: their entries become null
            for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
                dead = max(0, self.spec.first_seen(length - count)) // self.size
                table[row, :dead] = 0
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]

        def put(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(self.where)

        return StateStep(
            tokens=len(positions), requests=len(counts), max_query=max(counts), max_kv=max(lengths),
            query_start=put(starts), kv_lens=put(lengths), positions=put(positions), slot_mapping=put(slots),
            block_table=put(table), host_query_lens=counts, host_kv_lens=lengths,
        )  # fmt: skip

    def _step(self, counts: Sequence[int]) -> Iterator[str]:
        rows = [r for r, count in enumerate(counts) if count]
        counts = [counts[r] for r in rows]
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        step = self._layout(rows, counts, [self.lengths[r] for r in rows])
        values = [self._random(step.tokens, *t.shape) for t in self.spec.tensors]
        query = self._random(step.tokens, self.attention.heads, self.attention.head_dim)
        for kept, value in enumerate(values):
            for row, piece in zip(rows, value.split([*counts, 1]), strict=False):
                self.history[row][kept].append(piece.cpu())
        meta = self.provider.prepare(step, self.spec, self.attention, self.size)
        # Keys and values are slices of one projection's rows in a real layer.
        wide = [
            torch.cat((v.flatten(1), v.flatten(1)), dim=1)[:, : v[0].numel()].unflatten(1, v.shape[1:]) for v in values
        ]
        self.provider.write(self.views, meta, *wide)
        if self.spec.kind == "index":
            yield from self._selected(meta, query, rows, counts)
            return
        if self.spec.kind == "latent" and self.attention.top is None:
            yield from self._pieces(meta, rows, counts)
        self.chosen = self._choose(rows, counts) if self.attention.top is not None else None
        got = self.device.readback(self._attend(meta, query.clone(), self.chosen)).wait()
        self.last = (rows, counts, query, got)
        first = 0
        for row, count, have, asked in zip(
            rows, counts, got.split([*counts, 1]), query.split([*counts, 1]), strict=False
        ):
            want = self._naive(row, asked.cpu().float(), None if self.chosen is None else self.chosen[first:])
            first += count
            relative, absolute = _CLOSE[self.attention.dtype]
            if not torch.allclose(have.float(), want, rtol=relative, atol=absolute):
                off = float((have.float() - want).abs().max())
                yield f"request {row}, {count} of {self.lengths[row]} tokens: attention is off by up to {off:.3g}"

    def _attend(self, meta: Any, query: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        if chosen is None:
            return self.provider.attend(self.views, meta, query, self.sinks)
        return self.provider.attend_chosen(self.views, meta, query, chosen.to(self.where))

    def _choose(self, rows: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Some positions for each token, itself among them; the padding row reads its own."""
        picked = []
        for row, count in zip(rows, counts, strict=True):
            for at in range(self.lengths[row] - count, self.lengths[row]):
                others = torch.randperm(at, generator=self.noise)[: (self.attention.top or 0) - 1]
                picked.append(torch.cat((others, torch.tensor([at]))))
        picked.append(torch.tensor([0]))
        padded = [torch.nn.functional.pad(p, (0, (self.attention.top or 0) - len(p)), value=-1) for p in picked]
        return torch.stack(padded).to(torch.int32)

    def _pieces(self, meta: Any, rows: Sequence[int], counts: Sequence[int]) -> Iterator[str]:
        """Every request's whole state, in order, in pieces that fit the limit, with offsets that say where it is."""
        found: dict[int, list[list[torch.Tensor]]] = {}
        starts = {sum(counts[:i]): row for i, row in enumerate(rows)}
        for piece in self.provider.pieces(self.views, meta, 13):
            row = starts.get(piece.first)
            if row is None:  # the padding row's
                continue
            parts = found.setdefault(row, [[] for _ in piece.tensors])
            before = sum(len(p) for p in parts[0])
            if len(piece.tensors[0]) > 13 or piece.offset != self.lengths[row] - (piece.stop - piece.first) - before:
                yield f"request {row}: a piece is too long, or says that it lies elsewhere"
            for part, tensor in zip(parts, piece.tensors, strict=True):
                part.append(tensor.cpu().clone())
        for row in rows:
            want = [torch.cat(parts) for parts in self.history[row]]
            have = [torch.cat(parts) for parts in found.get(row, [])]
            if len(have) != len(want) or not all(torch.equal(*pair) for pair in zip(have, want, strict=True)):
                yield f"request {row}: pieces do not hold what was written"

    def _selected(self, meta: Any, query: torch.Tensor, rows: Sequence[int], counts: Sequence[int]) -> Iterator[str]:
        """The named tokens have the highest scores; scores that rounding could order otherwise may be exchanged."""
        weights = torch.randn(query.shape[:2], generator=self.noise)
        got = self.device.readback(self.provider.select(self.views, meta, query, weights.to(self.where))).wait()
        at = 0
        for row, count in zip(rows, counts, strict=True):
            keys = torch.cat(self.history[row][0]).float()
            for position in range(self.lengths[row] - count, self.lengths[row]):
                scores = [
                    float((weights[at] * (query[at].cpu().float() @ key).relu()).sum()) for key in keys[: position + 1]
                ]
                named = [n for n in got[at].tolist() if n >= 0]
                most = min(self.attention.top or 0, position + 1)
                best = sorted(scores, reverse=True)[:most]
                have = sorted((scores[n] for n in named if n <= position), reverse=True)
                close = len(have) == most and all(abs(a - b) < 1e-3 for a, b in zip(have, best, strict=True))
                if not close or len(set(named)) != len(named):
                    yield f"request {row}, position {position}: named {named}, which are not the best {most}"
                at += 1

    def _naive(self, row: int, query: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        """One query, one head, one softmax at a time, from the tokens as they were written."""
        parts = [torch.cat(written).float() for written in self.history[row]]
        if self.spec.kind == "latent":
            keys, values = torch.cat(parts, dim=-1)[:, None], parts[0][:, None]
        else:
            keys, values = parts
        group, total = query.shape[1] // keys.shape[1], len(keys)
        out = torch.zeros(query.shape[0], query.shape[1], values.shape[2])
        for q in range(query.shape[0]):
            at = total - query.shape[0] + q
            width = self.spec.window or at + 1
            first = at // width * width if self.spec.kind == "chunk" else max(0, at - width + 1)
            seen = range(first, at + 1) if chosen is None else [n for n in chosen[q].tolist() if n >= 0]
            for head in range(query.shape[1]):
                scores = keys[seen, head // group] @ query[q, head] * self.attention.scale
                if self.attention.softcap:
                    scores = self.attention.softcap * torch.tanh(scores / self.attention.softcap)
                sink = -math.inf if self.sinks is None else float(self.sinks[head])
                weights = torch.exp(scores - scores.max())
                weights = weights / (weights.sum() + math.exp(sink - float(scores.max())))
                out[q, head] = weights @ values[seen, head // group]
        return out

    def _exported(self, table: torch.Tensor, what: str) -> Iterator[str]:
        """Exported blocks hold the tokens bit by bit, wherever a window has not passed."""
        blocks = table.flatten().long().to(self.where)
        parts = [p.cpu() for p in self.provider.export_blocks(self.views, blocks)]
        for kept, (tensor, part) in enumerate(zip(self.spec.tensors, parts, strict=True)):
            wanted = (len(blocks), self.size, *tensor.shape)
            if tuple(part.shape) != wanted or part.dtype != self.dtype:
                yield f"{what}: {tensor.name} is {part.dtype} {tuple(part.shape)}, not {self.dtype} {wanted}"
                continue
            flat = part.unflatten(0, tuple(table.shape)).flatten(1, 2)
            for row, written in enumerate(self.history):
                if not torch.equal(flat[row, : self.lengths[row]], torch.cat(written[kept])):
                    yield f"{what}: {tensor.name} of request {row} is not what was written"

    def _round_trip(self) -> Iterator[str]:
        """Import elsewhere, export again: nothing is lost, nobody else is touched."""
        blocks = self.table.flatten().long().to(self.where)
        parts = self.provider.export_blocks(self.views, blocks)
        other = torch.zeros_like(self.storage)
        views = self.provider.bind(other, self.spec, self.size)
        turned = blocks.flip(0)
        self.provider.import_blocks(views, turned, parts)
        again = self.provider.export_blocks(views, turned)
        if not all(torch.equal(a, b) for a, b in zip(parts, again, strict=True)):
            yield "import_blocks, then export_blocks: not the same"
        rest = [b for b in range(self.blocks) if b not in set(blocks.tolist())]
        if other[rest].any():
            yield "import_blocks wrote to blocks that it was not given"

    def _copied(self) -> Iterator[str]:
        """Copies stand where they were asked for, and the requests go on from them."""
        free = sorted(set(range(1, self.blocks)) - set(self.table.flatten().tolist()))[:2]
        source = self.table[0, : len(free)]
        target = torch.tensor(free[: len(source)])
        self.provider.copy_blocks(self.views, source.long().to(self.where), target.to(self.where))
        moved = self.table.clone()
        moved[0, : len(source)] = target.to(torch.int32)
        yield from self._exported(self.table, "copy_blocks changed its source")
        yield from self._exported(moved, "copy_blocks")

    def _invariance(self) -> Iterator[str]:
        """A request alone has the bits that it had in company, if that is claimed."""
        if not self.provider.batch_invariant or self.spec.kind == "index":
            return
        rows, counts, query, whole = self.last
        first = 0
        for row, count, asked, had in zip(
            rows, counts, query.split([*counts, 1]), whole.split([*counts, 1]), strict=False
        ):
            step = self._layout([row], [count], [self.lengths[row]])
            meta = self.provider.prepare(step, self.spec, self.attention, self.size)
            padded = torch.cat((asked, asked[:1]))
            chosen = self.chosen
            if chosen is not None:
                chosen = torch.cat((chosen[first : first + count], chosen[-1:]))
            first += count
            got = self.device.readback(self._attend(meta, padded, chosen)).wait()
            if not torch.equal(got[:count], had):
                yield f"it claims batch invariance, but request {row} alone has other bits"


def _slice_of_rows(value: torch.Tensor) -> torch.Tensor:
    """The same values as the first half of wider rows."""
    flat = value.flatten(1)
    part: torch.Tensor = torch.cat((flat, flat), dim=1)[:, : flat.shape[1]].unflatten(1, value.shape[1:])
    return part
