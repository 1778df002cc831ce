"""The state provider: where rows lie, and which row each request starts from and ends in.

A step in which every request adds one token is computed for many requests at once, with indices that are computed on
the device, so that it can be captured. Other steps are computed request by request.
"""

from dataclasses import dataclass

import torch
from evener.contracts.state import RecurrentProvider, StateSpec, StateStep

from evener_state_example.gated_delta import one_token

BATCH = 16  # requests that are computed at once: it bounds the workspace


@dataclass(frozen=True)
class Meta:
    """A step. In steps of one token per request, int64 [R]: the block that each request's row is read from (not read
    where ``first`` is true, at position 0), and the block that it is written to. None in other steps."""

    step: StateStep
    spec: StateSpec
    block_size: int
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    first: torch.Tensor | None = None


class Rows(RecurrentProvider):
    name = layout = "example.rows"
    kinds = frozenset({"recurrent"})
    graph = "uniform_decode"  # steps in which each request adds one token can be captured
    drafts = True  # wrong tokens of speculative decoding leave nothing in the rows

    def supports(self, spec, attention, device):
        return None if attention.algorithm == "gated_delta" else f"computes gated_delta, not {attention.algorithm}"

    def block_sizes(self, spec):
        return (16, 32, 64, 128)  # a row has no tokens; these are the distances at which snapshots can be kept

    def bytes_per_block(self, spec, block_size):
        return spec.nbytes  # one row, whatever the block size

    def bind(self, storage, spec, block_size):
        # delta first, as float32 must be aligned, and with keys last, so that each value reads its keys in sequence.
        conv, delta = spec.tensors
        heads, key_dim, value_dim = delta.shape
        deltas = storage[:, : delta.nbytes].view(torch.float32).unflatten(1, (heads, value_dim, key_dim))
        convs = storage[:, delta.nbytes : spec.nbytes].view(getattr(torch, conv.dtype)).unflatten(1, conv.shape)
        return deltas, convs

    def prepare(self, step, spec, attention, block_size):
        if step.tokens != step.requests or step.max_query != 1:
            return Meta(step, spec, block_size)
        # kv_lens counts the token of this step: it is at position kv_lens - 1, and the row before it one earlier.
        table, last = step.block_table.long(), step.kv_lens.long()[:, None] - 1
        source = table.gather(1, (last - 1).clamp(min=0) // block_size)[:, 0]
        return Meta(step, spec, block_size, source, table.gather(1, last // block_size)[:, 0], last[:, 0] == 0)

    def advance(self, views, meta, *inputs):
        mixed, filters, decay, beta = inputs
        out = mixed.new_empty(len(mixed), *views[0].shape[1:3])
        if meta.source is None:
            self._advance_each(views, meta, out, mixed, filters, decay, beta)
            return out
        for start in range(0, len(mixed), BATCH):
            some = slice(start, start + BATCH)
            state = [view[meta.source[some]] for view in views]
            # Whatever was left in the block of a new request is not its own.
            state = [rows.masked_fill(meta.first[some].view(-1, *[1] * (rows.dim() - 1)), 0) for rows in state]
            out[some], *state = one_token(*state, mixed[some], filters, decay[some], beta[some])
            for view, rows in zip(views, state, strict=True):
                view[meta.target[some]] = rows.to(view.dtype)
        return out

    def _advance_each(self, views, meta, out, mixed, filters, decay, beta):
        step, size, at = meta.step, meta.block_size, 0
        every = meta.spec.every or size
        for row, (count, length) in enumerate(zip(step.host_query_lens, step.host_kv_lens, strict=True)):
            blocks = step.block_table[row].long()
            before = length - count
            kept = (step.host_kept_lens or step.host_kv_lens)[row]
            # The row before the first token is at the block of the token before it.
            column = max(before - 1, 0) // size
            state = [view[blocks[column : column + 1]] for view in views]
            if before == 0:
                state = [torch.zeros_like(rows) for rows in state]
            for position in range(before, length):
                now = slice(at, at + 1)
                out[now], *state = one_token(*state, mixed[now], filters, decay[now], beta[now])
                at += 1
                # The end of the step, or a snapshot. Proposed tokens follow behind ``kept``: they may be wrong.
                if position + 1 == kept or (position + 1 < kept and (position + 1) % every == 0):
                    column = position // size
                    for view, rows in zip(views, state, strict=True):
                        view[blocks[column : column + 1]] = rows.to(view.dtype)

    def copy_blocks(self, views, source, target):
        for view in views:
            view[target.long()] = view[source.long()]

    def export_blocks(self, views, blocks):
        deltas, convs = (view[blocks.long()] for view in views)
        return convs, deltas.transpose(-1, -2).contiguous()  # in the order and the shapes of spec.tensors

    def import_blocks(self, views, blocks, values):
        views[0][blocks.long()] = values[1].transpose(-1, -2).to(views[0].dtype)
        views[1][blocks.long()] = values[0].to(views[1].dtype)

    def workspace(self, spec, attention, max_tokens, max_kv):
        (channels, width), delta = spec.tensors[0].shape, spec.tensors[1].nbytes
        # Of one batch: delta up to five times (read, masked, decayed, the update, the sum), and the convolution.
        return BATCH * (5 * delta + 4 * channels * (4 * (width + 1) + 8))
