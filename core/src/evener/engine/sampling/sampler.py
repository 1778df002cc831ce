"""The sampler: logits to ids on the device, and log-probabilities for the rows that want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from evener.engine.inputs.device_tables import DeviceTables
from evener.layers.builder import Builder
from evener.resolution.buckets import bucket_index

#: When only some rows of the logits are changed, at most so many are copied at a time: the logits of a step over a
#: large vocabulary take hundreds of megabytes, and the memory plan has room for them once.
_MAX_COPIED_ROWS = 32


class LogprobTensors(NamedTuple):
    """Log-probabilities of n rows: of the ``chosen`` token [n], and the ``values`` [n, top] and ``ids`` int32 [n, top]
    of the likeliest tokens."""

    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor


class Sampler:
    """Samples one id for each row of logits. Greedy rows take the argmax; only the others are filtered and drawn.

    Its ops are declared and resolved like a model's. Each has a table of kernels, indexed by the bucket of the
    number of rows.
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
        """Add biases, then apply penalties, in the order of transformers. Returns the new logits [R, vocab]; may
        overwrite those given.

        Args:
            slots, positions: int32 [R]: the rows' slots, and the positions of their new tokens.
            longest: an upper bound of the positions.
            penalized, biased: int32, indices of the rows with a penalty, and with a bias; None if there are none.
        """
        if biased is not None or penalized is not None:
            logits = logits.float()
        for rows, change in ((biased, self._bias), (penalized, self._penalize)):
            if rows is not None and rows.shape[0] == logits.shape[0]:
                logits = change(logits, tables, slots, positions, longest)
            elif rows is not None:
                for some in rows.split(_MAX_COPIED_ROWS):
                    row_slots, row_positions = slots.index_select(0, some), positions.index_select(0, some)
                    # No variable keeps the copied rows, so their memory is free for the next ones.
                    logits.index_copy_(0, some.long(), change(
                        logits.index_select(0, some), tables, row_slots, row_positions, longest))  # fmt: skip
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
        """Sample ids int32 [R] from logits [R, V].

        Args:
            floats, ints: the rows' sampling parameters as in ``DeviceTables``.
            positions: int32 [R], the positions of the new tokens: with the seed, they determine the random numbers.
            random: indices of the rows that are not greedy; None if there are none.
            mask: a packed vocabulary mask int32 [R, ceil(V / 32)]; None allows every id.
            filtered: False if no random row uses top-k, top-p or min-p: then the vocabulary need not be sorted.
        """
        bucket = bucket_index(logits.shape[0])
        if mask is not None:
            logits = self._mask.table[bucket](logits, mask)
        if random is None:
            return self.likeliest(logits)
        if random.shape[0] == logits.shape[0]:
            return self._draw(filtered, logits, floats, ints, positions)
        ids = self.likeliest(logits)
        for some in random.split(_MAX_COPIED_ROWS):
            parts = (part.index_select(0, some) for part in (logits, floats, ints, positions))
            ids = ids.index_copy_(0, some.long(), self._draw(filtered, *parts))
        return ids

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Ids int32 [R] of the largest logits [R, V]."""
        return self._greedy.table[bucket_index(logits.shape[0])](logits)  # type: ignore[no-any-return]

    def _draw(
        self, filtered: bool, logits: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        function = self._sample[filtered].table[bucket_index(logits.shape[0])]
        return function(  # type: ignore[no-any-return]
            logits, floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2], ints[:, 1], positions
        )

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, top: int) -> LogprobTensors:
        """Log-probabilities of logits [n, V]: of ``ids`` int32 [n], and of the ``top`` likeliest tokens of each row."""
        return LogprobTensors(*self._logprobs.table[bucket_index(logits.shape[0])](logits, ids, top))

    @staticmethod
    def named(logits: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor, named: torch.Tensor) -> torch.Tensor:
        """Log-probabilities float32 [n, k] of ``named`` ids int32 [n * k], from logits [n, V] and the log-probabilities
        ``chosen`` [n] of ``ids`` int32 [n]: they differ as the logits do."""
        picked = torch.cat((ids[:, None], named.view(len(ids), named.shape[0] // len(ids))), 1).long()
        values = logits.gather(1, picked).float()
        return values[:, 1:] - values[:, :1] + chosen[:, None]

    @staticmethod
    def unpack(
        chosen: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, picked: Sequence[int]
    ) -> list[tuple[list[int], list[float]]]:
        """The ids and the values of each row as lists: the token ``picked`` first, then the likeliest."""
        rows = zip(chosen.tolist(), values.tolist(), ids.tolist(), picked, strict=True)
        return [([token, *top_ids], [value, *top]) for value, top, top_ids, token in rows]
