"""Rotary position embedding."""

from __future__ import annotations

import torch

from evener.contracts.ops import OpFunction, Static, Use


def rotary(static: Static, use: Use) -> OpFunction:
    """Row p of ``cos_sin`` belongs to position p: the cosines of the ``rotary_dim / 2`` angles, then their sines, also
    if pairs are interleaved. Angle i rotates elements i and ``rotary_dim / 2 + i`` of a head (interleaved: 2i and 2i +
    1)."""
    dim, head_dim, interleaved = static["rotary_dim"], static["head_dim"], static["interleaved"]

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        part = x[..., :dim].float()
        if interleaved:
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = part.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        turned = turned.to(x.dtype)
        return turned if dim == head_dim else torch.cat((turned, x[..., dim:]), dim=-1)

    def run(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
        return turn(query, cos, sin), turn(key, cos, sin)

    return run
