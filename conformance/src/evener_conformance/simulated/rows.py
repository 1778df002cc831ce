"""State of the other kinds: latents, index keys and recurrent rows, in the canonical layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.state import IndexProvider, Piece, RecurrentProvider, SparseLatentProvider, StateStep
from evener_conformance.simulated.device import SimulatedDevice
from evener_conformance.simulated.kernels import aligned_contiguous
from evener_conformance.simulated.state import PagedMeta, Pages, SimulatedPaged


class SimulatedRows(SimulatedPaged, SparseLatentProvider, IndexProvider, RecurrentProvider):
    """The simulated chip's state other than keys and values. Metadata may be of a part of a step, whose arrays are not
    aligned; and ``pieces`` loops on the host, which cannot be captured."""

    name = "simulated.rows"
    layout = "simulated.rows"
    kinds = frozenset({"latent", "index", "recurrent"})
    transposes = False
    drafts = True

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(device)
        self.graph = "never"

    def _slots(self, step: StateStep) -> torch.Tensor:
        return self._align((step.slot_mapping,))[0]

    def _arrays(self, step: StateStep) -> tuple[torch.Tensor, ...]:
        return self._align(super()._arrays(step))

    def attend_chosen(self, views: Pages, meta: PagedMeta, query: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self._compute("attend_chosen", views, meta, query, chosen)

    def select(self, views: Pages, meta: PagedMeta, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._compute("select", views, meta, query, weights)

    def advance(self, views: Pages, meta: PagedMeta, *inputs: torch.Tensor) -> torch.Tensor:
        return self._compute("advance", views, meta, *inputs)

    def pieces(self, views: Pages, meta: PagedMeta, limit: int) -> Iterator[Piece]:
        step, size, start = meta.step, meta.block_size, 0
        for row, (count, length) in enumerate(zip(step.host_query_lens, step.host_kv_lens, strict=True)):
            for first in range(0, length if count else 0, limit):
                stop = min(first + limit, length)
                table = aligned_contiguous(
                    step.block_table[row, first // size : -(-stop // size)], self._constraints.alignment
                )
                tensors = self._read(views, table, first % size, first % size + stop - first)
                yield Piece(start, start + count, length - count - first, tensors)
            start += count

    def _read(self, views: Pages, blocks: torch.Tensor, first: int, stop: int) -> tuple[torch.Tensor, ...]:
        def kernel(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(view[blocks].flatten(0, 1)[first:stop].contiguous() for view in views.canonical)

        found: tuple[torch.Tensor, ...] = self._device.launch("simulated.read", kernel, blocks)
        return found
