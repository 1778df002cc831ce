"""Pieces: tensors of the result that are made together, from one tensor of the source or one weight of it. Their names,
dtypes and shapes are known before any number is read, because a file begins with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.declared import Declared, LinearWeight, Slice, StackedWeight
from evener.contracts.quant import BLOCKS, QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener.loading.scheme import scheme_of
from evener_convert.split import named_pieces, spans_read

#: Reads a tensor of the source; for sizes alone, one without numbers.
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor of the result: torch's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta").nbytes


@dataclass(frozen=True)
class Piece:
    """Tensors that are made together. ``make`` gets a reader of the source's tensors."""

    make: Callable[[Read], Mapping[str, torch.Tensor]]
    stored: Mapping[str, Stored]

    @classmethod
    def of(cls, make: Callable[[Read], Mapping[str, torch.Tensor]], headers: Headers) -> Piece:
        """The piece that ``make`` makes; it is called once with tensors that have no numbers."""
        made = make(lambda name: _without_numbers(*headers[name]))
        stored = {n: Stored(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in made.items()}
        return cls(make, stored)


def stored_name(name: str, headers: Headers) -> str:
    """The name of a source's tensor in the result: blocks have their type as a further part of the name, because
    safetensors knows no blocks."""
    dtype = headers[name][0]
    return f"{name}.{dtype}" if dtype in BLOCKS else name


def whole_pieces(checkpoint: Checkpoint) -> Iterator[Piece]:
    """All tensors of a checkpoint, each as it is."""
    headers = checkpoint.headers
    for name in headers:

        def make(read: Read, name: str = name) -> Mapping[str, torch.Tensor]:
            return {stored_name(name, headers): read(name)}

        yield Piece.of(make, headers)


def rank_pieces(weights: Sequence[Declared], checkpoint: Checkpoint, scheme: QuantScheme) -> Iterator[Piece]:
    """What one rank reads of a checkpoint: of each tensor the slices of its declared ``weights``, quantized as they
    are."""
    headers, spans, done = checkpoint.headers, spans_read(weights), set()
    for item in weights:
        for name, _ in named_pieces(item):
            if name in done:
                continue
            done.add(name)
            stack = isinstance(item, StackedWeight) and "{}" in name
            for n in range(item.experts) if isinstance(item, StackedWeight) and stack else (0,):
                one = name.format(item.held.start + n) if isinstance(item, StackedWeight) and stack else name
                yield _rank_piece(item, one, spans[name], headers, scheme)


def _rank_piece(item: Declared, name: str, slices: Sequence[Slice], headers: Headers, scheme: QuantScheme) -> Piece:
    stacked = isinstance(item, StackedWeight) and name in (part.name for part in item.parts)
    judge = scheme_of(name, scheme, headers)
    part = judge.part(name, headers)
    roles = judge.tensors(name, headers)

    def make(read: Read) -> Mapping[str, torch.Tensor]:
        tensors: Mapping[str, torch.Tensor] = {role: read(each) for role, each in roles.items()}
        if stacked and isinstance(item, StackedWeight) and item.held.whole:
            held = item.held
            tensors = {role: tensor.narrow(0, held.start, held.size) for role, tensor in tensors.items()}
        if slices and (part is None or part.format.plain or not isinstance(item, LinearWeight)) and len(tensors) == 1:
            tensors = {role: _narrowed(tensor, item, slices) for role, tensor in tensors.items()}
        elif slices and part is not None:
            tensors = _cut(replace(part, tensors=tensors), slices, judge)
        return {stored_name(roles[role], headers): tensor.contiguous() for role, tensor in tensors.items()}

    return Piece.of(make, headers)


def _narrowed(tensor: torch.Tensor, item: Declared, slices: Sequence[Slice]) -> torch.Tensor:
    """The slices of a plain tensor, one after another."""
    axis = slices[0].axis
    if isinstance(item, StackedWeight) and tensor.dim() == 3:
        axis = 2 - axis if item.transposed else 1 + axis
    pieces = [tensor.narrow(axis, each.span.start, each.span.size) for each in slices]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def _cut(part: WeightPart, slices: Sequence[Slice], scheme: QuantScheme) -> Mapping[str, torch.Tensor]:
    """The slices of a quantized part, one after another; of a stack, those of each matrix."""
    first = next(iter(part.tensors.values()))
    stack = first.dim() == 3 and all(t.dim() == 3 and t.shape[0] == first.shape[0] for t in part.tensors.values())
    if stack and part.format.storage != "float4_e2m1":
        cut = [
            _cut(replace(part, tensors={role: t[i] for role, t in part.tensors.items()}), slices, scheme)
            for i in range(first.shape[0])
        ]
        return {role: torch.stack([each[role] for each in cut]) for role in part.tensors}
    pieces = [scheme.cut(part, "in" if s.axis else "out", s.span.start, s.span.stop).tensors for s in slices]
    if any(role not in each for each in pieces for role in part.tensors):
        raise CheckpointError(
            f"{part.name} is stored so that a piece of it cannot be written in the same way; convert without "
            "infer.tp_size: ranks cut it while they load"
        )
    joined = {}
    for role, tensor in part.tensors.items():
        found = [each[role] for each in pieces]
        same = all(each.shape == tensor.shape for each in found)
        joined[role] = found[0] if same or len(found) == 1 else torch.cat(found, slices[0].axis)
    return joined


def _without_numbers(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype in BLOCKS:
        elements, nbytes = BLOCKS[dtype]
        return torch.empty((*shape[:-1], shape[-1] // elements * nbytes), dtype=torch.uint8, device="meta")
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
