"""Which stored tensors a model multiplies with, and how it uses them. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evener.contracts.architecture import Architecture
from evener.contracts.checkpoint import Headers
from evener.contracts.conversion.quantizer import Matrix
from evener.contracts.declared import Declared, LinearWeight, StackedWeight
from evener.contracts.quant import WeightPart
from evener.layers.builder import Builder
from evener.loading.match import declared_names
from evener.loading.scheme import Unquantized

Kind = Literal["linear", "expert", "head", "router", "shared"]


@dataclass(frozen=True)
class ModelMatrices:
    """The matrices of one model.

    Attributes:
        found: by their names in the checkpoint, in the model's order.
        transposed: names of those that are stored as [experts, columns, rows].
        ties: the builder's.
    """

    found: Mapping[str, Matrix]
    transposed: frozenset[str]
    ties: Mapping[str, str]


def model_matrices(
    family: type[Architecture], config: Mapping[str, Any], headers: Headers, length: int
) -> ModelMatrices:
    """Declare the whole model for one rank, from the headers of an unquantized checkpoint, and see what it multiplies
    with. ``length``: tokens of the longest sequence; only tables depend on it."""
    scheme = Unquantized()
    build = Builder("bfloat16", length, lambda name: scheme.part(name, headers))
    vocabulary = family(config, build).vocab_size
    linear = [item for item in build.weights if isinstance(item, LinearWeight)]
    readers = _readers(build.weights)
    found: dict[str, Matrix] = {}
    transposed: set[str] = set()
    for item in linear:
        for name, rows in _stored(item):
            if name not in headers or len(headers[name][1]) not in (2, 3):
                continue  # the loader reports missing tensors and wrong shapes
            shape = headers[name][1]
            if isinstance(item, StackedWeight) and item.transposed and len(shape) == 3:
                transposed.add(name)
                shape = (shape[0], shape[2], shape[1])
            found[name] = Matrix(name, shape, _kind(item, rows == vocabulary, readers[name] > 1))
    return ModelMatrices(found, frozenset(transposed), build.ties)


def kinds_of(weights: Sequence[Declared], vocabulary: int) -> Iterator[tuple[LinearWeight, WeightPart, Kind]]:
    """The parts of a model's linear weights, each with its weight and its kind."""
    readers = _readers(weights)
    for item in weights:
        if isinstance(item, LinearWeight):
            for part in item.parts:
                yield item, part, _kind(item, part.rows == vocabulary, readers[part.name.format(0)] > 1)


def stored_names(item: LinearWeight, part: WeightPart) -> Iterator[str]:
    """Names of a part's tensors in the checkpoint: of each expert, or one."""
    yield from map(part.name.format, range(item.experts if "{}" in part.name else 1))


def _readers(weights: Sequence[Declared]) -> Counter[str]:
    """How many declared weights read a tensor."""
    return Counter(name for item in weights for name in dict.fromkeys(declared_names(item)))


def _kind(item: LinearWeight, vocabulary: bool, shared: bool) -> Kind:
    if item.out == "float32" and vocabulary and not item.normalize_rows:
        return "head"
    if shared or item.normalize_rows:
        return "shared"
    if item.out == "float32" or item.rows == 1:
        return "router"
    return "expert" if item.experts else "linear"


def _stored(item: LinearWeight) -> Iterator[tuple[str, int]]:
    """Names of its tensors in the checkpoint, with the rows of its part."""
    for part in item.parts:
        yield from ((name, part.rows) for name in stored_names(item, part))
