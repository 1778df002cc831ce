"""State in the canonical pages, attended by a kernel library: what flash-attn and flashinfer have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener.ops.reference.state import PlainPages
from evener_backend_cuda.library import Library

#: Below our own kernels: a library serves where the user names it.
PRIORITY = 50
NARROW = ("float16", "bfloat16")


@dataclass(frozen=True)
class Places:
    """Where a step's tokens are written: block and offset of each, int64 [T]."""

    blocks: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def of(step: StateStep, block_size: int) -> Places:
        """From the slots."""
        blocks = torch.div(step.slot_mapping, block_size, rounding_mode="floor")
        return Places(blocks.long(), (step.slot_mapping - blocks * block_size).long())


class PagedLibrary(PlainPages):
    """Keys and values as [blocks, block_size, kv_heads, head_dim], which these libraries call NHD.

    Attributes:
        library: whose kernels attend.
        head_dims: lengths of heads that it has kernels for.
        caps: whether it computes soft caps.
    """

    kinds = frozenset({"full", "window"})
    priority = PRIORITY
    batch_invariant = False
    library: Library
    head_dims: Sequence[int]
    sizes: Sequence[int]

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        lacking = self.library.refusal(device.variant)
        if lacking:
            return lacking
        if spec.per != "token" or len(spec.tensors) != 2:
            return "holds a key and a value for each token, nothing else"
        key, value = spec.tensors
        if attention.dtype not in NARROW or {key.dtype, value.dtype} != {attention.dtype}:
            return f"stores and computes in {' or '.join(NARROW)}, not in {attention.dtype} over {key.dtype}"
        if key.shape != value.shape or key.shape[1] not in self.head_dims:
            return f"has no kernel for keys of {key.shape[1]} and values of {value.shape[1]} numbers"
        if attention.heads % key.shape[0]:
            return f"{attention.heads} query heads cannot share {key.shape[0]} key heads evenly"
        if attention.sinks or attention.slopes is not None:
            return "has neither sinks nor slopes"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return self.sizes

    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        for view, value in zip(views, values, strict=True):
            view[meta.places.blocks, meta.places.offsets] = value.to(view.dtype)


def left_of(spec: StateSpec) -> int:
    """Tokens before its own that a query sees, as both libraries count; -1 is all of them."""
    return -1 if spec.window is None else spec.window - 1
