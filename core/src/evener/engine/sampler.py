"""The sample segment: logits to ids on the device, and log-probabilities for the rows that want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from evener.engine.device_tables import DeviceTables
from evener.layers.builder import Builder
from evener.resolution.buckets import bucket_index

#: Most rows of logits that are copied out at a time, where not all are meant: a step's rows of a large vocabulary are
#: hundreds of megabytes, and the memory plan has room for them once.
_TOGETHER = 32


class LogprobTensors(NamedTuple):
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
        self._add_bias = build.op("add_bias", "sampler", vocab=vocab)
        self._penalty = build.op("penalize", "sampler", vocab=vocab)
        self._mask = build.op("apply_mask", "sampler", vocab=vocab)
        self._logprobs = build.op("logprobs", "sampler", vocab=vocab)

    def adjust(
        self, logits: torch.Tensor, tables: DeviceTables, slots: torch.Tensor, positions: torch.Tensor, longest: int,
        penalized: torch.Tensor | None, biased: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Logits with biases, then penalties, as transformers has the order; those given are overwritten.

        Args:
            slots, positions: int32 [R], of the rows and of their new tokens.
            longest: no position is larger.
            penalized, biased: indices of the rows that have one; None if there are none.
        """
        if biased is not None or penalized is not None:
            logits = logits.float()
        for rows, change in ((biased, self._bias), (penalized, self._penalize)):
            if rows is not None and rows.shape[0] == logits.shape[0]:
                logits = change(logits, tables, slots, positions, longest)
            elif rows is not None:
                for some in rows.split(_TOGETHER):
                    whose, at = slots.index_select(0, some), positions.index_select(0, some)
                    # Nothing holds what was copied out when the next is.
                    logits.index_copy_(0, some.long(), change(logits.index_select(0, some), tables, whose, at, longest))
        return logits

    def _bias(
        self, logits: torch.Tensor, tables: DeviceTables, slots: torch.Tensor, positions: torch.Tensor, longest: int
    ) -> torch.Tensor:
        parts = (part.index_select(0, slots) for part in tables.biases)
        function = self._add_bias.table[bucket_index(logits.shape[0])]
        return function(logits, *parts, positions)  # type: ignore[no-any-return]

    def _penalize(
        self, logits: torch.Tensor, tables: DeviceTables, slots: torch.Tensor, positions: torch.Tensor, longest: int
    ) -> torch.Tensor:
        prompt = tables.ints.index_select(0, slots)[:, 2]
        penalties = tables.floats.index_select(0, slots)[:, 3:].unbind(1)
        function = self._penalty.table[bucket_index(logits.shape[0])]
        return function(logits, tables.tokens, slots, prompt, positions, longest, *penalties)  # type: ignore[no-any-return]

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
        if random.shape[0] == logits.shape[0]:
            return self._draw(filtered, logits, floats, ints, positions)
        ids: torch.Tensor = self._greedy.table[bucket](logits)
        for some in random.split(_TOGETHER):
            parts = (part.index_select(0, some) for part in (logits, floats, ints, positions))
            ids = ids.index_copy_(0, some.long(), self._draw(filtered, *parts))
        return ids

    def _draw(
        self, filtered: bool, logits: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        function = self._sample[filtered].table[bucket_index(logits.shape[0])]
        return function(  # type: ignore[no-any-return]
            logits, floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2], ints[:, 1], positions
        )

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, top: int) -> LogprobTensors:
        """Log-probabilities of rows of logits [n, V]: of ``ids`` int32 [n], and of the ``top`` likeliest."""
        return LogprobTensors(*self._logprobs.table[bucket_index(logits.shape[0])](logits, ids, top))

    @staticmethod
    def unpack(
        chosen: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, picked: Sequence[int]
    ) -> list[tuple[list[int], list[float]]]:
        """Host lists for each row: the sampled token first, then the likeliest."""
        rows = zip(chosen.tolist(), values.tolist(), ids.tolist(), picked, strict=True)
        return [([token, *top_ids], [value, *top]) for value, top, top_ids, token in rows]
