"""Plain oracle of Baichuan 13B, 1 and 2, written from the published facts alone, without sight of this project's model.

Meant to be read, as ``reference_models`` is, which has what 13B shares with 7B: the modeling's classes RMSNorm, MLP,
BaichuanLayer, BaichuanModel and NormHead are those of 7B but for the attention in a layer.

Sources, by the short names used below:

* *modeling*: ``modeling_baichuan.py`` of baichuan-inc/Baichuan2-13B-Base and -Chat; the model of
  baichuan-inc/Baichuan-13B-* differs in the head alone.
* *ALiBi*: Press et al., "Train short, test long", ICLR 2022, section 3, and the slopes of its published code for
  numbers of heads that are no power of two (``get_slopes``), which is ``_get_interleave`` of the modeling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from reference_models import Baichuan
from torch import Tensor, nn

__all__ = ["Baichuan13B"]


def _slopes(heads: int) -> list[float]:
    """One slope a head: ``2 ** (-8 h / heads)`` for ``h = 1 … heads`` where ``heads`` is a power of two (ALiBi).

    Otherwise those of the next smaller power, then the 1st, 3rd, 5th … of the next greater power, as many as are
    missing.  40 heads, those of the real model, are such a case: 32, then 8 of the 64.
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    between = [2.0 ** (-8.0 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return first + between[: heads - power]


class _Attention(nn.Module):
    """Causal attention without rotary positions: class BaichuanAttention of the modeling.

    ``W_pack`` gives all queries, then all keys, then all values (``unflatten(-1, (3, hidden_size))``); nothing has a
    bias.  ALiBi: a key ``d`` positions back loses ``slope * d``, after the scores' scaling by ``1 / sqrt(head size)``
    and not scaled itself.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        self.dim, self.slopes = hidden // heads, _slopes(heads)
        self.W_pack = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.W_pack(x).chunk(3, dim=-1)
        places = torch.arange(x.shape[0])
        back = places[:, None] - places[None, :]
        outputs = []
        for head, slope in enumerate(self.slopes):
            own = slice(head * self.dim, (head + 1) * self.dim)
            scores = queries[:, own] @ keys[:, own].T / math.sqrt(self.dim) - slope * back
            outputs.append(torch.softmax(scores.masked_fill(back < 0, -math.inf), dim=-1) @ values[:, own])
        out: Tensor = self.o_proj(torch.cat(outputs, dim=-1))
        return out


class Baichuan13B(Baichuan):
    """Baichuan 13B (BaichuanForCausalLM of the modeling): ALiBi where 7B has rotary positions, and all else alike.

    The config says which of the two a model is: those published for Baichuan 2 have the key ``z_loss_weight``, those
    for Baichuan 1 have not.
    """

    attention = _Attention
