"""A plan as arrays: positions, slots and offsets of one step. The host computes them in time proportional to the
step's tokens, whatever the length of the sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from evener.contracts.device import Device
from evener.engine.inputs.device_tables import DeviceTables
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, Plan, TableUpdate


def one_request(tokens: int, groups: int, block_size: int) -> Plan:
    """A step of one request of ``tokens`` tokens, over the null block of each of ``groups`` state groups."""
    columns = -(-tokens // block_size)
    return Plan(
        id=-1, admissions=[Admission(0, [0] * tokens, Sampling(temperature=0.0))],
        updates=[TableUpdate(0, 0, [[0] * columns] * groups)], slots=[0], starts=[0], counts=[tokens], samples=[0],
    )  # fmt: skip


#: What holds one array: a tensor on the device, or what becomes one.
A = TypeVar("A")


@dataclass(frozen=True, kw_only=True)
class StepArrays(Generic[A]):
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
    """

    token_at: A
    block_at: A
    sample_at: A
    positions: A
    offsets: A
    query_start: A
    kv_lens: A
    kept_lens: A | None
    slots: A
    last: A | None
    sample_slots: A
    sample_positions: A


@dataclass(frozen=True, kw_only=True)
class LayoutArrays(StepArrays[A]):
    """The arrays of a step that is not captured, with those that its sampling reads.

    Attributes:
        random, logprobs, penalized, biased: indices of samples, as in ``SamplePlan``.
        named: the ids of ``SamplePlan.named``, rows of equal length one after another, padded with 0.
        scores: the tokens whose next ones are scored (``Plan.scores``), as indices of the T tokens.
    """

    last: A
    random: A
    logprobs: A
    named: A
    penalized: A
    biased: A
    scores: A


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
    """All arrays of a step. They are joined on the host, sent in one upload, and sliced on the device."""

    def __init__(self, plan: Plan, tables: DeviceTables) -> None:
        starts, counts, slots = _int32(plan.starts), _int32(plan.counts), _int32(plan.slots)
        ends = starts + counts
        super().__init__(
            tokens=int(counts.sum()), requests=len(plan.slots), max_query=int(counts.max()), max_kv=int(ends.max()),
            query_lens=plan.counts, kv_lens=ends.tolist(), adapted=plan.adapted,
        )  # fmt: skip
        query_start = np.zeros(self.requests + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        inside = np.arange(self.tokens, dtype=np.int32) - np.repeat(query_start[:-1], counts)
        positions = np.repeat(starts, counts) + inside
        places = tables.places(np.repeat(slots, counts), positions)
        picked, how = _int32(plan.samples), plan.sampling
        left = {draft.row: len(draft.ids) for draft in plan.drafts}
        behind = np.zeros_like(picked)  # tokens of the row after the one that is sampled from
        for index, row in enumerate(plan.samples if left else ()):
            behind[index] = left.get(row, 0)
            left[row] = int(behind[index]) - 1
        longest = max(map(len, how.named), default=0)
        scored = [query_start[s.row] + np.arange(s.first, s.first + s.count, dtype=np.int32) for s in plan.scores]
        kept = ends.copy() if plan.drafts else None
        if kept is not None:
            kept[[draft.row for draft in plan.drafts]] -= [len(draft.ids) for draft in plan.drafts]
            self.kept_lens = kept.tolist()
        sample_slots, sample_positions = slots[picked], ends[picked] - behind
        self.arrays: LayoutArrays[np.ndarray[Any, Any]] = LayoutArrays(
            token_at=places.token, block_at=places.block,
            sample_at=tables.places(sample_slots, sample_positions).token,
            positions=positions, offsets=places.offset, query_start=query_start, kv_lens=ends, kept_lens=kept,
            slots=slots, last=query_start[1:][picked] - 1 - behind, sample_slots=sample_slots,
            sample_positions=sample_positions, scores=np.concatenate([np.zeros(0, dtype=np.int32), *scored]),
            named=_int32([ids + [0] * (longest - len(ids)) for ids in how.named]).reshape(-1),
            random=_int32(how.random), logprobs=_int32(how.logprobs), penalized=_int32(how.penalized),
            biased=_int32(how.biased),
        )  # fmt: skip

    def upload(self, device: Device) -> LayoutArrays[torch.Tensor]:
        """The arrays on the device, as slices of one tensor."""
        arrays = {name: array for name, array in vars(self.arrays).items() if array is not None}
        sent = device.upload(join(arrays, device.capabilities.alignment))
        return LayoutArrays(**{"kept_lens": None, **sliced(sent, arrays, device.capabilities.alignment)})


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


def _int32(numbers: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.array(numbers, dtype=np.int32)


def aligned(count: int, alignment: int) -> int:
    """The smallest number of int32, at least ``count``, whose bytes are a multiple of ``alignment``."""
    step = max(1, alignment // 4)
    return -(-count // step) * step
