"""The requests' data that stays on the device between steps: token ids, block tables and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.generation.drafter import BY_WORKER
from evener.engine.wire.plan import Admission, Plan, TableUpdate
from evener.sampling_params import MAX_BIASES

_FOREVER = 2**31 - 1


class DeviceTables:
    """Tables with one row for each of ``slots`` requests, and one spare row at the end: the padding rows of captured
    steps use it, and all its blocks are the null block.

    Args:
        length: tokens of the longest sequence.
        spans: for each group, the pages of one block.
        block_size: tokens of one block.

    Attributes:
        tokens: int32 [slots + 1, length + 1], known and sampled ids by position.
        blocks: for each group int32 [slots + 1, columns]. A block is numbered as the group's provider numbers it:
            the plan's block id divided by the group's span.
        floats: float32 [slots + 1, 6]: temperature, top_p, min_p, repetition, frequency and presence penalty.
        ints: int32 [slots + 1, 4]: top_k, seed, prompt length, slot of the adapter or -1.
    """

    def __init__(self, device: Device, slots: int, length: int, spans: Sequence[int], block_size: int) -> None:
        where = device.torch_device
        slots += 1
        self._device, self._spans = device, spans
        self.tokens = torch.zeros(slots, length + 1, dtype=torch.int32, device=where)
        columns = -(-length // block_size)
        self.blocks = [torch.zeros(slots, columns, dtype=torch.int32, device=where) for _ in spans]
        self.floats = torch.ones(slots, 6, dtype=torch.float32, device=where)
        self.ints = torch.zeros(slots, 4, dtype=torch.int32, device=where)
        self.ints[:, 3] = -1
        self._biased: set[int] = set()

    @cached_property
    def biases(self) -> list[torch.Tensor]:
        """Logit biases as three tensors [slots + 1, MAX_BIASES]: ids int32, values float32, and the int32 position
        before which each holds, 0 where there is none. Allocated when the first request needs them, and never moved
        after that, because captured steps keep their addresses."""
        shape, where = (self.tokens.shape[0], MAX_BIASES), self.tokens.device
        return [torch.zeros(shape, dtype=kind, device=where) for kind in (torch.int32, torch.float32, torch.int32)]

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Write the rows of new requests."""
        for a in admissions:
            self.tokens[a.slot, : len(a.tokens)] = self._device.upload(np.array(a.tokens, dtype=np.int32))
        slots = self._device.upload(np.array([a.slot for a in admissions], dtype=np.int32))
        floats = [(x.temperature, x.top_p, x.min_p, x.repetition_penalty, x.frequency_penalty, x.presence_penalty)
                  for x in (a.sampling for a in admissions)]  # fmt: skip
        ints = [(a.sampling.top_k, _signed(a.sampling.seed), a.prompt, a.adapter) for a in admissions]
        self.floats[slots] = self._device.upload(np.array(floats, dtype=np.float32))
        self.ints[slots] = self._device.upload(np.array(ints, dtype=np.int32))
        if changed := [a for a in admissions if a.sampling.bias or a.slot in self._biased]:
            self._write_biases(changed)

    def _write_biases(self, admissions: Sequence[Admission]) -> None:
        """Write the biases of new requests over those that the slots' previous requests left."""
        packed = np.zeros((3, len(admissions), MAX_BIASES))
        for row, a in enumerate(admissions):
            for column, bias in enumerate(a.sampling.bias):
                end = a.prompt + bias.count if bias.count else _FOREVER
                packed[:, row, column] = bias.token, bias.value, end
            (self._biased.add if a.sampling.bias else self._biased.discard)(a.slot)
        slots = self._device.upload(np.array([a.slot for a in admissions], dtype=np.int32))
        for table, part, kind in zip(self.biases, packed, (np.int32, np.float32, np.int32), strict=True):
            table[slots] = self._device.upload(part.astype(kind))

    def write_drafts(self, plan: Plan) -> None:
        """Write proposed ids where the plan's rows expect them; a draft model has written its own."""
        places: list[tuple[int, int, int]] = []
        for draft in plan.drafts:
            end = plan.starts[draft.row] + plan.counts[draft.row]
            first = end - len(draft.ids)
            places += [(plan.slots[draft.row], at, id) for at, id in enumerate(draft.ids, first) if id != BY_WORKER]
        if not places:
            return
        slots, positions, ids = self._device.upload(np.array(places, dtype=np.int32).T.copy())
        self.tokens[slots, positions] = ids

    def update(self, updates: Sequence[TableUpdate]) -> None:
        """Write the new block table entries of one step, all in one upload."""
        rows: list[int] = []
        columns: list[int] = []
        values: list[list[int]] = [[] for _ in self.blocks]
        for u in updates:
            count = len(u.blocks[0])
            rows.extend([u.slot] * count)
            columns.extend(range(u.start, u.start + count))
            for group, blocks, span in zip(values, u.blocks, self._spans, strict=True):
                group.extend(block // span for block in blocks)
        packed = self._device.upload(np.array([rows, columns, *values], dtype=np.int32))
        for table, ids in zip(self.blocks, packed[2:], strict=True):
            table[packed[0], packed[1]] = ids


def _signed(seed: int) -> int:
    """The low 32 bits of a seed as a signed integer."""
    return (seed + (1 << 31)) % (1 << 32) - (1 << 31)
