"""Expert layers: a block of experts, or the products with one stack of weights, is one call of the C++ library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.ops.expert_composites import MoEWeights
from evener_backend_cpu.block_packing import LAYOUT as BLOCKS
from evener_backend_cpu.block_packing import addresses, matrices
from evener_backend_cpu.native_library import Experts, Matrix
from evener_backend_cpu.primitives import ACTIVATIONS, NativeKernel

_SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_top": 2}
_KINDS = {**ACTIVATIONS, "clamped_swiglu": 3}
_NO_MEMORY = "no memory for the experts' scratch; lower infer.step_tokens or infer.kv_memory"
#: Matrices that take rows of the stream; the others take what is between two of them.
_OUTER = ("router", "gate_up", "shared_gate_up", "shared_gate")
_LINEARS = ("router", "shared_gate_up", "shared_down", "shared_gate")
_TENSORS = ("norm", "post_norm", "router_bias", "gate_up_bias", "down_bias", "correction", "copies")


class NativeGroupedLinear(NativeKernel):
    """One call for all experts. Weights of experts without rows are not read."""

    op = "grouped_linear"
    takes_weights = True

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("grouped", call.static["dtype"])
        rows, columns, experts = (call.static[k] for k in ("rows", "columns", "experts"))
        last: list[Any] = [None, None]  # the weight and where its matrices are

        def run(
            x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if last[0] is not weight:
                last[:] = weight, matrices(weight)
            x, slots = x.contiguous(), slots.contiguous()
            y = x.new_empty(*slots.shape, rows)
            if function(
                x.data_ptr(),
                slots.shape[0],
                slots.data_ptr(),
                slots.shape[1],
                experts,
                ctypes.addressof(last[1]),
                None if bias is None else bias.data_ptr(),
                rows,
                columns,
                y.data_ptr(),
                device.threads,
            ):
                raise MemoryError(_NO_MEMORY)
            return y

        return run


class _Site:
    """One call site: the C struct of its sizes, and of the addresses of the weights that it was called with last."""

    def __init__(self, static: Mapping[str, Any], layouts: Mapping[str, str]) -> None:
        self.struct = s = Experts()
        self.address = ctypes.addressof(s)
        self._weights: MoEWeights | None = None
        self._stacks: tuple[Any, Any] | None = None
        for name in ("hidden", "inner", "top", "groups", "top_groups", "group_best", "renormalize", "shared_inner"):
            setattr(s, name, static[name])
        for name in ("eps", "offset", "scale", "alpha", "limit"):
            setattr(s, name, static[name])
        s.count, s.slots = static["experts"], static["gate_up"].experts
        s.scoring, s.activation = _SCORINGS[static["scoring"]], _KINDS[static["activation"]]
        s.packed = any(layouts.get(name) == BLOCKS for name in _OUTER)
        s.packed_inner, s.packed_shared = (layouts.get(name) == BLOCKS for name in ("down", "shared_down"))

    def bind(self, weights: MoEWeights) -> int:
        """The struct's address, with these weights in it. They are the same objects at every step."""
        if weights is self._weights:
            return self.address
        s, named = self.struct, weights._asdict()
        for name in _LINEARS:
            setattr(s, name, Matrix() if named[name] is None else Matrix(*addresses(named[name])))
        for name in _TENSORS:
            setattr(s, name, _address(named[name]))
        s.slot_of, s.copy_columns = _address(weights.slots), weights.slots.shape[1]
        self._stacks = matrices(weights.gate_up), matrices(weights.down)
        s.gate_up, s.down = (ctypes.addressof(stack) for stack in self._stacks)
        self._weights = weights
        return self.address


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the loader gives contiguous weights"
    return tensor.data_ptr()


class NativeMoeBlock(NativeKernel):
    """Norm, routing, experts and their weighted sum in one parallel region."""

    op = "moe_block"
    takes_weights = True

    def _judge(self, call: OpCall) -> str | None:
        if call.static["activation"] not in _KINDS:
            return f"does not know activation {call.static['activation']!r}"
        if call.static["scoring"] not in _SCORINGS:
            return f"does not know scoring {call.static['scoring']!r}"
        return "weighs the experts' results, not their inputs" if call.static["weigh_input"] else None

    def workspace(self, call: OpCall) -> int:
        scratch, site = self.native.function("experts_scratch", call.static["dtype"]), _Site(call.static, call.layouts)
        return int(scratch(site.address, call.bucket.high, self.device.threads))

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("experts", call.static["dtype"])
        site = _Site(call.static, call.layouts)

        def run(x: torch.Tensor, residual: torch.Tensor, weights: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
            if function(site.bind(weights), x.shape[0], x.data_ptr(), residual.data_ptr(), device.threads):
                raise MemoryError(_NO_MEMORY)
            return x, residual

        return run


EXPERTS = (NativeGroupedLinear, NativeMoeBlock)
