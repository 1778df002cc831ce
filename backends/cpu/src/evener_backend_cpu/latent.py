"""Multi-head latent attention (DeepSeek-V2, DeepSeek-AI 2024) by torch's flash attention for the CPU (FlashAttention-2,
Dao 2023): pieces of prompts, and queries over latent state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from evener.backend.native_code import Unavailable
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.state import AttentionSpec, StateSpec
from evener.ops.reference.state import ReferenceState
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.native_library import DTYPES

#: Bytes that one of torch's threads has at most: blocks of queries, scores and results.
_THREAD_BYTES = 4 << 20
#: Longest head for which memory is planned.
_HEAD_DIM = 256
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [T, heads, head_dim] to key [S, heads, head_dim] and value [S, heads, value_dim]. Returns [T,
    heads, value_dim] in the dtype of the query, and the logarithm of the sum of the weights, float32 [T, heads].

    Args:
        mask: float32 [T, S] that is added to the scores, with at least one finite number in each row.
    """
    value_dim = value.shape[-1]
    # The kernel takes heads of one size. What is added is 0 and changes no score.
    if (missing := key.shape[-1] - value_dim) > 0:
        value = F.pad(value, (0, missing))
    if missing < 0:
        query, key = F.pad(query, (0, -missing)), F.pad(key, (0, -missing))
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    out, total = _FLASH(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    return out[0, :, :, :value_dim].transpose(0, 1), total[0].T


def _refused(device: CpuDevice, dtype: str) -> str | None:
    # ``cpu.native=off`` asks for the references of all ops.
    if isinstance(device.native, Unavailable):
        return device.native.reason
    return None if dtype in DTYPES else f"computes in float32 and bfloat16, not {dtype}"


class FlashPartialAttention(Kernel):
    """Attention over a piece of a context, in float32: queries that see all of it, and those that see a part by a
    mask."""

    op = "partial_attention"
    name = "flash_partial_attention"
    priority = 100

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    def supports(self, call: OpCall) -> str | None:
        return _refused(self._device, call.static["dtype"])

    def workspace(self, call: OpCall) -> int:
        # Results, and queries of a padded width; keys and values of a piece are fewer than the tokens of a step.
        return int(16 * call.bucket.high * call.static["heads"] * _HEAD_DIM) + self._device.threads * _THREAD_BYTES

    def build(self, call: OpCall) -> OpFunction:
        scale = call.static["scale"]

        def run(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offset: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, keys = query.shape[0], key.shape[0]
            query, key, value = query.float(), key.float(), value.float()
            out = query.new_zeros(*query.shape[:2], value.shape[-1])
            total = out.new_full(out.shape[:2], float("-inf"))
            first = min(tokens, max(0, -offset))  # those before see nothing
            whole = min(tokens, max(first, keys - 1 - offset))  # from here on all keys are seen
            if first < whole:
                seen = whole + offset
                at = torch.arange(first + offset, seen)[:, None]
                mask = torch.zeros(whole - first, seen).masked_fill_(torch.arange(seen) > at, float("-inf"))
                rows = slice(first, whole)
                out[rows], total[rows] = flash(query[rows], key[:seen], value[:seen], scale, mask)
            if whole < tokens:
                out[whole:], total[whole:] = flash(query[whole:], key, value, scale)
            return out, total

        return run


class LatentState(ReferenceState):
    """Latent state in the canonical layout, read for one token at a time."""

    name = "cpu.latent"
    kinds = frozenset({"latent"})
    # Below that of ``cpu.paged``: so no model without latent state lists this as refused.
    priority = 50

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        if attention.algorithm != "softmax" or attention.softcap or attention.slopes or attention.sinks:
            return "computes softmax without soft cap, slopes and sinks"
        return _refused(self._device, attention.dtype)

    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if sinks is not None:
            raise ValueError("latent attention has no sinks")
        out = query.new_empty(*query.shape[:2], views[0].shape[-1])
        for piece in self.pieces(views, meta, meta.step.max_kv):
            keys = torch.cat(piece.tensors, dim=-1)  # float32 if the state is quantized
            # The heads are the queries of one head: all read the same keys.
            for token in range(piece.first, piece.stop):
                seen = keys[: token - piece.first + piece.offset + 1, None]
                # A copy, which begins at a multiple of 64 bytes: torch's products give other bits elsewhere.
                asks = query[token, :, None].to(keys.dtype, copy=True)
                found, _ = flash(asks, seen, seen, meta.attention.scale)
                out[token] = found[:, 0, : out.shape[-1]]
        return out

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        # One request's keys as they are read, joined, and arranged for products; what the reference needs for layers
        # that read chosen tokens only.
        wide = sum(tensor.shape[-1] for tensor in spec.tensors)
        chosen = 0 if attention.top is None else super().workspace(spec, attention, max_tokens, max_kv)
        return max(chosen, 16 * max_kv * wide + self._device.threads * _THREAD_BYTES)
