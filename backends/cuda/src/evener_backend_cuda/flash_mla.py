"""The state provider "flash_mla": latent attention by FlashMLA (DeepSeek), in its pages of 64 tokens.

In one call of the library all requests have the same number of query tokens. So a step is cut into runs of requests
that add the same number of tokens; a decode step is one run. For whole prompts the layer expands the latents
(``pieces``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionSpec, LatentProvider, Piece, StateSpec, StateStep
from evener_backend_cuda.library import FLASH_MLA
from evener_backend_parts.paged_library import HALF_DTYPES, PRIORITY, TokenSlots

PAGE, RANK, ROPE = 64, 512, 64


@dataclass(frozen=True)
class Run:
    """Consecutive requests that add ``count`` tokens each: their rows and tokens in the step, and the library's
    schedule."""

    rows: slice
    tokens: slice
    count: int
    schedule: tuple[Any, Any]


@dataclass(frozen=True)
class LatentMeta:
    """One step of a group."""

    step: StateStep
    token_slots: TokenSlots
    scale: float
    runs: tuple[Run, ...]


class FlashMLAState(LatentProvider):
    """Latent and rotated key of a token are contiguous: [blocks, 64, 1, 576]."""

    name = layout = "flash_mla"
    kinds = frozenset({"latent"})
    priority = PRIORITY
    graph = "never"
    library = FLASH_MLA

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        lacking = self.library.refusal(device.variant)
        if lacking:
            return lacking
        latent, rope = spec.tensors
        if (latent.shape, rope.shape) != ((RANK,), (ROPE,)):
            return f"has kernels for latents of {RANK} + {ROPE} elements, not of {latent.shape[0]} + {rope.shape[0]}"
        if attention.dtype not in HALF_DTYPES or {latent.dtype, rope.dtype} != {attention.dtype}:
            return f"stores and computes in {' or '.join(HALF_DTYPES)}, not in {attention.dtype} over {latent.dtype}"
        if attention.top is not None or attention.softcap or attention.sinks or attention.slopes is not None:
            return "attends to every earlier token, without soft cap, sinks and slopes"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (PAGE,)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return spec.nbytes * block_size

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> torch.Tensor:
        dtype = getattr(torch, spec.tensors[0].dtype)
        flat = storage[:, : spec.nbytes * block_size].view(dtype)
        pages: torch.Tensor = flat.unflatten(1, (block_size, 1, RANK + ROPE))
        return pages

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> LatentMeta:
        runs, row, token = [], 0, 0
        for count, group in groupby(step.host_query_lens):
            rows, tokens = slice(row, row + len(list(group))), slice(token, token)
            if count:
                tokens = slice(token, token + (rows.stop - rows.start) * count)
                schedule = self.library.load().get_mla_metadata(step.kv_lens[rows], count * attention.heads, 1)
                runs.append(Run(rows, tokens, count, schedule))
            row, token = rows.stop, tokens.stop
        return LatentMeta(step, TokenSlots.of(step, block_size), attention.scale, tuple(runs))

    def write(self, views: torch.Tensor, meta: LatentMeta, *values: torch.Tensor) -> None:
        views[meta.token_slots.blocks, meta.token_slots.offsets, 0] = torch.cat(values, dim=-1).to(views.dtype)

    def attend(
        self, views: torch.Tensor, meta: LatentMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], RANK)
        for run in meta.runs:
            schedule, splits = run.schedule
            found, _ = self.library.load().flash_mla_with_kvcache(
                q=query[run.tokens].unflatten(0, (-1, run.count)).contiguous(), k_cache=views,
                block_table=meta.step.block_table[run.rows], cache_seqlens=meta.step.kv_lens[run.rows],
                head_dim_v=RANK, tile_scheduler_metadata=schedule, num_splits=splits, softmax_scale=meta.scale,
                causal=True,
            )  # fmt: skip
            out[run.tokens] = found.flatten(0, 1)
        return out

    def pieces(self, views: torch.Tensor, meta: LatentMeta, limit: int) -> Iterator[Piece]:
        for run in meta.runs:
            for row in range(run.rows.start, run.rows.stop):
                start = run.tokens.start + (row - run.rows.start) * run.count
                length = meta.step.host_kv_lens[row]
                for first in range(0, length, limit):
                    at = torch.arange(first, min(first + limit, length), device=views.device)
                    tokens = views[meta.step.block_table[row, at // PAGE].long(), at % PAGE, 0]
                    parts = tokens.split((RANK, ROPE), dim=-1)
                    yield Piece(start, start + run.count, length - run.count - first, parts)

    def copy_blocks(self, views: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        views[target] = views[source]

    def export_blocks(self, views: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        latent, rope = views[blocks, :, 0].split((RANK, ROPE), dim=-1)
        return latent.contiguous(), rope.contiguous()

    def import_blocks(self, views: torch.Tensor, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        views[blocks, :, 0] = torch.cat(list(values), dim=-1).to(views.dtype)
