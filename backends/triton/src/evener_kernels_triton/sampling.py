"""Kernels that sample tokens."""

from __future__ import annotations

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener_kernels_triton.jit.sampling import (
    apply_mask_kernel,
    chunk_argmax_kernel,
    filtered_sample_kernel,
    merge_argmax_kernel,
)
from evener_kernels_triton.kernel import TritonKernel
from evener_kernels_triton.primitives import rows_of
from evener_kernels_triton.tuning import Tuning, power_of_two

_CHUNK = 4096


def choose(
    tuning: Tuning, logits: torch.Tensor, temperature: torch.Tensor | None = None, seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """int32 [R]: the best id of each row [R, V], with noise if temperatures are given."""
    logits = rows_of(logits)
    rows, vocab = logits.shape
    block = min(_CHUNK, power_of_two(vocab))
    chunks = -(-vocab // block)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
        ids = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
        noise = [t.contiguous() if t is not None else out for t in (temperature, seed, position)]
        chunk_argmax_kernel[(rows, chunks)](
            logits, *noise, values, ids, logits.stride(0), vocab, chunks, RANDOM=temperature is not None, BLOCK=block,
            OVERLAP=tuning.overlap, num_warps=8, **tuning.launch,
        )  # fmt: skip
        merge_argmax_kernel[(rows,)](
            values, ids, out, chunks, CHUNKS=power_of_two(chunks), OVERLAP=tuning.overlap, num_warps=1, **tuning.launch
        )
    return out


class TritonGreedy(TritonKernel):
    """All chunks of all rows run in parallel."""

    op = "greedy"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        tuning = self.tuning

        def run(logits: torch.Tensor) -> torch.Tensor:
            return choose(tuning, logits)

        return run


def sample_filtered(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    seed: torch.Tensor, position: torch.Tensor, block: int = 2 * _CHUNK,
) -> torch.Tensor:  # fmt: skip
    """int32 [R]: one id of each row [R, V] by its filters and noise; see ``filtered_sample_kernel``. ``block``: at most
    so many ids at a time."""
    logits = rows_of(logits)
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        inputs = [t.contiguous() for t in (temperature, top_k, top_p, min_p, seed, position)]
        filtered_sample_kernel[(rows,)](
            logits, *inputs, out, logits.stride(0), vocab, BLOCK=min(block, power_of_two(vocab)), num_warps=16
        )
    return out


class TritonSample(TritonKernel):
    """Noise is computed where it is used; filters find their bounds by search, without sorting."""

    op = "sample"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        tuning, filters = self.tuning, call.static["filters"]

        def run(
            logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
            min_p: torch.Tensor, seed: torch.Tensor, position: torch.Tensor,
        ) -> torch.Tensor:  # fmt: skip
            if filters:
                return sample_filtered(logits, temperature, top_k, top_p, min_p, seed, position)
            return choose(tuning, logits, temperature, seed, position)

        return run


class TritonApplyMask(TritonKernel):
    """Elementwise."""

    op = "apply_mask"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        def run(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            logits, mask = rows_of(logits), rows_of(mask)
            rows, vocab = logits.shape
            y = torch.empty(rows, vocab, dtype=logits.dtype, device=logits.device)
            if y.numel():
                apply_mask_kernel[(rows, -(-vocab // _CHUNK))](
                    logits, mask, y, logits.stride(0), mask.stride(0), vocab, BLOCK=_CHUNK, num_warps=8
                )
            return y

        return run


SAMPLING = (TritonGreedy, TritonSample, TritonApplyMask)
