"""One token's experts in one launch: the kernel of ``one_token_experts.cu``.

Norm, router, choice and both products of the chosen experts in several launches wait for each other, and a launch has
no weights under way when it begins. Here 128 programs stay for the whole block, as in ``one_token.py``: they send each
other the router's logits. In each, one warp chooses the experts as soon as it has these, and from then on streams the
program's rows of gate and up, and of down, through a ring, so memory is not idle while activations are sent.
docs/lab/one-token-kernel.md has measurements.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import cast

import torch

from evener.contracts.device import Device
from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import MoEStatic
from evener.contracts.weights import MoEWeights
from evener.ops.reference.linear import PLAIN
from evener_backend_cuda.compiled import CompiledKernel, Driver
from evener_backend_cuda.one_launch import (
    CONTROL,
    COPIES,
    PATIENCE,
    PROGRAMS,
    WARPS,
    OneLaunchKernel,
    read_sources,
    shared_of,
)
from evener_backend_cuda.one_token_launch import Messages
from evener_kernels_triton.arguments import checked
from evener_kernels_triton.experts import TritonMoeBlock
from evener_kernels_triton.tuning import Tuning

#: As in one_token_experts.cu: threads of a program.
THREADS = 288
#: Columns of a tile at most; its bytes, with the gaps between its rows.
_MOST_COLUMNS = 1024
_TILE = 8 * (2 * _MOST_COLUMNS + 64)
_LEAST_STAGES = 4
#: Activations that a program holds, and choices of a warp.
_MOST_ACTIVATED, _MOST_TOP = 16_384, 32


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes that the kernel is compiled for.

    Attributes:
        experts, top: how many there are, and how many are chosen.
        inner: width of one.
    """

    hidden: int
    experts: int
    top: int
    inner: int

    @property
    def down_columns(self) -> int:
        """Columns of a tile of down: a whole part of one expert's."""
        return next(n for n in (1024, 768, 512, 256) if self.inner % n == 0)

    def refusal(self) -> str | None:
        """Why rows cannot be shared out; None if they can."""
        if PROGRAMS % self.top or self.top > _MOST_TOP:
            return f"shares {PROGRAMS} programs out to the experts of a token, up to {_MOST_TOP}, not to {self.top}"
        if self.hidden % 512 or self.inner % 256:
            return f"hidden {self.hidden} and inner {self.inner} are not multiples of 512 and 256"
        if self.top * self.inner > _MOST_ACTIVATED:
            return f"{self.top} experts of {self.inner} are more than {_MOST_ACTIVATED}"
        return None

    def shared(self, stages: int) -> int:
        """Bytes of shared memory of a program."""
        rows, routed = self.inner * self.top // PROGRAMS, -(-self.experts // PROGRAMS)
        tall = max(2 * -(-rows // 8), -(-self.hidden // PROGRAMS // 8)) * 8
        words = max(-(-rows // 2 // 3), -(-routed // 3)) * 12
        return (
            stages * (_TILE + 16) + 2 * self.hidden + 2 * self.top * self.inner + 256 * -(-self.experts // 32)
            + 16 * self.top + -(-self.top // 4) * 16 + 4 * WARPS * (routed + tall + 1)
            + -(-words // 16) * 16 + 8
        )  # fmt: skip

    def stages(self, shared: int) -> int:
        """Tiles of the ring of a program with so many bytes; 0: they are too few."""
        found = (shared - self.shared(0)) // (_TILE + 16)
        return found if found >= _LEAST_STAGES else 0

    def messages(self) -> int:
        """Messages of 8 bytes, with the counters."""
        rows, routed = self.inner * self.top // PROGRAMS, -(-self.experts // PROGRAMS)
        return CONTROL + sum(COPIES * PROGRAMS * -(-words // 3) * 2 for words in (routed, rows // 2))


class Experts(ctypes.Structure):
    """``Experts`` of one_token_experts.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "messages", "report", "stamps", "x", "stream", "norm", "router", "gate_up", "down", "slots")),
        ("copies", ctypes.c_uint), ("site", ctypes.c_uint),
    ]  # fmt: skip


class ExpertsSite:
    """The launch of one layer's experts, with the addresses of the last call's weights.

    Attributes:
        stamps: an address as in one_token_experts.cuh, for benchmarks.
    """

    stamps: int | None = None

    def __init__(self, launch: CompiledKernel, messages: Messages, count: int) -> None:
        self._launch, self._room, self._weights = launch, messages.of(count), cast(MoEWeights | None, None)
        self._argument = Experts(messages=self._room.data_ptr(), site=messages.site())

    def run(self, x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' result and the stream, in the memory of ``x`` and ``residual``."""
        if self._weights is not w:
            self._bind(w)
        x, residual = x.contiguous(), residual.contiguous()
        self._argument.x, self._argument.stream = x.data_ptr(), residual.data_ptr()
        self._argument.stamps = self.stamps
        self._launch(self._launch.place(x.device).stream, self._argument)
        return x, residual

    def _bind(self, w: MoEWeights) -> None:
        named: dict[str, PackedWeight | torch.Tensor | None] = {
            "norm": w.norm, "router": w.router, "gate_up": w.gate_up, "down": w.down, "slots": w.slots,
        }  # fmt: skip
        for name, value in named.items():
            tensor = value.data if isinstance(value, PackedWeight) else value
            if tensor is not None and (tensor.data_ptr() % 16 or not tensor.is_contiguous()):
                raise ValueError(f"{name} does not begin at a multiple of 16 bytes, or has gaps")
            setattr(self._argument, name, None if tensor is None else tensor.data_ptr())
        self._argument.copies, self._weights = w.slots.shape[1], w


class OneTokenExperts(OneLaunchKernel):
    """Norm, router, choice and experts of one token, in bfloat16. Several launches compute experts that have biases or
    whose choice is corrected.

    Args: as of ``OneTokenLayer``.
    """

    op, name = "moe_block", "cuda.one_token_experts"
    priority = 150
    packings = (PLAIN,)

    def __init__(
        self, device: Device, tuning: Tuning | None = None, driver: Driver | None = None, off: str | None = None
    ) -> None:
        super().__init__(device, driver, off)
        self._several = TritonMoeBlock(device, Tuning.of(device.capabilities) if tuning is None else tuning)

    def _refusal(self, call: OpCall) -> str | None:
        s = cast(MoEStatic, call.static)
        return _block_refusal(s) or self._several.supports(call) or _sizes(s).refusal()

    def _room_refusal(self, call: OpCall) -> str | None:
        if _sizes(cast(MoEStatic, call.static)).stages(shared_of(call)):
            return None
        return "a program of it does not fit into a multiprocessor's shared memory"

    def workspace(self, call: OpCall) -> int:
        return 8 * _sizes(cast(MoEStatic, call.static)).messages() + self._several.workspace(call)

    def build(self, call: OpCall) -> OpFunction:
        several, site = self._several.build(call), self.site(call)

        def run(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
            if any(each is not None for each in (w.router_bias, w.correction, w.gate_up_bias, w.down_bias)):
                return several(x, residual, w)  # type: ignore[no-any-return]
            return site.run(x, residual, w)

        return checked(call, run)

    def site(self, call: OpCall) -> ExpertsSite:
        """The launch of a call site."""
        s = cast(MoEStatic, call.static)
        sizes = _sizes(s)
        stages = sizes.stages(shared_of(call))
        macros = defines(s, stages, self._flight(stages))
        kernel = self._kernel(source(), macros, "one_token_experts", THREADS, sizes.shared(stages))
        return ExpertsSite(kernel, self._messages, sizes.messages())


def source() -> str:
    """The kernel, behind the functions that it is written in."""
    return read_sources("hopper.cuh", "forms.cuh", "one_token_experts.cuh", "streamed.cuh", "one_token_experts.cu")


def defines(s: MoEStatic, stages: int, flight: int) -> dict[str, object]:
    """The macros that one_token_experts.cu needs."""
    sizes = _sizes(s)
    return {
        "HIDDEN": sizes.hidden, "EXPERTS": sizes.experts, "TOP": sizes.top, "INNER": sizes.inner,
        "DOWN_COLUMNS": sizes.down_columns, "EPS": f"{s['eps']!r}f", "OFFSET": f"{float(s['offset'])!r}f",
        "SCALE": f"{float(s['scale'])!r}f", "RENORMALIZE": int(s["renormalize"] or s["scoring"] == "softmax_top"),
        "MOST": _MOST_COLUMNS, "STAGES": stages, "FLIGHT": flight, "PATIENCE": f"{PATIENCE}u", "WEIGHT_BITS": 16,
        "BLOCK": 0, "ZEROS": 0, "SHARED_BYTES": sizes.shared(stages),
    }  # fmt: skip


def _sizes(s: MoEStatic) -> ExpertSizes:
    return ExpertSizes(s["hidden"], s["experts"], s["top"], s["inner"])


def _block_refusal(s: MoEStatic) -> str | None:
    weights = (s["router"], s["gate_up"], s["down"])
    if s["dtype"] != "bfloat16" or any(each.dtype != "bfloat16" for each in weights):
        return f"computes in bfloat16, not in {s['dtype']}"
    if any(each.layout != PLAIN.layout for each in weights):
        return "reads weights as plain numbers"
    if s["scoring"] not in ("softmax", "softmax_top") or s["groups"] > 1:
        return "chooses by softmax, without groups"
    if s["activation"] != "silu" or s["router_weight_on_input"] or s["post_norm"]:
        return "computes silu, weights results, and has no norm after the experts"
    if s["shared_inner"]:
        return "has no shared experts"
    return None
