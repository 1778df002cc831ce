"""``load=dummy``: random weights of the right scale, for speed tests and folders with only a ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from evener.contracts.declared import Declared, LinearWeight, Slice, StackedWeight, Weight
from evener.contracts.quant import Packing, WeightPart
from evener.loading.loader import Ledger, WeightBytes, fill
from evener.loading.match import shared_names
from evener_inspection.dummy_formats import PERIOD, QuantizedNoise, repeated

STD = 0.02


def load_dummy(
    declared: Sequence[Declared], packings: Mapping[str, Packing], device: torch.device, seed: int = 0
) -> WeightBytes:
    """Fill ``value`` of every declared weight and every table. Matrices and embeddings are normal noise of standard
    deviation ``STD``; biases of linear layers and of the head, and sinks, are zeros; norms are ones, or zeros if an
    offset is added to them, with equal biases. A weight of ``build.weight`` is noise unless its ``dummy`` is set.

    A tensor's numbers depend on the seed and its name only; a slice has the numbers of that part of the whole tensor.
    One period of noise is drawn once and copied from an offset that the name decides, so filling is as fast as memory.
    Quantized parts are random numbers in their format (``dummy_formats``), and there a slice has numbers of its own.

    Raises:
        CheckpointError: a part has a format that cannot be made.
    """
    noise = _Noise(seed, shared_names(declared))
    tensor, matrices = partial(noise.weight, device=device), partial(_matrices, noise=noise, device=device)
    return fill(declared, tensor, matrices, packings, device, Ledger())


def _matrices(item: LinearWeight, noise: _Noise, device: torch.device) -> Iterator[list[WeightPart]]:
    """The parts of one matrix after another; each expert has its own numbers."""
    first = item.held.start if isinstance(item, StackedWeight) else 0
    for expert in range(first, first + max(1, item.experts)):
        named = [(replace(p, name=f"{p.name} {expert}" if item.experts else p.name), cut) for p, cut in item.pieces()]
        yield [noise.part(p, cut, item.dtype, device) for p, cut in named]


# Kept for the next engine of this process; it is read only.
@lru_cache(maxsize=1)
def _drawn(seed: int) -> torch.Tensor:
    """One period of noise, float32 in host memory: 4 MB."""
    return torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * STD


class _Noise:
    def __init__(self, seed: int, shared: frozenset[str]) -> None:
        self._seed, self._names, self._quantized = seed, shared, QuantizedNoise(seed, STD)
        self._period = _drawn(seed)
        self._typed: dict[tuple[str, str], torch.Tensor] = {}
        self._made: dict[tuple[str, tuple[int, ...], str, Slice | None], torch.Tensor] = {}

    def weight(self, item: Weight, device: torch.device) -> torch.Tensor:
        dtype = getattr(torch, item.dtype)
        if item.dummy in ("ones", "zeros"):
            return torch.full(item.shape, float(item.dummy == "ones"), dtype=dtype, device=device)
        if len(item.sources) > 1 and not item.shapes and not item.slices:
            return self._fill(item.name, item.shape, item.dtype, device)
        shapes = item.shapes or [item.shape if cut is None else cut.full_shape(item.shape) for _, cut in item.pieces()]
        pieces = zip(item.pieces(), shapes, strict=True)
        return item.join([self._shared(name, shape, item.dtype, device, cut) for (name, cut), shape in pieces])

    def part(self, part: WeightPart, cut: Slice | None, dtype: str, device: torch.device) -> WeightPart:
        if not part.format.plain:
            own = part.name if cut is None else f"{part.name} {cut.axis} {cut.span.start}"
            return replace(part, tensors=self._quantized.tensors(replace(part, name=own), device))
        shape: tuple[int, ...] = (part.rows, part.columns)
        shape = shape if cut is None else cut.full_shape(shape)
        return replace(part, tensors={"weight": self._shared(part.name, shape, dtype, device, cut)})

    def _shared(
        self, name: str, shape: tuple[int, ...], dtype: str, device: torch.device, cut: Slice | None
    ) -> torch.Tensor:
        """Noise for a tensor of the checkpoint, or a slice of it; weights that read one name (a tied head) share it."""
        key = (name, shape, dtype, cut)
        if key in self._made:
            return self._made[key]
        made = self._fill(name, shape, dtype, device)
        if cut is not None:
            made = made.narrow(cut.axis, cut.span.start, cut.span.size).clone(memory_format=torch.contiguous_format)
        if name in self._names:
            self._made[key] = made
        return made

    def _fill(self, name: str, shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
        key = (dtype, str(device))
        if key not in self._typed:
            self._typed[key] = self._period.to(device=device, dtype=getattr(torch, dtype))
        return repeated(self._typed[key], name, self._seed, shape)
