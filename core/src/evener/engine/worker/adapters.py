"""The places for adapters (LoRA) beside a model's linear weights, and writing one into its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from evener.config.schema import InferConfig
from evener.contracts.adapters import AdapterLimits, AdapterTensor
from evener.contracts.declared import AdapterRows, AdapterStack, LinearWeight, Slice, Table
from evener.contracts.quant import DTYPE_BYTES
from evener.engine.wire.plan import AdapterWrite
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.ops.parts import walk_static

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
    return {part.name: _whole(cut, part.rows, part.columns) for part, cut in pieces}


def _whole(cut: Slice | None, rows: int, columns: int) -> tuple[int, int]:
    rows, columns = (rows, columns) if cut is None else cut.full_shape((rows, columns))
    return rows, columns


class AdapterStacks:
    """Places beside every weight of ``build`` that may have adapters. They are declared as tables, so that the memory
    plan counts them. Make it after packings were chosen and before ops are resolved.

    Args:
        stages: all pipeline stages, ``build`` too.

    Attributes:
        rows: which rows of the step have which adapter.
        limits: what the front end is told; None: no adapters.

    Raises:
        ConfigError: adapters are asked for, and no weight can have one.
    """

    def __init__(self, build: Builder, infer: InferConfig, stages: Sequence[Builder]) -> None:
        slots, rank = infer.adapter_slots, infer.max_lora_rank
        self.rows = AdapterRows()
        self.limits: AdapterLimits | None = None
        self._weights = list(adaptable(build)) if slots else []
        if slots:
            targets = adapter_targets(stages)
            if not targets:
                raise ConfigError("this model has no projections that can have adapters; leave infer.lora_modules and "
                                  "infer.max_loras out")  # fmt: skip
            self.limits = AdapterLimits(targets=targets, rank=rank, loaded=infer.max_cpu_loras)
        for weight in self._weights:
            down = _table(build, weight, "down", (slots, len(weight.parts) * rank, weight.columns))
            up = _table(build, weight, "up", (slots, weight.rows, rank))
            weight.adapters = AdapterStack(down, up, slots, rank, self.rows)

    def write(self, adapter: AdapterWrite) -> None:
        """Replace what the adapter's place holds, on all weights. On several ranks, each writes its part."""
        found = {tensor.name: tensor for tensor in adapter.tensors}
        for weight in self._weights:
            stack = weight.adapters
            assert stack is not None and stack.down.value is not None and stack.up.value is not None
            down, up, end = stack.down.value[adapter.slot].zero_(), stack.up.value[adapter.slot].zero_(), 0
            for index, (part, cut) in enumerate(weight.pieces()):
                start, end = end, end + part.rows
                if (tensor := found.get(part.name)) is not None:
                    first = index * stack.rank
                    own_down, own_up = _matrices(tensor, cut)
                    down[first : first + tensor.rank].copy_(own_down)
                    up[start:end, : tensor.rank].copy_(own_up)


def _table(build: Builder, weight: LinearWeight, name: str, shape: tuple[int, ...]) -> Table:
    dtype = getattr(torch, weight.dtype)
    nbytes = int(math.prod(shape) * DTYPE_BYTES[weight.dtype])
    return build.table((weight.name, name), nbytes, lambda device: torch.zeros(shape, dtype=dtype, device=device))


def _matrices(tensor: AdapterTensor, cut: Slice | None) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of both matrices; the second with the scale."""
    kind = getattr(torch, tensor.dtype)
    down, up = (torch.frombuffer(bytearray(data), dtype=kind) for data in (tensor.down, tensor.up))
    down, up = down.view(tensor.rank, -1), up.view(-1, tensor.rank).float() * tensor.scale
    if cut is None:
        return down, up
    own = slice(cut.span.start, cut.span.stop)
    return (down, up[own]) if cut.axis == 0 else (down[:, own], up)
