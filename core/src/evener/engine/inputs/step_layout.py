"""A plan as arrays: positions, slots and offsets of one step. The host computes them in time proportional to the
step's tokens, whatever the length of the sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from evener.contracts.device import Device
from evener.engine.inputs.device_tables import DeviceTables, Paging, aligned
from evener.engine.wire.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StepArrays:
    """The arrays that a step is made of: T tokens of R requests, and S rows that are sampled from. They are int32, but
    for the first three, which are int64: what has 8 bytes comes first when arrays are joined.

    Attributes:
        token_at, block_at: [T], where the device's tables keep each token's id and block (``Places``).
        sample_at: [S], where the sampled ids are written.
        positions: [T], of each token in its request; offsets: in its block.
        query_start: [R + 1], the first token of each request, and T at the end.
        kv_lens: [R], tokens of each request after the step; kept_lens: without its proposed tokens, None if all are
            certain.
        slots: [R], of each request.
        last: [S], the hidden row that is sampled from; None: all rows, in order.
        sample_slots, sample_positions: [S], the slot and the position of ``sample_at``.
        paging: what the tables have at ``block_at``, ``offsets`` and ``slots``; None: the step looks it up.
    """

    token_at: torch.Tensor
    block_at: torch.Tensor
    sample_at: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    query_start: torch.Tensor
    kv_lens: torch.Tensor
    kept_lens: torch.Tensor | None = None
    slots: torch.Tensor
    last: torch.Tensor | None = None
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    paging: Paging | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutArrays(StepArrays):
    """The arrays of a step that is not captured, with those that its sampling reads.

    Attributes:
        random, logprobs, penalized, biased: indices of samples, as in ``SamplePlan``.
        named: the ids of ``SamplePlan.named``, rows of equal length one after another, padded with 0.
        scores: the tokens whose next ones are scored (``Plan.scores``), as indices of the T tokens.
    """

    last: torch.Tensor
    random: torch.Tensor
    logprobs: torch.Tensor
    named: torch.Tensor
    penalized: torch.Tensor
    biased: torch.Tensor
    scores: torch.Tensor


@dataclass
class StepShape:
    """The sizes of a step as host numbers; see ``evener.contracts.state.StateStep``. ``adapted``: whether a row has an
    adapter."""

    tokens: int
    requests: int
    max_query: int
    max_kv: int
    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    captured: bool = False
    adapted: bool = False
    kept_lens: Sequence[int] | None = None


class StepLayout(StepShape):
    """All arrays of a step. They are joined on the host, sent in one upload, and sliced on the device.

    Attributes:
        values: the arrays on the host, by their names in ``LayoutArrays``.
    """

    def __init__(self, plan: Plan, tables: DeviceTables) -> None:
        starts, counts, slots = np.int32(plan.starts), np.int32(plan.counts), np.int32(plan.slots)
        ends = starts + counts
        super().__init__(
            tokens=int(counts.sum()), requests=len(plan.slots), max_query=int(counts.max()), max_kv=int(ends.max()),
            query_lens=plan.counts, kv_lens=ends.tolist(), adapted=plan.adapted,
        )  # fmt: skip
        query_start = np.cumsum([0, *plan.counts], dtype=np.int32)
        positions = np.arange(self.tokens, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
        places = tables.places(np.repeat(slots, counts), positions)
        picked, how = np.int32(plan.samples), plan.sampling
        # How many tokens of the row come after the one that is sampled from: n, then one fewer for each proposed token.
        left = {draft.row: iter(range(len(draft.ids), -1, -1)) for draft in plan.drafts}
        behind = np.int32([next(left[row]) if row in left else 0 for row in plan.samples])
        longest = max(map(len, how.named), default=0)
        scored = [query_start[s.row] + np.arange(s.first, s.first + s.count, dtype=np.int32) for s in plan.scores]
        sample_slots, sample_positions = slots[picked], ends[picked] - behind
        self.values: dict[str, np.ndarray[Any, Any]] = {
            "token_at": places.token, "block_at": places.block,
            "sample_at": tables.places(sample_slots, sample_positions).token, "positions": positions,
            "offsets": places.offset, "query_start": query_start, "kv_lens": ends, "slots": slots,
            "last": query_start[1:][picked] - 1 - behind, "sample_slots": sample_slots,
            "sample_positions": sample_positions, "scores": np.concatenate([np.zeros(0, dtype=np.int32), *scored]),
            "named": np.int32([ids + [0] * (longest - len(ids)) for ids in how.named]).reshape(-1),
            "random": np.int32(how.random), "logprobs": np.int32(how.logprobs), "penalized": np.int32(how.penalized),
            "biased": np.int32(how.biased),
        }  # fmt: skip
        if plan.drafts:
            self.values["kept_lens"] = kept = ends.copy()
            kept[[draft.row for draft in plan.drafts]] -= [len(draft.ids) for draft in plan.drafts]
            self.kept_lens = kept.tolist()

    def upload(self, device: Device) -> LayoutArrays:
        """The arrays on the device, as slices of one tensor."""
        sent = device.upload(join(self.values, device.capabilities.alignment))
        return LayoutArrays(**sliced(sent, self.values, device.capabilities.alignment))


def join(arrays: Mapping[str, np.ndarray[Any, Any]], alignment: int) -> np.ndarray[Any, Any]:
    """One int32 array of int32 and int64 arrays, those of int64 first; each starts at a multiple of ``alignment``
    bytes."""
    words = [array.view(np.int32) for array in arrays.values()]
    padded = ((each, np.zeros(aligned(len(each), alignment) - len(each), dtype=np.int32)) for each in words)
    return np.concatenate(list(chain.from_iterable(padded)))


def sliced(joined: torch.Tensor, arrays: Mapping[str, np.ndarray[Any, Any]], alignment: int) -> dict[str, Any]:
    """The parts of a tensor like what ``join`` makes of such ``arrays``."""
    words = [array.nbytes // 4 for array in arrays.values()]
    pieces = joined.split([aligned(n, alignment) for n in words])
    kinds = (torch.int64 if array.dtype == np.int64 else torch.int32 for array in arrays.values())
    return {name: piece[:n].view(kind) for name, piece, n, kind in zip(arrays, pieces, words, kinds, strict=True)}
