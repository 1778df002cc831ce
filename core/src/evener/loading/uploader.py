"""Copies stored tensors to a device without a copy of the checkpoint on the host: several threads read files into a
ring of page-locked buffers, and each full buffer is copied while the next are read. It takes no memory but the ring.

Copies have no stream of their own and wait for the device's other work: packing a weight takes little time next to
reading it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from evener.contracts.checkpoint import Extent
from evener.contracts.device import Device
from evener.errors import CheckpointError

#: Number and size of buffers, minimum bytes per read, number of reader threads.
BUFFER_COUNT, BUFFER_BYTES, MIN_READ_BYTES, READERS = 8, 16 << 20, 1 << 20, 4


class Uploader:
    """Moves stored tensors to a device. Close it after use: that waits for its threads and copies."""

    def __init__(self, device: Device, buffers: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="evener-reader")
        #: Buffers, each with a function that waits for the last copy from it; the one that was used first comes first.
        self._ring: deque[tuple[torch.Tensor, Callable[[], object]]] = deque((b, lambda: None) for b in buffers)

    def close(self) -> None:
        """Wait for reads and copies that are running."""
        self._readers.shutdown(cancel_futures=True)
        for _, wait in self._ring:
            wait()

    def move(self, name: str, tensor: torch.Tensor, extent: Extent | None) -> torch.Tensor:
        """A copy of ``tensor``, which is contiguous, on the device; the copy may still be running.

        Args:
            extent: file and offset of its bytes; then ``tensor`` itself is not read.

        Raises:
            CheckpointError: the file cannot be read.
        """
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device.torch_device)
        step = min(self._ring[0][0].nbytes, max(MIN_READ_BYTES, -(-out.nbytes // READERS)))
        reading: deque[tuple[Future[None], torch.Tensor, torch.Tensor]] = deque()
        for number, place in enumerate(_bytes(out).split(step) if out.nbytes else ()):
            if not self._ring:
                self._send(*reading.popleft())
            buffer, wait = self._ring.popleft()
            wait()
            full = self._readers.submit(_read, name, tensor, extent, number * step, buffer[: place.numel()])
            reading.append((full, buffer, place))
        while reading:
            self._send(*reading.popleft())
        return out

    def _send(self, full: Future[None], buffer: torch.Tensor, place: torch.Tensor) -> None:
        full.result()
        place.copy_(buffer[: place.numel()], non_blocking=True)
        event = self._device.new_event()
        event.record()
        self._ring.append((buffer, event.synchronize))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _read(name: str, tensor: torch.Tensor, extent: Extent | None, start: int, target: torch.Tensor) -> None:
    if extent is None:
        target.copy_(_bytes(tensor)[start : start + target.numel()])
        return
    try:
        with extent.file.open("rb") as file:
            file.seek(extent.offset + start)
            if file.readinto(target.numpy()) < target.numel():
                raise OSError("it ends too early")
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot read {name!r} from {extent.file}: {reason}; fetch the file again") from error
