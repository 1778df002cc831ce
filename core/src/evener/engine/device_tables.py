"""What lives on the device between steps: token ids, block tables and sampling parameters, one row a slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from evener.contracts.device import Device
from evener.engine.plan import Admission, TableUpdate


class DeviceTables:
    """Rows for up to ``slots`` requests, and a spare one for the padding of captured steps: its blocks are all the null
    block.

    Attributes:
        tokens: int32 [slots, length], known and sampled ids by position.
        blocks: for each group int32 [slots, columns], numbered as its provider numbers them.
        floats: float32 [slots, 3]: temperature, top_p, min_p; ints: int32 [slots, 2]: top_k, seed.
    """

    def __init__(self, device: Device, slots: int, length: int, spans: Sequence[int], block_size: int) -> None:
        where = device.torch_device
        slots += 1
        self._device = device
        self.tokens = torch.zeros(slots, length + 1, dtype=torch.int32, device=where)
        columns = -(-length // block_size)
        self.blocks = [torch.zeros(slots, columns, dtype=torch.int32, device=where) for _ in spans]
        self._spans = spans
        self.floats = torch.zeros(slots, 3, dtype=torch.float32, device=where)
        self.ints = torch.zeros(slots, 2, dtype=torch.int32, device=where)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.nbytes for t in (self.tokens, self.floats, self.ints, *self.blocks))

    def admit(self, admissions: Sequence[Admission]) -> None:
        """New requests take their slots."""
        for a in admissions:
            self.tokens[a.slot, : len(a.tokens)] = self._device.upload(np.array(a.tokens, dtype=np.int32))
        sampling = [a.sampling for a in admissions]
        slots = self._device.upload(np.array([a.slot for a in admissions], dtype=np.int32))
        floats = np.array([(x.temperature, x.top_p, x.min_p) for x in sampling], dtype=np.float32)
        ints = np.array([(x.top_k, _signed(x.seed)) for x in sampling], dtype=np.int32)
        self.floats[slots] = self._device.upload(floats)
        self.ints[slots] = self._device.upload(ints)

    def update(self, updates: Sequence[TableUpdate]) -> None:
        """New entries of block tables, all of a step's at once."""
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
    seed &= 0xFFFFFFFF
    return seed - (1 << 32) if seed >= 1 << 31 else seed
