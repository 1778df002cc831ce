"""What kernels of one token in one launch have in common: 128 programs that stay for a whole block, in machine code for
Hopper. ``one_token.py`` has layers, ``one_token_experts.py`` experts, ``one_token_latent.py`` latent attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from importlib.resources import files

from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCall
from evener_backend_cuda.compiled import CompiledKernel, Driver
from evener_backend_cuda.one_token_launch import Messages
from evener_kernels_triton.features import number_of

#: As in forms.cuh and streamed.cuh: programs, warps of one that compute, copies of what all programs read.
PROGRAMS, WARPS, COPIES = 128, 8, 4
#: Places of counters before the messages.
CONTROL = 256
#: Looks of a wait, some 20 seconds of them at messages: one that needs more has lost its partner, and the launch fails.
PATIENCE = 1 << 26


class OneLaunchKernel(Kernel):
    """Base of these kernels.

    Args:
        device: where it runs.
        driver: compiles and loads kernels; None: NVIDIA's.
        off: why it is not used at all; None: it is used where it can be.
    """

    capturable = True

    def __init__(self, device: Device, driver: Driver | None, off: str | None) -> None:
        self._off, self._driver = off, Driver() if driver is None else driver
        self._messages = Messages(device.torch_device)
        #: By machine code: calls of one kernel can share a launch.
        self._loaded: dict[bytes, CompiledKernel] = {}

    def supports(self, call: OpCall) -> str | None:
        if self._off is not None:
            return self._off
        if call.bucket.high != 1:
            return "computes one token"
        if call.device.variant != "sm_90":
            return f"its machine code is for sm_90, not {call.device.variant}"
        if reason := self._refusal(call):
            return reason
        if number_of("units", call.device.features, 0) < PROGRAMS:
            return f"needs {PROGRAMS} multiprocessors"
        return self._room_refusal(call) or self._driver.refusal()

    @abstractmethod
    def _refusal(self, call: OpCall) -> str | None:
        """Why the block is for others; None if it is not."""

    @abstractmethod
    def _room_refusal(self, call: OpCall) -> str | None:
        """Why a program does not fit into the device's shared memory; None if it does."""

    def _flight(self, stages: int) -> int:
        """(optional) Tiles that a program asks for at once, of a ring of so many."""
        return stages

    def _kernel(
        self, source: str, defines: Mapping[str, object], name: str, threads: int, shared: int
    ) -> CompiledKernel:
        """The loaded kernel; each machine code is loaded once."""
        code = self._driver.compile(source, defines)
        if code not in self._loaded:
            self._loaded[code] = self._driver.kernel(code, name, PROGRAMS, threads, shared)
        return self._loaded[code]


def shared_of(call: OpCall) -> int:
    """Shared memory that a program may have."""
    return number_of("shared", call.device.features, 0)


def read_sources(*names: str) -> str:
    """Files of this package, one behind the other."""
    return "".join((files("evener_backend_cuda") / name).read_text() for name in names)
