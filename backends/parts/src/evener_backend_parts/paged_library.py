"""State in canonical pages, with attention by a kernel library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateStep
from evener.ops.reference.state import PlainPages
from evener_backend_parts.library import Library

#: Below our own kernels: a library is used only if the user names it.
PRIORITY = 50
HALF_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class TokenSlots:
    """Where a step's tokens are written: block and offset of each token, int64 [T]."""

    blocks: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def of(step: StateStep, block_size: int) -> TokenSlots:
        """From ``step.slot_mapping``."""
        blocks = torch.div(step.slot_mapping, block_size, rounding_mode="floor")
        return TokenSlots(blocks.long(), (step.slot_mapping - blocks * block_size).long())


class PagedLibrary(PlainPages, AttentionProvider):
    """Keys and values as [blocks, block_size, kv_heads, head_dim], which these libraries call NHD.

    Attributes:
        library: the kernel library.
        head_dims: head lengths for which it has kernels.
        sizes: block sizes that it supports, preferred first.
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
            return "stores one key and one value per token, nothing else"
        key, value = spec.tensors
        if attention.dtype not in HALF_DTYPES or {key.dtype, value.dtype} != {attention.dtype}:
            return f"stores and computes in {' or '.join(HALF_DTYPES)}, not in {attention.dtype} over {key.dtype}"
        if key.shape != value.shape or key.shape[1] not in self.head_dims:
            return f"has no kernel for keys of {key.shape[1]} and values of {value.shape[1]} elements"
        if attention.heads % key.shape[0]:
            return f"{attention.heads} query heads are not a multiple of {key.shape[0]} key heads"
        if attention.sinks or attention.slopes is not None:
            return "supports neither sinks nor slopes"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return self.sizes

    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        for view, value in zip(views, values, strict=True):
            view[meta.token_slots.blocks, meta.token_slots.offsets] = value.to(view.dtype)


def window_left_of(spec: StateSpec) -> int:
    """Number of earlier tokens that a query sees, as both libraries count; -1 means all."""
    return -1 if spec.window is None else spec.window - 1
