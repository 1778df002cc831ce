"""The sample segment: logits to ids on the device, and log-probabilities for the rows that want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evener.layers.builder import Builder
from evener.resolution.buckets import bucket_index


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities of some rows: chosen [n], values [n, top], ids int32 [n, top]."""

    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor


class Sampler:
    """Greedy rows take one argmax; only the others are filtered and given noise.

    Its call sites are declared like a model's and resolved with them; a table is indexed by the bucket of the rows.
    """

    def __init__(self, build: Builder, vocab: int) -> None:
        self._greedy = build.op("greedy", "sampler", vocab=vocab)
        self._sample = {on: build.op("sample", "sampler", vocab=vocab, filters=on) for on in (False, True)}
        self._mask = build.op("apply_mask", "sampler", vocab=vocab)
        self._logprobs = build.op("logprobs", "sampler", vocab=vocab)

    def ids(
        self, logits: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, positions: torch.Tensor,
        random: torch.Tensor | None, mask: torch.Tensor | None = None, filtered: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """int32 [R] from logits [R, V].

        Args:
            floats, ints: the rows' sampling parameters as in ``DeviceTables``.
            positions: int32 [R], where each new token will stand: the noise's counter.
            random: indices of the rows that are not greedy; None if there are none.
            filtered: False if none of the random rows has a filter on, which spares sorting the vocabulary.
            mask: packed vocabulary mask int32 [R, ceil(V / 32)]; None allows every id.
        """
        bucket = bucket_index(logits.shape[0])
        if mask is not None:
            logits = self._mask.table[bucket](logits, mask)
        if random is None:
            return self._greedy.table[bucket](logits)  # type: ignore[no-any-return]
        whole = random.shape[0] == logits.shape[0]
        ids = None if whole else self._greedy.table[bucket](logits)
        f, i = floats.index_select(0, random), ints.index_select(0, random)
        drawn: torch.Tensor = self._sample[filtered].table[bucket_index(random.shape[0])](
            logits.index_select(0, random),
            f[:, 0],
            i[:, 0],
            f[:, 1],
            f[:, 2],
            i[:, 1],
            positions.index_select(0, random),
        )
        return drawn if ids is None else ids.index_copy(0, random.long(), drawn)

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, top: int) -> LogprobTensors:
        """Raw log-probabilities of ``rows``: of the sampled id, and the ``top`` likeliest."""
        table = self._logprobs.table[bucket_index(rows.shape[0])]
        return LogprobTensors(*table(logits.index_select(0, rows), ids.index_select(0, rows), top))

    @staticmethod
    def unpack(
        chosen: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, picked: Sequence[int]
    ) -> list[tuple[list[int], list[float]]]:
        """Host lists for each row: the sampled token first, then the likeliest."""
        rows = zip(chosen.tolist(), values.tolist(), ids.tolist(), picked, strict=True)
        return [([token, *top_ids], [value, *top]) for value, top, top_ids, token in rows]
