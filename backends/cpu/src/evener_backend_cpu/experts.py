"""Expert layers: a whole MoE block, or the products with one stack of weights, is one call of the C++ library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any, cast

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import ExpertsStatic, MoEStatic
from evener.contracts.weights import MoEWeights
from evener_backend_cpu.answers import Answers, Asked, Question, Routed
from evener_backend_cpu.arguments import optional, require, require_count, require_weight
from evener_backend_cpu.block_packing import LAYOUT as BLOCKS
from evener_backend_cpu.native_library import Experts, Matrix
from evener_backend_cpu.primitives import ACTIVATIONS, NativeKernel, rounded_as, rounded_rows, with_factor
from evener_backend_cpu.segments import addresses, matrices

_SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_top": 2}
_KINDS = {**ACTIVATIONS, "clamped_swiglu": 3}
#: Matrices whose input is a row of the stream; the input of the others is an intermediate result.
_OUTER = ("router", "gate_up", "shared_gate_up", "shared_gate")


class NativeGroupedLinear(NativeKernel):
    """One call for all experts. Weights of experts without rows are not read."""

    op = "grouped_linear"
    takes_weights = rounds_rows = True

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("grouped", call.static["dtype"])
        rows, columns, experts = (call.static[k] for k in ("rows", "columns", "experts"))
        dtype = getattr(torch, call.static["dtype"])
        how = rounded_as(call.static.get("weight"))
        last: list[Any] = [None, None]  # the weight and the addresses of its matrices

        def run(
            x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if last[0] is not weight:
                require_weight("the stack", weight, (experts, rows, columns), dtype)
                last[:] = weight, matrices(weight)
            factor, added = None, bias
            if how is not None:
                x, factor = rounded_rows(x, how, dtype)
                added = bias if factor is None else None
            x, slots = x.contiguous(), slots.contiguous()
            y = x.new_empty(*slots.shape, rows)
            function(
                require("the input", x, dtype, (slots.shape[0], columns)),
                slots.shape[0],
                require("slots", slots, torch.int32, slots.shape),
                slots.shape[1],
                experts,
                ctypes.addressof(last[1]),
                optional("the bias", added, dtype, (experts, rows)),
                rows,
                columns,
                y.data_ptr(),
                device.threads,
            )
            if factor is None:
                return y
            own = None if bias is None else bias[slots.clamp(min=0)] * (slots >= 0)[..., None]
            return with_factor(y, factor[:, :, None], own)

        return run


class NativeMixExperts(NativeKernel):
    """A weighted sum in one pass. Torch's threads take no part: after a product of torch they spin for milliseconds, on
    the cores that this library's threads need."""

    op = "mix_experts"

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("mix", call.static["dtype"])
        hidden, dtype = call.static["hidden"], getattr(torch, call.static["dtype"])

        def run(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            x, weights = x.contiguous(), weights.contiguous()
            tokens, top = weights.shape
            y = x.new_empty(tokens, hidden)
            function(
                require("the experts' rows", x, dtype, (tokens, top, hidden)),
                require("the weights", weights, torch.float32, (tokens, top)),
                y.data_ptr(),
                tokens,
                top,
                hidden,
                device.threads,
            )
            return y

        return run


class _Stacks:
    """Experts of one call site: the C struct with sizes, and the addresses of the weights of the last call."""

    def __init__(self, static: ExpertsStatic | MoEStatic, layouts: Mapping[str, str]) -> None:
        self.struct = s = Experts()
        self.address = ctypes.addressof(s)
        self._weights: MoEWeights | None = None
        self._dtype: torch.dtype = getattr(torch, static["dtype"])
        self._stacks: tuple[Any, Any] | None = None
        s.hidden, s.inner, s.top = static["hidden"], static["inner"], static["top"]
        s.groups = s.top_groups = s.group_best = 1
        s.alpha, s.limit, s.activation = static["alpha"], static["limit"], _KINDS[static["activation"]]
        s.count, s.slots = static["experts"], static["gate_up"].experts
        s.packed = any(layouts.get(name) == BLOCKS for name in _OUTER)
        s.packed_inner, s.packed_shared = (layouts.get(name) == BLOCKS for name in ("down", "shared_down"))
        self._matrices: dict[str, tuple[int, int]] = {}
        self._tensors = {
            "gate_up_bias": (self._dtype, s.slots * 2 * s.inner), "down_bias": (self._dtype, s.slots * s.hidden),
            "copies": (torch.int32, s.count),
        }  # fmt: skip

    def bind(self, weights: MoEWeights) -> int:
        """Put these weights into the struct; returns its address. They are the same objects at every step."""
        if weights is self._weights:
            return self.address
        self._weights = None  # if these are refused, the struct is that of no weights
        s, named, dtype = self.struct, weights._asdict(), self._dtype
        for name, shape in self._matrices.items():
            if named[name] is not None:
                require_weight(name, named[name], shape, dtype)
            setattr(s, name, Matrix() if named[name] is None else Matrix(*addresses(named[name])))
        for name, (kind, count) in self._tensors.items():
            tensor = named[name]
            setattr(s, name, None if tensor is None else require_count(name, tensor, kind, count))
        s.copy_columns = weights.slots.shape[1]
        s.slot_of = require("slots", weights.slots, torch.int32, (s.count, s.copy_columns))
        for name, stack, rows, columns in (
            ("gate_up", weights.gate_up, 2 * s.inner, s.hidden), ("down", weights.down, s.hidden, s.inner),
        ):  # fmt: skip
            require_weight(name, stack, (s.slots, rows, columns), dtype)
        self._stacks = matrices(weights.gate_up), matrices(weights.down)
        s.gate_up, s.down = (ctypes.addressof(stack) for stack in self._stacks)
        self._weights = weights
        return self.address


class _Site(_Stacks):
    """The same of a whole block."""

    def __init__(self, static: MoEStatic, layouts: Mapping[str, str]) -> None:
        super().__init__(static, layouts)
        s = self.struct
        s.shared_inner, s.groups, s.top_groups = static["shared_inner"], static["groups"], static["top_groups"]
        s.group_best, s.renormalize, s.scale = static["group_best"], static["renormalize"], static["scale"]
        s.eps, s.offset, s.scoring = static["eps"], static["offset"], _SCORINGS[static["scoring"]]
        self._matrices = {
            "router": (s.count, s.hidden), "shared_gate_up": (2 * s.shared_inner, s.hidden),
            "shared_down": (s.hidden, s.shared_inner), "shared_gate": (1, s.hidden),
        }  # fmt: skip
        self._tensors |= {
            "norm": (self._dtype, s.hidden), "post_norm": (self._dtype, s.hidden),
            "router_bias": (self._dtype, s.count), "correction": (torch.float32, s.count),
        }  # fmt: skip


class NativeRoutedExperts(NativeKernel):
    """The chosen experts and their weighted sum in one parallel region: for experts of layers whose other parts another
    device computes."""

    op = "routed_experts"
    takes_weights = keeps_int8 = True

    def _unsupported_reason(self, call: OpCall) -> str | None:
        return _unsupported(cast(ExpertsStatic, call.static))

    def workspace(self, call: OpCall) -> int:
        static = cast(ExpertsStatic, call.static)
        scratch, site = self.native.function("experts_scratch", static["dtype"]), _Stacks(static, call.layouts)
        pairs = call.bucket.high * static["top"]
        return int(scratch(site.address, call.bucket.high, self.device.threads)) + 4 * pairs

    def build(self, call: OpCall) -> OpFunction:
        static = cast(ExpertsStatic, call.static)
        names = ("routed", "routed_aside", "answer")
        here, aside, answer = (self.native.function(name, static["dtype"]) for name in names)
        return _Routed(self.device, here, aside, answer, static, call.layouts)


class _Routed:
    """``routed_experts``; with ``out``, into given memory."""

    #: See ``OpFunction``.
    takes_out = True
    #: Answers questions of ``asked``.
    answers = Answers

    def __init__(
        self, device: Any, function: Any, aside: Any, answer: Any, static: ExpertsStatic, layouts: Mapping[str, str]
    ) -> None:
        self._device, self._function, self._site = device, function, _Stacks(static, layouts)
        self._aside, self._answer = aside, answer
        self._hidden, self._top, self._dtype = static["hidden"], static["top"], getattr(torch, static["dtype"])
        #: Tensors of the last call with ``out``, and their addresses: they are the same objects at every step.
        self._last: tuple[Any, ...] = (None, None, None, None)
        self._addresses = 0, 0, 0, 0

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights,
        out: torch.Tensor | None = None, rows: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        count = x.shape[0] if rows is None else rows
        if out is None:
            x, ids, weights, out = x.contiguous(), ids.contiguous(), weights.contiguous(), torch.empty_like(x)
            addresses = self._checked(x, ids, weights, out)
        else:
            if not all(map(is_, self._last, (x, ids, weights, out))):
                self._last, self._addresses = (x, ids, weights, out), self._checked(x, ids, weights, out)
            addresses = self._addresses
        if not 0 <= count <= len(x):
            raise ValueError(f"{count} rows of {len(x)} were asked for")
        self._function(self._site.bind(experts), count, *addresses, self._device.threads)
        return out

    def begin(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights, out: torch.Tensor,
        threads: int, word: torch.Tensor | None = None,
    ) -> Callable[[], int]:  # fmt: skip
        """Begin to compute into ``out``, with so many threads, of which none is the caller. Returns what waits for the
        end: the nanoseconds that it took. Inputs, ``out`` and weights may not change until then. In the end, whether it
        succeeded or not, 1 is stored in ``word``, int32 [1]. One call of a device at a time."""
        aside = self._device.aside
        place = None if word is None else require("the word", word, torch.int32, (1,))
        addresses = self._checked(x, ids, weights, out)
        self._aside(aside.handle, self._site.bind(experts), x.shape[0], *addresses, threads, place)
        return cast("Callable[[], int]", aside.end)

    def asked(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights, out: torch.Tensor,
        expert_bytes: int, ready: int, done: int,
    ) -> Question:  # fmt: skip
        """A place in a step where a device asks for this, into ``out``. It unlocks the lock of ``pthread_spin_lock`` at
        the address ``ready``, and waits for 1 at the address ``done``."""
        address, addresses = self._site.bind(experts), self._checked(x, ids, weights, out)
        asked = Asked(ready, done, Routed(address, x.shape[0], *addresses, self._device.threads), expert_bytes)
        return Question(self._answer, partial(self, x, ids, weights, experts, out, 0), asked)

    def _checked(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> tuple[int, int, int, int]:
        self._last = (None, None, None, None)
        rows, pairs = (x.shape[0], self._hidden), (x.shape[0], self._top)
        return (
            require("the input", x, self._dtype, rows),
            require("the experts' ids", ids, torch.int32, pairs),
            require("the weights", weights, torch.float32, pairs),
            require("the result", y, self._dtype, rows),
        )


class NativeMoeBlock(NativeKernel):
    """Norm, routing, experts and their weighted sum in one parallel region."""

    op = "moe_block"
    takes_weights = keeps_int8 = True

    def _unsupported_reason(self, call: OpCall) -> str | None:
        static = cast(MoEStatic, call.static)
        if static["scoring"] not in _SCORINGS:
            return f"does not know scoring {static['scoring']!r}"
        return _unsupported(static)

    def workspace(self, call: OpCall) -> int:
        static = cast(MoEStatic, call.static)
        scratch, site = self.native.function("experts_scratch", static["dtype"]), _Site(static, call.layouts)
        return int(scratch(site.address, call.bucket.high, self.device.threads))

    def build(self, call: OpCall) -> OpFunction:
        static = cast(MoEStatic, call.static)
        device, function = self.device, self.native.function("experts", static["dtype"])
        site, hidden, dtype = _Site(static, call.layouts), static["hidden"], getattr(torch, static["dtype"])

        def run(x: torch.Tensor, residual: torch.Tensor, weights: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
            shape = x.shape[0], hidden
            address, stream = require("the input", x, dtype, shape), require("residual", residual, torch.float32, shape)
            function(site.bind(weights), x.shape[0], address, stream, device.threads)
            return x, residual

        return run


def _unsupported(static: ExpertsStatic | MoEStatic) -> str | None:
    if static["activation"] not in _KINDS:
        return f"does not know activation {static['activation']!r}"
    return "weights the experts' results, not their inputs" if static["router_weight_on_input"] else None


EXPERTS = (NativeGroupedLinear, NativeMixExperts, NativeRoutedExperts, NativeMoeBlock)
