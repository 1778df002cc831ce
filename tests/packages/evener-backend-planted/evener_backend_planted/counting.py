"""Counting what torch allocates: the device has no allocator that does."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counting(TorchDispatchMode):
    """While active, counts bytes of memory that ops make. ``peak``: the most that was held at once."""

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._held = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in given | self._held.keys():
                storage = tensor.untyped_storage()
                self._held[_address(tensor)] = storage.nbytes()
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._freed, _address(tensor))
        return made

    def _freed(self, address):
        self._now -= self._held.pop(address, 0)


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
