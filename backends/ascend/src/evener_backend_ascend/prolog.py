"""Latent attention with ``npu_mla_prolog_v3``: both projections to latents, their norms, the queries' way into latent
space and the rotation are one kernel. It takes the sizes of DeepSeek V3 and models made like it, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener.contracts.state import SplitMetadata
from evener.contracts.statics import LatentStatic
from evener.contracts.weights import LatentWeights
from evener.errors import EngineError
from evener.ops.latent import INNER_EPS
from evener.ops.norms import norm_static
from evener.ops.reference.linear import PLAIN
from evener_backend_ascend import calls
from evener_backend_ascend.calls import LATENT_SIZES
from evener_backend_ascend.kernels import NpuAddRmsNorm, NpuKernel, NpuRmsNorm

_HIDDEN, _Q_RANK, _RANK, _NOPE, _ROPE, _HEADS = LATENT_SIZES
_VALUE = 128
#: Steps of more tokens expand keys and values, which takes fewer operations.
_MOST = 256


class LatentWeightsPacking(Packing):
    """Weights of latent attention, recognized by the kernel's sizes. ``data`` is a tuple:

    - of the first projections, which are one weight: [hidden, 1536] and [hidden, 576] in FRACTAL_NZ;
    - of queries from their latent: [1536, heads * 192] in FRACTAL_NZ;
    - of keys and values from latents: [heads, 128, 512] of each.
    """

    layout = "ascend.latent_weights"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        if dtype != "bfloat16" or any(not part.format.plain for part in parts):
            return f"holds bfloat16, not {parts[0].format.storage} for {dtype}"
        rows, columns = tuple(part.rows for part in parts), parts[0].columns
        down = rows == (_Q_RANK, _RANK + _ROPE) and columns in _HIDDEN
        queries = len(rows) == 1 and columns == _Q_RANK and rows[0] in {n * (_NOPE + _ROPE) for n in _HEADS}
        both = len(rows) == 1 and columns == _RANK and rows[0] in {n * (_NOPE + _VALUE) for n in _HEADS}
        return None if down or queries or both else "holds weights of latent attention in DeepSeek V3's sizes only"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return 2 * sum(part.rows for part in parts) * parts[0].columns

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        data: tuple[torch.Tensor, ...]
        pieces = [part.tensors["weight"].to(device, torch.bfloat16) for part in parts]
        if parts[0].columns == _RANK:
            keys, values = pieces[0].unflatten(0, (-1, _NOPE + _VALUE)).split([_NOPE, _VALUE], dim=1)
            data = (keys.contiguous(), values.contiguous())
        else:
            data = tuple(calls.as_fractal_nz(piece.T.contiguous()) for piece in pieces)
        shape = sum(part.rows for part in parts), parts[0].columns
        return PackedWeight(self.layout, shape, data, self.nbytes(parts, dtype), tuple(p.format for p in parts))


LATENT_WEIGHTS = LatentWeightsPacking()


class NpuLatentLinear(NpuKernel):
    """These weights in steps that the fused kernel does not serve."""

    op, name, vendor = "linear", "ascend.latent_linear", calls.PROLOG
    packings = (LATENT_WEIGHTS,)

    def _unsupported(self, call: OpCall) -> str | None:
        given, wanted = call.static["dtype"], call.static["out"]
        return None if given == wanted else f"gives {given}, not {wanted}"

    def workspace(self, call: OpCall) -> int:
        return int(2 * call.bucket.high * call.static["rows"])

    def build(self, call: OpCall) -> OpFunction:
        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            if weight.shape[1] == _RANK:
                parts = [(x @ piece.flatten(0, 1).T).unflatten(-1, piece.shape[:2]) for piece in weight.data]
                y = torch.cat(parts, dim=-1).flatten(1)
            else:
                y = torch.cat([x @ piece for piece in weight.data], dim=-1)
            return y if bias is None else y + bias

        return run


class NpuLatentAttentionBlock(NpuKernel):
    """Norm, the fused kernel, write, attention in latent space, values, output projection.

    The kernel writes latents and keys to scratch pages, not to the state: its rotation leaves the first elements of all
    pairs before the second ones (CANN's design of MlaProlog, formula 15), and steps that expand keys read the state in
    the model's order.
    """

    op, name, vendor = "latent_attention_block", "ascend.latent_attention_block", calls.PROLOG
    packings = (LATENT_WEIGHTS, PLAIN)
    state_layout = "ascend.latent"
    # It begins with NpuAddRmsNorm.
    deterministic = False

    def _unsupported(self, call: OpCall) -> str | None:
        s = cast(LatentStatic, call.static)
        own = [call.layouts.get(name) == LATENT_WEIGHTS.layout for name in ("down", "q", "kv_b")]
        sizes = s["hidden"], s["q_rank"], s["rank"], s["nope_dim"], s["rope_dim"], s["heads"]
        known = all(size in wanted if isinstance(wanted, tuple) else size == wanted
                    for size, wanted in zip(sizes, LATENT_SIZES, strict=True))  # fmt: skip
        if s["dtype"] != "bfloat16":
            return f"computes in bfloat16, not in {s['dtype']}"
        if not known or s["value_dim"] != _VALUE or not all(own) or call.layouts.get("o") != PLAIN.layout:
            return f"has no kernel for these sizes or weights; it takes hidden sizes {_HIDDEN} and DeepSeek V3's ranks"
        if s["absorb"] != "absorb-without-precomp":
            return f"absorbs without precomputed products, but mla_absorb is {s['absorb']}"
        if not s["interleaved"] or s["norm"] != "rms" or not s.get("pre_norm", True):
            return "rotates neighbours, after an RMS norm"
        if call.bucket.high > _MOST:
            return f"serves up to {_MOST} tokens; more expand keys and values"
        return None

    def workspace(self, call: OpCall) -> int:
        s = cast(LatentStatic, call.static)
        slot, high = s["state"], call.bucket.high
        assert slot.provider is not None, "state is resolved before composites"
        # Queries twice, what attention gives, values; scratch pages, latents and keys; the norm's rows in float32.
        width = s["heads"] * (3 * (_RANK + _ROPE) + _VALUE) + 3 * (_RANK + _ROPE)
        return int(high * (2 * width + 12 * s["hidden"]) + slot.provider.workspace(slot.spec, slot.attention, high, 0))

    def build(self, call: OpCall) -> OpFunction:
        s = cast(LatentStatic, call.static)
        norm, add_norm = (
            kernel.build(OpCall(kernel.op, norm_static(call.static), call.bucket, call.device))
            for kernel in (NpuRmsNorm(), NpuAddRmsNorm())
        )
        provider = cast(Any, s["state"].provider)

        def run(
            x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: LatentWeights, views: Any,
            meta: Any, *index: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            if w.down_bias is not None:
                raise EngineError(f"{calls.PROLOG} takes no bias; set ops.latent_attention_block=reference")
            assert w.q is not None and w.q_norm is not None, "queries have a rank"
            x, total = (norm(x, w.norm), x.float()) if residual is None else add_norm(x, residual, w.norm)
            cos, sin = (part.repeat(1, 2).to(x.dtype) for part in w.cos_sin.index_select(0, positions).chunk(2, dim=-1))
            down, (up,), (keys, values) = w.down.data, w.q.data, w.kv_b.data
            query, turned, latent, key = calls.latent_prolog(
                x, down[0], up, keys, down[1], w.q_norm.to(x.dtype), w.kv_norm.to(x.dtype), sin, cos, INNER_EPS
            )
            query, key = torch.cat((query, _in_pairs(turned)), dim=-1), _in_pairs(key)
            found = []
            for part, rows in _parts(meta, x.shape[0]):
                provider.write(views, part, latent[rows], key[rows])
                found.append(provider.attend(views, part, query[rows]))
            inside = found[0] if len(found) == 1 else torch.cat(found)
            out = torch.bmm(inside.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)
            return torch.nn.functional.linear(out.flatten(1), w.o.data, w.o_bias), total

        return run


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    """[…, D] from first and second halves of pairs to neighbours."""
    found: torch.Tensor = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return found


def _parts(meta: Any, tokens: int) -> Iterator[tuple[Any, slice]]:
    """Metadata of each part of a step, and its tokens."""
    if not isinstance(meta, SplitMetadata):
        yield meta, slice(0, tokens)
        return
    if meta.decode is not None:
        yield meta.decode, slice(0, meta.tokens)
    if meta.prefill is not None:
        yield meta.prefill, slice(meta.tokens, tokens)
