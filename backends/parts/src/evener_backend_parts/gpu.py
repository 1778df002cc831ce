"""A device of torch's namespace ``cuda``, whichever vendor's build serves it: memory, graphs, collectives."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

from evener.backend.torch_communicator import TorchCommunicator, open_torch_communicator
from evener.backend.torch_device import TorchDevice
from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.contracts.device import Device, DeviceCapabilities
from evener_backend_parts.graphs import TorchGraphs

#: The namespace of torch, and the backend string of ``torch.distributed``. Vendors' builds keep both names.
NAMESPACE, LIBRARY = "cuda", "nccl"
NCCL_CAPABILITIES = CommunicatorCapabilities(
    dtypes=frozenset({"float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"}), capturable=True
)


class GpuDevice(TorchDevice):
    """A device whose allocator counts as torch's own for this namespace does. Products keep their sums in float32:
    torch allows parts of a sum to be added in float16 or bfloat16 otherwise, which the kit finds at odd sizes.

    Attributes:
        host_function: the driver's library and its function of the form of ``cuLaunchHostFunc``: stream, function and
            what it gets, 0 if it succeeds. Used if ``capabilities.host_calls``.
    """

    host_function = ("libcuda.so.1", "cuLaunchHostFunc")

    def __init__(self, namespace: str, index: int, capabilities: DeviceCapabilities) -> None:
        super().__init__(namespace, index, capabilities)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def host_call(self, work: Callable[[], None]) -> None:
        if not self.capabilities.host_calls:
            return super().host_call(work)
        stream = self.module.current_stream(self.index).cuda_stream
        # The address of the object itself: nothing needs to be kept for a capture but the object.
        if code := _launch(*self.host_function)(stream, _CALL, id(work)):
            raise RuntimeError(f"{self.host_function[1]} failed with error {code}")
        return None

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        # Requested bytes: torch counts a whole block if it did not split it, up to a megabyte more for each tensor.
        self.module.reset_peak_memory_stats(self.index)
        before = self.module.memory_stats(self.index)["requested_bytes.all.current"]
        work()
        return int(self.module.memory_stats(self.index)["requested_bytes.all.peak"]) - int(before)


def _call(work: int) -> None:
    """Call a Python function by its address; ctypes takes the GIL first."""
    ctypes.cast(work, ctypes.py_object).value()


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CALL = _HOST_FUNCTION(_call)


@cache
def _launch(library: str, name: str) -> Any:
    function = getattr(ctypes.CDLL(library), name)
    function.restype, function.argtypes = ctypes.c_int, (ctypes.c_void_p, _HOST_FUNCTION, ctypes.c_void_p)
    return function


#: How steps are captured.
Graphs = TypeVar("Graphs", bound=TorchGraphs)


def gpu_graphs(device: Device, kind: type[Graphs] = TorchGraphs) -> Graphs:  # type: ignore[assignment]  # the default
    """Captures of steps in one memory pool."""
    assert isinstance(device, TorchDevice), "it is this backend's device"
    # Other threads move state while a step is captured; what they do must not end the capture.
    return kind(device, torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle, capture_error_mode="thread_local")


def open_gpu_communicator(
    name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str
) -> Communicator:
    """This rank's end of a group over the vendor's collectives library. Pairs are connected now, except those of
    tensor parallel ranks, which send each other nothing."""
    base: TorchCommunicator = open_torch_communicator(
        LIBRARY, name, ranks, rank, world_size, init_method, NCCL_CAPABILITIES
    )
    if name != "tp":
        connect_pairs(base, torch.device(NAMESPACE))
    return base


def connect_pairs(base: Communicator, where: torch.device) -> None:
    """Exchange a message in both directions of every pair now. NCCL connects each direction at its first message and
    blocks the sending host until the other side receives: a stage that sends token ids would wait for a step that
    cannot start before it is ready."""
    word = torch.zeros(1, device=where)
    for pair in itertools.combinations(range(base.size), 2):
        for sender, receiver in (pair, pair[::-1]):
            if base.rank == sender:
                base.send(word, receiver)
            elif base.rank == receiver:
                base.receive(word, sender)
