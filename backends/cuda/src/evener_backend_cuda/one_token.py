"""Whole decoder layers for one token in one launch: the kernel of ``one_token.cu``.

One request's step of a small model is made of waiting: for launches, and for the first bytes of each product. Here 128
programs stay for a whole layer. In each, one warp copies the program's rows of all weights into a ring in shared
memory, ahead of everything else: weights depend on nothing. Vectors go from program to program as messages of 8 bytes,
4 of them a number that says which launch wrote them, so a reader needs no barrier (NVIDIA 2017, NCCL's protocol "LL").
Each 16 programs have one key head: its projections, its attention over a part of the keys each, and the merge of these
parts. The next layer takes the stream from messages too. In a captured graph, layers with nothing between them can be
one launch, whose ring goes on with the next layer's weights. docs/lab/one-token-kernel.md has measurements.

Two such launches share the multiprocessors: the next one's programs start while this one's compute (programmatic
dependent launch). For layers of any size, weights in e4m3 or integers of four bits, and attention alone, a program has
a multiprocessor and a longer ring; ``cuda.one_launch=small`` leaves these out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.device import Device, DeviceCapabilities
from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import Packing
from evener.contracts.statics import AttentionStatic, DecoderLayerStatic, MLPStatic
from evener.contracts.weights import AttentionWeights, MLPWeights
from evener.ops.reference.linear import PLAIN
from evener_backend_cuda.capability import SHORT_TOKENS
from evener_backend_cuda.compiled import Driver
from evener_backend_cuda.one_launch import CONTROL, COPIES, PATIENCE, PROGRAMS, WARPS, OneLaunchKernel, read_sources
from evener_backend_cuda.one_token_launch import CallSite
from evener_kernels_triton.arguments import checked
from evener_kernels_triton.blocks import PackedForm
from evener_kernels_triton.composites import TritonAttentionBlock, TritonMlpBlock
from evener_kernels_triton.features import number_of
from evener_kernels_triton.packed import PACKED, segments_of
from evener_kernels_triton.state import LAYOUT, PagedMeta, PagedViews
from evener_kernels_triton.stored import STORED, Form, form_of
from evener_kernels_triton.tuning import Tuning

#: As in one_token.cu. A team is the programs that share query heads.
SHARE, THREADS = 16, 320
TEAMS = PROGRAMS // SHARE
_KV_STAGES = 2
#: Bytes of a layer's weights. With more, reading takes most of the time: with 368 MiB several launches are faster.
_MOST_BYTES = 40 << 20
#: Bytes of a row of a tile of eight, and of a tile: its rows are 64 bytes apart.
_ROW = 2048
_TILE = 8 * (_ROW + 64)
#: Of integers of four bits, columns that share a scale, and numbers and words of scales of a tile.
_GROUP, _PACKED_NUMBERS, _PACKED_SCALES = 128, 32_768, 128
#: Tiles in the ring: fewer than the first leave the copies no time, more than the second find no room where two
#: programs share a multiprocessor.
_LEAST_STAGES, _MOST_STAGES = 3, 5
#: Layers of one launch: their arguments are within the 32 KB that a launch may have.
MOST_LAYERS = 96
#: What the hardware keeps of each program's shared memory.
_RESERVED = 1024
KV_HEADS, GROUPS, HEAD_DIMS = (4, 8), (1, 2, 4), (64, 128)
#: A program's rows of keys are a tile's eight.
_PACKED_HEAD_DIM = 128
#: Rows and columns that share a scale.
_BLOCK = 128
#: With more, a program's rows of gate would be in more than two rows of blocks.
_MOST_INNER = 16_384


@dataclass(frozen=True)
class Sizes:
    """Sizes that the kernel is compiled for.

    Attributes:
        inner: of the MLP; 0: there is attention alone.
        weight_bits: of an element; block: rows and columns that share a scale, 0: whole rows.
        packed: how integers of four bits are stored.
        resident: programs that share a multiprocessor.
    """

    hidden: int
    inner: int
    heads: int
    head_dim: int
    kv_heads: int = TEAMS
    weight_bits: int = 16
    block: int = 0
    resident: int = 2
    packed: PackedForm | None = None

    @property
    def group(self) -> int:
        """Query heads of a team."""
        return self.heads // TEAMS

    def refusal(self) -> str | None:
        """Why rows cannot be shared out; None if they can."""
        if self.head_dim not in HEAD_DIMS or self.group not in GROUPS or self.heads % TEAMS:
            return f"{self.heads} heads of {self.head_dim}: takes {TEAMS} times {GROUPS} heads of {HEAD_DIMS}"
        if self.packed is not None and self.head_dim != _PACKED_HEAD_DIM:
            return f"reads integers of four bits with heads of {_PACKED_HEAD_DIM}, not {self.head_dim}"
        unit = 256 if self.weight_bits == 16 else 512
        if self.hidden % 512 or self.inner % unit:
            return f"hidden {self.hidden} and inner {self.inner} are not multiples of 512 and {unit}"
        if self.inner > _MOST_INNER:
            return f"inner {self.inner} is more than {_MOST_INNER}"
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of a layer's weights."""
        heads = 2 * self.heads + 2 * self.kv_heads
        return self.weight_bits * self.hidden * (heads * self.head_dim + 3 * self.inner) // 8

    def shared(self, stages: int) -> int:
        """Bytes of shared memory of a program."""
        dim, group, out = self.head_dim, self.group, self.hidden // PROGRAMS
        wide = max(2 * max(self.heads * dim, self.inner), 4 * self.hidden)
        qkv, inner = (group + 2) * dim // SHARE, self.inner // PROGRAMS
        rows = max(_whole(qkv, 16 if self.packed else 8), self._tall(out), 2 * self._tall(inner))
        words = max(self._words[0], *self._words[2:])
        mlp = bool(self.inner)
        scales = (3 + 4 * mlp) * self.hidden + 2 * self.heads * dim + 2 * self.inner
        fixed = (
            _KV_STAGES * WARPS * (32 // (dim // 8)) * dim * 4  # keys and values
            + max(2 * self.hidden + wide, WARPS * group * dim * 4)  # vectors, or sums of attention
            + WARPS * group * 8 + SHARE * self._part_messages * 12 + group * dim * 4 + 2 * dim * 2 + dim * 4
            + -(-out * 4 // 16) * 16 + WARPS * rows * 4 + -(-12 * -(-words // 3) // 16) * 16 + 2 * WARPS * 4 + 16
            + (2 * _KV_STAGES + 2) * 8
            + (WARPS * 4 if self.weight_bits == 8 else 0) + (4 * scales // self.block if self.block else 0)
            + (max(self.hidden, self.heads * dim, self.inner) // _GROUP * 16 if self.packed else 0)
        )  # fmt: skip
        return fixed + stages * (self._tile + 16)

    def stages(self, shared: int) -> int:
        """Tiles of the ring, so that the programs fit into ``shared`` bytes of a multiprocessor; 0: they do not."""
        room = shared // self.resident - _RESERVED - self.shared(0)
        most = max(0, room // (self._tile + 16))
        if self.resident > 1:
            most = min(most, _MOST_STAGES)
        return most if most >= _LEAST_STAGES else 0

    def messages(self) -> int:
        """Messages of 8 bytes of a layer, with the counters."""
        parts = PROGRAMS * SHARE * self._part_messages * 2
        to_all = sum(COPIES * PROGRAMS * -(-words // 3) * 2 for words in self._words)
        return CONTROL + parts + TEAMS * (self.group + 2) * self.head_dim // 2 + to_all

    @property
    def _tile(self) -> int:
        """Bytes of a tile."""
        if self.packed is None:
            return _TILE
        return _PACKED_NUMBERS // 2 + 4 * _PACKED_SCALES * (2 if self.packed.style == "zero" else 1)

    def _tall(self, rows: int) -> int:
        """So many rows in whole tiles."""
        return _whole(rows, 8 if self.packed is None or rows <= 8 else 16 if rows <= 16 else 32)

    @property
    def _words(self) -> tuple[int, int, int, int]:
        """Words of 4 bytes that a program sends to all: attention, output, activation, the next layer's stream."""
        out = self.hidden // PROGRAMS
        return self.group * self.head_dim // SHARE // 2, out // 2, self.inner // PROGRAMS // 2, out

    @property
    def _part_messages(self) -> int:
        """Messages of three numbers that bring a program its share of attention from one other."""
        return -(-(self.group * self.head_dim // SHARE + 2) // 3)


def _whole(rows: int, unit: int) -> int:
    """Rounded up."""
    return -(-rows // unit) * unit


@dataclass(frozen=True)
class Way:
    """How a launch is made.

    Attributes:
        flight: tiles that a program asks for at once; 0: as many as its ring has.
        layers: that a launch has room for.
    """

    flight: int
    layers: int


class _OneLaunch(OneLaunchKernel):
    """Base of the kernels below. With longer state several launches take its place, which share more programs out to a
    key head.

    Args: as of ``OneLaunchKernel``, and
        tuning: sizes of these launches; None: the usual ones for the device.
    """

    state_layout = LAYOUT
    #: Programs that share a multiprocessor.
    resident = 1

    def __init__(
        self, device: Device, tuning: Tuning | None = None, driver: Driver | None = None, off: str | None = None
    ) -> None:
        super().__init__(device, driver, off)
        tuning = Tuning.of(device.capabilities) if tuning is None else tuning
        self._attention, self._mlp = TritonAttentionBlock(device, tuning), TritonMlpBlock(device, tuning)

    def _refusal(self, call: OpCall) -> str | None:
        attention, mlp = _blocks(call)
        if attention["dtype"] != "bfloat16":
            return f"computes in bfloat16, not in {attention['dtype']}"
        reason = _attention_refusal(attention) or _mlp_refusal(mlp) or _form_refusal(call)
        if reason:
            return reason
        sizes = _sizes(call, self.resident)
        return sizes.refusal() or self._size_refusal(sizes)

    def _room_refusal(self, call: OpCall) -> str | None:
        if _sizes(call, self.resident).stages(_shared_of(call.device)):
            return None
        many = "one program" if self.resident == 1 else f"{self.resident} programs"
        return f"{many} of it do not fit into a multiprocessor's shared memory"

    def _size_refusal(self, sizes: Sizes) -> str | None:
        """(optional) Why layers of these sizes are for others."""
        del sizes
        return None

    def _way(self, sizes: Sizes) -> Way:
        """(optional) The fastest way for layers of these sizes."""
        del sizes
        return Way(0, 1)

    def workspace(self, call: OpCall) -> int:
        parts = [self._attention.workspace(_half(call, 0))]
        if call.op == "decoder_layer":
            parts.append(self._mlp.workspace(_half(call, 1)))
        return 8 * _sizes(call, self.resident).messages() + max(parts)

    def _launched(self, call: OpCall) -> CallSite:
        """The launch of a call site."""
        sizes = _sizes(call, self.resident)
        stages, way = sizes.stages(_shared_of(call.device)), self._way(sizes)
        flight = min(way.flight or stages, stages)
        macros = defines(call, sizes, stages, flight, way.layers)
        kernel = self._kernel(source(), macros, "one_token_layers", THREADS, sizes.shared(stages))
        name, chained = _blocks(call)[0]["state"].name, bool(sizes.inner)
        return CallSite(name, kernel, self._messages, way.layers, sizes.messages(), chained)


class OneTokenLayer(_OneLaunch):
    """Norm, projections, attention over pages, MLP of one token, for small layers in bfloat16.

    A launch takes the stream of the layer before from that layer's messages, without waiting for its end, if the
    captured graph has nothing between the two launches. So a change of the stream between two layers is seen, also one
    in place. Outside a capture the driver does not say what was launched last, and the stream is read from memory.
    """

    op, name = "decoder_layer", "cuda.one_token_layer"
    priority = 200
    packings: tuple[Packing, ...] = (PLAIN,)
    resident = 2

    def _size_refusal(self, sizes: Sizes) -> str | None:
        if sizes.kv_heads != TEAMS:
            return f"shares its programs out to {TEAMS} key heads, not {sizes.kv_heads}"
        if sizes.nbytes > _MOST_BYTES:
            return f"is for layers of up to {_MOST_BYTES >> 20} MiB, not {sizes.nbytes >> 20}: there reading dominates"
        return None

    def _way(self, sizes: Sizes) -> Way:
        return Way(1, 1)  # more tiles make messages wait

    def build(self, call: OpCall) -> OpFunction:
        layer = self._launched(call)
        attention, mlp = self._attention.build(_half(call, 0)), self._mlp.build(_half(call, 1))

        def run(
            x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: AttentionWeights,
            mlp_weights: MLPWeights, views: PagedViews, meta: PagedMeta,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            if meta.step.max_kv >= SHORT_TOKENS:
                x, stream = attention(x, residual, positions, w, views, meta)
                return mlp(x, stream, mlp_weights)  # type: ignore[no-any-return]
            return layer.run(x, residual, positions, w, mlp_weights, views, meta)

        return checked(call, run)


class OneTokenLayers(OneTokenLayer):
    """The same for layers of any size, also with weights in e4m3 with scales of rows or of 128 x 128, and integers of
    four bits in groups of 128: a program has a multiprocessor, and layers of a captured graph share a launch where that
    is faster."""

    name = "cuda.one_token_layers"
    priority = 250
    packings = (PLAIN, STORED, PACKED)
    resident = 1

    def _size_refusal(self, sizes: Sizes) -> str | None:
        return None

    def _way(self, sizes: Sizes) -> Way:
        if sizes.weight_bits == 8:
            return Way(0, 1)  # with several layers, registers do not suffice for the conversion
        return Way(2 if sizes.nbytes <= _MOST_BYTES else 4, MOST_LAYERS)


class OneTokenAttention(_OneLaunch):
    """Norm, projections, attention over pages and output projection of one token, where experts follow."""

    op, name = "attention_block", "cuda.one_token_attention"
    priority = 150
    packings = (PLAIN, STORED, PACKED)

    def build(self, call: OpCall) -> OpFunction:
        block, several = self._launched(call), self._attention.build(call)

        def run(
            x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: AttentionWeights,
            views: PagedViews, meta: PagedMeta,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            if meta.step.max_kv >= SHORT_TOKENS:
                return several(x, residual, positions, w, views, meta)  # type: ignore[no-any-return]
            return block.run(x, residual, positions, w, None, views, meta)

        return checked(call, run)


def source() -> str:
    """The kernel, behind the functions that it is written in."""
    return read_sources("hopper.cuh", "forms.cuh", "one_token.cuh", "streamed.cuh", "four_bits.cuh", "one_token.cu")


def defines(call: OpCall, sizes: Sizes, stages: int, flight: int, layers: int = 1) -> dict[str, object]:
    """The macros that one_token.cu needs."""
    attention, mlp = _blocks(call)
    scale, packed = attention["state"].attention.scale * math.log2(math.e), sizes.packed
    return {
        "HIDDEN": sizes.hidden, "INNER": sizes.inner, "HEADS": sizes.heads, "KV_HEADS": sizes.kv_heads,
        "D": sizes.head_dim, "EPS": f"{attention['eps']!r}f", "MLP_EPS": f"{(mlp or attention)['eps']!r}f",
        "OFFSET": f"{float(attention['offset'])!r}f", "QK_NORM": int(attention["qk_norm"]), "SCALE": f"{scale!r}f",
        "MOST": 8 * _ROW // sizes.weight_bits, "STAGES": stages, "FLIGHT": flight,
        "MOST_LAYERS": layers, "PATIENCE": f"{PATIENCE}u",
        "WEIGHT_BITS": sizes.weight_bits, "BLOCK": sizes.block, "MLP": int(mlp is not None),
        "SCALE_BF16": int(packed is not None and packed.bf16),
        "ZEROS": int(packed is not None and packed.style == "zero"),
        "RESIDENT": sizes.resident,
    }  # fmt: skip


def _blocks(call: OpCall) -> tuple[AttentionStatic, MLPStatic | None]:
    """What the call computes: attention, and an MLP or not."""
    if call.op == "attention_block":
        return cast(AttentionStatic, call.static), None
    static = cast(DecoderLayerStatic, call.static)
    return static["attention"], static["mlp"]


def _half(call: OpCall, index: int) -> OpCall:
    """The call of the attention block, or of the MLP."""
    block = _blocks(call)[index]
    return replace(call, op=("attention_block", "mlp_block")[index], static=cast(Mapping[str, Any], block))


def _shared_of(device: DeviceCapabilities) -> int:
    """Shared memory of a multiprocessor."""
    return number_of("shared", device.features, 0) + _RESERVED


def _weights(call: OpCall) -> list[LinearWeight]:
    attention, mlp = _blocks(call)
    return [attention["qkv"], attention["o"], *([mlp["gate_up"], mlp["down"]] if mlp is not None else [])]


def _form(weight: LinearWeight) -> Form | PackedForm | None:
    """How elements are stored, at the beginning of the weight; None: as plain numbers."""
    if weight.layout == PACKED.layout:
        return next(form for _, form in segments_of(weight.parts))
    return form_of(weight.parts) if weight.layout == STORED.layout else None


def _form_refusal(call: OpCall) -> str | None:
    weights = _weights(call)
    forms = {_form(weight) for weight in weights}
    if len(forms) > 1:
        return "its weights are stored differently"
    (form,) = forms
    if isinstance(form, PackedForm):
        return _packed_refusal(form, weights)
    if form is not None and form not in (Form("e4m3", 1, 0), Form("e4m3", _BLOCK, _BLOCK)):
        return f"reads e4m3 with a scale for a row or for {_BLOCK} x {_BLOCK}, not {form}"
    return None


def _packed_refusal(form: PackedForm, weights: Sequence[LinearWeight]) -> str | None:
    if form.kind != "q4" or form.style not in ("half", "zero") or (form.group, form.units) != (_GROUP, 2):
        return f"reads packed integers of four bits in groups of {_GROUP}, not {form}"
    if any(len(list(segments_of(weight.parts))) > 1 for weight in weights):
        return "its weights are stored differently"
    parts = [part for weight in weights for part in weight.parts]
    if any(part.format.order == "act" or part.format.activation is not None for part in parts):
        return "reads columns of packed weights in order, and does not round activations"
    return None


def _sizes(call: OpCall, resident: int) -> Sizes:
    attention, mlp = _blocks(call)
    form = _form(attention["qkv"])
    packed = form if isinstance(form, PackedForm) else None
    bits = 16 if form is None else 8 if packed is None else 4
    return Sizes(
        attention["hidden"], mlp["inner"] if mlp is not None else 0, attention["heads"], attention["head_dim"],
        attention["kv_heads"], bits, form.wide if isinstance(form, Form) else 0, resident, packed,
    )  # fmt: skip


def _attention_refusal(s: AttentionStatic) -> str | None:
    state, spec = s["state"].attention, s["state"].spec
    if s["kv_heads"] not in KV_HEADS:
        return f"shares its programs out to {KV_HEADS} key heads, not {s['kv_heads']}"
    if s["head_dim"] != s["value_dim"] or s["rotary_dim"] != s["head_dim"] or s["interleaved"]:
        return "takes values as wide as keys, rotated as a whole, in halves"
    if spec.kind != "full" or state.softcap or state.sinks or state.slopes is not None:
        return "attends to all keys, without soft cap, sinks and slopes"
    if any(tensor.wide for tensor in spec.tensors):
        return "reads keys and values that are not quantized"
    return "has no norm after attention" if s["post_norm"] else None


def _mlp_refusal(s: MLPStatic | None) -> str | None:
    if s is None:
        return None
    if s["activation"] != "silu":
        return f"does not know activation {s['activation']!r}"
    if s["bias"] or s["post_norm"]:
        return "has no biases in the MLP, and no norm after it"
    return None
