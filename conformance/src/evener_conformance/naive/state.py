"""State of the naive engine: one sequence, as plain tensors of tokens, read in float32 by the definition of each
kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from evener.contracts.state import AttentionSpec, Piece, StateProvider, StateSpec, StateStep


@dataclass
class NaiveState:
    """One layer's state of one sequence: each state tensor as [tokens, *shape], in the state's dtype; of quantized
    state the numbers that its elements stand for, in float32. ``scales``: of quantized state, as ``StateSlot``'s."""

    spec: StateSpec
    attention: AttentionSpec
    tensors: list[torch.Tensor] = field(default_factory=list)
    last: int = 0
    scales: Sequence[Sequence[float]] = ()

    def write(self, *values: torch.Tensor) -> None:
        """Append this step's tokens."""
        self.last = len(values[0])
        kept = [self._kept(number, value) for number, value in enumerate(values)]
        self.tensors = [torch.cat(pair) for pair in zip(self.tensors, kept, strict=True)] if self.tensors else kept

    def _kept(self, number: int, value: torch.Tensor) -> torch.Tensor:
        stored = getattr(torch, self.spec.tensors[number].dtype)
        if not self.scales:
            return value.to(stored)
        scale = torch.tensor(self.scales[number])[:, None]
        largest = 127.0 if stored is torch.int8 else float(torch.finfo(stored).max)
        divided = (value.float() / scale).clamp(-largest, largest)
        return (divided.round() if stored is torch.int8 else divided.to(stored).float()) * scale

    def _keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[kv_heads, tokens, dim] each."""
        parts = [t.float() for t in self.tensors]
        if self.spec.kind == "latent":
            return torch.cat(parts, dim=-1)[None], parts[0][None]
        return parts[0].transpose(0, 1), parts[1].transpose(0, 1)

    def attend(
        self, query: torch.Tensor, sinks: torch.Tensor | None = None, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of the last tokens' queries [T, heads, dim] over everything written."""
        keys, values = self._keys_and_values()
        group = query.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * self.attention.scale  # [heads, T, tokens]
        if self.attention.softcap is not None:
            scores = self.attention.softcap * torch.tanh(scores / self.attention.softcap)
        tokens, count = keys.shape[1], query.shape[0]
        at, to = torch.arange(tokens - count, tokens)[:, None], torch.arange(tokens)
        distance, width = at - to, self.spec.window or tokens
        if self.attention.slopes is not None:
            scores = scores - torch.tensor(self.attention.slopes).view(-1, 1, 1) * distance
        near = at // width == to // width if self.spec.kind == "chunk" else distance < width
        seen = (distance >= 0) & near
        if chosen is not None:
            seen &= torch.stack([torch.isin(torch.arange(tokens), row) for row in chosen])
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, count, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :tokens]
        return (weights @ values).transpose(0, 1).to(query.dtype)

    def attend_chosen(self, query: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Attention over the positions in each token's row of ``chosen``."""
        return self.attend(query, None, chosen)

    def pieces(self, limit: int) -> Iterator[Piece]:
        """The whole state in one piece, for the tokens that were written last."""
        del limit
        total = self.tensors[0].shape[0]
        yield Piece(0, self.last, total - self.last, tuple(self.tensors))

    def select(self, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The best ``top`` positions of each token, one token at a time."""
        (keys,) = (t.float() for t in self.tensors)
        out = torch.full((query.shape[0], self.attention.top or 0), -1, dtype=torch.int32)
        for row in range(query.shape[0]):
            seen = keys[: keys.shape[0] - query.shape[0] + row + 1]
            scores = (weights[row].float()[:, None] * (query[row].float() @ seen.T).relu()).sum(0).tolist()
            best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: out.shape[1]]
            out[row, : len(best)] = torch.tensor(best, dtype=torch.int32)
        return out


@dataclass
class NaiveRecurrentState:
    """A recurrent layer's state of one sequence."""

    spec: StateSpec
    attention: AttentionSpec
    conv: torch.Tensor
    delta: torch.Tensor

    def advance(
        self, mixed: torch.Tensor, filters: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """The gated delta rule, one token and one head at a time; see ``RecurrentProvider.advance``."""
        heads, key_dim, value_dim = self.delta.shape
        key_heads = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
        sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
        out = mixed.new_zeros(mixed.shape[0], heads, value_dim)
        for at in range(mixed.shape[0]):
            line = torch.cat((self.conv, mixed[at].to(self.conv.dtype)[:, None]), dim=1)
            self.conv = line[:, 1:]
            moved = F.silu((line.float() * filters.float()).sum(1)).to(mixed.dtype).float()
            q, k, v = (part.unflatten(0, (-1, dim)) for part, dim in zip(
                moved.split(sizes), (key_dim, key_dim, value_dim), strict=True))  # fmt: skip
            for head in range(heads):
                own = head * key_heads // heads
                query, key = (t[own] / torch.sqrt((t[own] * t[own]).sum() + 1e-6) for t in (q, k))
                state = self.delta[head] * torch.exp(decay[at, head].float())
                state = state + torch.outer(key, beta[at, head].float() * (v[head] - key @ state))
                self.delta[head] = state
                out[at, head] = (query * key_dim**-0.5 @ state).to(out.dtype)
        return out


class _NaiveProvider:
    """The provider of slots with naive state: passes each call to the state itself, which it gets as ``views``."""

    name = layout = "naive"

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda views, meta, *values: getattr(views, method)(*values)


NAIVE_PROVIDER: Any = _NaiveProvider()


class ProviderPages:
    """State of a kind that a package adds: one sequence, in consecutive blocks of the package's own provider.

    Attributes:
        views: the provider's views of these blocks.
    """

    def __init__(self, spec: StateSpec, attention: AttentionSpec, provider: StateProvider, tokens: int) -> None:
        self._spec, self._attention, self._provider = spec, attention, provider
        self._size = provider.block_sizes(spec)[0]
        columns = -(-tokens // self._size)
        # Block 0 is the null block.
        self._table = torch.arange(1, columns + 1, dtype=torch.int32)[None]
        page = provider.bytes_per_block(spec, self._size)
        self.views = provider.bind(torch.zeros(columns + 1, page, dtype=torch.uint8), spec, self._size)

    def metadata(self, positions: torch.Tensor) -> Any:
        """Metadata of a step with the tokens at these consecutive positions."""
        count, length = len(positions), int(positions[-1]) + 1
        blocks = self._table[0, torch.div(positions, self._size, rounding_mode="floor")]
        step = StateStep(
            tokens=count, requests=1, max_query=count, max_kv=length,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            kv_lens=torch.tensor([length], dtype=torch.int32),
            positions=positions, slot_mapping=blocks * self._size + positions % self._size,
            block_table=self._table, host_query_lens=[count], host_kv_lens=[length],
        )  # fmt: skip
        return self._provider.metadata(step, self._spec, self._attention, self._size)


def make_naive_state(
    spec: StateSpec, attention: AttentionSpec, scales: Sequence[Sequence[float]] = ()
) -> NaiveState | NaiveRecurrentState | None:
    """The empty state of a layer; None for kinds and algorithms that are not defined here."""
    if attention.algorithm == "gated_delta":
        conv, delta = (torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in spec.tensors)
        return NaiveRecurrentState(spec, attention, conv, delta)
    known = spec.kind in ("full", "window", "chunk", "latent", "index") and attention.algorithm == "softmax"
    return NaiveState(spec, attention, scales=scales) if known else None
