"""Which weights a cache file holds, and their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from evener.contracts.declared import Declared, LinearWeight, Slice, StackedWeight, Table, Weight
from evener.contracts.quant import Packing, QuantScheme, WeightPart
from evener.loading.scheme import scheme_of


@dataclass
class ChosenTensors:
    """Tensors of weights, each once, in the order in which they are found.

    Attributes:
        tensors: no two of them are the same memory.
        weights: of each weight, the numbers of its tensors.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, list[int]] = field(default_factory=dict)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)

    def add(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Add a weight."""
        self.weights[name] = [self._number(tensor) for tensor in tensors]

    def _number(self, tensor: torch.Tensor) -> int:
        place = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if not tensor.numel() or place not in self._numbers:
            self._numbers[place] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[place]


def worth_saving(
    declared: Sequence[Declared], checkpoint_copied: frozenset[str], headers: Mapping[str, tuple[str, tuple[int, ...]]],
    scheme: QuantScheme,
) -> list[Weight | LinearWeight]:  # fmt: skip
    """The weights that take work to make from the checkpoint: those that are converted, computed or packed. Others
    are read as fast from the model's own files."""

    def is_cheap(item: Weight | LinearWeight) -> bool:
        if isinstance(item, Weight):
            return item.make is None and all(is_stored(name, item.dtype, cut) for name, cut in item.pieces())
        if item.layout != "plain" or item.normalize_rows:
            return False
        if isinstance(item, StackedWeight) and item.transposed:
            return False
        names = [(name, cut) for part, cut in item.pieces() for name in _names(item, part)]
        return all(is_stored(name, item.dtype, cut) for name, cut in names)

    def is_stored(name: str, dtype: str, cut: Slice | None) -> bool:
        stored = scheme_of(name, scheme, headers).part(name, headers)
        plain = stored is None or stored.format.plain
        held = headers[name][0] == dtype if name in headers else False
        return plain and held and name not in checkpoint_copied and (cut is None or not cut.axis)

    return [item for item in declared if not isinstance(item, Table) and not is_cheap(item)]


def _names(item: LinearWeight, part: WeightPart) -> Iterator[str]:
    if isinstance(item, StackedWeight) and "{}" in part.name:
        yield from (part.name.format(item.held.start + n) for n in range(item.experts))
    else:
        yield part.name


def numbered(items: Sequence[Weight | LinearWeight]) -> dict[str, Weight | LinearWeight]:
    """The weights by a name of their own: an embedding and the head that it is tied to have the same."""
    return {f"{number} {item.name}": item for number, item in enumerate(items)}


def tensors_of(items: Mapping[str, Weight | LinearWeight], packings: Mapping[str, Packing]) -> ChosenTensors:
    """The tensors of loaded weights; weights whose packing saves none are left out, and with them those that share a
    tensor of the checkpoint with one: they would no longer share memory."""
    saved: dict[str, Sequence[torch.Tensor]] = {}
    lost: set[str] = set()
    for name, item in items.items():
        found: Sequence[torch.Tensor] | None = None
        if isinstance(item, Weight):
            found = None if item.value is None else (item.value,)
        elif item.value is not None:
            found = packings[item.layout].saved(item.value)
        if found is None:
            lost |= set(_sources(item))
        else:
            saved[name] = found
    made = ChosenTensors()
    for name, item in items.items():
        if name in saved and lost.isdisjoint(_sources(item)):
            made.add(name, saved[name])
    return made


def _sources(item: Weight | LinearWeight) -> Iterable[str]:
    """Names of the checkpoint's tensors or weights that an item is made of."""
    return item.sources if isinstance(item, Weight) else (part.name for part in item.parts)
