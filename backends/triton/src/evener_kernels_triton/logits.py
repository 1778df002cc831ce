"""Kernels that change single logits, and that compute the log-probabilities of a row."""

from __future__ import annotations

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener_kernels_triton.jit.logits import (
    add_bias_kernel,
    chunk_top_logprobs_kernel,
    count_kernel,
    logprobs_kernel,
    penalize_kernel,
)
from evener_kernels_triton.kernel import TritonKernel
from evener_kernels_triton.primitives import rows_of
from evener_kernels_triton.tuning import power_of_two

_CHUNK = 4096
_PLACES = 1024
#: Most rows whose ids are counted at a time: counters for each id of a large vocabulary take 0.6 MB per row.
_ROWS_PER_COUNT = 32
#: Most log-probabilities that a request may ask for.
_MAX_TOP_LOGPROBS = 20
#: The sign bit of int32: a mark in a count, and smaller than the key of every number.
_SEEN = _NONE = -(2**31)


class TritonAddBias(TritonKernel):
    """Entries of one id are summed before they are added, so the order of writes does not matter."""

    op = "add_bias"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        def run(
            logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, until: torch.Tensor, position: torch.Tensor
        ) -> torch.Tensor:
            logits = rows_of(logits)
            rows, entries = ids.shape
            if ids.numel():
                mine = min(32, power_of_two(entries))
                add_bias_kernel[(rows, -(-entries // mine))](
                    logits, ids.contiguous(), values.contiguous(), until.contiguous(), position.contiguous(),
                    logits.stride(0), entries, MINE=mine, OTHERS=min(128, power_of_two(entries)), num_warps=4,
                )  # fmt: skip
            return logits

        return run


class TritonPenalize(TritonKernel):
    """Counts by atomic integer sums, which give the same result in any order. The program that uses a count resets it
    to zero, so the next rows find zeros too."""

    op = "penalize"
    batch_invariant = True

    def workspace(self, call: OpCall) -> int:
        return int(4 * min(call.bucket.high, _ROWS_PER_COUNT) * call.static["vocab"])

    def build(self, call: OpCall) -> OpFunction:
        def run(
            logits: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, prompt: torch.Tensor,
            lengths: torch.Tensor, longest: int, repetition: torch.Tensor, frequency: torch.Tensor,
            presence: torch.Tensor,
        ) -> torch.Tensor:  # fmt: skip
            logits, tokens = rows_of(logits), rows_of(tokens)
            rows, vocab = logits.shape
            if not (rows and longest):
                return logits
            counts = torch.zeros(min(rows, _ROWS_PER_COUNT), vocab, dtype=torch.int32, device=logits.device)
            columns = [t.contiguous() for t in (slots, prompt, lengths, repetition, frequency, presence)]
            places, sizes = -(-longest // _PLACES), {"SEEN": _SEEN, "BLOCK": _PLACES, "num_warps": 4}
            together = zip(*(t.split(_ROWS_PER_COUNT) for t in (logits, *columns)), strict=True)
            for some, whose, begin, ends, *penalties in together:
                grid = (some.shape[0], places)
                count_kernel[grid](tokens, whose, begin, ends, counts, tokens.stride(0), longest, vocab, **sizes)
                penalize_kernel[grid](
                    some, tokens, whose, ends, counts, *penalties, logits.stride(0), tokens.stride(0), longest, vocab,
                    **sizes,
                )  # fmt: skip
            return logits

        return run


class TritonLogprobs(TritonKernel):
    """Each chunk of a row lists its largest logits; the lists are merged. Of equal values the lowest id comes first."""

    op = "logprobs"
    batch_invariant = True

    def workspace(self, call: OpCall) -> int:
        # The call does not say how many a request asks for.
        chunks = -(-call.static["vocab"] // min(_CHUNK, power_of_two(call.static["vocab"])))
        return int(call.bucket.high * chunks * 2 * (1 + _MAX_TOP_LOGPROBS) * 4)

    def build(self, call: OpCall) -> OpFunction:
        def run(logits: torch.Tensor, ids: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = rows_of(logits)
            rows, vocab = logits.shape
            where = logits.device
            chosen = torch.empty(rows, dtype=torch.float32, device=where)
            values = torch.empty(rows, top, dtype=torch.float32, device=where)
            top_ids = torch.empty(rows, top, dtype=torch.int32, device=where)
            if rows:
                block = min(_CHUNK, power_of_two(vocab))
                chunks = -(-vocab // block)
                peaks, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=where)
                keys, places = torch.empty(2, rows, chunks, top, dtype=torch.int32, device=where)
                chunk_top_logprobs_kernel[(rows, chunks)](
                    logits, peaks, sums, keys, places, logits.stride(0), vocab, chunks, top,
                    NONE=_NONE, BLOCK=block, num_warps=8,
                )  # fmt: skip
                logprobs_kernel[(rows,)](
                    logits, ids.contiguous(), peaks, sums, keys, places, chosen, values, top_ids, logits.stride(0),
                    chunks, top, NONE=_NONE, CHUNKS=power_of_two(chunks), num_warps=1,
                )  # fmt: skip
            return chosen, values, top_ids

        return run


LOGITS = (TritonAddBias, TritonPenalize, TritonLogprobs)
