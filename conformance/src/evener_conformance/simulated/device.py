"""The simulated device: core's own ``TorchDevice`` over the simulated namespace."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from evener.backend.torch_device import TorchDevice
from evener.contracts.device import Device, Readback, ReadyReadback
from evener.contracts.graph import Replay
from evener_conformance.graph.record import RecordingCapture
from evener_conformance.simulated import NAME
from evener_conformance.simulated.constraints import ConstraintError, Constraints
from evener_conformance.simulated.launch import Launcher, active_recorder
from evener_conformance.simulated.namespace import Namespace
from evener_conformance.simulated.registration import open_namespace

if TYPE_CHECKING:
    import numpy as np


class ChipCapture(RecordingCapture):
    """Captures of one chip, of which no more than ``limit`` may exist at once."""

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


class PieceCapture(RecordingCapture):
    """Captures that replays interrupt for what was left out."""

    def leave_out(self, work: Callable[[], None]) -> None:
        """Let replays call ``work`` here, which is not captured."""
        recorder = active_recorder()
        assert recorder is not None, "a segment is captured"
        recorder.leave_out(work)


class SimulatedDevice(TorchDevice):
    """One chip.

    Attributes:
        constraints: the chip's constraints.
        namespace: its memory, and the torch ops that ran on the host.
        launch: runs its kernels; ``launches`` counts them.
        capture: captures steps; its ``replays`` show what was captured and how often each ran.
        simulated: True: a run on it is evidence of level L3.

    Raises:
        BackendError: there is no such device, or this process has the other kind (compiled or Python).
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
        # An upload begins a step, its read-back ends it. A value that is read in between would wait for the chip.
        self.namespace.refuse_reads(not self.constraints.host_reads)
        # Torch never asks a Python device for page-locked memory.
        return super().upload(array) if self.namespace.compiled else Device.upload(self, array)

    def readback(self, tensor: torch.Tensor) -> Readback:
        # On a real chip this copy is asynchronous and reads no value on the host; here it is done at once.
        self.namespace.refuse_reads(False)
        return ReadyReadback(self.namespace.host(tensor).clone())

    def host_call(self, work: Callable[[], None]) -> None:
        # As on a real chip, a capture does not keep it alive.
        recorder, alive = active_recorder(), weakref.ref(work)

        def call() -> None:
            if (found := alive()) is None:
                raise ConstraintError("simulated: a replay calls a function of the host that is no longer there")
            found()

        with _disable_current_modes():
            if recorder is None:
                call()
            else:
                recorder.record(call, (), {})

    def piece_capture(self) -> PieceCapture:
        """Captures in pieces, beside those of ``capture``."""
        return PieceCapture(None, self.constraints.graph_update)

    def measure(self, work: Callable[[], None]) -> float:
        # The chip computes on the host and has no events that take times.
        return Device.measure(self, work)

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        # Tensors of the Python device are host tensors, which are not counted.
        return super().peak_memory(work) if self.namespace.compiled else None

    def host_fallbacks(self) -> int:
        return sum(self.fallbacks().values())

    def fallbacks(self) -> dict[str, int]:
        """Torch ops that ran on the host since this device was opened: name → count."""
        now = self.namespace.on_host()
        return {name: n - self._before.get(name, 0) for name, n in now.items() if n > self._before.get(name, 0)}
