"""The requests' data that stays on the device between steps: token ids, block tables and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.generation.drafter import BY_WORKER
from evener.engine.wire.plan import Admission, Plan
from evener.sampling_params import MAX_BIASES

_FOREVER = 2**31 - 1


class Places(NamedTuple):
    """Where the tables keep what belongs to n tokens, as indices of their flattened rows.

    Attributes:
        token: int64 [n], of each token's id.
        block: int64 [n], of the first group's block with the token; counted from that group's first column.
        offset: int32 [n], of the token in its block.
    """

    token: np.ndarray[Any, Any]
    block: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]


class Paging(NamedTuple):
    """Where the state of a step's tokens lies, for all groups. The part of each group starts at a multiple of the
    device's alignment.

    Attributes:
        slot_mapping: int32 [groups, T], ``block * block_size + offset`` of each token.
        block_table: int32 [groups, R, columns], the blocks of each request.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor


class DeviceTables:
    """Tables with one row for each of ``slots`` requests, and one spare row at the end: the padding rows of captured
    steps use it, and all its blocks are the null block. All but the biases are parts of one tensor, so that whatever a
    plan changes is one copy to the device and one write there: each costs the host more time than the device.

    Args:
        length: tokens of the longest sequence.
        spans: for each group, the pages of one block.
        block_size: tokens of one block.

    Attributes:
        tokens: int32 [slots + 1, length + 1], known and sampled ids by position.
        blocks: int32 [slots + 1, groups, columns]. A block is numbered as the group's provider numbers it: the plan's
            block id divided by the group's span.
        floats: float32 [slots + 1, 6]: temperature, top_p, min_p, repetition, frequency and presence penalty.
        ints: int32 [slots + 1, 4]: top_k, seed, prompt length, slot of the adapter or -1.
        expected: the captured inputs that are right for the next step if it has these slots and starts, as long as
            no plan changes a block and no other captured inputs use ``captured_blocks``; None: there are none.
    """

    expected: tuple[object, list[int], list[int]] | None = None

    def __init__(self, device: Device, slots: int, length: int, spans: Sequence[int], block_size: int) -> None:
        columns = table_columns(-(-length // block_size), len(spans), device.capabilities.alignment)
        self._device, self._spans, self.block_size = device, np.array(spans, dtype=np.int32)[:, None], block_size
        self._starts = length + 1 + columns * np.arange(len(spans))[:, None]
        self._end = length + 1 + columns * len(spans)
        self._rows = torch.zeros(slots + 1, self._end + 10, dtype=torch.int32, device=device.torch_device)
        self._flat, apart = self._rows.view(-1), columns * (len(spans) - 1)
        # All groups' blocks by one index: each group's begin ``columns`` behind those of the group before.
        self._flat_blocks = self._flat.as_strided(
            (len(self._flat) - length - 1 - apart, len(spans)), (1, columns), length + 1
        )
        self.tokens = self._rows[:, : length + 1]
        self.blocks = self._rows[:, length + 1 : self._end].unflatten(1, (len(spans), columns))
        self.floats, self.ints = self._rows.view(torch.float32)[:, self._end : -4], self._rows[:, -4:]
        self.floats.fill_(1)
        self.ints[:, 3] = -1
        self._biased: set[int] = set()

    @cached_property
    def captured_blocks(self) -> torch.Tensor:
        """Memory for the block tables that captured steps read, int32. All captures share it, as each may have as many
        requests of as many tokens as the tables."""
        return torch.zeros_like(self.blocks.flatten())

    @cached_property
    def biases(self) -> list[torch.Tensor]:
        """Logit biases as three tensors [slots + 1, MAX_BIASES]: ids int32, values float32, and the int32 position
        before which each holds, 0 where there is none. Allocated when the first request needs them, and never moved
        after that, because captured steps keep their addresses."""
        shape, where = (self.tokens.shape[0], MAX_BIASES), self.tokens.device
        return [torch.zeros(shape, dtype=kind, device=where) for kind in (torch.int32, torch.float32, torch.int32)]

    def places(self, slots: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> Places:
        """Where the tables keep what belongs to the tokens of ``slots`` at ``positions``, both int32 [n]. The host
        computes it, as each operation on the device would take a microsecond of every step."""
        row = np.multiply(slots, self._rows.shape[1], dtype=np.int64)
        block, offset = np.divmod(positions, np.int32(self.block_size))
        return Places(row + positions, row + block, offset)

    def ids(self, at: torch.Tensor) -> torch.Tensor:
        """Token ids int32 [n] at ``Places.token``."""
        return self._flat.index_select(0, at)

    def put(self, at: torch.Tensor, ids: torch.Tensor) -> None:
        """Write token ids int32 [n] at ``Places.token``."""
        self._flat.index_copy_(0, at, ids)

    def paging(self, at: torch.Tensor, offsets: torch.Tensor, slots: torch.Tensor, longest: int) -> Paging:
        """Look up the paging of T tokens, which are at ``Places.block`` and ``Places.offset``, and of R requests, whose
        ``slots`` are int32 [R], and of which none has more than ``longest`` tokens."""
        # Selected along the first dimension: along another one torch would first copy the whole table, on the CPU.
        found, alignment = self._flat_blocks.index_select(0, at).t(), self._device.capabilities.alignment
        mapping = found.new_empty(len(found), aligned(len(at), alignment))[:, : len(at)]
        torch.add(offsets, found, alpha=self.block_size, out=mapping)  # one launch: each takes a microsecond of a step
        columns = table_columns(-(-longest // self.block_size), len(found), alignment)
        tables = self.blocks[:, :, :columns].index_select(0, slots)
        return Paging(mapping, tables.transpose(0, 1).contiguous())

    def adapters(self, at: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The slots of adapters, or -1, int32 [n], of tokens at ``Places.token`` and ``positions``."""
        return self._flat.index_select(0, at - positions + (self._rows.shape[1] - 1))

    def write(self, plan: Plan) -> None:
        """Write the rows of new requests, the new entries of block tables, and proposed ids where the plan's rows
        expect them; a draft model has written its own."""
        # Arrays of slots, columns and values, of the same size.
        parts: list[Sequence[np.ndarray[Any, Any]]] = []
        if plan.admissions:
            slots, known = [a.slot for a in plan.admissions], [np.array(a.tokens, np.int32) for a in plan.admissions]
            columns = np.concatenate([np.arange(len(each)) for each in known])
            parts.append((np.repeat(slots, [len(each) for each in known]), columns, np.concatenate(known)))
            floats = [(x.temperature, x.top_p, x.min_p, x.repetition_penalty, x.frequency_penalty, x.presence_penalty)
                      for x in (a.sampling for a in plan.admissions)]  # fmt: skip
            ints = [(a.sampling.top_k, _signed(a.sampling.seed), a.prompt, a.adapter) for a in plan.admissions]
            numbers = np.array(floats, dtype=np.float32).view(np.int32), np.array(ints, dtype=np.int32)
            columns = np.tile(np.arange(self._end, self._end + 10), len(slots))
            parts.append((np.repeat(slots, 10), columns, np.hstack(numbers)))
        if plan.updates:
            self.expected = None
            slots = [u.slot for u in plan.updates for _ in u.blocks[0]]
            places = [at for u in plan.updates for at in range(u.start, u.start + len(u.blocks[0]))]
            ids = [[*chain.from_iterable(blocks)] for blocks in zip(*(u.blocks for u in plan.updates), strict=True)]
            parts.append((np.tile(slots, len(ids)), self._starts + places, np.array(ids, np.int32) // self._spans))
        drafted = [(plan.slots[d.row], at, id) for d in plan.drafts for at, id in enumerate(
            d.ids, plan.starts[d.row] + plan.counts[d.row] - len(d.ids)) if id != BY_WORKER]  # fmt: skip
        parts += [np.array(drafted).T] if drafted else []
        if parts:
            packed = np.empty((3, sum(values.size for *_, values in parts)), dtype=np.int32)
            for row, each in zip(packed, zip(*parts, strict=True), strict=True):
                np.concatenate(each, axis=None, out=row, casting="same_kind")
            rows, columns, values = self._device.upload(packed)
            self._rows[rows, columns] = values
        if changed := [a for a in plan.admissions if a.sampling.bias or a.slot in self._biased]:
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


def table_columns(columns: int, groups: int, alignment: int) -> int:
    """``columns``, or a few more: with several groups, whose tables are selected together, a row has a multiple of
    ``alignment`` bytes, so that the table of each group starts at such a multiple."""
    return aligned(columns, alignment if groups > 1 else 4)


def aligned(count: int, alignment: int) -> int:
    """The smallest number of int32, at least ``count``, whose bytes are a multiple of ``alignment``."""
    step = max(1, alignment // 4)
    return -(-count // step) * step


def _signed(seed: int) -> int:
    """The low 32 bits of a seed as a signed integer."""
    return (seed + (1 << 31)) % (1 << 32) - (1 << 31)
