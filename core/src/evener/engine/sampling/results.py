"""Reading the results of steps."""

from __future__ import annotations

import torch

from evener.contracts.device import Device, Readback


class SideReadback(Readback):
    """A copy on another stream, which keeps its source until it is read."""

    def __init__(self, copy: Readback, source: torch.Tensor) -> None:
        self._copy, self._source = copy, source

    def ready(self) -> bool:
        return self._copy.ready()

    def wait(self) -> torch.Tensor:
        return self._copy.wait()


class Results:
    """Copies results to the host on a stream of its own, if the device has streams and events: the next step does not
    wait for the copy, which takes longer to begin than the small kernels of a step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        try:
            device.new_event()  # a device may have streams only
            self._stream = device.new_stream()
        except NotImplementedError:
            self._stream = None

    def read(self, tensor: torch.Tensor) -> Readback:
        """Start to copy a tensor that no later work overwrites, after the work submitted so far."""
        if self._stream is None:
            return self._device.readback(tensor)
        written = self._device.new_event()
        written.record()
        with self._stream:
            written.wait()
            return SideReadback(self._device.readback(tensor), tensor)
