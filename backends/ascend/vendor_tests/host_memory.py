"""The memory of npu tensors, which the fake runtime keeps on the host."""

from __future__ import annotations

import ctypes

import torch


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of an npu tensor, which the fake runtime keeps on the host."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, *place)
