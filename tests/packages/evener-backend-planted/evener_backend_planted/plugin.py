"""The device, how it captures steps, how its ranks talk, and the hooks."""

import torch
from evener.contracts.device import Device, DeviceCapabilities, MemoryInfo, ReadyReadback
from evener.contracts.graph import GraphCapture, Replay
from evener.contracts.hooks import hookimpl
from evener.backend.torch_communicator import open_torch_communicator

from evener_backend_planted.counting import Counting
from evener_backend_planted.defects import planted
from evener_backend_planted.kernels import Activation, AddNorm, Block, Greedy, Linear, Norm, Rotary
from evener_backend_planted.state import Pages


class Planted(Device):
    torch_device = torch.device("cpu")
    capabilities = DeviceCapabilities(
        dtypes=frozenset({"float32", "bfloat16"} | ({"float16"} if planted("dtype-claimed") else set())),
        int64=True, graphs=True, host_memory=True, alignment=64,
    )  # fmt: skip

    def __init__(self, index):
        self.name, self.index = f"Planted {index}", index

    def select(self):
        pass

    def synchronize(self):
        pass

    def memory(self):
        return MemoryInfo(free=(2 if planted("memory-lies") else 1) << 30, total=1 << 30)

    def peak_memory(self, work):
        with Counting() as counting:
            work()
        return counting.peak

    def readback(self, tensor):
        return ReadyReadback(tensor if planted("readback-live") else tensor.clone())


class Again(Replay):
    def __init__(self, segment):
        self._segment = segment

    def __call__(self):
        if not planted("graph-stale"):
            self._segment()


class Capture(GraphCapture):
    """A capture is the segment itself, which runs again on the same addresses."""

    def capture(self, segment):
        segment()
        return Again(segment)


def open_ranks(name, ranks, rank, world_size, init_method):
    found = open_torch_communicator("gloo", name, ranks, rank, world_size, init_method)
    if planted("sum-tail"):
        whole = found.all_reduce

        def all_reduce(tensor):
            last = tensor.reshape(-1)[-1:].clone()
            tensor = whole(tensor)
            if tensor.numel() % 2:
                tensor.view(-1)[-1:] = last
            return tensor

        found.all_reduce = all_reduce
    return found


@hookimpl
def evener_device(index, options):
    return Planted(index)


@hookimpl
def evener_kernels(device, options):
    return [Norm(), AddNorm(), Activation(), Rotary(), Linear(), Block(), Greedy()]


@hookimpl
def evener_state_providers(device, options):
    return [Pages()]


@hookimpl
def evener_graph_capture(device, options):
    return Capture()


@hookimpl
def evener_communicator(options):
    return open_ranks
