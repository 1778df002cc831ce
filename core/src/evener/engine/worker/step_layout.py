"""A plan as arrays: positions, slots and offsets of one step. The host computes them in time proportional to the
step's tokens, whatever the length of the sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evener.contracts.device import Device
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, Plan, TableUpdate


def one_request(tokens: int, groups: int, block_size: int) -> Plan:
    """A step of one request of ``tokens`` tokens, over the null block of each of ``groups`` state groups."""
    columns = -(-tokens // block_size)
    return Plan(
        id=-1, admissions=[Admission(0, [0] * tokens, Sampling(temperature=0.0))],
        updates=[TableUpdate(0, 0, [[0] * columns] * groups)], slots=[0], starts=[0], counts=[tokens], samples=[0],
    )  # fmt: skip


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
    """All int32 arrays of a step. They are joined on the host, sent in one upload, and sliced on the device."""

    def __init__(self, plan: Plan) -> None:
        starts, counts = np.array(plan.starts, dtype=np.int32), np.array(plan.counts, dtype=np.int32)
        slots = np.array(plan.slots, dtype=np.int32)
        ends = starts + counts
        super().__init__(
            tokens=int(counts.sum()), requests=len(plan.slots), max_query=int(counts.max()), max_kv=int(ends.max()),
            query_lens=plan.counts, kv_lens=ends.tolist(), adapted=plan.adapted,
        )  # fmt: skip
        query_start = np.zeros(self.requests + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        inside = np.arange(self.tokens, dtype=np.int32) - np.repeat(query_start[:-1], counts)
        positions, token_slots = np.repeat(starts, counts) + inside, np.repeat(slots, counts)
        picked, how = np.array(plan.samples, dtype=np.int32), plan.sampling
        left = {draft.row: len(draft.ids) for draft in plan.drafts}
        behind = np.zeros_like(picked)  # tokens of the row behind the one that is sampled from
        for index, row in enumerate(plan.samples if left else ()):
            behind[index] = left.get(row, 0)
            left[row] = int(behind[index]) - 1
        longest = max(map(len, how.named), default=0)
        scored = [query_start[s.row] + np.arange(s.first, s.first + s.count, dtype=np.int32) for s in plan.scores]
        self.arrays: dict[str, np.ndarray[Any, Any]] = {
            "positions": positions,
            "token_slots": token_slots,
            "query_start": query_start,
            "kv_lens": ends,
            "slots": slots,
            "last": query_start[1:][picked] - 1 - behind,
            "sample_slots": slots[picked],
            "sample_positions": ends[picked] - behind,
            "random": np.array(how.random, dtype=np.int32),
            "logprobs": np.array(how.logprobs, dtype=np.int32),
            "named": np.array([ids + [0] * (longest - len(ids)) for ids in how.named], dtype=np.int32).reshape(-1),
            "penalized": np.array(how.penalized, dtype=np.int32),
            "biased": np.array(how.biased, dtype=np.int32),
            "scores": np.concatenate([np.zeros(0, dtype=np.int32), *scored]),
        }
        if plan.drafts:
            kept = ends.copy()
            kept[[draft.row for draft in plan.drafts]] -= [len(draft.ids) for draft in plan.drafts]
            self.arrays["kept_lens"], self.kept_lens = kept, kept.tolist()

    def upload(self, device: Device) -> dict[str, torch.Tensor]:
        """The arrays on the device by name, as slices of one tensor; each starts at an address that the device's
        alignment divides."""
        alignment = device.capabilities.alignment
        pieces: list[np.ndarray[Any, Any]] = []
        for part in self.arrays.values():
            pieces += [part, np.zeros(aligned(len(part), alignment) - len(part), dtype=np.int32)]
        sent = device.upload(np.concatenate(pieces)).split([len(piece) for piece in pieces])
        return dict(zip(self.arrays, sent[::2], strict=True))


def aligned(count: int, alignment: int) -> int:
    """The smallest number of int32, at least ``count``, whose bytes are a multiple of ``alignment``."""
    step = max(1, alignment // 4)
    return -(-count // step) * step
