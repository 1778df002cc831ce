"""The recurrence: one token of some requests (the gated delta rule, Yang et al. 2024). It knows no blocks."""

import torch
from torch.nn.functional import silu


def one_token(delta, conv, mixed, filters, decay, beta):
    """One token of each of B requests.

    Args:
        delta: float32 [B, heads, value_dim, key_dim]; conv: [B, channels, width - 1]. The state before the token.
        mixed: [B, channels], queries and keys of the key heads, then values.
        filters: [channels, width], of the causal convolution.
        decay, beta: float32 [B, heads]; decay is a logarithm.

    Returns:
        The result [B, heads, value_dim], and ``delta`` and ``conv`` after the token. Nothing is mutated.
    """
    heads, value_dim, key_dim = delta.shape[1:]
    window = torch.cat((conv.to(mixed.dtype), mixed[..., None]), dim=-1)
    moved = silu((window.float() * filters.float()).sum(-1)).to(mixed.dtype).float()
    values = heads * value_dim
    keys = (moved.shape[1] - values) // 2
    q, k, v = moved.split([keys, keys, values], dim=-1)
    q, k = unit_heads(q, heads, key_dim) * key_dim**-0.5, unit_heads(k, heads, key_dim)
    delta = delta * decay.exp()[..., None, None]
    error = v.unflatten(-1, (heads, value_dim)) - (delta @ k[..., None])[..., 0]
    delta = delta + (beta[..., None] * error)[..., None] * k[..., None, :]
    return (delta @ q[..., None])[..., 0].to(mixed.dtype), delta, window[..., 1:]


def unit_heads(x, heads, dim):
    """Heads of length 1: [B, heads, dim] of [B, key_heads * dim], each key head for the value heads that share it."""
    x = x.unflatten(-1, (-1, dim))
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(heads // x.shape[1], dim=1)
