"""Storing the parts of a weight together, as ``evener convert --merge`` does: those that a model multiplies with at
once, and their biases. Parts whose format cannot be one weight of the same format stay apart, such as those with one
scale each, and so do their biases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.declared import Declared, LinearWeight, StackedWeight, Weight
from evener.contracts.quant import QuantScheme
from evener.errors import CheckpointError
from evener.loading.match import declared_names
from evener_convert.merged import MergedPart
from evener_convert.pieces import Piece, Read, Stored, stored_name


@dataclass(frozen=True)
class MergedPieces:
    """The pieces of a file, and which of their tensors have parts."""

    pieces: Sequence[Piece]
    parts: Mapping[str, Sequence[MergedPart]]


def merge(
    pieces: Sequence[Piece], weights: Sequence[Declared], checkpoint: Checkpoint, scheme: QuantScheme
) -> MergedPieces:
    """``pieces`` of a file, with one in place of those of each weight of several parts.

    Args:
        weights: what the reader of the file declares.
        checkpoint, scheme: the source, and what reads it.
    """
    where = {name: number for number, piece in enumerate(pieces) for name in piece.stored}
    made: list[Piece | None] = list(pieces)
    parts: dict[str, Sequence[MergedPart]] = {}

    def take(plan: _Plan | None) -> bool:
        """Whether the plan could be carried out."""
        if plan is None or any(name in where or name in parts for name in plan.parts):
            return False
        first, *others = plan.numbers
        made[first] = plan.piece
        for number in others:
            made[number] = None
        parts.update(plan.parts)
        return True

    together: set[str] = set()
    for names in _merged_names(weights):
        if any(name not in where for name in _stored(names, checkpoint.headers, scheme)):
            continue
        if take(_Plan.of(names, pieces, where, checkpoint, scheme)):
            together.add(_target(names))
    for names in _joined_biases(weights):
        # Beside parts that stay apart, biases do too.
        if _target(names) in together and all(name in where for name in names):
            take(_Plan.of_biases(names, pieces, where))
    return MergedPieces([piece for piece in made if piece is not None], parts)


def _target(names: Sequence[str]) -> str:
    """The name of the merged layer of such weights or biases; empty if there is none."""
    return merged_stem([name.removesuffix(".weight").removesuffix(".bias") for name in names])


def _joined_biases(weights: Sequence[Declared]) -> Iterator[Sequence[str]]:
    """The names of the biases of each weight that has several, and has them for itself."""
    readers = Counter(name for item in weights for name in dict.fromkeys(declared_names(item)))
    for item in weights:
        if not isinstance(item, Weight) or item.make is not None or len(item.sources) < 2:
            continue
        own = len(set(item.sources)) == len(item.sources) and all(readers[name] == 1 for name in item.sources)
        if own and all(name.endswith(".bias") for name in item.sources):
            yield item.sources


def _merged_names(weights: Sequence[Declared]) -> Iterator[Sequence[str]]:
    """The names of the parts of each weight that has several, and has them for itself."""
    readers = Counter(name for item in weights for name in dict.fromkeys(declared_names(item)))
    for item in weights:
        if not isinstance(item, LinearWeight) or len(item.parts) < 2:
            continue
        stack = isinstance(item, StackedWeight)
        first = item.held.start if isinstance(item, StackedWeight) else 0
        for expert in range(first, first + item.experts) if stack else (0,):
            names = [part.name.format(expert) for part in item.parts]
            if len(set(names)) == len(names) and all(readers[name] == 1 for name in names):
                yield names


def _stored(names: Sequence[str], headers: Headers, scheme: QuantScheme) -> list[str]:
    return [stored_name(each, headers) if each in headers else each
            for name in names for each in scheme.tensors(name, headers).values()]  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """One weight: the numbers of its parts' pieces, the piece in their place, and the parts of its tensors."""

    numbers: Sequence[int]
    piece: Piece
    parts: Mapping[str, Sequence[MergedPart]]

    @classmethod
    def of(
        cls, names: Sequence[str], pieces: Sequence[Piece], where: Mapping[str, int], checkpoint: Checkpoint,
        scheme: QuantScheme,
    ) -> _Plan | None:  # fmt: skip
        """None: the parts cannot be one weight, or something else is made together with them."""
        headers = checkpoint.headers
        of_parts = [
            {role: stored_name(each, headers) for role, each in scheme.tensors(name, headers).items()} for name in names
        ]
        tensors = {each for roles in of_parts for each in roles.values()}
        numbers = sorted({where[each] for each in tensors})
        stored = {name: each for number in numbers for name, each in pieces[number].stored.items()}
        target = _target(names)
        if not target or stored.keys() != tensors or any(roles.keys() != of_parts[0].keys() for roles in of_parts):
            return None
        rows = [[stored[roles[role]] for roles in of_parts] for role in of_parts[0]]
        for axes in product(*(_axes(each) for each in rows)):
            headers_of: dict[str, tuple[str, tuple[int, ...]]] = {}
            found: dict[str, Sequence[MergedPart]] = {}
            for role, sizes, axis in zip(of_parts[0], rows, axes, strict=True):
                merged = target + of_parts[0][role].removeprefix(names[0].removesuffix(".weight"))
                headers_of[merged] = sizes[0].dtype, _joined(sizes, axis)
                found[merged] = _spans([roles[role] for roles in of_parts], sizes, axis)
            if not _fits(f"{target}.weight", names, headers_of, stored, scheme):
                continue
            common = [parts for parts in found.values() if parts[0].axis is None]
            if all(_equal(parts, pieces, where, checkpoint) for parts in common):
                made = {name: Stored(*each) for name, each in headers_of.items()}
                return cls(numbers, Piece(_maker([pieces[n] for n in numbers], found), made), found)
        return None

    @classmethod
    def of_biases(cls, names: Sequence[str], pieces: Sequence[Piece], where: Mapping[str, int]) -> _Plan | None:
        """None: they cannot be one tensor, or something else is made together with them."""
        numbers = [where[name] for name in names]
        sizes = [pieces[number].stored[name] for number, name in zip(numbers, names, strict=True)]
        alone = all(len(pieces[number].stored) == 1 for number in numbers)
        if not alone or any(len(each.shape) != 1 or each.dtype != sizes[0].dtype for each in sizes):
            return None
        found = {f"{_target(names)}.bias": _spans(names, sizes, 0)}
        made = {name: Stored(sizes[0].dtype, _joined(sizes, 0)) for name in found}
        own = sorted(numbers)
        return cls(own, Piece(_maker([pieces[number] for number in own], found), made), found)


def merged_stem(stems: Sequence[str]) -> str:
    """The name of a weight of such parts: ``….qkv_proj`` of ``….q_proj``, ``….k_proj`` and ``….v_proj``; empty if they
    are not of one module."""
    parents, own = zip(*(stem.rpartition(".")[::2] for stem in stems), strict=True)
    if len(set(parents)) > 1:
        return ""
    short = [name.removesuffix("_proj") for name in own]
    if any(name == stem for name, stem in zip(short, own, strict=True)):
        return f"{parents[0]}.{'_'.join(own)}"
    between = "" if all(len(name) == 1 for name in short) else "_"
    return f"{parents[0]}.{between.join(short)}_proj"


def _axes(sizes: Sequence[Stored]) -> list[int | None]:
    """Along which axes tensors can be joined; None: they may be one tensor."""
    if len({each.dtype for each in sizes}) > 1 or len({len(each.shape) for each in sizes}) > 1:
        return []
    found: list[int | None] = []
    for axis in range(min(2, len(sizes[0].shape))):
        if len({(*each.shape[:axis], *each.shape[axis + 1 :]) for each in sizes}) == 1:
            found.append(axis)
    return [*found, None] if len({each.shape for each in sizes}) == 1 else found


def _joined(sizes: Sequence[Stored], axis: int | None) -> tuple[int, ...]:
    shape = list(sizes[0].shape)
    if axis is not None:
        shape[axis] = sum(each.shape[axis] for each in sizes)
    return tuple(shape)


def _spans(names: Sequence[str], sizes: Sequence[Stored], axis: int | None) -> list[MergedPart]:
    at, found = 0, []
    for name, size in zip(names, sizes, strict=True):
        extent = 0 if axis is None else size.shape[axis]
        found.append(MergedPart(name, axis, at, extent))
        at += extent
    return found


def _fits(
    merged: str, names: Sequence[str], headers: Headers, stored: Mapping[str, Stored], scheme: QuantScheme
) -> bool:
    """Whether the scheme reads the merged tensors as one weight with the rows of all parts."""
    own = {name: (each.dtype, each.shape) for name, each in stored.items()}
    try:
        whole, parts = scheme.part(merged, headers), [scheme.part(name, own) for name in names]
        roles = scheme.tensors(merged, headers)
    except CheckpointError:
        return False
    found = [part for part in parts if part is not None]
    return (
        whole is not None and len(found) == len(parts) and set(roles.values()) == headers.keys()
        and whole.rows == sum(part.rows for part in found)
        and all((part.columns, part.format) == (whole.columns, whole.format) for part in found)
    )  # fmt: skip


def _equal(parts: Sequence[MergedPart], pieces: Sequence[Piece], where: Mapping[str, int], source: Checkpoint) -> bool:
    """Whether tensors have the same numbers. What is computed while it is read counts as different: it is too much
    work to make it twice."""
    if any(part.name not in source.headers or part.name in source.copied for part in parts):
        return False
    made = [pieces[where[part.name]].make(source.tensor)[part.name] for part in parts]
    return all(torch.equal(made[0], each) for each in made[1:])


def _maker(
    pieces: Sequence[Piece], parts: Mapping[str, Sequence[MergedPart]]
) -> Callable[[Read], Mapping[str, torch.Tensor]]:
    def make(read: Read) -> Mapping[str, torch.Tensor]:
        made = {name: tensor for piece in pieces for name, tensor in piece.make(read).items()}
        return {
            merged: made[found[0].name] if (axis := found[0].axis) is None
            else torch.cat([made[part.name] for part in found], axis)
            for merged, found in parts.items()
        }  # fmt: skip

    return make
