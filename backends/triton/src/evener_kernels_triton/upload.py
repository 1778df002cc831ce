"""Copies of stored matrices to a device, as fast as the disk: several threads bring rows of memory-mapped files into
page-locked memory, and each full piece is copied while the next are read. A copy from mapped memory itself would read
the file in one thread, a few pages at a time, and the device would wait for it.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

#: Threads that read, bytes of a piece, and pieces that are read or full before the first is copied. Smaller matrices
#: share a piece: each takes Python's lock from the loader a few times.
READERS, PIECE_BYTES, AHEAD = 8, 4 << 20, 32


class Uploads:
    """Copies that are under way; all have been asked for once the block is left.

    Args:
        device: where to. Copies to another device than torch's accelerator, which has page-locked memory, and copies
            from a device are done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(READERS, "evener-upload") if _has_page_locked_memory(device) else None
        self._reading: deque[tuple[Future[list[torch.Tensor]], list[torch.Tensor]]] = deque()
        #: The next piece: rows, and where they go.
        self._rows: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []
        self._nbytes = 0

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        try:
            if error is None:
                self._submit(self._pool)
                while self._reading:
                    self._send()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def copy(self, to: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``rows`` [n, columns], which must not change before the block is left."""
        if self._pool is None or not rows.is_cpu:
            to.copy_(rows)
            return
        step = max(1, PIECE_BYTES // max(1, rows.shape[1] * rows.element_size()))
        whole = len(rows) <= step
        for place, piece in [(to, rows)] if whole else zip(to.split(step), rows.split(step), strict=True):
            if self._nbytes + piece.nbytes > PIECE_BYTES:
                self._submit(self._pool)
            self._places.append(place)
            self._rows.append(piece)
            self._nbytes += piece.nbytes

    def _submit(self, pool: ThreadPoolExecutor) -> None:
        if len(self._reading) == AHEAD:
            self._send()
        if self._rows:
            self._reading.append((pool.submit(_page_locked, self._rows), self._places))
            self._rows, self._places, self._nbytes = [], [], 0

    def _send(self) -> None:
        full, places = self._reading.popleft()
        for place, rows in zip(places, full.result(), strict=True):
            # torch keeps page-locked memory until the copy from it is done.
            place.copy_(rows, non_blocking=True)


def _has_page_locked_memory(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def _page_locked(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in page-locked memory."""
    return [torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each) for each in rows]
