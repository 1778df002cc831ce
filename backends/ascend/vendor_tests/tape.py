"""NPU graphs over the fake runtime: ops of a capture are written down, and computed at each replay.

torch_npu's own graph classes are used: its memory pool, its record of every attention call, and its update of their
parameters. While a stream captures, nothing is computed, as on the device. What a device cannot capture raises: a read
on the host, and a copy from memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch_npu
from host_memory import on_host
from host_products import run
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map


@dataclass
class Call:
    """One op over addresses. ``outputs``: where its results go; None for a result that is an argument."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor | None]


@dataclass
class Tape:
    """The ops of one capture, in order."""

    calls: list[Call] = field(default_factory=list)

    def run(self) -> None:
        """Compute every op again, on the same addresses."""
        with _disable_current_modes(), torch.inference_mode():
            for call in self.calls:
                found = tree_flatten(call.function(*call.args, **call.kwargs))[0]
                tensors = [each for each in found if isinstance(each, torch.Tensor)]
                for result, output in zip(tensors, call.outputs, strict=True):
                    if output is not None:
                        output.copy_(result)


def inferred(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` would return, without computing it: tensors on the device "meta", or an argument itself.

    Raises:
        RuntimeError: the op reads a value on the host, or copies from there.
    """
    name = func._schema.name
    if func.namespace == "npu" and func._schema.overload_name == "out":
        return kwargs["out"]
    given = {id(x): x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)}
    for tensor in given.values():
        if tensor.device.type == "cpu" and tensor.dim():
            raise RuntimeError(f"{name} copies a tensor from the host, which a capture cannot")
    back: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def lower(value: Any) -> Any:
        if isinstance(value, torch.device):
            if value.type == "cpu":
                raise RuntimeError(f"{name} copies to the host, which a capture cannot")
            return torch.device("meta")
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        kept.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))
        back[id(kept[-1])] = value
        return kept[-1]

    low_args, low_kwargs = tree_map(lower, (args, kwargs))
    return tree_map(lambda value: back.get(id(value), value), run(func, low_args, low_kwargs))


class GraphTapes:
    """The tapes of a simulated device.

    Attributes:
        replays: how many there were.
        tape: of the capture that is under way.
        updated: the recorded op whose arguments the next call replaces.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.tape: Tape | None = None
        self.updated: Call | None = None
        self._groups: list[tuple[Any, Call]] = []

    def capture(self, func: Any, given: tuple[Any, Any], lowered: tuple[Any, Any], target: torch.device) -> Any:
        """Add an op to the capture that is under way; returns what it will write.

        Args:
            given: the op's arguments and keyword arguments.
            lowered: the same with tensors of the host over the memory of npu tensors.
            target: where new tensors are made.
        """
        assert self.tape is not None
        outputs: list[torch.Tensor | None] = []

        def allocate(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            fresh = value.device.type == "meta"
            if fresh:
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=target)
            outputs.append(on_host(value) if fresh else None)
            return value

        made = tree_map(allocate, inferred(func, *given))
        self.tape.calls.append(Call(func, *lowered, outputs))
        return made

    def update(self, func: Any, args: Any, kwargs: Any, given: Any) -> Any:
        """Give the recorded op that torch_npu updates the arguments of this call. ``given``: the keyword arguments
        before they were lowered."""
        assert self.updated is not None and func is self.updated.function, f"{func} in the place of {self.updated}"
        self.updated.args, self.updated.kwargs = args, kwargs
        return given["out"]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """torch_npu's graphs write tapes while this is open."""
        tapes, graphs = self, torch_npu.npu.graphs

        class SimulatedGraph(torch_npu.npu.NPUGraph):  # type: ignore[misc]
            def capture_begin(self, *args: Any, **kwargs: Any) -> None:
                super().capture_begin(*args, **kwargs)
                tapes.tape = self.tape = Tape()

            def capture_end(self) -> None:
                tapes.tape = None
                super().capture_end()

            def replay(self) -> None:
                super().replay()
                self.tape.run()
                tapes.replays += 1

        group_end = graphs.graph_task_group_end
        update_begin, update_end = graphs.graph_task_update_begin, graphs.graph_task_update_end

        def end_group(stream: Any) -> Any:
            assert tapes.tape is not None
            handle = group_end(stream)
            tapes._groups.append((handle, tapes.tape.calls[-1]))
            return handle

        def begin_update(stream: Any, handle: Any) -> None:
            update_begin(stream, handle)
            (tapes.updated,) = [call for known, call in tapes._groups if known is handle]

        def end_update(stream: Any) -> None:
            tapes.updated = None
            update_end(stream)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_npu.npu, "NPUGraph", SimulatedGraph)
            patch.setattr(graphs, "graph_task_group_end", end_group)
            patch.setattr(graphs, "graph_task_update_begin", begin_update)
            patch.setattr(graphs, "graph_task_update_end", end_update)
            yield
