"""The CPU as a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evener.backend.native_code import Unavailable
from evener.contracts.device import Device, DeviceCapabilities, MemoryInfo, Readback, ReadyReadback
from evener.contracts.quant import Packing
from evener.errors import BackendError
from evener.ops.reference.linear import PLAIN
from evener_backend_cpu import huge_pages, isa, memory
from evener_backend_cpu.block_packing import BlockPacking
from evener_backend_cpu.native_library import Aside, Native, load
from evener_backend_cpu.screened import ScreenedPacking
from evener_backend_cpu.stored_packing import StoredPacking


class CpuDevice(Device):
    """This machine's processors, as one device. Several ranks on a machine share it, whatever their index.

    Attributes:
        native: the compiled kernels, or the reason why there are none.
        plain, blocks, stored, screened: the packings of unquantized weights, of block-quantized ones, of those of one
            byte an element with scales beside them, and of heads with codes beside them.
        screens: whether the user wants heads with codes.
        threads: threads that compute a step.
    """

    def __init__(self, index: int, options: Mapping[str, Any]) -> None:
        if index < 0:
            raise BackendError(f"device {index} of backend cpu was asked for; use index 0, or the index of a rank")
        processor = isa.usable(options.get("isa", "auto"))
        self.index, self.torch_device = index, torch.device("cpu")
        self.threads = torch.get_num_threads()
        limit = f", limited to {processor.limit}" if processor.limit else ""
        self.name = f"{processor.name}, {self.threads} threads{limit}"
        self.capabilities = DeviceCapabilities(
            dtypes=frozenset({"float32", "bfloat16"}),
            emulated=frozenset({"float16"}),
            alignment=64,
            int64=True,
            host_lengths=True,
            host_memory=True,
            variant=processor.variant,
            features=processor.features,
        )
        huge = options.get("huge_pages", "auto") == "auto" and huge_pages.available()
        arena = huge_pages.Arena() if huge else None
        self.plain: Packing = PLAIN if arena is None else huge_pages.HugePacking(arena)
        self.blocks = BlockPacking(self, arena)
        self.stored = StoredPacking(self, arena)
        self.screened, self.screens = ScreenedPacking(self, arena), bool(options.get("screened_head", True))
        self._options, self._processor = options, processor
        self._native: Native | Unavailable | None = None
        self._aside: Aside | None = None

    @property
    def native(self) -> Native | Unavailable:
        """Compiled on first use (seconds, once on each machine)."""
        if self._native is None:
            wanted = self._options.get("native", "auto")
            if wanted == "off":
                self._native = Unavailable("cpu.native=off")
            else:
                self._native = load(self._processor, self._options.get("compiler"))
            if isinstance(self._native, Unavailable) and wanted == "require":
                raise BackendError(
                    f"cpu.native=require, but {self._native.reason}; set cpu.native=auto to run without C++ kernels"
                )
        return self._native

    @property
    def aside(self) -> Aside:
        """A thread for calls that do not hold up the one that asks for them; made on first use."""
        if self._aside is None:
            assert isinstance(self.native, Native), "a kernel of it asks"
            self._aside = self.native.aside()
        return self._aside

    def select(self) -> None:
        # OpenMP's thread count belongs to the calling thread, so the thread that runs the steps has to set it.
        torch.set_num_threads(self.threads)

    def synchronize(self) -> None:
        """Nothing to wait for: the CPU runs nothing asynchronously."""

    def memory(self) -> MemoryInfo:
        return MemoryInfo(*memory.free_and_total())

    def readback(self, tensor: torch.Tensor) -> Readback:
        return ReadyReadback(tensor.clone())

    def conditions(self) -> Mapping[str, str]:
        """The threads that compute; their number is part of the name."""
        return {"threads": str(self.threads)}

    def limit_threads(self, count: int) -> None:
        """Use ``count`` threads from now on."""
        if count < 1:
            raise BackendError(f"{count} threads were asked for; use 1 or more")
        self.threads = count
        torch.set_num_threads(count)
