"""Paged keys and values in a layout of its own: keys [heads, dim, tokens], values [heads, tokens, dim].

A step is computed request by request, so that the workspace is that of one request. Values that change between steps
are read on the device; the only host value is the number of queries, which is 1 in every captured step.
"""

from dataclasses import dataclass

import torch
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateStep


@dataclass(frozen=True)
class Meta:
    """A step, and where its tokens are written: blocks and offsets in them, int64 [T]."""

    step: StateStep
    spec: StateSpec
    attention: AttentionSpec
    size: int
    blocks: torch.Tensor
    offsets: torch.Tensor


class Paged(AttentionProvider):
    name = layout = "worked.paged"
    kinds = frozenset({"full", "window", "chunk"})
    graph = "uniform_decode"

    def supports(self, spec, attention, device):
        if attention.sinks or attention.slopes or attention.algorithm != "softmax":
            return "computes plain softmax attention, without sinks and slopes"
        return None

    def block_sizes(self, spec):
        return (32, 16)  # preferred first; each a multiple of the smallest

    def bytes_per_block(self, spec, block_size):
        return block_size * spec.nbytes

    def bind(self, storage, spec, block_size):
        # A page may be longer than a block: cut it before viewing it as another dtype.
        (heads, dim), (_, value_dim) = (tensor.shape for tensor in spec.tensors)
        cut, end = (block_size * n for n in (spec.tensors[0].nbytes, spec.nbytes))
        keys, values = (
            piece.view(getattr(torch, tensor.dtype))
            for piece, tensor in zip((storage[:, :cut], storage[:, cut:end]), spec.tensors, strict=True)
        )
        return keys.unflatten(1, (heads, dim, block_size)), values.unflatten(1, (heads, block_size, value_dim))

    def prepare(self, step, spec, attention, block_size):
        slots = step.slot_mapping.long()
        return Meta(step, spec, attention, block_size, slots // block_size, slots % block_size)

    def write(self, views, meta, key, value):
        keys, values = views
        keys[meta.blocks, :, :, meta.offsets] = key.to(keys.dtype)
        values[meta.blocks, :, meta.offsets] = value.to(values.dtype)

    def attend(self, views, meta, query, sinks=None):
        step, start, values = meta.step, 0, views[1]
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        for row, count in enumerate(step.host_query_lens):
            if count:
                stop = start + count
                out[start:stop] = self._row(views, meta, row, query[start:stop], step.positions[start:stop])
                start = stop
        return out

    def _row(self, views, meta, row, query, at):
        """Attention of one request's queries [n, heads, dim] at positions ``at`` [n]; [n, heads, value_dim]."""
        n, how = len(query), meta.attention
        blocks = meta.step.block_table[row, : -(-meta.step.max_kv // meta.size)].long()
        keys, values = (view[blocks].float() for view in views)
        keys, values = keys.permute(1, 2, 0, 3).flatten(2), values.transpose(0, 1).flatten(1, 2)
        # Each key head serves a group of query heads: [kv_heads, group * n, dim].
        q = query.float().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = q @ keys * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        where, at = torch.arange(keys.shape[-1], device=query.device), at[:, None]
        hidden = (where > at) | (where < meta.spec.first_attended(at))
        weights = scores.unflatten(1, (-1, n)).masked_fill(hidden, float("-inf")).softmax(-1).flatten(1, 2)
        return (weights @ values).unflatten(1, (-1, n)).permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)

    def copy_blocks(self, views, source, target):
        for view in views:
            view[target.long()] = view[source.long()]

    def export_blocks(self, views, blocks):
        keys, values = (view[blocks.long()] for view in views)
        return keys.permute(0, 3, 1, 2).contiguous(), values.transpose(1, 2).contiguous()

    def import_blocks(self, views, blocks, values):
        views[0][blocks.long()] = values[0].permute(0, 2, 3, 1).to(views[0].dtype)
        views[1][blocks.long()] = values[1].transpose(1, 2).to(views[1].dtype)

    def workspace(self, spec, attention, max_tokens, max_kv):
        # One request: keys and values as stored, in float32 and transposed, queries, and three copies of the scores.
        kept = sum(tensor.shape[0] * tensor.shape[1] for tensor in spec.tensors)
        wide = attention.heads * (2 * attention.head_dim + 3 * spec.tensors[1].shape[1])
        length = max_kv + 32  # whole blocks
        return 4 * (3 * length * kept + max_tokens * wide + 4 * attention.heads * max_tokens * length)
