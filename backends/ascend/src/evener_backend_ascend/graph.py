"""NPU graphs: captures whose attention gets its lengths from the host before each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from evener.backend.torch_device import TorchDevice
from evener_backend_parts.graphs import TorchGraphs, TorchReplay


class NpuReplay(TorchReplay):
    """One capture. ``graph``: an NPUGraph that was captured with ``auto_dispatch_capture``; it keeps every call of the
    attention kernel, and submits them again with new lengths."""

    def update(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        # One entry is for all recorded calls: every group of a step has the same lengths. In a decode step each
        # request adds one token, so the ends of queries stay as they were captured.
        self.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(kv_lens)}])


class NpuGraphs(TorchGraphs):
    """Captures whose calls of attention are recorded too."""

    replay = NpuReplay

    def __init__(self, device: TorchDevice) -> None:
        super().__init__(device, device.module.NPUGraph, device.module.graph_pool_handle)

    def record(self, graph: Any, pool: Any, segment: Callable[[], None]) -> None:
        npu = self.device.module
        stream = npu.current_stream()
        try:
            with npu.graph(graph, pool=pool, auto_dispatch_capture=True):
                segment()
        except RuntimeError:
            npu.set_stream(stream)
            _stop_recording(graph)
            raise


def _stop_recording(graph: Any) -> None:
    """Leave what torch_npu leaves only after a capture that ended well: the mode that records calls of attention."""
    stack = _get_current_dispatch_mode_stack()
    if stack and stack[-1] is graph.graph_dispatch_mode:
        graph.graph_dispatch_mode.__exit__(None, None, None)
