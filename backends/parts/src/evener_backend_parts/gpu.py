"""A device of torch's namespace ``cuda``, whichever vendor's build serves it: memory, graphs, collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from evener.backend.torch_communicator import TorchCommunicator, open_torch_communicator
from evener.backend.torch_device import TorchDevice
from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.contracts.device import Device, DeviceCapabilities
from evener.contracts.graph import GraphCapture
from evener_backend_parts.graphs import TorchGraphs

#: The namespace of torch, and the backend string of ``torch.distributed``. Vendors' builds keep both names.
NAMESPACE, LIBRARY = "cuda", "nccl"
NCCL_CAPABILITIES = CommunicatorCapabilities(
    dtypes=frozenset({"float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"}), capturable=True
)


class GpuDevice(TorchDevice):
    """A device whose allocator counts as torch's own for this namespace does. Products keep their sums in float32:
    torch allows parts of a sum to be added in float16 or bfloat16 otherwise, which the kit finds at odd sizes."""

    def __init__(self, namespace: str, index: int, capabilities: DeviceCapabilities) -> None:
        super().__init__(namespace, index, capabilities)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        # Requested bytes: torch counts a whole block if it did not split it, up to a megabyte more for each tensor.
        self.module.reset_peak_memory_stats(self.index)
        before = self.module.memory_stats(self.index)["requested_bytes.all.current"]
        work()
        return int(self.module.memory_stats(self.index)["requested_bytes.all.peak"]) - int(before)


def gpu_graphs(device: Device) -> GraphCapture:
    """Captures of steps in one memory pool."""
    assert isinstance(device, TorchDevice), "it is this backend's device"
    # Other threads move state while a step is captured; what they do must not end the capture.
    return TorchGraphs(
        device, torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle, capture_error_mode="thread_local"
    )  # fmt: skip


def open_gpu_communicator(
    name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str
) -> Communicator:  # fmt: skip
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
