"""The device. Its tensors are in host memory until you name your own `torch.device` and start real copies."""

import os

import torch
from evener.contracts.device import Device, DeviceCapabilities, MemoryInfo, ReadyReadback


class Example(Device):
    torch_device = torch.device("cpu")
    # The defaults are conservative: claim more once the kit has checked it. Remove `host_memory` with the CPU tensors.
    capabilities = DeviceCapabilities(dtypes=frozenset({"float32", "bfloat16"}), host_memory=True)

    simulated = os.environ.get("EXAMPLE_PRETEND") == "1"  # the kit marks its results L3, never L5

    def __init__(self, index):
        self.name, self.index = f"Example {index}", index

    def select(self):
        pass

    def synchronize(self):
        pass

    def memory(self):
        return MemoryInfo(free=1 << 30, total=1 << 30)

    def readback(self, tensor):
        return ReadyReadback(tensor.clone())
