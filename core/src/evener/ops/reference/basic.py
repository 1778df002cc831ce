"""Embedding, activations, row picking, and attention without state."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from evener.contracts.ops import OpFunction, Static, Use

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu, "relu_squared": lambda x: F.relu(x).square(),
}  # fmt: skip


def embedding(static: Static, use: Use) -> OpFunction:
    dtype = getattr(torch, static["dtype"])
    # The checkpoint's model rounds the factor to its compute dtype before multiplying.
    scale = None if static["scale"] == 1.0 else torch.tensor(static["scale"], dtype=dtype).item()

    def run(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids, table)
        return rows if scale is None else rows * scale

    return run


def act_and_mul(static: Static, use: Use) -> OpFunction:
    if static["activation"] == "clamped_swiglu":
        return _clamped_swiglu(static["alpha"], static["limit"])
    act, inner = ACTIVATIONS[static["activation"]], static["inner"]

    def run(x: torch.Tensor) -> torch.Tensor:
        return act(x[:, :inner]).mul_(x[:, inner:])  # in place: no memory besides input and output

    return run


def activate(static: Static, use: Use) -> OpFunction:
    return ACTIVATIONS[static["activation"]]


def _clamped_swiglu(alpha: float, limit: float) -> OpFunction:
    def run(x: torch.Tensor) -> torch.Tensor:
        gate, up = x[:, 0::2].float().clamp(max=limit), x[:, 1::2].float().clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)

    return run


def take_rows(static: Static, use: Use) -> OpFunction:
    def run(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    return run


def softcap(static: Static, use: Use) -> OpFunction:
    cap = static["cap"]

    def run(x: torch.Tensor) -> torch.Tensor:
        capped: torch.Tensor = torch.tanh(x.float() / cap) * cap
        return capped.to(x.dtype)

    return run


def encode_attention(static: Static, use: Use) -> OpFunction:
    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Copies, because some of torch's kernels for this read unaligned rows at a wrong address.
        even = torch.contiguous_format
        q, k, v = (part.transpose(0, 1)[None].clone(memory_format=even) for part in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, scale=static["scale"])[0].transpose(0, 1)

    return run
