"""Launch sizes, from the device's features: its units, its shared memory, the dtypes of its matrix unit.

A backend sets words in ``DeviceCapabilities.features``: ``units:<multiprocessors>``, ``shared:<bytes per program>``,
``overlap`` (a kernel may start while the previous one finishes), ``warpgroups`` (products of groups of four warps, and
copies of boxes of a tensor), ``short:<tokens>`` and ``short-latent:<tokens>`` (see ``PagedState``, ``LatentState``),
``ptx`` (instructions of compute capability 8.0), ``fp8`` and ``int8`` (products of float8_e4m3fn, of int8),
``scaled-rows`` and ``scaled-blocks`` (torch's products of float8_e4m3fn: with a scale for each row, and with one for
each matrix; with scales of 128 columns of a token and of 128 x 128 blocks of the weight; ``scaled-bytes:<bytes>``: what
these may take for partial sums). A device without these words gets sizes that fit everywhere. Vendor names are not used
here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Variant
from evener_kernels_triton.features import number_of

_UNITS, _SHARED = 64, 48 << 10
#: Up to this many tiles of keys are not split. With four, a layer was 2 µs slower than with one, at 16 requests of 128
#: to 400 tokens on a GPU with 132 units.
MIN_TILES = 1
#: Most tokens for which our products are at least as fast as the library's; and the same where rows give fewer programs
#: than there are units, which the library leaves idle.
MAX_OWN_TOKENS, MAX_OWN_TOKENS_FEW_ROWS = 32, 64
#: The same for weights that the library would need a copy of.
MAX_OWN_TOKENS_STORED = 256
#: Most tokens in a tile for which sums of groups of packed weights are scaled, rather than the weights.
MAX_SUMMED_TOKENS = 16
#: Most columns of stored elements in a tile.
MAX_COLUMNS = 256
#: Most columns of a row of packed weights that one token's product has in one tile.
MAX_TOKEN_COLUMNS = 16384
#: Most tokens in a tile.
MAX_TILE_TOKENS = 128
#: ``triton.even_attention``: tokens of the longest request from which attention is in even parts. Steps of Qwen3-8B on
#: an H200, one request: with 16,384 tokens 5.00 instead of 4.90 ms, with 65,536 6.71 instead of 10.16.
MIN_EVEN_TOKENS = 65536
#: Most splits of a request with long state; half as many otherwise.
MAX_SPLITS = 32
#: Most splits of a request with latent state, and, if that is more, of a few requests together.
MAX_LATENT_SPLITS, MAX_FEW_LATENT_SPLITS = 8, 64
#: Counters that are allocated at a time.
MIN_COUNTERS = 4096


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True)
class Product:
    """Block sizes of a matrix product with few tokens: ``m`` tokens, ``n`` rows of the weight, ``k`` columns at a time,
    all columns split into ``splits`` spans."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1


@dataclass(frozen=True)
class Grouped:
    """Block sizes of products with matrices of a stack: ``m`` pairs of a token and a matrix, ``n`` rows, ``k`` columns.
    ``flip``: few pairs for each matrix; the weights are the left operand."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    flip: bool


@dataclass(frozen=True)
class SingleToken:
    """One token's experts: ``up.m`` programs for each expert, ``up.n`` rows at a time; ``down.n`` rows of all
    experts."""

    up: Product
    down: Product


@dataclass(frozen=True)
class LatentTile:
    """Sizes for attention over latents: ``m`` lines, ``n`` rows of state at a time."""

    m: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LongTile:
    """Sizes for attention of long queries: ``m`` tokens, ``n`` keys a step, ``stages`` steps under way; ``least``
    tokens a request on average, below which the kernel for any mix is faster."""

    m: int
    n: int
    stages: int
    least: int


@dataclass(frozen=True)
class EvenTile:
    """Sizes for attention of one query a request in even parts: ``n`` keys a step, ``stages`` steps under way. A key
    head of a request counts as ``least`` steps at least. It is for captured steps of up to ``heads`` key heads of all
    requests together, one of which has ``even_from`` tokens, or an eighth of that in steps of ``many`` key heads or
    more. ``registers`` of a thread, on average: the rest is for the next kernel, which asks for its weights meanwhile.
    """

    n: int
    stages: int
    least: int
    heads: int
    registers: int
    many: int


Sizes = TypeVar("Sizes", Product, Grouped)
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def memoized(
    rule: Callable[Concatenate[Tuning, Asked], Answer],
) -> Callable[Concatenate[Tuning, Asked], Answer]:
    """A rule whose results are cached by its arguments: without graph capture it is called at every launch."""

    @wraps(rule)
    def ask(self: Tuning, /, *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
        key = (rule, *args, *kwargs.items()) if kwargs else (rule, *args)
        answer: Answer
        try:
            answer = self.answers[key]
        except KeyError:
            answer = self.answers[key] = rule(self, *args, **kwargs)
        return answer

    return ask


class ArrivalCounters:
    """Counters by which programs that sum one tile find which is last; zero between launches. Launches that use them
    must not overlap: two streams need two of these."""

    def __init__(self) -> None:
        self._counters: dict[tuple[torch.device, int], torch.Tensor] = {}

    def of(self, device: torch.device, count: int) -> torch.Tensor:
        """At least ``count`` int32 counters, which never move, because a graph may have captured them. The first call
        allocates them and must not be captured."""
        found = self._counters.get((device, count))
        if found is None:
            key = device, power_of_two(max(count, MIN_COUNTERS))
            if key not in self._counters:
                self._counters[key] = torch.zeros(key[1], dtype=torch.int32, device=device)
            found = self._counters[device, count] = self._counters[key]
        return found


@dataclass(frozen=True)
class Tuning:
    """Launch sizes for one device.

    Attributes:
        units: programs that can run at the same time, at least.
        shared: bytes of shared memory that a program may have.
        overlap: kernels themselves wait for the previous kernel.
        warpgroups: the device has products of warp groups.
        ptx: the device takes PTX of compute capability 8.0.
        float8, integers: its matrix unit multiplies float8_e4m3fn, int8.
        scaled_rows, scaled_blocks: so does torch's library, with scales of rows or one, with those of blocks; with up
            to ``scaled_bytes`` of partial sums.
        even_from: tokens of the longest request from which captured attention is in even parts (``EvenTile``).
        changes: measured sizes that are better than those of the rules below, by field; for the products of a composite
            by "part.field".
        arrivals: counters of programs that share a sum.
        answers: cached results of the rules, by rule and arguments.
    """

    units: int
    shared: int
    overlap: bool
    changes: tuple[tuple[str, int | str], ...] = ()
    arrivals: ArrivalCounters = field(default_factory=ArrivalCounters, compare=False, repr=False)
    answers: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    warpgroups: bool = False
    ptx: bool = False
    float8: bool = False
    integers: bool = False
    scaled_rows: bool = False
    scaled_blocks: bool = False
    scaled_bytes: int = 0
    even_from: int = MIN_EVEN_TOKENS

    @classmethod
    def of(cls, device: DeviceCapabilities, overlap: bool = True, even_from: int = MIN_EVEN_TOKENS) -> Tuning:
        """Make it from the features of a device."""
        return cls(
            number_of("units", device.features, _UNITS),
            number_of("shared", device.features, _SHARED),
            overlap and "overlap" in device.features,
            warpgroups="warpgroups" in device.features,
            ptx="ptx" in device.features,
            float8="fp8" in device.features,
            integers="int8" in device.features,
            scaled_rows="scaled-rows" in device.features,
            scaled_blocks="scaled-blocks" in device.features,
            scaled_bytes=number_of("scaled-bytes", device.features, 0),
            even_from=even_from,
        )

    def with_changes(self, variant: Variant) -> Tuning:
        """A copy with these changes."""
        return replace(self, changes=tuple(variant.items())) if variant else self

    def part(self, name: str) -> Tuning:
        """A copy with the changes for one part of a composite."""
        own = ((key.removeprefix(name + "."), value) for key, value in self.changes if key.startswith(name + "."))
        return replace(self, changes=tuple(own)) if self.changes else self

    def changed(self, field: str) -> bool:
        """Whether there is a change with this name."""
        return any(key == field for key, _ in self.changes)

    @property
    def resized(self) -> bool:
        """Whether there are changes, other than those of a part."""
        return any("." not in key for key, _ in self.changes)

    def _apply_changes(self, sizes: Sizes) -> Sizes:
        """The sizes of a rule, with the changes."""
        own: dict[str, Any] = {key: value for key, value in self.changes if hasattr(sizes, key)}
        return replace(sizes, **own) if own else sizes

    @property
    def converts(self) -> bool:
        """Whether the device has instructions that convert float8_e4m3fn, in PTX."""
        return self.ptx and self.float8

    @property
    def launch(self) -> dict[str, bool]:
        """Extra arguments of a launch whose kernel itself waits for the previous one."""
        return {"launch_pdl": True} if self.overlap else {}

    @memoized
    def persistent_gemv(self, rows: int, columns: int, halves: int, stored: bool = False) -> Product | None:
        """One token, rows that fit into one tile, programs that loop over rows; ``m`` is programs for each unit. None
        where that is slower: rows that are too long, or as many as the head of a model has.

        Measured on a GPU with 132 units, for products of models with 1,024 and 4,096 columns; ``stored``, weights of
        one byte an element, with 4,096 (of 26 sizes, those near the best with scales of rows and of blocks).
        """
        k = power_of_two(columns)
        if not 16 <= k <= 4096 or rows > 512 * self.units or (stored and columns % 4):
            return None
        if stored:
            n, each, warps = 2, 4, 4
        elif halves == 2:
            n, each, warps = (2, 6, 8) if k <= 1024 else (1, 8, 8)
        elif k <= 1024:
            n, each, warps = 2, 8, 8
        elif rows > columns:
            n, each, warps = 4, 2, 16
        else:
            n, each, warps = (2, 4, 4) if k > 2048 else (4, 2, 4)
        return self._apply_changes(Product(each, n, k, warps, 1))

    @memoized
    def gemv(self, rows: int, columns: int, halves: int, stored: bool = False) -> Product:
        """One token, rows of any length. A program takes several rows as long as every unit has several programs.

        Weights of one byte an element: an H100 with a read speed of 3.12 TB/s took 18.0 µs for 4,096 x 12,288 (floor
        16.1); of 12 other sizes none was faster.
        """
        if stored:
            k = max(16, power_of_two(min(columns, 1024)))
            return self._apply_changes(Product(1, 4 // halves, k, 2 if k >= 1024 else 1, 1))
        k = power_of_two(min(columns, 2048))
        n = 2 if rows * halves >= 16 * self.units and halves == 1 else 1
        return self._apply_changes(Product(1, n, k, 8 if n * k * halves >= 2048 else 4, 1))

    @memoized
    def uses_own_product(self, tokens: int, rows: int, stored: bool = False) -> bool:
        """Whether our products are used: as measured, or else by a rule from other sizes. ``stored``: the library would
        need a copy of the weight in the compute dtype."""
        if self.changed("library") or self.changed("own"):
            return self.changed("own")
        if stored:
            return tokens <= MAX_OWN_TOKENS_STORED
        return tokens <= MAX_OWN_TOKENS or (tokens <= MAX_OWN_TOKENS_FEW_ROWS and -(-rows // 64) <= self.units)

    @memoized
    def skinny(self, tokens: int, rows: int, columns: int, element: int) -> Product:
        """A few tokens: a program has as many rows as a matrix unit takes; columns are split into as many spans (a
        power of two, 8 at most, each two tiles long) as still give every program its own unit; stages fill shared
        memory.

        Measured on a GPU with 132 units, µs: 4,096 x 4,096 at 16 tokens 10.9 unsplit, 10.7 in two spans; 2,048 x 4,096
        8.8 unsplit, 6.8 in four spans and 10.2 with tiles of 32 rows instead; 6,144 x 4,096 14.6 unsplit, 17.3 in two
        spans, which is more programs than units. At 64 tokens six stages are faster than seven.
        """
        m = max(16, power_of_two(tokens))
        n = max(16, min(64, power_of_two(rows)))
        k = max(16, min(128, power_of_two(columns)))
        while k > 32 and 2 * (m + n) * k * element > self.shared:
            k //= 2
        stages = max(2, min(8 if m < 64 else 6, (self.shared - 1024) // ((m + n) * k * element)))
        tiles, splits = -(-rows // n) * -(-tokens // m), 1
        while splits < 8 and 2 * splits * tiles <= self.units and 4 * splits * k <= columns:
            splits *= 2
        return self._apply_changes(Product(m, n, k, 4, stages, splits))

    @memoized
    def stored(self, tokens: int, rows: int, columns: int, element: int, most: int) -> Product:
        """Weights of one byte an element, ``most`` columns at a time at most; x has ``element`` bytes. Splits as in
        ``skinny``, but until there are several programs for each unit.

        The rule follows sweeps of sizes on a GPU with 132 units. With 64 tokens the best took, for 6,144 x 4,096,
        4,096 x 4,096, 24,576 x 4,096 and 4,096 x 12,288 with a scale a row, 18.1, 14.2, 46.7 and 30.0 µs. With up to 16
        tokens these four products and two norms took 83.4 µs on an H100 (reading takes 61.9), and 97.3 with tiles of 64
        rows and twice as many spans; with scales of 128 x 128 91.0 and 96.6.
        """
        m = max(16, min(MAX_TILE_TOKENS, power_of_two(tokens)))
        n = max(16, min(32 if m == 16 else 64, power_of_two(rows)))
        k = min(max(16, most), max(16, min(MAX_COLUMNS if m == 16 else 64, power_of_two(columns))))
        # A tile of the weight is there as it is stored, and in x's dtype.
        while k > 32 and 2 * (m * element + n * (1 + element)) * k > self.shared:
            k //= 2
        # Rows of few tiles that are long hide the latency of memory by stages, not by other programs.
        tiles, splits = -(-rows // n) * -(-tokens // m), 1
        if m == 16:
            stages, programs = 4 if tiles < 2 * self.units else 3, 1 if tiles >= self.units else 2 if k > 128 else 4
        else:
            stages, programs = (7 if rows <= columns else 5, 3) if m <= 64 else (3, 2)
        stages = max(2, min(stages, (self.shared - 1024) // ((m * element + n) * k)))
        while splits < 8 and 2 * splits * tiles <= programs * self.units and 8 * splits * k <= columns:
            splits *= 2
        return self._apply_changes(Product(m, n, k, 4, stages, splits))

    @memoized
    def rounded(self, tokens: int, rows: int, columns: int, most: int) -> Product:
        """Weights and activations of one byte an element, ``most`` columns at a time at most.

        With up to 64 tokens a product takes as long as reading the weight: small tiles, several programs for each unit,
        and splits as in ``stored``. Programs of a span have three stages, so that one more fits on a multiprocessor.
        Up to 256 tokens, tiles have half the rows if whole ones gave each unit less than two programs: 48 tiles in four
        spans took 33 µs on 132 units, 6,144 x 4,096 at 128 tokens, twice as long as reading.
        """
        wide = 64 if tokens <= 64 else 128
        few = tokens <= 256 and -(-rows // 128) * -(-tokens // 128) < 2 * self.units
        m, n = max(16, min(wide, power_of_two(tokens))), max(16, min(64 if few else wide, power_of_two(rows)))
        k = min(most, max(32, min(128, power_of_two(columns))))
        tiles, splits, programs = -(-rows // n) * -(-tokens // m), 1, 3 if wide == 64 else 2
        while splits < 8 and 2 * splits * tiles <= programs * self.units and 8 * splits * k <= columns:
            splits *= 2
        stages = max(2, min(3 if wide == 64 and splits > 1 else 4, (self.shared - 1024) // ((m + n) * k)))
        found = self._apply_changes(Product(m, n, k, 8 if m * n > 8192 else 4, stages, splits))
        return replace(found, k=min(found.k, most))

    @memoized
    def rounded_grouped(self, pairs: int, matrices: int, rows: int, columns: int, halves: int, most: int) -> Product:
        """The same with matrices of a stack; tiles of pairs as in ``grouped``.

        Measured on an H100 for 128 matrices of 1,536 x 2,048 and 2,048 x 768, eight for each token: with 256 tokens
        146.5 and 79.7 µs (floors 129 and 65), 157.4 and 90.6 with half the rows of gate and up, tiles of 32 pairs of
        the others and 4 stages. With 64 tokens 142.7 and 73.8 (128 and 64).
        """
        m = max(16, min(128, power_of_two(-(-2 * pairs // matrices))))
        few, small = pairs <= 8 * matrices, m <= 32
        if small and halves == 1:
            m = 16
        n = max(16, min(128 if small and not few else 128 // halves, power_of_two(rows)))
        k = min(most, max(32, min(128, power_of_two(columns))))
        stages = max(2, min(3 if small else 4, (self.shared - 1024) // ((m + halves * n) * k)))
        warps = (8 if few else 4) if small else 8 if m * n * halves > 8192 else 4
        found = self._apply_changes(Product(m, n, k, warps, stages))
        return replace(found, k=min(found.k, most))

    @memoized
    def packed(self, tokens: int, rows: int, columns: int, wide: int, element: int) -> Product:
        """Packed weights, whose rows have spans of ``wide`` columns; x has ``element`` bytes. Splits of the spans as in
        ``stored``."""
        if tokens <= MAX_SUMMED_TOKENS:
            m, n, warps, stages, programs = 8 if tokens <= 8 else 16, 32, 2, 3, 8
        else:
            m, n, warps, stages, programs = min(MAX_TILE_TOKENS, power_of_two(tokens)), 64, 4, 2, 3
        n = max(16, min(n, power_of_two(rows)))
        m, stages = self._fitting(m, n, wide, element, stages)
        tiles, splits, spans = -(-rows // n) * -(-tokens // m), 1, -(-columns // wide)
        while splits < 8 and 2 * splits * tiles <= programs * self.units and 4 * splits <= spans:
            splits *= 2
        return self._apply_changes(Product(m, n, wide, warps, stages, splits))

    @memoized
    def packed_token(self, rows: int, columns: int, halves: int, group: int, table: bool = False) -> Product | None:
        """One token and packed weights of four bits, ``group`` columns of which share a scale: as ``persistent_gemv``;
        None if a row does not fit into one tile. ``table``: numbers are looked up, which takes more registers. Measured
        on an H200, of 40 sizes for each product of Qwen3-8B's layers. A thread has one piece of 32 columns, or two.
        """
        k = max(128, power_of_two(columns))
        if k > MAX_TOKEN_COLUMNS:
            return None
        warps, n = max(1, min(16 if table else 8, k // 1024)), 8 // halves
        each = 2 if halves == 1 else 4 if group >= 128 else 6
        if k > 4096:
            n, each = 4 // halves if table or group >= 128 else 2 // halves, 1 if table else each
        elif table:
            n, each = (n, 3) if rows * halves >= 40 * self.units else (n // 2, 4)
        return self._apply_changes(Product(each, max(1, n), k, warps, 1))

    @memoized
    def packed_grouped(self, pairs: int, matrices: int, rows: int, wide: int, element: int, searched: int) -> Product:
        """Packed matrices of a stack, as ``grouped``; ``searched``: tokens that programs search, which a tile holds; 0:
        pairs are listed."""
        m = max(8, min(64, power_of_two(searched or -(-2 * pairs // matrices))))
        n, warps, stages = (32, 2, 3) if m <= MAX_SUMMED_TOKENS else (64, 4, 2)
        if searched == 1:
            n, warps = 16, 1
        n = max(16, min(n, power_of_two(rows)))
        small, stages = self._fitting(m, n, wide, element, stages)
        return self._apply_changes(Product(m if searched else small, n, wide, warps, stages))

    def _fitting(self, m: int, n: int, wide: int, element: int, stages: int) -> tuple[int, int]:
        """(tokens, stages) for spans of ``wide`` columns in shared memory: x, and the words of ``n`` rows."""
        while stages * wide * (m * element + n) > self.shared - 1024 and (m > 8 or stages > 1):
            m, stages = (m // 2, stages) if m > MAX_SUMMED_TOKENS else (m, stages - 1) if stages > 1 else (8, 1)
        return m, stages

    @memoized
    def grouped(self, pairs: int, matrices: int, rows: int, columns: int, halves: int, element: int) -> Grouped:
        """Products with matrices of a stack. A tile holds twice the pairs that a matrix gets of ``pairs`` in an even
        distribution, so that few matrices are read twice."""
        m = max(16, min(128, power_of_two(-(-2 * pairs // matrices))))
        flip = m < 64
        if self.shared < 96 << 10:
            m, wide = min(m, 64), 64 * halves
        elif m == 128 and element <= 2:
            wide = 256
        else:
            wide = 64 * halves if flip else 128
        n = max(16, min(wide // halves, power_of_two(rows)))
        k = max(16, min(128 if m == 16 else 64, power_of_two(columns)))
        while k > 16 and 2 * (m + halves * n) * k * element > self.shared - 1024:
            k //= 2
        most = 3 if k > 64 or wide == 256 else 4
        stages = max(2, min(most, (self.shared - 1024) // ((m + halves * n) * k * element)))
        return self._apply_changes(Grouped(m, n, k, 8 if m * n * halves > 8192 else 4, stages, flip))

    @memoized
    def single_token(self, hidden: int, inner: int, top: int, narrow: bool = False) -> SingleToken | None:
        """One token and its ``top`` choices; None if its row does not fit into one tile. ``narrow``: ``down`` has one
        byte an element, or shared experts are choices. A layer of Qwen3-30B-A3B with bytes took 27.5 µs on an H200 with
        128 columns, 31.1 with 256; one of DeepSeek-V2-Lite 40.7 and 44.5."""
        k = power_of_two(hidden)
        if not 16 <= k <= 4096:
            return None
        up = Product(max(1, -(-2 * self.units // top)), max(1, 8192 // k), k, 4, 1)
        wide = max(16, min(128 if narrow else 256, power_of_two(inner)))
        down = Product(1, max(1, 16384 // (power_of_two(top) * wide)), wide, 16, 1)
        return SingleToken(self.part("up")._apply_changes(up), self.part("down")._apply_changes(down))

    @memoized
    def scores(self, tokens: int, experts: int, columns: int, element: int) -> tuple[Product, int]:
        """Products of a router, and the number of spans of columns, a power of two."""
        k = max(16, min(128 if element <= 2 else 32, power_of_two(columns)))
        m, n = 16 if tokens <= 64 else 64, max(16, min(64, power_of_two(experts)))
        parts = power_of_two(max(1, self.units // (2 * -(-tokens // m) * -(-experts // n))))
        return Product(m, n, k, 4, 2), min(parts, 16, power_of_two(columns) // k)

    @memoized
    def decode_tile(self, wide: int, element: int) -> tuple[int, int, int]:
        """(keys per tile, warps, stages) for heads of ``wide`` elements (keys and values together: twice)."""
        n = 64 if wide <= 128 else 32 if wide <= 256 else 16
        while n > 16 and 2 * 2 * n * wide * element > self.shared:
            n //= 2
        stages = max(2, min(3, self.shared // (2 * n * wide * element)))
        return n, 4, stages

    @memoized
    def mixed_tile(self, wide: int, group: int, element: int) -> tuple[int, int, int, int]:
        """(query lines, keys per tile, warps, stages)."""
        if element > 2:
            # No matrix unit takes these, so a product is unrolled: with tiles of 64 a kernel takes 7 s to compile and
            # has 790 KB.
            m, n = max(32, power_of_two(group)), 32 if wide <= 128 else 16
            return m, n if (m + 2 * n) * wide * element <= self.shared else 16, 8, 1
        m = 128 if wide <= 128 and self.shared >= 160 << 10 else 64 if wide <= 128 else 32
        m = max(m, 16, power_of_two(group))
        if m == wide == 128:
            return m, 32, 4, 3  # 163 µs; 64 keys, 8 warps and 2 stages took 198 (16 prompts of 512, 32 heads)
        n = 64 if wide <= 128 else 32
        while n > 16 and (m + 2 * 2 * n) * wide * element > self.shared:
            n //= 2
        # Two programs on a unit hide each other's latency better than a third stage does.
        stages = max(1, min(2, (self.shared - m * wide * element) // (2 * n * wide * element)))
        return m, n, 8 if m >= 128 else 4, stages

    @memoized
    def long_tile(self, wide: int) -> LongTile | None:
        """For heads of ``wide`` 16-bit numbers; None where there are no sizes. Measured on a GPU with 132 units."""
        sizes = {64: LongTile(128, 128, 2, 1024), 128: LongTile(128, 128, 2, 128), 256: LongTile(128, 64, 2, 32)}
        tile = sizes.get(wide)
        fits = tile is not None and (tile.m + 2 * tile.stages * tile.n) * wide * 2 + 1024 <= self.shared
        return tile if fits else None

    @memoized
    def even_tile(self, wide: int) -> EvenTile | None:
        """For heads of ``wide`` 16-bit numbers; None where there are no sizes. Measured on a GPU with 132 units."""
        sizes = {64: EvenTile(128, 2, 2, 32, 128, 33), 128: EvenTile(128, 2, 2, 64, 128, 64),
                 256: EvenTile(64, 2, 2, 64, 168, 16)}  # fmt: skip
        tile = sizes.get(wide)
        fits = tile is not None and (64 + 2 * tile.stages * tile.n) * wide * 2 + 2048 <= self.shared
        return tile if fits else None

    def even_programs(self, heads: int) -> int:
        """Programs for ``heads`` key heads of all requests together: nearly all units, and if possible none with parts
        of two heads where states are equally long."""
        whole = self.units // heads * heads
        return whole if 20 * whole >= 19 * self.units else self.units

    def splits(self, programs: int, longest: int, tile: int) -> int:
        """Number of splits of a request's keys that fills the device, a power of two.

        Measured on a GPU with 132 units: one request of 16,384 tokens with 8 key heads takes 41.5 µs in 16 splits and
        29.2 in 32; of 128 tokens 6.0 and 6.9.
        """
        wanted = power_of_two(max(1, (4 * self.units) // max(1, programs)))
        most = MAX_SPLITS if longest >= 128 * tile else MAX_SPLITS // 2
        return max(1, min(wanted, most, power_of_two(-(-longest // (tile * MIN_TILES)))))

    @memoized
    def latent_tile(self, heads: int, element: int, programs: int) -> LatentTile:
        """Decode over latents, by ``programs`` tiles of heads.

        Measured on a GPU with 132 units and 16 heads: two programs per unit with two tiles in flight in each are
        fastest if there are enough programs, else one with three (16 requests of 264 tokens: 10.2 µs, 11.8
        with one tile in flight). State as the left operand is as fast at 64 requests and a sixth slower at 256;
        products in four batches of a quarter of the latent are slower by half.
        """
        if not self._has(160, element):
            return LatentTile(16, 16, 4, 1)
        m = max(16, min(64, power_of_two(heads))) if self._has(200, element) else 16
        alone = 4 if m == 16 else 2
        return LatentTile(m, 32, 4 if m == 16 else 8, 3 if programs > self.units else alone)

    @memoized
    def latent_mixed_tile(self, element: int) -> LatentTile:
        """Any query lengths over latents."""
        if self._has(200, element):
            return LatentTile(64, 32, 8, 2)
        return LatentTile(16, 32, 4, 2) if self._has(160, element) else LatentTile(16, 16, 4, 1)

    @memoized
    def prefill_tile(self, element: int) -> Product:
        """Whole prompts over expanded keys and values: ``m`` queries, ``n`` keys."""
        if self._has(200, element):
            return Product(128, 64, 0, 8, 2)
        if self._has(160, element):
            return Product(64, 64, 0, 4, 2)
        return Product(32, 32 if element <= 2 else 16, 0, 4, 1)

    def _has(self, kilobytes: int, element: int) -> bool:
        """Whether a program may have this much shared memory, and elements have two bytes at most."""
        return self.shared >= kilobytes << 10 and element <= 2

    def latent_splits(self, programs: int, requests: int, longest: int, tile: LatentTile) -> int:
        """As ``splits``. But a split's partial result is as large as the state of 32 tokens, so the device is filled
        only once, and splits are limited: a few requests share their limit, a power of two for each."""
        wanted, tiles = power_of_two((2 * self.units) // max(1, programs) + 1) // 2, -(-longest // (tile.n * MIN_TILES))
        most = max(MAX_LATENT_SPLITS, power_of_two(MAX_FEW_LATENT_SPLITS // max(1, requests) + 1) // 2)
        return max(1, min(wanted, most, power_of_two(tiles)))

    @memoized
    def latent_product(self, tokens: int, rank: int) -> Product:
        """Projection of one head's queries into latent space; ``n``: columns of it for each program."""
        m = max(16, min(64, power_of_two(tokens)))
        return Product(m, min(128 if m == 64 and tokens > 64 else 64, max(16, power_of_two(rank))), 0, 4, 1)

    @memoized
    def latent_values(self, tokens: int, value: int, rank: int) -> Product:
        """One head's values: ``m`` tokens (of one, parts at a time), ``n`` values, ``k`` of the latent."""
        wide = max(16, power_of_two(value))
        if tokens == 1:
            return Product(32, min(wide, 16), min(rank, 512), 8, 1)
        m = max(16, min(64, power_of_two(tokens)))
        return Product(m, min(wide, 32 if m * tokens <= 4096 else 64), min(rank, 64), 4, 3)
