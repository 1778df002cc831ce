"""The device: simulated in host memory. Its steps can be captured."""

import torch
from evener.contracts.device import Device, DeviceCapabilities, MemoryInfo, ReadyReadback


class Worked(Device):
    torch_device = torch.device("cpu")
    simulated = True  # what runs on it is evidence of level L3
    capabilities = DeviceCapabilities(
        dtypes=frozenset({"float32", "bfloat16", "float16"}), alignment=64, graphs=True, host_memory=True
    )

    def __init__(self, index):
        self.name, self.index = f"Worked {index}", index

    def select(self):
        pass

    def synchronize(self):
        pass

    def memory(self):
        # A constant, because nothing is counted. A real device asks its driver: the state pool is sized by `free`.
        return MemoryInfo(free=2 << 30, total=2 << 30)

    def readback(self, tensor):
        return ReadyReadback(tensor.clone())
