"""The simulated device: core's own ``TorchDevice`` over the simulated namespace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from evener.contracts.device import Device, Readback, ReadyReadback
from evener.contracts.graph import Replay
from evener.devices.torch_device import TorchDevice
from evener.testing.graph_record import RecordingCapture
from evener.testing.simulated import NAME
from evener.testing.simulated.constraints import ConstraintError, Constraints
from evener.testing.simulated.launch import Launcher
from evener.testing.simulated.namespace import Namespace
from evener.testing.simulated.opened import open_namespace

if TYPE_CHECKING:
    import numpy as np


class ChipCapture(RecordingCapture):
    """Captures of one chip, of which no more than ``limit`` may live."""

    def __init__(self, limit: int, needs_update: bool) -> None:
        super().__init__(None, needs_update)
        self._most = limit

    def capture(self, segment: Callable[[], None]) -> Replay:
        if len(self.replays) >= self._most:
            raise ConstraintError(
                f"simulated.max_captures={self._most}: this device holds {self._most} captures at once, and all are "
                "in use"
            )
        return super().capture(segment)


class SimulatedDevice(TorchDevice):
    """One chip.

    Attributes:
        constraints: what it insists on.
        namespace: its memory, and what of torch ran on the host.
        launch: runs its kernels; ``launches`` counts them.
        capture: how it captures steps; ``replays`` shows what was captured and how often each ran.
        simulated: True; what runs on it is evidence of level L3.

    Raises:
        BackendError: there is no such device, or the process has another kind of it.
    """

    simulated = True

    def __init__(self, index: int, constraints: Constraints) -> None:
        self.namespace: Namespace = open_namespace(constraints.python)
        if not self.namespace.compiled:
            constraints = replace(constraints, graphs=False)
        super().__init__(NAME, index, constraints.capabilities)
        self.constraints = constraints
        self.namespace.set_memory(index, constraints.memory)
        self.namespace.set_missing(constraints.missing)
        self.namespace.refuse_reads(False)
        self.launch = Launcher(constraints, self.namespace, self.torch_device)
        self.capture = ChipCapture(constraints.max_captures, constraints.graph_update)
        self._before = self.namespace.on_host()

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        # A step begins; its read-back ends it. What is read in between would wait for the chip.
        self.namespace.refuse_reads(not self.constraints.host_reads)
        # Torch asks a device made in Python for no page-locked memory.
        return super().upload(array) if self.namespace.compiled else Device.upload(self, array)

    def readback(self, tensor: torch.Tensor) -> Readback:
        # A chip's copy is asynchronous and no look at a value; this one is done at once.
        self.namespace.refuse_reads(False)
        return ReadyReadback(self.namespace.host(tensor).clone())

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        # Tensors of the device made in Python are the host's, which nobody counts.
        return super().peak_memory(work) if self.namespace.compiled else None

    def host_fallbacks(self) -> int:
        return sum(self.fallbacks().values())

    def fallbacks(self) -> dict[str, int]:
        """Torch's ops that ran on the host since this device was opened, by name."""
        now = self.namespace.on_host()
        return {name: n - self._before.get(name, 0) for name, n in now.items() if n > self._before.get(name, 0)}
