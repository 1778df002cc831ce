"""Captures by recording: the torch calls of a segment are recorded and run again over the same addresses."""

import torch
from evener.contracts.graph import GraphCapture, Replay
from evener.errors import EngineError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Runs each call and records it with its results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            # This exception, no other, means that such steps run eagerly.
            raise EngineError("a capture cannot read a value on the host")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


class Taped(Replay):
    """Keeps the tensors alive that the segment made: the engine and later segments read them after each replay."""

    def __init__(self, calls):
        self._calls = calls

    def __call__(self):
        for func, args, kwargs, made in self._calls:
            again = func(*args, **kwargs)
            for kept, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                # A result in new memory is copied to the captured one; views and donated inputs are already in place.
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class Taping(GraphCapture):
    def capture(self, segment):
        with Tape() as tape:
            segment()  # exactly once
        return Taped(tape.calls)
