"""The inputs of captured steps: int32 arrays at fixed addresses, which are written before each replay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from evener.contracts.device import Device
from evener.engine.wire.plan import Plan
from evener.engine.worker.step_layout import StepArrays, StepShape, aligned


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

    Args:
        rows: padded number of requests.
        spare: a row of the tables that belongs to no request.
        length: tokens of the longest sequence.

    Attributes:
        shape: the sizes that the capture is made for.
        arrays: what the runner makes a step of, padding included.
    """

    def __init__(self, device: Device, rows: int, spare: int, length: int) -> None:
        self._rows, self._spare = rows, spare
        width = aligned(rows, device.capabilities.alignment)
        self._buffer = torch.zeros(3, width, dtype=torch.int32, device=device.torch_device)
        self._buffer[1], self._buffer[2] = spare, 1
        self._staging = Staging(device, self._buffer, 32, 0)
        positions, slots, lengths = self._buffer[:, :rows]
        every = torch.arange(rows + 1, dtype=torch.int32, device=device.torch_device)
        self.arrays = StepArrays(
            positions=positions, token_slots=slots, query_start=every, kv_lens=lengths, kept_lens=None, slots=slots,
            last=None, sample_slots=slots, sample_positions=lengths,
        )  # fmt: skip
        ones = [1] * rows
        self.shape = StepShape(rows, rows, 1, length, ones, ones, captured=True)

    def fill(self, plan: Plan) -> Lengths:
        """Write a plan's inputs."""
        host, rows = self._staging.next(), len(plan.slots)
        host[0, :rows], host[1, :rows] = plan.starts, plan.slots
        host[0, rows:], host[1, rows:] = 0, self._spare
        np.add(host[0], 1, out=host[2])
        self._staging.send()
        return Lengths(self.shape.query_lens, host[2, : self._rows].tolist())


class PromptInputs:
    """Inputs of steps of one request that adds a few tokens and samples after the last of them. The padding tokens are
    a second request in the spare slot, which has no tokens if there is nothing to pad.

    Args:
        tokens: padded number of tokens.
        spare, length: as for ``DecodeInputs``.
        samples: padded number of samples.

    Attributes: as of ``DecodeInputs``.
    """

    def __init__(self, device: Device, tokens: int, spare: int, length: int, samples: int = 1) -> None:
        self._device, self._spare, self._samples = device, spare, samples
        own = [tokens, 0]
        self.shape = StepShape(tokens, 2, tokens, length, own, own, captured=True, kept_lens=own)
        sizes = {name: len(value) for name, value in vars(self._values(spare, 0, tokens, samples)).items()}
        starts = list(accumulate((aligned(n, device.capabilities.alignment) for n in sizes.values()), initial=0))
        self._places = {name: slice(at, at + sizes[name]) for name, at in zip(sizes, starts, strict=False)}
        self._buffer = torch.zeros(starts[-1], dtype=torch.int32, device=device.torch_device)
        self.arrays = StepArrays(**{name: self._buffer[place] for name, place in self._places.items()})
        self._write(spare, 0, tokens, samples)

    def fill(self, plan: Plan) -> Lengths:
        """Write a plan's inputs."""
        return self._write(plan.slots[0], plan.starts[0], plan.counts[0], len(plan.samples))

    def _write(self, slot: int, start: int, count: int, samples: int) -> Lengths:
        host: np.ndarray[Any, Any] = np.zeros(self._buffer.shape, dtype=np.int32)
        values = self._values(slot, start, count, samples)
        for name, value in vars(values).items():
            host[self._places[name]] = value
        self._buffer.copy_(self._device.upload(host))
        return Lengths([count, self.shape.tokens - count], values.kv_lens)

    def _values(self, slot: int, start: int, count: int, samples: int) -> StepArrays[list[int]]:
        rest, end, unused = self.shape.tokens - count, start + count, self._samples - samples
        return StepArrays(
            positions=[*range(start, end), *range(rest)], token_slots=[slot] * count + [self._spare] * rest,
            query_start=[0, count, self.shape.tokens], kv_lens=[end, rest], kept_lens=[end - samples + 1, rest],
            slots=[slot, self._spare], last=[*range(count - samples, count)] + [0] * unused,
            sample_slots=[slot] * samples + [self._spare] * unused,
            sample_positions=[*range(end - samples + 1, end + 1)] + [0] * unused,
        )  # fmt: skip


#: The inputs of one capture.
Inputs = DecodeInputs | PromptInputs
