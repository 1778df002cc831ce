"""One token's latent attention in one launch: the kernel of ``one_token_latent.cu``.

Norm and projections, the way into latent space, attention, the way out of it and the output projection are five
launches otherwise, each of which begins with nothing under way. Here 128 programs stay for the whole block, as in
``one_token.py``. As many of them as there are for a head are its team: each has some rows of its query, projects these
into latent space, and sends the team a part of the sum; each attends to a share of the earlier tokens, merges the
team's parts, and makes some of the head's values. So there are three exchanges, two of them in teams. One warp streams
all weights of a program through a ring, ahead of everything else. docs/lab/one-token-kernel.md has measurements.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, cast

import torch

from evener.contracts.device import Device
from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.contracts.state import SplitMetadata
from evener.contracts.statics import LatentStatic
from evener.contracts.weights import LatentWeights
from evener.ops.latent import INNER_EPS
from evener.ops.reference.linear import PLAIN
from evener_backend_cuda.capability import SHORT_LATENT_TOKENS
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
from evener_kernels_triton.latent import TritonLatentAttentionBlock
from evener_kernels_triton.latent_state import LATENT_LAYOUT, LOG2_E, LatentMeta, LatentViews
from evener_kernels_triton.tuning import Tuning

#: As in one_token_latent.cu: threads of a program.
THREADS = 352
#: Columns of a tile at most; its bytes, with the gaps between its rows.
_MOST_COLUMNS = 1024
_TILE = 8 * (2 * _MOST_COLUMNS + 64)
_LEAST_STAGES = 4
#: Stages of the state of earlier tokens, and tokens of one.
_STATE_STAGES, _STAGE_TOKENS = 2, 32
HEADS, RANKS, ROPE_DIMS = (8, 16, 32), (256, 512), (32, 64)
#: Numbers of all heads' values.
_MOST_VALUES = 8192


@dataclass(frozen=True)
class LatentSizes:
    """Sizes that the kernel is compiled for.

    Attributes:
        nope, rope: unrotated and rotated part of a head's query.
        value: width of a head's value.
        rank: width of the latent.
    """

    hidden: int
    heads: int
    nope: int
    rope: int
    value: int
    rank: int

    @property
    def share(self) -> int:
        """Programs of a team."""
        return PROGRAMS // self.heads

    def refusal(self) -> str | None:
        """Why rows cannot be shared out; None if they can."""
        if self.heads not in HEADS:
            return f"shares {PROGRAMS} programs out to {HEADS} heads, not to {self.heads}"
        if self.rank not in RANKS or self.rope not in ROPE_DIMS:
            return f"takes latents of {RANKS} and keys of {ROPE_DIMS}, not of {self.rank} and {self.rope}"
        if self.nope % self.share or self.value % (2 * self.share) or self.nope > 256:
            return f"{self.share} programs cannot share {self.nope} rows of a query and {self.value} of a value"
        if self.hidden % 512 or self.heads * self.value % 256 or self.heads * self.value > _MOST_VALUES:
            return f"hidden {self.hidden} and {self.heads} values of {self.value} are not multiples of 512 and 256"
        return None

    @property
    def _words(self) -> tuple[int, int, int, int]:
        """Words of 4 bytes of a program: of queries and of parts to the team, of the latent and of values to all."""
        pairs, values = self.rope // self.share // 2, self.value // self.share // 2
        return self.rank // 2 + pairs, self.rank // 2 + 2, self.rank // PROGRAMS // 2 + 1, values

    def shared(self, stages: int) -> int:
        """Bytes of shared memory of a program."""
        share, width = self.share, self.rank + self.rope
        down = max(2, -(-((self.nope + self.rope) // share + self.rank // PROGRAMS + 1) // 8))
        tall = max(down - 1, -(-self.value // share // 8), -(-self.hidden // PROGRAMS // 8)) * 8
        query, part, _, values = (-(-words // 3) * 12 for words in self._words)
        return (
            stages * (_TILE + 16) + _STATE_STAGES * (_STAGE_TOKENS * width * 2 + 16) + 2 * width
            + 2 * (self.hidden + self.rank + self.heads * self.value)
            + max(4 * WARPS * self.rank, share * max(query, part)) + 8 * WARPS + 4 * width + 4 * self.rope + 32 * down
            + 4 * WARPS * tall + -(-max(query, part, values) // 16) * 16 + 4 * WARPS + 16 + 16
        )  # fmt: skip

    def stages(self, shared: int) -> int:
        """Tiles of the ring of a program with so many bytes; 0: they are too few."""
        found = (shared - self.shared(0)) // (_TILE + 16)
        return found if found >= _LEAST_STAGES else 0

    def messages(self) -> int:
        """Messages of 8 bytes, with the counters."""
        query, part, latent, values = (-(-words // 3) * 2 for words in self._words)
        return CONTROL + PROGRAMS * (query + part + COPIES * (latent + values))


class Latent(ctypes.Structure):
    """``Latent`` of one_token_latent.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "messages", "report", "stamps", "x", "residual", "stream", "norm", "down", "kv_norm", "kv_b", "o",
            "cos_sin", "positions", "slots", "kv_lens", "table", "rows")),
        ("page", ctypes.c_longlong),
        ("site", ctypes.c_uint), ("wide_slots", ctypes.c_uint), ("page_bits", ctypes.c_uint),
    ]  # fmt: skip


class LatentSite:
    """The launch of one layer's attention, with the addresses of the last call's weights and pages.

    Attributes:
        stamps: an address as in one_token_latent.cuh, for benchmarks.
    """

    stamps: int | None = None

    def __init__(self, launch: CompiledKernel, messages: Messages, count: int) -> None:
        self._launch, self._room = launch, messages.of(count)
        self._bound: tuple[Any, Any] = (None, None)
        self._argument = Latent(messages=self._room.data_ptr(), site=messages.site())

    def run(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: LatentWeights,
        views: LatentViews, meta: LatentMeta,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The block's result and the stream, in the memory of ``x`` and ``residual``."""
        if self._bound[0] is not w or self._bound[1] is not views:
            self._bind(w, views)
        x, step, argument = x.contiguous(), meta.step, self._argument
        stream = torch.empty(x.shape, dtype=torch.float32, device=x.device) if residual is None else residual
        stream = stream.contiguous()
        argument.x, argument.stream = x.data_ptr(), stream.data_ptr()
        argument.residual = None if residual is None else stream.data_ptr()
        argument.positions, argument.kv_lens = positions.data_ptr(), step.kv_lens.data_ptr()
        argument.slots, argument.wide_slots = step.slot_mapping.data_ptr(), step.slot_mapping.element_size() == 8
        argument.table, argument.stamps = step.block_table.data_ptr(), self.stamps
        self._launch(self._launch.place(x.device).stream, argument)
        return x, stream

    def _bind(self, w: LatentWeights, views: LatentViews) -> None:
        named: dict[str, PackedWeight | torch.Tensor | None] = {
            "norm": w.norm, "down": w.down, "kv_norm": w.kv_norm, "kv_b": w.heads, "o": w.o, "cos_sin": w.cos_sin,
        }  # fmt: skip
        for name, value in named.items():
            tensor = value.data if isinstance(value, PackedWeight) else value
            assert tensor is not None, f"a layer with absorption has {name}"
            if tensor.data_ptr() % 16 or not tensor.is_contiguous():
                raise ValueError(f"{name} does not begin at a multiple of 16 bytes, or has gaps")
            setattr(self._argument, name, tensor.data_ptr())
        rows, size = views.rows, views.block_size
        self._argument.rows, self._argument.page = rows.data_ptr(), rows.stride(0)
        self._argument.page_bits = size.bit_length() - 1
        if size & (size - 1) or rows.stride(0) % 8 or rows.data_ptr() % 16:
            raise ValueError(f"pages of {size} tokens, {rows.stride(0)} numbers apart: takes powers of two")
        self._bound = w, views


class OneTokenLatent(OneLaunchKernel):
    """Norm, projections, attention over latents and output projection of one token, in bfloat16. Several launches
    compute attention with biases, and attention to longer state, which each head would read by itself.

    Args: as of ``OneTokenLayer``.
    """

    op, name = "latent_attention_block", "cuda.one_token_latent"
    priority = 150
    packings = (PLAIN,)
    state_layout = LATENT_LAYOUT

    def __init__(
        self, device: Device, tuning: Tuning | None = None, driver: Driver | None = None, off: str | None = None
    ) -> None:
        super().__init__(device, driver, off)
        tuning = Tuning.of(device.capabilities) if tuning is None else tuning
        self._several = TritonLatentAttentionBlock(device, tuning)

    def _refusal(self, call: OpCall) -> str | None:
        s = cast(LatentStatic, call.static)
        return _block_refusal(s) or self._several.supports(call) or _sizes(s).refusal()

    def _room_refusal(self, call: OpCall) -> str | None:
        if _sizes(cast(LatentStatic, call.static)).stages(shared_of(call)):
            return None
        return "a program of it does not fit into a multiprocessor's shared memory"

    def workspace(self, call: OpCall) -> int:
        return 8 * _sizes(cast(LatentStatic, call.static)).messages() + self._several.workspace(call)

    def build(self, call: OpCall) -> OpFunction:
        several, site = self._several.build(call), self.site(call)

        def run(
            x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: LatentWeights,
            views: LatentViews, meta: LatentMeta | SplitMetadata, *index: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            part = meta.decode or meta.prefill if isinstance(meta, SplitMetadata) else meta
            if part.step.max_kv >= SHORT_LATENT_TOKENS or w.down_bias is not None or w.o_bias is not None:
                return several(x, residual, positions, w, views, meta, *index)  # type: ignore[no-any-return]
            return site.run(x, residual, positions, w, views, part)

        return checked(call, run)

    def site(self, call: OpCall) -> LatentSite:
        """The launch of a call site."""
        s = cast(LatentStatic, call.static)
        sizes = _sizes(s)
        stages = sizes.stages(shared_of(call))
        macros = defines(s, stages, self._flight(stages))
        kernel = self._kernel(source(), macros, "one_token_latent", THREADS, sizes.shared(stages))
        return LatentSite(kernel, self._messages, sizes.messages())


def source() -> str:
    """The kernel, behind the functions that it is written in."""
    return read_sources("hopper.cuh", "forms.cuh", "one_token_latent.cuh", "streamed.cuh", "one_token_latent.cu")


def defines(s: LatentStatic, stages: int, flight: int) -> dict[str, object]:
    """The macros that one_token_latent.cu needs."""
    sizes = _sizes(s)
    return {
        "HIDDEN": sizes.hidden, "HEADS": sizes.heads, "NOPE": sizes.nope, "ROPE": sizes.rope, "VALUE": sizes.value,
        "RANK": sizes.rank, "INTERLEAVED": int(s["interleaved"]), "EPS": f"{s['eps']!r}f",
        "INNER_EPS": f"{INNER_EPS!r}f", "OFFSET": f"{float(s['offset'])!r}f",
        "SCALE": f"{s['state'].attention.scale * LOG2_E!r}f", "MOST": _MOST_COLUMNS, "STAGES": stages,
        "FLIGHT": flight, "PATIENCE": f"{PATIENCE}u", "WEIGHT_BITS": 16, "BLOCK": 0, "ZEROS": 0,
        "SHARED_BYTES": sizes.shared(stages), "MESSAGES_HELD": sizes.messages(),
        "STATE_STAGES": _STATE_STAGES, "STAGE_TOKENS": _STAGE_TOKENS,
    }  # fmt: skip


def _sizes(s: LatentStatic) -> LatentSizes:
    return LatentSizes(s["hidden"], s["heads"], s["nope_dim"], s["rope_dim"], s["value_dim"], s["rank"])


def _block_refusal(s: LatentStatic) -> str | None:
    weights = (s["down"], s["kv_b"], s["o"])
    if s["dtype"] != "bfloat16" or any(each.dtype != "bfloat16" for each in weights):
        return f"computes in bfloat16, not in {s['dtype']}"
    if any(each.layout != PLAIN.layout for each in weights):
        return "reads weights as plain numbers"
    if s["q_rank"]:
        return "projects queries at once, not through a latent of their own"
    if any(tensor.dtype != "bfloat16" for tensor in s["state"].spec.tensors):
        return "reads state in bfloat16"
    return None
