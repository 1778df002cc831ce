"""Launches of ``one_token.cu``: their argument, the memory of their messages, and which layers share a launch."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from evener.contracts.quant import PackedWeight
from evener.contracts.weights import AttentionWeights, MLPWeights
from evener_backend_cuda.compiled import CompiledKernel, Place
from evener_kernels_triton.packed import PackedMatrix
from evener_kernels_triton.state import PagedMeta, PagedViews
from evener_kernels_triton.stored import StoredMatrix

#: Layers that one device's messages serve: the kernel keeps a counter for each.
MAX_SITES = 255


class Layer(ctypes.Structure):
    """``Layer`` of one_token.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "x", "residual", "out", "stream", "norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "mlp_norm",
            "gate_up", "down", "cos_sin", "positions", "slots", "kv_lens", "table", "keys", "values")),
        ("key_page", ctypes.c_longlong), ("value_page", ctypes.c_longlong),
        ("before", ctypes.c_uint), ("after", ctypes.c_uint), ("site", ctypes.c_uint), ("wide_slots", ctypes.c_uint),
        ("page_bits", ctypes.c_uint),
        *((name, ctypes.c_void_p) for name in ("qkv_scales", "o_scales", "gate_up_scales", "down_scales")),
    ]  # fmt: skip


@cache
def layers_type(most: int) -> type[ctypes.Structure]:
    """``Layers`` of one_token.cu, with room for so many."""
    fields = [(name, ctypes.c_void_p) for name in ("messages", "report", "stamps")]
    return type(
        "Layers", (ctypes.Structure,), {"_fields_": [*fields, ("count", ctypes.c_uint), ("layer", Layer * most)]}
    )


@dataclass(frozen=True)
class _Last:
    """The last launch in a capture, or what is known of it: what its last layer returned, the place after it, that
    layer, its messages and their mark, and the launch, to which a layer can be added."""

    x: torch.Tensor
    stream: torch.Tensor
    after: Place
    layer: tuple[str, int]
    site: int
    room: torch.Tensor
    flag: int
    kernel: CompiledKernel
    argument: Any


class Messages:
    """The memory through which the programs of a device's layers talk, and what the last launch was. Launches run one
    after another."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._sites, self._flags = device, 0, 0
        self._held: dict[int, torch.Tensor] = {}
        self.last: _Last | None = None

    def site(self) -> int:
        """A number for a callable. Two that are the same belong to layers that never run one after the other."""
        self._sites += 1
        return self._sites % MAX_SITES

    def of(self, count: int) -> torch.Tensor:
        """Room for so many messages; always the same."""
        if count not in self._held:
            self._held[count] = torch.zeros(count, dtype=torch.int64, device=self._device)
        return self._held[count]

    def next_flag(self) -> int:
        """A mark of 32 bits, not 0, that no launch of the last hours has."""
        self._flags = self._flags % 0xFFFF_FFFE + 1
        return self._flags


class CallSite:
    """One layer of a model: its part of the kernel's argument, with the addresses of the last call's weights and pages.

    Args:
        name: of its state.
        most: layers that a launch has room for.
        count: messages that it needs.
        chained: whether the next layer takes the stream from messages.

    Attributes:
        report, stamps: addresses as in one_token.cu, for benchmarks.
    """

    report: int | None = None
    stamps: int | None = None

    def __init__(
        self, name: str, launch: CompiledKernel, messages: Messages, most: int, count: int, chained: bool
    ) -> None:  # fmt: skip
        self._launch, self._messages, self._most, self._chained = launch, messages, most, chained
        self._room = messages.of(count)
        self._layer = _number(name)
        self._key: tuple[Any, ...] = (None, None, None)
        self._argument = Layer(site=messages.site())

    def run(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, attention: AttentionWeights,
        mlp: MLPWeights | None, views: PagedViews, meta: PagedMeta,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Returns the layer's output and the stream, float32. In a capture it may join the launch before it, which then
        computes both."""
        key, argument, step = self._key, self._argument, meta.step
        if key[0] is not attention or key[1] is not mlp or key[2] is not views:
            self._bind(attention, mlp, views)
        if not x.is_contiguous():
            x = x.contiguous()
        stream = torch.empty(x.shape, dtype=torch.float32, device=x.device) if residual is None else residual
        place = self._launch.place(x.device)
        argument.x = argument.out = x.data_ptr()
        argument.residual = None if residual is None else residual.data_ptr()
        argument.stream = stream.data_ptr()
        argument.positions, argument.kv_lens = positions.data_ptr(), step.kv_lens.data_ptr()
        argument.slots, argument.wide_slots = step.slot_mapping.data_ptr(), step.slot_mapping.element_size() == 8
        argument.table = step.block_table.data_ptr()
        before = self._before(x, residual, place)
        argument.before, argument.after = 0 if before is None else before.flag, self._messages.next_flag()
        layers, after = self._started(place, before, x.device)
        if place.capture and self._chained:
            self._messages.last = _Last(x, stream, after, self._layer, argument.site, self._room, argument.after,
                                        self._launch, layers)  # fmt: skip
        return x, stream

    def _started(self, place: Place, before: _Last | None, device: torch.device) -> tuple[Any, Place]:
        """The argument of the launch that this layer is in, and the place after it."""
        if before is not None and before.kernel is self._launch and before.argument.count < self._most:
            layers = before.argument
            layers.layer[layers.count] = self._argument
            layers.count += 1
            if self._launch.change(place, layers):
                return layers, place
        layers = layers_type(self._most)(self._room.data_ptr(), self.report, self.stamps, 1)
        layers.layer[0] = self._argument
        self._launch(place.stream, layers)
        return layers, self._launch.place(device) if place.capture else place

    def _before(self, x: torch.Tensor, residual: torch.Tensor | None, place: Place) -> _Last | None:
        """The launch whose messages have ``x + residual``; None: they must be read from memory."""
        last = self._messages.last
        if not self._chained or last is None or last.x is not x or last.stream is not residual or last.after != place:
            return None
        (before, number), (name, own) = last.layer, self._layer
        same = before == name and number + 1 == own and last.room is self._room
        return last if same and last.site != self._argument.site else None

    def _bind(self, attention: AttentionWeights, mlp: MLPWeights | None, views: PagedViews) -> None:
        argument = self._argument
        tensors: Mapping[str, torch.Tensor | PackedWeight | None] = {
            "norm": attention.norm, "qkv": attention.qkv, "qkv_bias": attention.qkv_bias, "q_norm": attention.q_norm,
            "k_norm": attention.k_norm, "o": attention.o, "o_bias": attention.o_bias, "cos_sin": attention.cos_sin,
            "keys": views.keys, "values": views.values,
        }  # fmt: skip
        if mlp is not None:
            tensors = {**tensors, "mlp_norm": mlp.norm, "gate_up": mlp.gate_up, "down": mlp.down}
        for name, value in tensors.items():
            tensor = value.data if isinstance(value, PackedWeight) else value
            if isinstance(tensor, StoredMatrix):
                setattr(argument, f"{name}_scales", tensor.scales.data_ptr())
                tensor = tensor.elements
            elif isinstance(tensor, PackedMatrix):
                (segment,) = tensor.segments
                if segment.scales.data_ptr() % 16:  # they are copied like the numbers
                    raise ValueError(f"scales of {name} do not begin at a multiple of 16 bytes")
                setattr(argument, f"{name}_scales", segment.scales.data_ptr())
                tensor = segment.low
            if tensor is not None and (tensor.data_ptr() % 16 or tensor.stride(-1) != 1):
                raise ValueError(f"{name} does not begin at a multiple of 16 bytes, or has gaps")
            setattr(argument, name, None if tensor is None else tensor.data_ptr())
        argument.key_page, argument.value_page = views.key_page, views.value_page
        argument.page_bits = views.block_size.bit_length() - 1
        if views.block_size != 1 << argument.page_bits or views.key_page % 8 or views.value_page % 8:
            raise ValueError(f"pages of {views.block_size} tokens, {views.key_page} numbers apart: takes powers of two")
        self._key = attention, mlp, views


def _number(name: str) -> tuple[str, int]:
    """A layer's number, and what is before it in the name of its state."""
    found = re.match(r"(.*?)(\d+)(?:\.\D*)?$", name)
    return (found[1], int(found[2])) if found else (name, -2)
