"""Test cases of the primitive ops: odd sizes, ties, empty steps.

Each function takes ``(dtype, generator)`` and yields ``OpCase``. For an input that the schema marks
*packed*, a case holds the ``WeightPart`` tuple to be packed, because each kernel has its own packing; the static
parameter ``weight`` is a declared ``LinearWeight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from evener.contracts.declared import LinearWeight, StackedWeight
from evener.contracts.ops import OpCase
from evener.contracts.quant import WeightPart, plain

#: (rows, columns) of a deep and a wide matrix: beyond 4,096 columns, beyond 8,192 rows. 128 divides all of them, so
#: that a kernel with large tiles takes them too; and odd sizes in between.
LARGE_MATRICES = ((128, 4352), (8448, 128), (1033, 1291))
#: Epsilon of norms: large, so that a kernel with another epsilon is seen.
EPS = 0.1


class InputFactory:
    """Random inputs of one dtype, on the CPU."""

    def __init__(self, dtype: str, generator: torch.Generator) -> None:
        self.dtype, self._generator = dtype, generator

    def noise(self, *shape: int, dtype: str | None = None, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        """Normal noise, rounded to the dtype."""
        values = torch.randn(shape, generator=self._generator) * scale + shift
        return values.to(getattr(torch, dtype or self.dtype))

    def ids(self, below: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers from 0 to below - 1."""
        return torch.randint(below, shape, generator=self._generator, dtype=dtype)

    def permutations(self, rows: int, size: int, step: float) -> torch.Tensor:
        """[rows, size]: distinct multiples of ``step`` in random order, so that no two values are nearly equal."""
        order = [torch.randperm(size, generator=self._generator) for _ in range(rows)]
        return (torch.stack(order) * step if order else torch.empty(0, size)).to(getattr(torch, self.dtype))

    def parts(self, sizes: Sequence[int], columns: int) -> tuple[WeightPart, ...]:
        """Unquantized parts; part i has ``sizes[i]`` rows."""
        return tuple(
            WeightPart(
                f"part{i}", n, columns, plain(self.dtype), {"weight": self.noise(n, columns, scale=columns**-0.5)}
            )
            for i, n in enumerate(sizes)
        )


def _declared(parts: tuple[WeightPart, ...], dtype: str) -> LinearWeight:
    bare = tuple(WeightPart(p.name, p.rows, p.columns, p.format) for p in parts)
    return LinearWeight("weight", bare, sum(p.rows for p in parts), parts[0].columns, dtype)


def embedding(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """With and without a scale; no rows; first and last id."""
    make = InputFactory(dtype, generator)
    for tokens, vocab, hidden, scale in ((1, 7, 8, 1.0), (13, 211, 36, 6.0), (0, 5, 16, 1.0), (3, 33, 7, 0.3)):
        ids = make.ids(vocab, tokens)
        ids[:1], ids[1:2] = vocab - 1, 0
        static = {"hidden": hidden, "dtype": dtype, "vocab": vocab, "scale": scale, "weight": None}
        yield OpCase(static, (ids, make.noise(vocab, hidden)))


def _norm_static(hidden: int, dtype: str, offset: float = 0.0, eps: float = EPS) -> dict[str, Any]:
    return {"hidden": hidden, "dtype": dtype, "eps": eps, "offset": offset}


def rms_norm(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Rows of any width, heads [T, heads, D], large and zero rows, both orders of rounding."""
    make = InputFactory(dtype, generator)
    for shape, offset in (((1, 64), 0.0), ((5, 60), 0.0), ((3, 576), 1.0), ((7, 9, 80), 0.0), ((2, 3, 256), 1.0)):
        x = make.noise(*shape, scale=3.0)
        x[-1] = 0
        weight = make.noise(shape[-1], scale=0.2, shift=1.0 - offset)
        yield OpCase(_norm_static(shape[-1], dtype, offset), (x, weight))
    yield OpCase(_norm_static(37, dtype, eps=1e-6), (make.noise(4, 37, scale=100.0), make.noise(37)))
    yield OpCase(_norm_static(2048, dtype), (make.noise(5, 2048), make.noise(2048, scale=0.2, shift=1.0)))


def add_rms_norm(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Rows of any width."""
    make = InputFactory(dtype, generator)
    for tokens, hidden, offset in ((1, 64, 0.0), (6, 60, 1.0), (33, 37, 0.0), (2, 576, 1.0)):
        weight = make.noise(hidden, scale=0.2, shift=1.0 - offset)
        residual = make.noise(tokens, hidden, dtype="float32")
        yield OpCase(_norm_static(hidden, dtype, offset), (make.noise(tokens, hidden), residual, weight))


def layer_norm(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """With and without bias and weight; rows far from zero; heads [T, heads, D]."""
    make = InputFactory(dtype, generator)
    for *shape, gains, shift in ((1, 64, 2, 0.0), (5, 60, 1, 0.0), (9, 37, 2, 2.0), (4, 3, 20, 0, 1.0)):
        size = int(shape[-1])
        weights = make.noise(size, scale=0.2, shift=1.0) if gains else None, make.noise(size) if gains > 1 else None
        static = {"hidden": size, "dtype": dtype, "eps": EPS}
        yield OpCase(static, (make.noise(*map(int, shape), shift=shift), *weights))


def linear(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """One to three parts, with and without bias, sizes no vector width divides, a deep and a wide matrix, rounded and
    float32 results."""
    make = InputFactory(dtype, generator)
    sizes: tuple[tuple[int, Sequence[int], int, bool], ...] = (
        (1, (64,), 64, False), (3, (90, 30, 30), 60, True), (17, (33,), 40, False), (5, (88, 88), 37, False),
        (2, (7,), 576, True), (0, (16,), 16, False), *((2, (rows,), columns, True) for rows, columns in LARGE_MATRICES),
    )  # fmt: skip
    for tokens, rows, columns, biased in sizes:
        parts = make.parts(rows, columns)
        weight = _declared(parts, dtype)
        bias = make.noise(weight.rows) if biased else None
        for out in sorted({dtype, "float32"}):
            static = {"weight": weight, "columns": columns, "rows": weight.rows, "dtype": dtype, "out": out}
            yield OpCase(static, (make.noise(tokens, columns), parts, bias))


def grouped_linear(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Rows without a slot, experts without a row, one expert only, no rows at all; matrices of two parts; biases; deep
    and wide matrices."""
    make = InputFactory(dtype, generator)
    sizes: tuple[tuple[int, int, int, tuple[int, ...], int, bool], ...] = (
        (1, 2, 3, (16,), 24, False), (11, 3, 5, (12, 7), 20, True), (0, 2, 2, (8,), 8, False),
        (9, 1, 1, (5,), 33, False), (3, 2, 4, (6,), 10, True), (70, 2, 6, (32,), 64, False),
        *((2, 2, 2, (rows,), columns, True) for rows, columns in LARGE_MATRICES),
    )  # fmt: skip
    for tokens, top, experts, rows, columns, biased in sizes:
        matrices = tuple(make.parts(rows, columns) for _ in range(experts))
        slots = make.ids(experts, tokens, top)
        slots[2::3, 0] = -1
        if tokens == 3:
            slots[:] = -1
        one = _declared(matrices[0], dtype)
        weight = StackedWeight("stack", one.parts, sum(rows), columns, dtype, experts=experts)
        static = {"weight": weight, "experts": experts, "columns": columns, "rows": sum(rows), "dtype": dtype}
        bias = make.noise(experts, sum(rows)) if biased else None
        yield OpCase(static, (make.noise(tokens, columns), matrices, slots, bias))


def rotary(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Heads 9/3 and 1/1, sizes 64, 256 and 80, whole and partial rotation, both pairings, first and last position."""
    make = InputFactory(dtype, generator)
    sizes = (
        (1, 9, 3, 64, 64, False), (7, 9, 3, 64, 64, True), (5, 1, 1, 256, 64, False), (3, 4, 2, 80, 32, True),
        (6, 2, 2, 80, 80, False), (4, 5, 1, 18, 10, True),
    )  # fmt: skip
    for tokens, heads, kv_heads, head_dim, dim, interleaved in sizes:
        length = 130
        positions = make.ids(length, tokens)
        positions[:1], positions[1:2] = length - 1, 0
        inverse = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
        static = {"head_dim": head_dim, "rotary_dim": dim, "interleaved": interleaved, "dtype": dtype}
        heads_in = (make.noise(tokens, heads, head_dim), make.noise(tokens, kv_heads, head_dim))
        yield OpCase(static, (positions, *heads_in, torch.cat((angles.cos(), angles.sin()), dim=-1)))


def act_and_mul(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Every activation; inputs at which they saturate."""
    make = InputFactory(dtype, generator)
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared"):
        for tokens, inner, scale in ((1, 64, 1.0), (5, 88, 3.0), (3, 13, 8.0)):
            static = {"inner": inner, "activation": activation, "dtype": dtype, "alpha": 1.0, "limit": 0.0}
            yield OpCase(static, (make.noise(tokens, 2 * inner, scale=scale),))
    for tokens, inner, scale in ((1, 64, 1.0), (5, 13, 9.0)):
        static = {"inner": inner, "activation": "clamped_swiglu", "dtype": dtype, "alpha": 1.702, "limit": 7.0}
        yield OpCase(static, (make.noise(tokens, 2 * inner, scale=scale),))


def activate(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Every activation; inputs at which they saturate; no rows."""
    make = InputFactory(dtype, generator)
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared"):
        for tokens, inner, scale in ((1, 64, 1.0), (5, 13, 6.0), (0, 8, 1.0)):
            static = {"inner": inner, "activation": activation, "dtype": dtype}
            yield OpCase(static, (make.noise(tokens, inner, scale=scale),))


def take_rows(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Repeated rows, no rows, the last row."""
    make = InputFactory(dtype, generator)
    for tokens, hidden, picked in ((1, 8, 1), (9, 37, 5), (4, 60, 0), (3, 64, 7)):
        rows = make.ids(tokens, picked, dtype=torch.int64)
        rows[:1] = tokens - 1
        yield OpCase({"hidden": hidden, "dtype": dtype}, (make.noise(tokens, hidden), rows))


def softcap(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Values far below and far above the cap."""
    make = InputFactory(dtype, generator)
    for rows, vocab, cap, scale in ((1, 33, 30.0, 1.0), (4, 211, 30.0, 60.0), (2, 64, 50.0, 10.0)):
        yield OpCase({"cap": cap, "dtype": dtype}, (make.noise(rows, vocab, scale=scale),))


def route(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Every scoring, with and without bias, groups and renormalising; equal logits, where the lowest ids win, and which
    count once in a group's best."""
    make = InputFactory("float32", generator)
    kinds = (
        (1, 8, 2, "softmax", True, 1.0, False, (1, 1, 1)), (7, 60, 4, "softmax", False, 1.0, False, (1, 1, 1)),
        (5, 13, 3, "sigmoid", True, 2.5, True, (1, 1, 1)), (9, 16, 16, "sigmoid", False, 1.0, False, (1, 1, 1)),
        (6, 32, 4, "softmax_top", False, 1.0, False, (1, 1, 1)), (8, 24, 5, "sigmoid", True, 2.5, True, (4, 2, 2)),
        (8, 24, 3, "softmax", False, 16.0, False, (6, 3, 1)), (4, 12, 4, "sigmoid", True, 1.0, False, (3, 1, 2)),
    )  # fmt: skip
    for tokens, experts, top, scoring, renormalize, scale, biased, (groups, top_groups, group_best) in kinds:
        static = {"experts": experts, "top": top, "scoring": scoring, "renormalize": renormalize, "scale": scale,
                  "groups": groups, "top_groups": top_groups, "group_best": group_best}  # fmt: skip
        logits = make.permutations(tokens, experts, 0.05) - 0.5
        if not biased:
            logits[-1] = 0.25
            logits[tokens // 2, ::3] = logits[tokens // 2].max() + 0.1
        if not biased and groups > 1:
            each = experts // groups
            logits[1] = -3.0
            logits[1, 0::each] = 0.5 + 0.05 * torch.arange(groups)
            logits[1, 1::each] = 0.1
            # The worst group, unless both of its equal logits count.
            logits[1, -each : 2 - each] = torch.tensor([0.3 if group_best > 1 else 0.2, 0.2])
            logits[1, 2 - each] = 0.2
        bias = torch.arange(experts, dtype=torch.float32).flip(0) * 0.11 if biased else None
        yield OpCase(static, (logits, bias))


def place_experts(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """One place for each expert in any order; spare copies; experts that are elsewhere; no tokens."""
    make = InputFactory("float32", generator)
    for tokens, experts, top, most in ((1, 4, 2, 1), (9, 7, 3, 3), (0, 5, 2, 2), (33, 16, 4, 2)):
        copies = make.ids(most + 1, experts) if most > 1 else torch.ones(experts, dtype=torch.int32)
        order = torch.randperm(experts * most, generator=generator, dtype=torch.int64).int().view(experts, most)
        slots = torch.where(torch.arange(most) < copies[:, None], order, -1).int()
        yield OpCase({"experts": experts}, (make.ids(experts, tokens, top), slots, copies))


def mix_experts(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """One and several experts a token; weights of 0; no tokens."""
    make = InputFactory(dtype, generator)
    for tokens, top, hidden in ((1, 1, 8), (7, 4, 60), (0, 2, 16), (33, 8, 37)):
        weights = make.noise(tokens, top, dtype="float32").abs()
        weights[::2, 0] = 0
        yield OpCase({"hidden": hidden, "dtype": dtype}, (make.noise(tokens, top, hidden), weights))


def encode_attention(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Self attention, and attention over a longer and a shorter sequence; one row, odd heads and widths."""
    make = InputFactory(dtype, generator)
    for rows, seen, heads, dim in ((1, 1, 1, 8), (49, 49, 3, 20), (9, 49, 3, 128), (33, 5, 4, 104), (2, 300, 1, 7)):
        static = {"heads": heads, "head_dim": dim, "scale": dim**-0.5, "dtype": dtype}
        yield OpCase(static, tuple(make.noise(count, heads, dim) for count in (rows, seen, seen)))


def greedy(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """The maximum in the last column, in several columns, in all of them; -inf everywhere else."""
    make = InputFactory(dtype, generator)
    for rows, vocab in ((1, 1), (1, 259), (5, 211), (3, 1000)):
        logits = make.noise(rows, vocab)
        logits[-1] = 0.5
        if rows > 2:
            logits[0, vocab - 1] = 9.0
            logits[1, [3, vocab // 2, vocab - 2]] = 9.0
            logits[2] = -torch.inf
            logits[2, 7] = -3.0
        yield OpCase({"vocab": vocab}, (logits,))


def sample(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Each filter alone, all together, none; greedy rows among them; smallest and largest seeds and positions; the
    largest possible noise on an id of almost no probability, and on one of none; so many draws that scores that are
    slightly wrong change some."""
    make = InputFactory(dtype, generator)
    settings = (
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1),
        (0.9, 40, 0.95, 0.02), (1.0, 1, 1.0, 0.0), (2.0, 10000, 1e-6, 0.0), (0.01, 0, 1.0, 0.0),
    )  # fmt: skip
    for vocab in (33, 259):
        rows = len(settings)
        temperature, top_k, top_p, min_p = (list(column) for column in zip(*settings, strict=True))
        seed = make.ids(2**31 - 1, rows)
        seed[0], seed[1], seed[2] = 0, -1, -(2**31)
        position = make.ids(5000, rows)
        position[0] = 0
        logits, temperatures = make.permutations(rows, vocab, 0.125), torch.tensor(temperature)
        filters = torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p)
        off = torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)
        yield OpCase({"vocab": vocab, "filters": True}, (logits, temperatures, *filters, seed, position))
        yield OpCase({"vocab": vocab, "filters": True}, (logits, temperatures, *off, seed, position))
        yield OpCase({"vocab": vocab, "filters": False}, (logits, temperatures, *off, seed, position))
    rows = 128
    seed, position = make.ids(2**31 - 1, rows), make.ids(5000, rows)
    temperatures = torch.tensor((0.7, 1.0, 1.3, 2.0)).repeat(rows // 4)
    off = torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)
    some = torch.full((rows,), 40, dtype=torch.int32), torch.full((rows,), 0.95), torch.full((rows,), 0.01)
    for filters in (off, some):
        logits = make.noise(rows, 259, scale=3.0, shift=20.0)
        yield OpCase({"vocab": 259, "filters": filters is some}, (logits, temperatures, *filters, seed, position))
    # Hashes whose upper 24 bits are all ones, for the ids 9, 18 and 17.
    seed, position = (torch.tensor(x, dtype=torch.int32) for x in ([61, 406, 703], [2308, 3515, 328]))
    off = torch.zeros(3, dtype=torch.int32), torch.ones(3), torch.zeros(3)
    for low in (-60.0, -torch.inf):
        logits = make.permutations(3, 33, 0.125)
        logits[[0, 1, 2], [9, 18, 17]] = low
        for on in (False, True):
            yield OpCase({"vocab": 33, "filters": on}, (logits, torch.ones(3), *off, seed, position))


def add_bias(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Empty entries, expired entries, no entries at all; -inf, also together with a finite bias on the same id."""
    make = InputFactory("float32", generator)
    for rows, vocab, entries in ((1, 33, 1), (4, 211, 16), (3, 64, 0), (2, 7, 5)):
        ids = torch.stack([torch.randperm(vocab, generator=generator)[:entries] for _ in range(rows)]).to(torch.int32)
        values, until, position = make.noise(rows, entries, scale=50.0), make.ids(40, rows, entries), make.ids(40, rows)
        until[0] = 2**31 - 1
        if entries > 3:
            values[-1, :2] = -torch.inf
            ids[-1, 2:4], until[-1, :3] = ids[-1, 0].item(), torch.tensor([50, 50, 50], dtype=torch.int32)
            ids[:, -1] = until[:, -1] = 0
        yield OpCase({"vocab": vocab}, (make.noise(rows, vocab, scale=4.0), ids, values, until, position))


def penalize(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Each penalty alone, all, none; ids of the prompt, of the output and of both; a sequence of one token and one of
    all columns; two rows with one slot; logits of -inf and 0."""
    make = InputFactory("float32", generator)
    kinds = ((1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, -1.5), (0.7, -0.25, 2.0), (2.0, 2.0, 0.125))
    for vocab, slots, columns in ((33, 7, 24), (259, 6, 40), (5, 9, 70)):
        rows = len(kinds)
        repetition, frequency, presence = (torch.tensor(column) for column in zip(*kinds, strict=True))
        lengths = make.ids(columns - 1, rows) + 2
        lengths[0], lengths[1] = columns, 1
        prompt = torch.minimum(make.ids(columns, rows) + 1, lengths)
        where = torch.arange(rows, dtype=torch.int32)
        where[-1] = 0
        logits = make.noise(rows, vocab, scale=4.0)
        logits[:, 1], logits[:, 2] = -torch.inf, 0.0
        tables = make.ids(vocab, slots, columns), where, prompt, lengths, int(lengths.max())
        yield OpCase({"vocab": vocab}, (logits, *tables, repetition, frequency, presence))


def apply_mask(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Vocabularies that are and are not a multiple of 32; nothing and everything allowed; the sign bit."""
    make = InputFactory(dtype, generator)
    for rows, vocab in ((1, 32), (3, 33), (4, 211), (2, 5)):
        words = -(-vocab // 32)
        mask = make.ids(2**31 - 1, rows, words) * 2 + make.ids(2, rows, words)
        mask[0] = -1
        mask[-1, 0] = -(2**31) if rows > 1 else -1
        yield OpCase({"vocab": vocab}, (make.noise(rows, vocab), mask))


def logprobs(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """None, one and several of the largest; the first and the last id chosen; large logits."""
    make = InputFactory(dtype, generator)
    for rows, vocab, top, step in ((1, 33, 0, 0.125), (3, 211, 1, 0.125), (5, 64, 20, 0.25), (2, 100, 100, 0.25)):
        ids = make.ids(vocab, rows)
        ids[0], ids[-1] = 0, vocab - 1
        yield OpCase({"vocab": vocab}, (make.permutations(rows, vocab, step), ids, top))
