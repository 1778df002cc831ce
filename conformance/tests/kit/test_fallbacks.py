"""Fallbacks to the host that torch makes below the dispatch of Python are seen wherever the kit calls a backend."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from warm import warm

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener_conformance.kit.composites import check_composite
from evener_conformance.kit.fallback_monitor import FallbackMonitor
from evener_conformance.kit.shapes import Shape
from evener_conformance.kit.state import check_provider
from evener_conformance.kit.wrapped_kernel import WrappedKernel
from evener_conformance.reference.device import HostDevice

from .test_composites import Expansion

#: A device of torch's own that lacks kernels for some ops: torch runs them on the host, as for any vendor's device.
LAZY = """
import torch
import torch._lazy.ts_backend
from evener_conformance.kit.fallback_monitor import FallbackMonitor
from evener_conformance.reference.device import HostDevice

torch._lazy.ts_backend.init()
device = HostDevice(0)
device.torch_device = torch.device("lazy")
x = torch.ones(3, 4).to("lazy")
for work in (lambda: x + 1, lambda: x.cumprod(0)):
    watch = FallbackMonitor(device)
    with watch(), watch.profiled():
        work()
    print(watch.undetectable, dict(watch.seen))
"""


def test_a_fallback_that_torch_makes_by_itself_is_seen_by_its_profiler() -> None:
    done = subprocess.run([warm() / "python", "-c", LAZY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, lost = [line for line in done.stdout.splitlines() if line.startswith("None")]
    assert kept == "None {}" and "torch's fallback to the host" in lost


class Close(FallbackMonitor):
    """Knows whether the profiler is active."""

    def __init__(self) -> None:
        super().__init__(HostDevice(0))
        self.looks = False

    @contextmanager
    def profiled(self) -> Iterator[None]:
        self.looks = True
        yield
        self.looks = False


class Noting(ReferenceState):
    """Records which of its calls were profiled: name, and whether it was a decode step."""

    def __init__(self, watch: Close) -> None:
        self.watch, self.calls = watch, set[tuple[str, bool]]()

    def __getattribute__(self, name: str) -> Any:
        if name in ("write", "attend", "attend_chosen", "select", "advance") and self.watch.looks:
            return lambda views, meta, *rest: self._note(name, meta, views, *rest)
        return super().__getattribute__(name)

    def _note(self, name: str, meta: Any, views: Any, *rest: Any) -> Any:
        self.calls.add((name, meta.step.max_query == 1))
        return getattr(ReferenceState, name)(self, views, meta, *rest)


def test_every_provider_method_is_profiled_for_prefill_and_decode() -> None:
    watch = Close()
    provider = Noting(watch)
    shapes = [Shape(4, 2, 16, 16), Shape(3, 1, 24, 16, kind="latent", top=9), Shape(6, 1, 18, 18, kind="index", top=7)]
    assert check_provider(provider, HostDevice(0), shapes=shapes, watch=watch).problems == []
    names = ("write", "attend", "attend_chosen", "select", "advance")
    assert provider.calls == {(name, single) for name in names for single in (False, True)}


def test_every_callable_built_by_a_composite_kernel_is_profiled() -> None:
    watch, built, looked = Close(), list[int](), set[int]()

    def around(_: OpCall, run: OpFunction) -> OpFunction:
        number = len(built)
        built.append(0)

        def noted(*inputs: Any) -> Any:
            built[number] += 1
            if watch.looks:
                looked.add(number)
            return run(*inputs)

        return noted

    kernel: Kernel = WrappedKernel(Expansion("mlp_block"), around)
    results = check_composite(kernel, BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=("grouped",), watch=watch)
    assert [r.outcome for r in results] == ["passed"]
    assert looked == {number for number, calls in enumerate(built) if calls} and looked


def test_uninitialized_memory_is_still_poisoned_while_profiling() -> None:
    watch = Close()
    with watch.profiled(), watch():
        assert torch.empty(3).isnan().all()
