"""A kernel that stands for another one in a check: it has the same answers, and is seen when it is asked and called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.plugins.hook_check import check_supports
from evener_conformance.kit.fallback_monitor import FallbackMonitor


class WrappedKernel(Kernel):
    """A kernel whose callables are wrapped: ``around`` is given the ``OpCall`` and the kernel's callable."""

    def __init__(self, kernel: Kernel, around: Callable[[OpCall, OpFunction], OpFunction]) -> None:
        self._kernel, self._around = kernel, around
        for name in ("op", "name", "priority", "capturable", "deterministic", "batch_invariant", "packings",
                     "state_layout", "across_ranks", "non_default"):  # fmt: skip
            setattr(self, name, copy.copy(getattr(kernel, name)))

    def supports(self, call: OpCall) -> str | None:
        return check_supports(self._kernel, self._kernel.supports(call))

    def rounds(self, call: OpCall, weight: str) -> bool:
        return self._kernel.rounds(call, weight)

    def workspace(self, call: OpCall) -> int:
        return self._kernel.workspace(call)

    def build(self, call: OpCall) -> OpFunction:
        run: OpFunction = self._around(call, self._kernel.build(call))
        return run


def monitored(kernel: Kernel, watch: FallbackMonitor, note: Callable[[OpCall, Sequence[Any]], None]) -> Kernel:
    """A kernel whose calls are watched for fallbacks; ``note`` gets each callable's first call with its inputs."""

    def around(call: OpCall, run: OpFunction) -> OpFunction:
        looks = [watch.profiled]  # slow, so once for each callable

        def watched(*inputs: Any) -> Any:
            if looks:
                note(call, inputs)
            with looks.pop()() if looks else nullcontext(), watch():
                return run(*inputs)

        return watched

    return WrappedKernel(kernel, around)
