"""The gated delta rule (Yang et al. 2024), its gates, and the norm after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from evener.contracts.ops import OpFunction, Static, Use

#: Tokens whose updates are computed together with a few matrix products.
_CHUNK = 64


def delta_gates(static: Static, use: Use) -> OpFunction:
    def run(
        a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()

    return run


def gated_rms_norm(static: Static, use: Use) -> OpFunction:
    eps = static["eps"]

    def run(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        return (wide * F.silu(gate.float())).to(x.dtype)

    return run


def gated_delta(
    conv: torch.Tensor, delta: torch.Tensor, mixed: torch.Tensor, filters: torch.Tensor, decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Some tokens of one request; see ``RecurrentProvider.advance``. Returns the result and both states after it."""
    heads, key_dim, value_dim = delta.shape
    line = torch.cat((conv.to(mixed.dtype), mixed.T), dim=1)
    moved = F.silu(F.conv1d(line.float()[None], filters.float()[:, None], groups=line.shape[0])[0]).to(mixed.dtype)
    keys = (mixed.shape[1] - heads * value_dim) // 2
    q, k, v = moved.T.float().split([keys, keys, heads * value_dim], dim=-1)
    q, k = (_spread(part.unflatten(-1, (-1, key_dim)), heads) for part in (q, k))
    parts = (q * key_dim**-0.5, k, v.unflatten(-1, (heads, value_dim)), decay.float(), beta.float())
    out = []
    for pieces in zip(*(part.transpose(0, 1).split(_CHUNK, dim=1) for part in parts), strict=True):
        found, delta = _chunk(delta, *pieces)
        out.append(found)
    return torch.cat(out, dim=1).transpose(0, 1).to(mixed.dtype), line[:, line.shape[1] - conv.shape[1] :], delta


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Normalise heads [T, key_heads, dim] to length 1, and repeat them for each value head."""
    unit = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return unit.repeat_interleave(heads // x.shape[1], dim=1)


def _chunk(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [heads, n, key_dim], v [heads, n, value_dim], decay and beta [heads, n]; returns result and new state.

    Each token's update depends on the earlier ones in the chunk: a triangular system, which is solved at once.
    """
    total = decay.cumsum(1)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later, float("-inf")).exp()
    scaled = k * beta[..., None]
    right = torch.cat((v * beta[..., None], scaled * total.exp()[..., None]), dim=-1)
    system = scaled @ k.transpose(1, 2) * between
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    update = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ state
    out = (q * total.exp()[..., None]) @ state + (q @ k.transpose(1, 2) * between) @ update
    rest = (total[:, -1:] - total).exp()[..., None]
    return out, state * total[:, -1].exp()[:, None, None] + (k * rest).transpose(1, 2) @ update
