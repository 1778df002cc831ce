"""The scales of a model's quantized state, for any number of ranks. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evener.errors import CheckpointError

#: Element types, and the largest number of each.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
#: Scales outside of these bounds are no maximum of activations divided by that of an element type.
SMALLEST, LARGEST_SCALE = 2.0**-64, 2.0**64


@dataclass(frozen=True)
class Shares:
    """The scales of a layer's keys, or of its values. Each is for an equal share of the heads, in order.

    Attributes:
        values: one for all heads; one for each rank of those that they were made for; or one for each head.
        per_head: they are one for each head.
    """

    values: tuple[float, ...]
    per_head: bool = False

    def of_rank(self, rank: int, ranks: int, heads: int) -> tuple[float, ...] | None:
        """The scale of each of the ``heads`` that this rank has; None if they do not fit.

        A head that several shares belong to gets the largest scale. With more ranks than heads, ranks hold the same
        head.
        """
        count, all_heads = len(self.values), heads * ranks
        if self.per_head and count == heads:  # one rank, or a layer that every rank holds whole
            return self.values
        if self.per_head and count != all_heads and (heads > 1 or ranks % count):
            return None
        if max(count, all_heads) % min(count, all_heads):
            return None
        first = rank * heads
        return tuple(
            max(self.values[(first + head) * count // all_heads : -(-(first + head + 1) * count // all_heads)])
            for head in range(heads)
        )


@dataclass(frozen=True)
class Scales:
    """The scales of a model.

    Attributes:
        dtype: the element type that they were made for.
        layers: (keys, values) of each layer, by its number.
        where: what messages call their source.
        fingerprint: of the model that they were made for; empty: unknown.
    """

    dtype: str
    layers: Mapping[int, tuple[Shares, Shares]]
    where: str
    fingerprint: str = ""

    def of_layer(self, number: int, rank: int, ranks: int, heads: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """For keys and for values, the scale of each of this rank's ``heads``.

        Raises:
            CheckpointError: there are none for the layer, or not for so many heads.
        """
        if number not in self.layers:
            raise CheckpointError(
                f"{self.where} has scales of {len(self.layers)} layers, and none of layer {number}; make the file "
                "again with `evener calibrate`"
            )
        found = [each.of_rank(rank, ranks, n) for each, n in zip(self.layers[number], heads, strict=True)]
        if None in found:
            counts = " and ".join(str(len(each.values)) for each in self.layers[number])
            raise CheckpointError(
                f"{self.where}: layer {number} has {counts} scales of keys and values, which do not fit its "
                f"{heads[0]} heads on each of {ranks} ranks; make the file again with `evener calibrate`"
            )
        return tuple(each for each in found if each is not None)


def check_scale(value: object, what: str) -> float:
    """``value`` if it can be a scale.

    Raises:
        CheckpointError: it is no positive, finite number; ``what`` names it.
    """
    # An integer of many digits cannot be made a float, but can be compared with one.
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not SMALLEST <= number <= LARGEST_SCALE:
        raise CheckpointError(f"{what} is {str(value)[:40]}, not a positive number that can be a scale; make the "
                              "scales again with `evener calibrate`")  # fmt: skip
    return float(number)


def layer_numbers(names: Sequence[str]) -> Iterator[int]:
    """The number in each layer's name: 3 of ``model.layers.3.self_attn``; layers without one count from 0."""
    for at, name in enumerate(names):
        yield next((int(part) for part in name.split(".") if part.isdecimal()), at)
