"""Keys and values in blocks of 16 or 32 tokens, heads before tokens."""

import torch
from evener.contracts.state import AttentionProvider

from evener_backend_planted.defects import planted


class Pages(AttentionProvider):
    name, layout, kinds = "planted.pages", "planted.pages", frozenset({"full", "window"})
    priority, graph, batch_invariant = 10, "any", True

    def supports(self, spec, attention, device):
        if attention.sinks or attention.slopes or attention.algorithm != "softmax":
            return "computes plain softmax attention"
        return None

    def block_sizes(self, spec):
        return (16, 32)

    def bytes_per_block(self, spec, block_size):
        tensors = spec.tensors[:1] if planted("bytes-short") else spec.tensors
        return block_size * sum(t.nbytes for t in tensors)

    def bind(self, storage, spec, block_size):
        views, start = [], 0
        for tensor in spec.tensors:
            stop = start + block_size * tensor.nbytes
            heads, dim = tensor.shape
            flat = storage[:, start:stop].view(getattr(torch, tensor.dtype))
            views.append(flat.unflatten(1, (heads, block_size, dim)))
            start = stop
        return tuple(views)

    def prepare(self, step, spec, attention, block_size):
        return step, spec, attention, block_size

    def write(self, views, meta, *values):
        step, _, _, size = meta
        slots = step.slot_mapping.long()
        if planted("tail-unwritten") and step.tokens > 4:
            slots = slots[: step.tokens // 4 * 4]
        for view, value in zip(views, values, strict=True):
            view[slots // size, :, slots % size] = value[: len(slots)].to(view.dtype)

    def attend(self, views, meta, query, sinks=None):
        step, spec, attention, size = meta
        out = torch.empty(*query.shape[:2], views[1].shape[-1], dtype=query.dtype)
        # Lengths are read from the device: a replayed step has others than the captured one.
        starts, lengths = step.query_start.tolist(), step.kv_lens.tolist()
        for row in range(step.requests):
            start, stop = starts[row], starts[row + 1]
            if stop > start:
                kept = self._read(views, step.block_table[row], lengths[row], size)
                out[start:stop] = self._softmax(query[start:stop], *kept, spec, attention, lengths[row], size)
        if planted("company") and step.requests > 4:
            out = out.to(torch.bfloat16).to(query.dtype)
        return out

    def _read(self, views, table, length, size):
        blocks = table[: -(-length // size)].long()
        stop = len(blocks) * size if planted("reads-beyond") else length
        return [view[blocks].transpose(1, 2).flatten(0, 1)[:stop].float() for view in views]

    def _softmax(self, query, keys, values, spec, attention, length, size):
        heads, kv_heads = torch.arange(query.shape[1]), keys.shape[1]
        picked = heads % kv_heads if planted("heads-mixed") else heads // (len(heads) // kv_heads)
        at = torch.arange(length - len(query), length)
        scale = query.shape[-1] ** -0.5 if planted("attention-scale") else attention.scale
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys[:, picked]) * scale
        if attention.softcap and not planted("softcap-forgotten"):
            scores = torch.tanh(scores / attention.softcap) * attention.softcap
        to = torch.arange(len(keys))
        hidden = (to[None] > at[:, None]) & (to[None] < length)
        if spec.window is not None:
            wide = planted("window-wide") or (planted("window-long") and spec.window > 64)
            hidden |= to[None] <= at[:, None] - spec.window - int(wide)
        if planted("block-boundary") and length % size == 0:
            hidden[:, length - 1] = True
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values[:, picked]).to(query.dtype)

    def workspace(self, spec, attention, max_tokens, max_kv):
        # One request at a time, in float32: what is read, the same for each query head, and scores.
        read = max_kv * attention.heads * sum(t.shape[-1] for t in spec.tensors)
        return 4 * (4 * read + 6 * attention.heads * max_tokens * max_kv)

    def copy_blocks(self, views, source, target):
        for view in views[:1] if planted("copy-half") else views:
            view[target.long()] = view[source.long()]

    def export_blocks(self, views, blocks):
        keys, values = (view[blocks.long()] for view in views)
        turned = values.transpose(1, 2)
        if planted("export-unturned"):
            turned = values.reshape(turned.shape)
        return keys.transpose(1, 2).contiguous(), turned.contiguous()

    def import_blocks(self, views, blocks, values):
        for view, value in zip(views, values, strict=True):
            view[blocks.long()] = value.transpose(1, 2).to(view.dtype)
