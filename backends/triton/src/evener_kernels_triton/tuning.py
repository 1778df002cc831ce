"""Sizes of launches, by what the device says of itself: its units, its shared memory, what its matrix unit takes.

A backend puts words into ``DeviceCapabilities.features``: ``units:<multiprocessors>``, ``shared:<bytes a program may
have>``, ``overlap`` (a kernel may start while the one before it drains). A device that says nothing gets sizes that fit
everywhere. No vendor's name is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Variant

_UNITS, _SHARED = 64, 48 << 10
#: Tiles of keys that are not worth being split. Four were 2 µs a layer slower than one, at 16 requests of 128 to 400
#: tokens on a GPU with 132 units.
LEAST = 1
#: Most tokens for which the own products are at least as fast as the library's, and for which they are where rows make
#: fewer programs than there are units, which the library leaves idle.
FEW, FEW_WITH_FEW_ROWS = 32, 64
#: Most parts that a request over latents is cut into.
MOST_LATENT_SPLITS = 8
#: Counters that are made at once.
FEWEST_ARRIVALS = 4096


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True)
class Product:
    """Block sizes of a matrix product with few tokens: ``m`` tokens, ``n`` rows of the weight, ``k`` columns at a time,
    all of them cut into ``splits`` spans."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1


@dataclass(frozen=True)
class Grouped:
    """Block sizes of products with matrices of a stack: ``m`` pairs of a token and a matrix, ``n`` rows, ``k`` columns.
    ``flip``: few of them a matrix; the weights are the left side."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    flip: bool


@dataclass(frozen=True)
class Lone:
    """One token's experts: ``up.m`` programs an expert, ``up.n`` rows at a time; ``down.n`` rows of all experts."""

    up: Product
    down: Product


@dataclass(frozen=True)
class LatentTile:
    """Sizes for attention over latents: ``m`` lines, ``n`` rows of state a step."""

    m: int
    n: int
    warps: int
    stages: int


Sizes = TypeVar("Sizes", Product, Grouped)
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def remembered(
    rule: Callable[Concatenate[Tuning, Asked], Answer],
) -> Callable[Concatenate[Tuning, Asked], Answer]:
    """A rule that is worked out once for each of what it is asked: a step that is not captured asks at every launch."""

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


class Arrivals:
    """Counters with which programs that add up one tile find out who is last; zero between launches. Launches that use
    them follow each other: two streams need two of these."""

    def __init__(self) -> None:
        self._counters: dict[tuple[torch.device, int], torch.Tensor] = {}

    def of(self, device: torch.device, count: int) -> torch.Tensor:
        """At least ``count`` counters, int32, which stay where they are: a graph may have recorded them. The first call
        makes them, and may not be recorded."""
        found = self._counters.get((device, count))
        if found is None:
            key = device, power_of_two(max(count, FEWEST_ARRIVALS))
            if key not in self._counters:
                self._counters[key] = torch.zeros(key[1], dtype=torch.int32, device=device)
            found = self._counters[device, count] = self._counters[key]
        return found


@dataclass(frozen=True)
class Tuning:
    """What kernels ask before a launch.

    Attributes:
        units: programs that can run side by side at least.
        shared: bytes of shared memory that a program may have.
        overlap: kernels wait by themselves for the one before.
        changes: sizes that were measured to be better than those of the rules below, by field; of the products of a
            composite by "part.field".
        arrivals: counters of programs that share a sum.
        answers: of its rules so far, by rule and what it was asked.
    """

    units: int
    shared: int
    overlap: bool
    changes: tuple[tuple[str, int | str], ...] = ()
    arrivals: Arrivals = field(default_factory=Arrivals, compare=False, repr=False)
    answers: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, device: DeviceCapabilities, overlap: bool = True) -> Tuning:
        """From the words of a device."""
        return cls(
            _number("units", device.features, _UNITS),
            _number("shared", device.features, _SHARED),
            overlap and "overlap" in device.features,
        )

    def varied(self, variant: Variant) -> Tuning:
        """With these changes."""
        return replace(self, changes=tuple(variant.items())) if variant else self

    def part(self, name: str) -> Tuning:
        """With the changes for one part of a composite."""
        own = ((key.removeprefix(name + "."), value) for key, value in self.changes if key.startswith(name + "."))
        return replace(self, changes=tuple(own)) if self.changes else self

    def changed(self, field: str) -> bool:
        """Whether there is a change of this name."""
        return any(key == field for key, _ in self.changes)

    def _own(self, sizes: Sizes) -> Sizes:
        """Sizes of the rules, with the changes."""
        own: dict[str, Any] = {key: value for key, value in self.changes if hasattr(sizes, key)}
        return replace(sizes, **own) if own else sizes

    @property
    def launch(self) -> dict[str, bool]:
        """Extra arguments of a launch whose kernel waits by itself."""
        return {"launch_pdl": True} if self.overlap else {}

    @remembered
    def stream(self, rows: int, columns: int, halves: int) -> Product | None:
        """One token, rows that fit into one tile, programs that go on to the next rows; ``m`` is programs a unit. None
        where that does not pay: rows too long, or so many that the head of a model is meant.

        Measured on a GPU with 132 units, for products of models with 1,024 and 4,096 columns.
        """
        k = power_of_two(columns)
        if not 16 <= k <= 4096 or rows > 512 * self.units:
            return None
        if halves == 2:
            n, each, warps = (2, 6, 8) if k <= 1024 else (1, 8, 8)
        elif k <= 1024:
            n, each, warps = 2, 8, 8
        elif rows > columns:
            n, each, warps = 4, 2, 16
        else:
            n, each, warps = (2, 4, 4) if k > 2048 else (4, 2, 4)
        return self._own(Product(each, n, k, warps, 1))

    @remembered
    def gemv(self, rows: int, columns: int, halves: int) -> Product:
        """One token, rows of any length. Rows are joined while every unit has several programs."""
        k = power_of_two(min(columns, 2048))
        n = 2 if rows * halves >= 16 * self.units and halves == 1 else 1
        return self._own(Product(1, n, k, 8 if n * k * halves >= 2048 else 4, 1))

    @remembered
    def few(self, tokens: int, rows: int) -> bool:
        """Whether products are the own ones: as measured, or else by what is known of other sizes."""
        if self.changed("library") or self.changed("own"):
            return self.changed("own")
        return tokens <= FEW or (tokens <= FEW_WITH_FEW_ROWS and -(-rows // 64) <= self.units)

    @remembered
    def skinny(self, tokens: int, rows: int, columns: int, element: int) -> Product:
        """A few tokens: as many rows a program as a matrix unit takes, columns in as many spans (a power of two, 8 at
        most, each two tiles long) as leave every program a unit of its own, and stages that fill shared memory.

        Measured on a GPU with 132 units, µs: 4,096 x 4,096 at 16 tokens 10.9 whole, 10.7 in two; 2,048 x 4,096 8.8
        whole, 6.8 in four and 10.2 with tiles of 32 rows instead; 6,144 x 4,096 14.6 whole, 17.3 in two, which is more
        programs than units. At 64 tokens six stages are faster than seven.
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
        return self._own(Product(m, n, k, 4, stages, splits))

    @remembered
    def grouped(self, pairs: int, matrices: int, rows: int, columns: int, halves: int, element: int) -> Grouped:
        """Products with matrices of a stack. Tiles hold twice what a matrix gets of ``pairs`` if all get the same, so
        that few are read twice."""
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
        return self._own(Grouped(m, n, k, 8 if m * n * halves > 8192 else 4, stages, flip))

    @remembered
    def lone(self, hidden: int, inner: int, top: int) -> Lone | None:
        """One token and its ``top`` experts; None where its row does not fit into one tile."""
        k = power_of_two(hidden)
        if not 16 <= k <= 4096:
            return None
        up = Product(max(1, -(-2 * self.units // top)), max(1, 8192 // k), k, 4, 1)
        wide = min(256, power_of_two(inner))
        down = Product(1, max(1, 16384 // (power_of_two(top) * wide)), wide, 16, 1)
        return Lone(self.part("up")._own(up), self.part("down")._own(down))

    @remembered
    def scores(self, tokens: int, experts: int, columns: int, element: int) -> tuple[Product, int]:
        """Products of a router, and the parts that columns are cut into: a power of two."""
        k = max(16, min(128 if element <= 2 else 32, power_of_two(columns)))
        m, n = 16 if tokens <= 64 else 64, max(16, min(64, power_of_two(experts)))
        parts = power_of_two(max(1, self.units // (2 * -(-tokens // m) * -(-experts // n))))
        return Product(m, n, k, 4, 2), min(parts, 16, power_of_two(columns) // k)

    @remembered
    def decode_tile(self, wide: int, element: int) -> tuple[int, int, int]:
        """Keys a tile, warps, stages for heads of ``wide`` elements (keys and values together: twice)."""
        n = 64 if wide <= 128 else 32 if wide <= 256 else 16
        while n > 16 and 2 * 2 * n * wide * element > self.shared:
            n //= 2
        stages = max(2, min(3, self.shared // (2 * n * wide * element)))
        return n, 4, stages

    @remembered
    def mixed_tile(self, wide: int, group: int, element: int) -> tuple[int, int, int, int]:
        """Query lines, keys a tile, warps, stages."""
        if element > 2:
            # No matrix unit takes these, so a product is written out: with tiles of 64 a kernel takes 7 s to compile
            # and is 790 KB long.
            m, n = max(32, power_of_two(group)), 32 if wide <= 128 else 16
            return m, n if (m + 2 * n) * wide * element <= self.shared else 16, 8, 1
        m = 128 if wide <= 128 and self.shared >= 160 << 10 else 64 if wide <= 128 else 32
        m = max(m, 16, power_of_two(group))
        if m == wide == 128:
            return m, 32, 4, 3  # 163 µs where 64 keys, 8 warps and 2 stages took 198: 16 prompts of 512, 32 heads
        n = 64 if wide <= 128 else 32
        while n > 16 and (m + 2 * 2 * n) * wide * element > self.shared:
            n //= 2
        # Two programs side by side hide each other's waits better than a third stage does.
        stages = max(1, min(2, (self.shared - m * wide * element) // (2 * n * wide * element)))
        return m, n, 8 if m >= 128 else 4, stages

    def splits(self, programs: int, longest: int, tile: int) -> int:
        """How many parts a request's keys are cut into, so that the device is full; a power of two."""
        wanted = power_of_two(max(1, (4 * self.units) // max(1, programs)))
        return max(1, min(wanted, 16, power_of_two(-(-longest // (tile * LEAST)))))

    @remembered
    def latent_tile(self, heads: int, element: int, programs: int) -> LatentTile:
        """Decode over latents, by ``programs`` tiles of heads.

        Measured on a GPU with 132 units and 16 heads: two programs a unit with two tiles under way in each are fastest
        where there are so many programs, one with three where there are not (16 requests of 264 tokens: 10.2 µs, 11.8
        with one tile under way). State on the left side of
        the products is as fast at 64 requests and a sixth slower at 256; products in four batches of a quarter of the
        latent are slower by half.
        """
        if not self._has(160, element):
            return LatentTile(16, 16, 4, 1)
        m = max(16, min(64, power_of_two(heads))) if self._has(200, element) else 16
        alone = 4 if m == 16 else 2
        return LatentTile(m, 32, 4 if m == 16 else 8, 3 if programs > self.units else alone)

    @remembered
    def latent_mixed_tile(self, element: int) -> LatentTile:
        """Any query lengths over latents."""
        if self._has(200, element):
            return LatentTile(64, 32, 8, 2)
        return LatentTile(16, 32, 4, 2) if self._has(160, element) else LatentTile(16, 16, 4, 1)

    @remembered
    def prompt_tile(self, element: int) -> Product:
        """Whole prompts over expanded keys and values: ``m`` queries, ``n`` keys."""
        if self._has(200, element):
            return Product(128, 64, 0, 8, 2)
        if self._has(160, element):
            return Product(64, 64, 0, 4, 2)
        return Product(32, 32 if element <= 2 else 16, 0, 4, 1)

    def _has(self, kilobytes: int, element: int) -> bool:
        """So much shared memory, for elements of two bytes."""
        return self.shared >= kilobytes << 10 and element <= 2

    def latent_splits(self, programs: int, longest: int, tile: LatentTile) -> int:
        """As ``splits``, but what a part leaves to be merged is as large as what it read of 32 tokens, so a device is
        filled once and no more, and no request is cut into more than ``MOST_LATENT_SPLITS``."""
        wanted = power_of_two(max(1, (2 * self.units) // max(1, programs)) + 1) // 2
        return max(1, min(wanted, MOST_LATENT_SPLITS, power_of_two(-(-longest // (tile.n * LEAST)))))

    @remembered
    def latent_product(self, tokens: int, rank: int) -> Product:
        """Queries of one head into latent space; ``n``: columns of it a program."""
        m = max(16, min(64, power_of_two(tokens)))
        return Product(m, min(128 if m == 64 and tokens > 64 else 64, max(16, power_of_two(rank))), 0, 4, 1)

    @remembered
    def latent_values(self, tokens: int, value: int, rank: int, splits: int) -> Product:
        """One head's values from ``splits`` parts of latents: ``m`` tokens, ``n`` values, ``k`` of the latent."""
        wide = max(16, power_of_two(value))
        if tokens == 1:
            return Product(1, min(wide, 16), min(rank, max(16, 8192 // splits)), 4, 1)
        m = max(16, min(64, power_of_two(tokens)))
        return Product(m, min(wide, 32 if m * tokens <= 4096 else 64), min(rank, 64), 4, 3)


def _number(word: str, features: Iterable[str], default: int) -> int:
    for feature in features:
        name, _, value = feature.partition(":")
        if name == word and value.isdigit():
            return int(value)
    return default
