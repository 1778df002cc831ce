"""Greedy and random sampling, packed masks and log-probabilities.

Noise depends only on (seed, position, token id), so a request's tokens do not depend on other requests or on the
device. It uses int32 arithmetic with wrap-around, which every device has. The hash is Chris Wellons' lowbias32; the
choice by noise is the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014): argmax(logit / temperature - log(-log(u))).
"""

from __future__ import annotations

import torch

from evener.contracts.ops import OpFunction, Static, Use


def _int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


_M1, _M2 = _int32(0x7FEB352D), _int32(0x846CA68B)
_GOLDEN = _int32(0x9E3779B9)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def hash32(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 of an int32 tensor, as int32 bits."""
    x = (x ^ _shift_right(x, 16)) * _M1
    x = (x ^ _shift_right(x, 15)) * _M2
    return x ^ _shift_right(x, 16)


def gumbel(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float32, for int32 seed and position [R, 1] and token ids [R, n] (or [1, n])."""
    bits = hash32(hash32(hash32(seed) + position * _GOLDEN) ^ hash32(ids))
    # 24 bits give 2 ** 24 cells of (0, 1); u is the middle of a cell, so both logarithms are finite. In float32 the
    # middle of the last cell rounds to 1, whose noise would be infinite; the largest float32 below 1 replaces it.
    uniform = ((_shift_right(bits, 8).float() + 0.5) * (1.0 / (1 << 24))).clamp_max(1.0 - 2.0**-24)
    return -torch.log(-torch.log(uniform))


def greedy(static: Static, use: Use) -> OpFunction:
    def run(logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1).to(torch.int32)

    return run


def add_bias(static: Static, use: Use) -> OpFunction:
    def run(
        logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, until: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        on = position[:, None] < until
        return logits.scatter_add_(1, ids.long(), values.masked_fill(~on, 0.0))

    return run


def penalize(static: Static, use: Use) -> OpFunction:
    def run(
        logits: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, prompt: torch.Tensor, lengths: torch.Tensor,
        longest: int, repetition: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ids = tokens[:, :longest].index_select(0, slots).long()
        place = torch.arange(longest, dtype=torch.int32, device=ids.device)[None]
        known = place < lengths[:, None]
        # Entries after the end repeat the first token: writing the same value twice changes nothing.
        ids = torch.where(known, ids, ids[:, :1])
        seen = logits.gather(1, ids)
        factor = repetition[:, None]
        logits.scatter_(1, ids, torch.where(seen > 0, seen / factor, seen * factor))
        generated = (known & (place >= prompt[:, None])).to(torch.int32)
        counts = torch.zeros(logits.shape, dtype=torch.int32, device=ids.device).scatter_add_(1, ids, generated)
        count = counts.gather(1, ids).float()
        value = logits.gather(1, ids) - frequency[:, None] * count
        return logits.scatter_(1, ids, value - presence[:, None] * (count > 0))

    return run


def apply_mask(static: Static, use: Use) -> OpFunction:
    vocab = static["vocab"]

    def run(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
        allowed = ((mask[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
        return logits.masked_fill(~allowed, float("-inf"))

    return run


def logprobs(static: Static, use: Use) -> OpFunction:
    def run(logits: torch.Tensor, ids: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = logits.float().log_softmax(-1)
        best = values.topk(top, dim=-1)
        return values.gather(1, ids[:, None].long()).squeeze(1), best.values, best.indices.to(torch.int32)

    return run


def filtered(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of each row, best first: ids [R, n] and scores [R, n], -inf where a filter removed them.

    ``scores`` are logits over temperature. top-k first, then top-p over what is left (the token that crosses the bound
    stays), then min-p relative to the most likely token; the order of Hugging Face's warpers.
    """
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device, dtype=torch.int32)[None]
    values = values.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), float("-inf"))
    probability = values.softmax(-1)
    before = probability.cumsum(-1) - probability
    # A sum of rounded probabilities can reach 1 before the last token, so top_p 1 must be handled as "off".
    beyond = (before >= top_p[:, None]) & (top_p[:, None] < 1) & (rank > 0)
    values = values.masked_fill(beyond, float("-inf"))
    return ids, values.masked_fill(probability < min_p[:, None] * probability[:, :1], float("-inf"))


def sample(static: Static, use: Use) -> OpFunction:
    filters = static["filters"]

    def run(
        logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
        seed: torch.Tensor, position: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        scores = logits.float()
        cold = temperature <= 0
        scores = scores / torch.where(cold, torch.ones_like(temperature), temperature)[:, None]
        best = scores.argmax(dim=-1)
        if filters:
            ids, values = filtered(scores, top_k, top_p, min_p)
        else:  # every token is a candidate
            ids, values = torch.arange(scores.shape[1], device=scores.device)[None], scores
        noise = gumbel(seed[:, None], position[:, None], ids.to(torch.int32))
        drawn = ids.expand_as(values).gather(1, (values + noise).argmax(dim=-1, keepdim=True)).squeeze(1)
        return torch.where(cold, best, drawn).to(torch.int32)

    return run
