"""The device. Its tensors lie in host memory until you write your own `torch.device` and start real copies."""

import os

import torch
from evener.contracts.device import Device, DeviceCapabilities, MemoryInfo, ReadyReadback


class Example(Device):
    torch_device = torch.device("cpu")
    # Every default is the careful one; claim what the kit has seen. `host_memory` goes when its tensors lie elsewhere.
    capabilities = DeviceCapabilities(dtypes=frozenset({"float32", "bfloat16"}), host_memory=True)

    simulated = os.environ.get("EXAMPLE_PRETEND") == "1"  # the kit stamps L3, never L5

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
