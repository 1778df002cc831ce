"""Torch's ops on npu tensors, computed on the CPU over the same memory; for tests over the fake runtime.

torch_npu's own allocator, streams and events are used. An op of the vendor without a reference in ``npu_reference``
raises, and each result is compared with what the vendor's own shape inference says.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from host_memory import on_host
from host_products import run
from tape import GraphTapes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

#: These only move or describe memory: torch_npu itself does them over the fake runtime.
_OWN = frozenset({
    "aten::empty.memory_format", "aten::empty_strided", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Storage", "aten::resize_", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory",
    "aten::lift_fresh", "aten::detach",
})  # fmt: skip
_VENDOR = ("npu", "atb")
#: Of these the vendor has no shape inference, only the schema.
_SCHEMA_ONLY = frozenset({"npu::npu_format_cast", "atb::_npu_reshape_and_cache", "atb::_npu_paged_attention"})
#: What torch_npu's graphs ask for before a capture of the attention kernel: memory, of which nothing is computed.
_ALLOCATE = frozenset({
    "npu::_npu_fused_infer_attention_score_get_max_workspace", "npu::_npu_fused_infer_attention_score_infer_output",
})  # fmt: skip


class SimulatedNpu(TorchDispatchMode):
    """While active, this thread's ops on npu tensors are computed on the host.

    Attributes:
        calls: how often each op ran, or was captured.
        graphs: captures of this thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.graphs = GraphTapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode, ops that consist of others come whole
                whole = func.decompose(*args, **kwargs)
            if whole is not NotImplemented:
                return whole
        self.calls[name] += 1
        if name in _OWN or func.is_view:
            return func(*args, **kwargs)
        devices = [x.device for x in tree_flatten((args, kwargs))[0] if _is_npu(x)]
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted)
        if not devices and (wanted is None or wanted.type != "npu"):
            return func(*args, **kwargs)
        target = wanted or devices[0]
        back: dict[int, Any] = {}
        kept: list[torch.Tensor] = []  # alive, so that no id is used twice

        def lower(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu") if value.type == "npu" else value
            if not _is_npu(value):
                return value
            alias = on_host(value)
            back[id(alias)] = value
            kept.append(alias)
            return alias

        def lift(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in back:
                return back[id(value)]
            if target.type != "npu":
                return value
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=target)
            if value.numel():
                on_host(made).copy_(value)
            return made

        low_args, low_kwargs = tree_map(lower, (args, kwargs))
        if self.graphs.updated is not None:
            return self.graphs.update(func, low_args, low_kwargs, kwargs)
        if self.graphs.tape is not None and name not in _ALLOCATE:
            return self.graphs.capture(func, (args, kwargs), (low_args, low_kwargs), target)
        result = run(func, low_args, low_kwargs)
        if func.namespace in _VENDOR and name not in _ALLOCATE | _SCHEMA_ONLY:
            _compare_shapes(name, func, args, kwargs, result)
        return tree_map(lift, result)


def _is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _compare_shapes(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """The vendor's shape inference must give the shapes and dtypes of our reference."""
    meta_args, meta_kwargs = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (args, kwargs))
    inferred = func(*meta_args, **meta_kwargs)
    ours, theirs = (
        [(tuple(t.shape), t.dtype) for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        for out in (result, inferred)
    )
    assert ours == theirs, f"{name}: the reference gives {ours}, the vendor infers {theirs}"
