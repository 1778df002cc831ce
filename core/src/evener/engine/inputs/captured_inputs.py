"""The inputs of captured steps: arrays at fixed addresses, which are written before each replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from evener.contracts.device import Device
from evener.engine.inputs.device_tables import DeviceTables, Paging, aligned
from evener.engine.inputs.step_layout import StepArrays, StepShape, join, sliced
from evener.engine.wire.plan import Plan


class Lengths(NamedTuple):
    """Lengths of the requests of a step, padding included: the tokens that each adds, and its tokens after the step."""

    query: Sequence[int]
    kv: Sequence[int]


class Staging:
    """Page-locked memory for what the host writes before each replay: it is copied into ``target``, int32, while the
    device may still copy what was written before. Devices without such memory upload.

    Args:
        count: how many copies the memory has room for; even.
        value: what each of them has at first. The target is not read: a step may be under way.
    """

    def __init__(self, device: Device, target: torch.Tensor, count: int, value: int) -> None:
        self._device, self._target, self._at = device, target, 0
        pinned = [b.view(torch.int32) for b in device.pinned_buffers(1, count * target.nbytes)]
        self._hosts = [part.view(target.shape).fill_(value) for each in pinned for part in each.chunk(count)]
        self._arrays = [host.numpy() for host in self._hosts] or [np.full(target.shape, value, dtype=np.int32)]
        self._copied = device.new_event() if self._hosts else None

    def next(self) -> np.ndarray[Any, Any]:
        """The array that the host may write now. It has what was written some time before, at first ``value``."""
        self._at = (self._at + 1) % len(self._arrays)
        if self._copied is not None and self._at % (len(self._arrays) // 2) == 0:
            # The event was recorded half a ring ago: once it has passed, the arrays that come next have been copied.
            self._copied.synchronize()
            self._copied.record()
        return self._arrays[self._at]

    def send(self) -> None:
        """Copy the array that ``next`` returned last, after the work submitted so far."""
        host = self._hosts[self._at] if self._hosts else self._device.upload(self._arrays[0])
        self._target.copy_(host, non_blocking=True)


class DecodeInputs:
    """Inputs of steps whose requests all compute one token and sample the next. Padding rows use the tables' spare
    slot, whose blocks are all the null block.

    A replay ends with ``advance``, so a step that has the next token of each request of the step before, in the same
    block, finds its inputs on the device: the host sends nothing. Until then block tables stay as they are too, and
    slots go on by one. So the paging is looked up when the host sends; in each replay it would take three launches.

    Args:
        tables: the requests' data on the device.
        rows: padded number of requests.
        spare: a row of the tables that belongs to no request.
        length: tokens of the longest sequence.

    Attributes:
        shape: the sizes that the capture is made for.
        arrays: what the runner makes a step of, padding included.
    """

    def __init__(self, device: Device, tables: DeviceTables, rows: int, spare: int, length: int) -> None:
        self._tables, self._rows, self._spare = tables, rows, spare
        # Words of 8 bytes are whole, see ``advance``.
        self._alignment = max(8, device.capabilities.alignment)
        self.shape = StepShape(rows, rows, 1, length, [1] * rows, [1] * rows, captured=True)
        values = self._values([], [])
        self._buffer = device.upload(np.stack([join(values, self._alignment)] * 2))
        self._staging = Staging(device, self._buffer, 32, 0)
        sent = sliced(self._buffer[0], values, self._alignment)
        every = torch.arange(rows + 1, dtype=torch.int32, device=device.torch_device)
        mapping = sent.pop("slot_mapping").view(tables.blocks.shape[1], -1)[:, :rows]
        self._where = sent["block_at"], sent["offsets"], sent["slots"], length
        table = tables.paging(*self._where).block_table
        self._paging = Paging(mapping, tables.captured_blocks[: table.numel()].view_as(table))
        self.arrays = StepArrays(query_start=every, sample_slots=sent["slots"], sample_positions=sent["kv_lens"],
                                 paging=self._paging, **sent)  # fmt: skip
        #: By number of requests, what ``advance`` adds.
        self._steps: dict[int, np.ndarray[Any, Any]] = {}
        self.fill(Plan(id=-1))  # padding only, for the run before the capture

    def fill(self, plan: Plan) -> Lengths:
        """Write a plan's inputs, unless the device has them."""
        slots, starts, ends = list(plan.slots), list(plan.starts), [start + 1 for start in plan.starts]
        begins = not all(start % self._tables.block_size for start in starts)
        if begins or (self, slots, starts) != self._tables.expected:
            host, values = self._staging.next(), self._values(slots, starts)
            if len(slots) not in self._steps:
                live = np.arange(aligned(self._rows, self._alignment)) < len(slots)
                # What the paging is found by goes on too: nothing reads it before it is sent again.
                steps = {name: np.resize(live, len(each)).astype(each.dtype) for name, each in values.items()}
                self._steps[len(slots)] = join(steps | {"slots": np.zeros_like(values["slots"])}, self._alignment)
            host[0], host[1] = join(values, self._alignment), self._steps[len(slots)]
            self._staging.send()
            for own, found in zip(self._paging, self._tables.paging(*self._where), strict=True):
                own.copy_(found)
        self._tables.expected = self, slots, ends
        return Lengths(self.shape.query_lens, ends + [1] * (self._rows - len(ends)))

    def advance(self) -> None:
        """On the device: go on to the next token of each request. One launch for words of 4 and of 8 bytes: two
        numbers in one word do not carry into each other, as none is that large."""
        now, steps = self._buffer.view(torch.int64)
        now += steps

    def _values(self, slots: Sequence[int], starts: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
        rest = self._rows - len(slots)
        owners, positions = np.int32([*slots, *[self._spare] * rest]), np.int32([*starts, *[0] * rest])
        here, behind = (self._tables.places(owners, each) for each in (positions, positions + 1))
        mapping = np.zeros(self._tables.blocks.shape[1] * aligned(self._rows, self._alignment), dtype=np.int32)
        return {"token_at": here.token, "block_at": here.block, "sample_at": behind.token, "positions": positions,
                "offsets": here.offset, "kv_lens": positions + 1, "slots": owners, "slot_mapping": mapping}  # fmt: skip


class PromptInputs:
    """Inputs of steps of one request that adds a few tokens and samples after the last of them. The padding tokens are
    a second request in the spare slot, which has no tokens if there is nothing to pad.

    Args:
        tokens: padded number of tokens.
        tables, spare, length: as for ``DecodeInputs``.
        samples: padded number of samples.

    Attributes: as of ``DecodeInputs``.
    """

    def __init__(
        self, device: Device, tables: DeviceTables, tokens: int, spare: int, length: int, samples: int = 1
    ) -> None:
        self._device, self._tables, self._spare, self._samples = device, tables, spare, samples
        own = [tokens, 0]
        self.shape = StepShape(tokens, 2, tokens, length, own, own, captured=True, kept_lens=own)
        values, self._alignment = self._values(spare, 0, tokens, samples), device.capabilities.alignment
        self._buffer = device.upload(join(values, self._alignment))
        self.arrays = StepArrays(**sliced(self._buffer, values, self._alignment))

    def fill(self, plan: Plan) -> Lengths:
        """Write a plan's inputs."""
        count = plan.counts[0]
        values = self._values(plan.slots[0], plan.starts[0], count, len(plan.samples))
        self._buffer.copy_(self._device.upload(join(values, self._alignment)))
        return Lengths([count, self.shape.tokens - count], values["kv_lens"].tolist())

    def advance(self) -> None:
        """Nothing: each step sends its inputs."""

    def _values(self, slot: int, start: int, count: int, samples: int) -> dict[str, np.ndarray[Any, Any]]:
        rest, end, unused = self.shape.tokens - count, start + count, self._samples - samples
        positions, sampled = [*range(start, end), *range(rest)], [*range(end - samples + 1, end + 1)] + [0] * unused
        places = self._tables.places(np.int32([slot] * count + [self._spare] * rest), np.int32(positions))
        owners = np.int32([slot] * samples + [self._spare] * unused)
        return {
            "token_at": places.token, "block_at": places.block,
            "sample_at": self._tables.places(owners, np.int32(sampled)).token, "positions": np.int32(positions),
            "offsets": places.offset, "query_start": np.int32([0, count, self.shape.tokens]),
            "kv_lens": np.int32([end, rest]), "kept_lens": np.int32([end - samples + 1, rest]),
            "slots": np.int32([slot, self._spare]), "last": np.int32([*range(count - samples, count)] + [0] * unused),
            "sample_slots": owners, "sample_positions": np.int32(sampled),
        }  # fmt: skip


#: The inputs of one capture.
Inputs = DecodeInputs | PromptInputs
