"""A whole decoder layer for one token in one launch: the kernel of ``one_token.cu``.

One request's step of a small model is made of waiting: for launches, and for the first bytes of each product. Here 128
programs stay for a whole layer. In each, one warp copies the program's rows of all weights into a ring in shared
memory, ahead of everything else: weights depend on nothing. Vectors go from program to program as messages of 8 bytes,
4 of them a number that says which launch wrote them, so a reader needs no barrier (NVIDIA 2017, NCCL's protocol "LL").
Each 16 programs have one key head: its projections, its attention over a part of the keys each, and the merge of these
parts. The next layer's programs start while this one's compute (programmatic dependent launch), and take the stream
from messages too. docs/lab/one-token-kernel.md has measurements.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, cast

import torch

from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import AttentionStatic, DecoderLayerStatic, MLPStatic
from evener.contracts.weights import AttentionWeights, MLPWeights
from evener.ops.reference.linear import PLAIN
from evener_backend_cuda.capability import SHORT_TOKENS
from evener_backend_cuda.compiled import CompiledKernel, Driver, Place
from evener_kernels_triton.arguments import checked
from evener_kernels_triton.composites import TritonAttentionBlock, TritonMlpBlock
from evener_kernels_triton.state import LAYOUT, PagedMeta, PagedViews
from evener_kernels_triton.tuning import Tuning, number_of

#: As in one_token.cu.
PROGRAMS, SHARE, WARPS, THREADS = 128, 16, 8, 320
_KV_STAGES, _CONTROL, _COPIES = 2, 256, 4
#: Bytes of a layer's weights. With more, reading takes most of the time: with 368 MiB several launches are faster.
_MOST_BYTES = 40 << 20
#: Layers that one device's messages serve: the kernel keeps a counter for each.
MAX_SITES = 255
#: Columns of a tile of eight rows, and bytes of it: its rows are 64 bytes apart.
_COLUMNS = 1024
_TILE = 8 * (_COLUMNS * 2 + 64)
#: Tiles in the ring: fewer than the first leave the copies no time, more than the second find no room.
_LEAST_STAGES, _MOST_STAGES = 3, 5
#: What the hardware keeps of each program's shared memory.
_RESERVED = 1024
#: Looks of a wait, some 20 seconds of them at messages: one that needs more has lost its partner, and the launch fails.
_PATIENCE = 1 << 26
KV_HEADS = PROGRAMS // SHARE
GROUPS, HEAD_DIMS = (1, 2, 4), (64, 128)


class _Argument(ctypes.Structure):
    """``Layer`` of one_token.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "x", "residual", "out", "stream", "norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "mlp_norm",
            "gate_up", "down", "cos_sin", "positions", "slots", "kv_lens", "table", "keys", "values")),
        ("key_page", ctypes.c_longlong), ("value_page", ctypes.c_longlong),
        ("messages", ctypes.c_void_p), ("report", ctypes.c_void_p), ("stamps", ctypes.c_void_p),
        ("before", ctypes.c_uint), ("after", ctypes.c_uint), ("site", ctypes.c_uint), ("wide_slots", ctypes.c_uint),
        ("page_bits", ctypes.c_uint),
    ]  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer that the kernel is compiled for."""

    hidden: int
    inner: int
    heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // KV_HEADS

    def refusal(self) -> str | None:
        """Why rows cannot be shared out; None if they can."""
        if self.head_dim not in HEAD_DIMS or self.group not in GROUPS or self.heads % KV_HEADS:
            return f"{self.heads} heads of {self.head_dim}: takes {GROUPS} heads of {HEAD_DIMS} for each key head"
        if self.hidden % 512 or self.inner % 256:
            return f"hidden {self.hidden} and inner {self.inner} are not multiples of 512 and 256"
        if self.nbytes > _MOST_BYTES:
            return f"is for layers of up to {_MOST_BYTES >> 20} MiB, not {self.nbytes >> 20}: there reading dominates"
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of a layer's weights."""
        heads = 2 * self.heads + 2 * KV_HEADS
        return 2 * self.hidden * (heads * self.head_dim + 3 * self.inner)

    def shared(self, stages: int) -> int:
        """Bytes of shared memory of a program."""
        dim, group, out = self.head_dim, self.group, self.hidden // PROGRAMS
        wide = max(2 * max(self.heads * dim, self.inner), 4 * self.hidden)
        rows = 8 * max(-(-(group + 2) * dim // SHARE // 8), 2 * -(-self.inner // PROGRAMS // 8))
        words = max(self._words[0], *self._words[2:])
        fixed = (
            _KV_STAGES * WARPS * (32 // (dim // 8)) * dim * 4  # keys and values
            + max(2 * self.hidden + wide, WARPS * group * dim * 4)  # vectors, or sums of attention
            + WARPS * group * 8 + SHARE * self._part_messages * 12 + group * dim * 4 + 2 * dim * 2 + dim * 4
            + -(-out * 4 // 16) * 16 + WARPS * rows * 4 + -(-12 * -(-words // 3) // 16) * 16 + 2 * WARPS * 4 + 16
            + (2 * _KV_STAGES + 1) * 8
        )  # fmt: skip
        return fixed + stages * (_TILE + 16)

    def stages(self, shared: int) -> int:
        """Tiles of the ring, so that two programs fit into ``shared`` bytes of a multiprocessor; 0: they do not."""
        fitting = [n for n in range(_LEAST_STAGES, _MOST_STAGES + 1) if 2 * (self.shared(n) + _RESERVED) <= shared]
        return max(fitting, default=0)

    def messages(self) -> int:
        """Messages of 8 bytes of a layer, with the counters."""
        parts = PROGRAMS * SHARE * self._part_messages * 2
        to_all = sum(_COPIES * PROGRAMS * -(-words // 3) * 2 for words in self._words)
        return _CONTROL + parts + KV_HEADS * (self.group + 2) * self.head_dim // 2 + to_all

    @property
    def _words(self) -> tuple[int, int, int, int]:
        """Words of 4 bytes that a program sends to all: attention, output, activation, the next layer's stream."""
        out = self.hidden // PROGRAMS
        return self.group * self.head_dim // SHARE // 2, out // 2, self.inner // PROGRAMS // 2, out

    @property
    def _part_messages(self) -> int:
        """Messages of three numbers that bring a program its share of attention from one other."""
        return -(-(self.group * self.head_dim // SHARE + 2) // 3)


@dataclass(frozen=True)
class _Last:
    """The last launch in a capture: what it returned, the place after it, its layer, its messages, and their mark."""

    x: torch.Tensor
    stream: torch.Tensor
    after: Place
    layer: tuple[str, int]
    site: int
    room: torch.Tensor
    flag: int


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


class OneTokenLayer(Kernel):
    """Norm, projections, attention over pages, MLP of one token: 128 programs, one launch.

    A launch takes the stream of the layer before from that layer's messages, without waiting for its end, if the
    captured graph has nothing between the two launches. So a change of the stream between two layers is seen, also one
    in place. Outside a capture the driver does not say what was launched last, and the stream is read from memory.

    With longer state a layer is computed in several launches, which share more programs out to a key head.

    Args:
        device: where it runs.
        tuning: sizes of these launches; None: the usual ones for the device.
        driver: compiles and loads kernels; None: NVIDIA's.
    """

    op, name = "decoder_layer", "cuda.one_token_layer"
    priority = 200
    capturable = True
    packings = (PLAIN,)
    state_layout = LAYOUT

    def __init__(self, device: Device, tuning: Tuning | None = None, driver: Driver | None = None) -> None:
        self._driver = Driver() if driver is None else driver
        self._messages = Messages(device.torch_device)
        tuning = Tuning.of(device.capabilities) if tuning is None else tuning
        self._parts = TritonAttentionBlock(device, tuning), TritonMlpBlock(device, tuning)

    def supports(self, call: OpCall) -> str | None:
        static, device = cast(DecoderLayerStatic, call.static), call.device
        attention, mlp = static["attention"], static["mlp"]
        if call.bucket.high != 1:
            return f"computes one token, not {call.bucket}"
        if device.variant != "sm_90":
            return f"its machine code is for sm_90, not {device.variant}"
        if static["dtype"] != "bfloat16":
            return f"computes in bfloat16, not in {static['dtype']}"
        reason = _attention_refusal(attention) or _mlp_refusal(mlp) or _sizes(static).refusal()
        if reason:
            return reason
        if number_of("units", device.features, 0) < PROGRAMS:
            return f"needs {PROGRAMS} multiprocessors"
        stages = _sizes(static).stages(number_of("shared", device.features, 0) + _RESERVED)
        if not stages:
            return "two programs of it do not fit into a multiprocessor's shared memory"
        return self._driver.refusal()

    def workspace(self, call: OpCall) -> int:
        own = 8 * _sizes(cast(DecoderLayerStatic, call.static)).messages()
        return own + max(part.workspace(each) for part, each in zip(self._parts, _halves(call), strict=True))

    def build(self, call: OpCall) -> OpFunction:
        static, device = cast(DecoderLayerStatic, call.static), call.device
        sizes = _sizes(static)
        stages = sizes.stages(number_of("shared", device.features, 0) + _RESERVED)
        code = self._driver.compile(source(), defines(static, stages))
        launch = self._driver.kernel(code, "one_token_layer", PROGRAMS, THREADS, sizes.shared(stages))
        attention, mlp = (part.build(each) for part, each in zip(self._parts, _halves(call), strict=True))
        layer = _Layer(static, launch, self._messages, sizes)

        def run(
            x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: AttentionWeights,
            mlp_weights: MLPWeights, views: PagedViews, meta: PagedMeta,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            if meta.step.max_kv >= SHORT_TOKENS:
                x, stream = attention(x, residual, positions, w, views, meta)
                return mlp(x, stream, mlp_weights)  # type: ignore[no-any-return]
            return layer.run(x, residual, positions, w, mlp_weights, views, meta)

        return checked(call, run)


class _Layer:
    """One call site: the kernel's argument, with the addresses of the last call's weights and pages."""

    def __init__(self, static: DecoderLayerStatic, launch: CompiledKernel, messages: Messages, sizes: Sizes) -> None:
        self._launch, self._messages, self._hidden = launch, messages, sizes.hidden
        self._room = messages.of(sizes.messages())
        self._layer = _number(static["attention"]["state"].name)
        self._key: tuple[Any, ...] = (None, None, None)
        self._argument = _Argument(messages=self._room.data_ptr(), site=messages.site())

    def run(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, attention: AttentionWeights,
        mlp: MLPWeights, views: PagedViews, meta: PagedMeta,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
        argument.before, argument.after = self._before(x, residual, place), self._messages.next_flag()
        self._launch(place.stream, argument)
        if place.capture:
            after = self._launch.place(x.device)
            self._messages.last = _Last(x, stream, after, self._layer, argument.site, self._room, argument.after)
        return x, stream

    def _before(self, x: torch.Tensor, residual: torch.Tensor | None, place: Place) -> int:
        """The mark of the messages that have ``x + residual``, or 0 if they must be read from memory."""
        last = self._messages.last
        if last is None or last.x is not x or last.stream is not residual or last.after != place:
            return 0
        (before, number), (name, own) = last.layer, self._layer
        same = before == name and number + 1 == own and last.room is self._room
        return last.flag if same and last.site != self._argument.site else 0

    def _bind(self, attention: AttentionWeights, mlp: MLPWeights, views: PagedViews) -> None:
        argument = self._argument
        tensors: Mapping[str, torch.Tensor | PackedWeight | None] = {
            "norm": attention.norm, "qkv": attention.qkv, "qkv_bias": attention.qkv_bias, "q_norm": attention.q_norm,
            "k_norm": attention.k_norm, "o": attention.o, "o_bias": attention.o_bias, "cos_sin": attention.cos_sin,
            "mlp_norm": mlp.norm, "gate_up": mlp.gate_up, "down": mlp.down, "keys": views.keys, "values": views.values,
        }  # fmt: skip
        for name, value in tensors.items():
            tensor = value.data if isinstance(value, PackedWeight) else value
            if tensor is not None and (tensor.data_ptr() % 16 or tensor.stride(-1) != 1):
                raise ValueError(f"{name} does not begin at a multiple of 16 bytes, or has gaps")
            setattr(argument, name, None if tensor is None else tensor.data_ptr())
        argument.key_page, argument.value_page = views.key_page, views.value_page
        argument.page_bits = views.block_size.bit_length() - 1
        if views.block_size != 1 << argument.page_bits or views.key_page % 8 or views.value_page % 8:
            raise ValueError(f"pages of {views.block_size} tokens, {views.key_page} numbers apart: takes powers of two")
        self._key = attention, mlp, views


def source() -> str:
    """The kernel, behind the functions that it is written in."""
    return "".join((files("evener_backend_cuda") / name).read_text() for name in ("hopper.cuh", "one_token.cu"))


def defines(static: DecoderLayerStatic, stages: int) -> dict[str, object]:
    """The macros that one_token.cu needs."""
    sizes, attention, mlp = _sizes(static), static["attention"], static["mlp"]
    scale = attention["state"].attention.scale * math.log2(math.e)
    return {
        "HIDDEN": sizes.hidden, "INNER": sizes.inner, "HEADS": sizes.heads, "KV_HEADS": KV_HEADS, "D": sizes.head_dim,
        "EPS": f"{attention['eps']!r}f", "MLP_EPS": f"{mlp['eps']!r}f", "OFFSET": f"{float(attention['offset'])!r}f",
        "QK_NORM": int(attention["qk_norm"]), "SCALE": f"{scale!r}f", "MOST": _COLUMNS, "STAGES": stages,
        "PATIENCE": f"{_PATIENCE}u",
    }  # fmt: skip


def _halves(call: OpCall) -> tuple[OpCall, OpCall]:
    """The calls of the attention block and of the MLP."""
    static = cast(DecoderLayerStatic, call.static)
    return (
        replace(call, op="attention_block", static=cast(Mapping[str, Any], static["attention"])),
        replace(call, op="mlp_block", static=cast(Mapping[str, Any], static["mlp"])),
    )


def _sizes(static: DecoderLayerStatic) -> Sizes:
    attention = static["attention"]
    return Sizes(static["hidden"], static["mlp"]["inner"], attention["heads"], attention["head_dim"])


def _attention_refusal(s: AttentionStatic) -> str | None:
    state, spec = s["state"].attention, s["state"].spec
    if s["kv_heads"] != KV_HEADS:
        return f"shares its programs out to {KV_HEADS} key heads, not {s['kv_heads']}"
    if s["head_dim"] != s["value_dim"] or s["rotary_dim"] != s["head_dim"] or s["interleaved"]:
        return "takes values as wide as keys, rotated as a whole, in halves"
    if spec.kind != "full" or state.softcap or state.sinks or state.slopes is not None:
        return "attends to all keys, without soft cap, sinks and slopes"
    if any(tensor.wide for tensor in spec.tensors):
        return "reads keys and values that are not quantized"
    return "has no norm after attention" if s["post_norm"] else None


def _mlp_refusal(s: MLPStatic) -> str | None:
    if s["activation"] != "silu":
        return f"does not know activation {s['activation']!r}"
    if s["bias"] or s["post_norm"]:
        return "has no biases in the MLP, and no norm after it"
    return None


def _number(name: str) -> tuple[str, int]:
    """A layer's number, and what is before it in the name of its state."""
    found = re.match(r"(.*?)(\d+)(?:\.\D*)?$", name)
    return (found[1], int(found[2])) if found else (name, -2)
