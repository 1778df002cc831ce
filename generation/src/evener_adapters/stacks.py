"""The places for adapters (LoRA) beside a model's linear weights, and writing one into its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from evener.config.schema import InferConfig
from evener.contracts.adapters import AdapterLimits, AdapterStacks, AdapterTensor
from evener.contracts.declared import LinearWeight, Slice, Table
from evener.contracts.quant import DTYPE_BYTES
from evener.engine.wire.messages import LoadAdapter, UnloadAdapter
from evener.engine.wire.plan import AdapterWrite
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.ops.parts import walk_static
from evener_adapters.product import AdapterRows, AdapterStack

#: Ops whose linear weights compute every row of a step, and with ``linear`` alone.
_OPS = frozenset({"decoder_layer", "attention_block", "gated_attention_block", "mlp_block"})


def adaptable(build: Builder) -> Iterator[LinearWeight]:
    """The weights that may have adapters: the projections of attention and of MLPs without experts."""
    values = (value for site in build.sites if site.op in _OPS for _, value in walk_static(site.static))
    found = dict.fromkeys(value for value in values if isinstance(value, LinearWeight))
    yield from (weight for weight in found if not weight.normalize_rows and weight.out in (None, weight.dtype))


def adapter_targets(builds: Sequence[Builder]) -> dict[str, tuple[int, int]]:
    """``AdapterLimits.targets`` of a model, from the declarations of its pipeline stages."""
    pieces = (piece for build in builds for weight in adaptable(build) for piece in weight.pieces())
    shapes = ((part.name, (part.rows, part.columns), cut) for part, cut in pieces)
    whole = ((name, shape if cut is None else cut.full_shape(shape)) for name, shape, cut in shapes)
    return {name: (rows, columns) for name, (rows, columns) in whole}


class LoraStacks(AdapterStacks):
    """Places beside every weight of ``build`` that may have adapters. They are declared as tables, so that the memory
    plan counts them. Make it after packings were chosen and before ops are resolved.

    Args:
        stages: all pipeline stages, ``build`` too.

    Attributes:
        rows: which rows of the step have which adapter.

    Raises:
        ConfigError: no weight can have one.
    """

    def __init__(self, build: Builder, infer: InferConfig, stages: Sequence[Builder]) -> None:
        slots, rank = infer.adapter_slots, infer.max_lora_rank
        self.rows = AdapterRows()
        self._weights = list(adaptable(build))
        self._kept: dict[str, dict[tuple[str, Slice | None], _Matrices]] = {}
        targets = adapter_targets(stages)
        if not targets:
            raise ConfigError("this model has no projections that can have adapters; leave infer.lora_modules and "
                              "infer.max_loras out")  # fmt: skip
        self.limits = AdapterLimits(targets=targets, rank=rank, loaded=infer.max_cpu_loras)
        for weight in self._weights:
            down = _table(build, weight, "down", (slots, len(weight.parts) * rank, weight.columns))
            up = _table(build, weight, "up", (slots, weight.rows, rank))
            weight.adapters = AdapterStack(down, up, slots, rank, self.rows)

    def keep(self, order: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(order, UnloadAdapter):
            self._kept.pop(order.id, None)
            return
        kept, tensors = self._kept.setdefault(order.id, {}), {tensor.name: tensor for tensor in order.tensors}
        for weight in self._weights:
            for part, cut in weight.pieces():
                if (tensor := tensors.get(part.name)) is not None:
                    kept[part.name, cut] = _Matrices.of(tensor, cut)

    def select(self, index: torch.Tensor | None) -> None:
        self.rows.index = index

    def write(self, writes: Sequence[AdapterWrite]) -> None:
        for each in writes:
            self._write(each)

    def _write(self, write: AdapterWrite) -> None:
        """Replace what a place holds, on all weights, by what was kept of an adapter."""
        kept = self._kept.get(write.adapter, {})
        for weight in self._weights:
            stack = weight.adapters
            assert isinstance(stack, AdapterStack) and stack.down.value is not None and stack.up.value is not None
            down, up, end = stack.down.value[write.slot].zero_(), stack.up.value[write.slot].zero_(), 0
            for index, (part, cut) in enumerate(weight.pieces()):
                start, end = end, end + part.rows
                if (own := kept.get((part.name, cut))) is not None:
                    first = index * stack.rank
                    down[first : first + len(own.down)].copy_(own.down)
                    up[start:end, : len(own.down)].copy_(own.up.float() * own.scale)


def _table(build: Builder, weight: LinearWeight, name: str, shape: tuple[int, ...]) -> Table:
    dtype = getattr(torch, weight.dtype)
    nbytes = int(math.prod(shape) * DTYPE_BYTES[weight.dtype])
    return build.table((weight.name, name), nbytes, lambda device: torch.zeros(shape, dtype=dtype, device=device))


class _Matrices(NamedTuple):
    """A rank's part of an ``AdapterTensor``."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @classmethod
    def of(cls, tensor: AdapterTensor, cut: Slice | None) -> _Matrices:
        kind = getattr(torch, tensor.dtype)
        down, up = (torch.frombuffer(bytearray(data), dtype=kind) for data in (tensor.down, tensor.up))
        down, up = down.view(tensor.rank, -1), up.view(-1, tensor.rank)
        if cut is not None:  # copies: nothing of the whole is kept
            own = slice(cut.span.start, cut.span.stop)
            down, up = (down, up[own].clone()) if cut.axis == 0 else (down[:, own].clone(), up)
        return cls(down, up, tensor.scale)
