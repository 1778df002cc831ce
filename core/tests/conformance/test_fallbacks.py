"""Fallbacks to the host that torch makes below the dispatch of Python are seen wherever the kit calls a backend."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener.testing.conformance.composites import Wrapped, check_composite
from evener.testing.conformance.state import Shape, check_provider
from evener.testing.conformance.witness import HostWatch
from evener.testing.reference_device import HostDevice

from .test_composites import Expansion

#: Torch's own device without kernels for some ops, which it runs on the host as it does for any vendor's.
LAZY = """
import torch
import torch._lazy.ts_backend
from evener.testing.conformance.witness import HostWatch
from evener.testing.reference_device import HostDevice

torch._lazy.ts_backend.init()
device = HostDevice(0)
device.torch_device = torch.device("lazy")
x = torch.ones(3, 4).to("lazy")
for work in (lambda: x + 1, lambda: x.cumprod(0)):
    watch = HostWatch(device)
    with watch(), watch.profiled():
        work()
    print(watch.blind, dict(watch.seen))
"""


def test_a_fallback_that_torch_makes_by_itself_is_seen_by_its_profiler() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, lost = [line for line in done.stdout.splitlines() if line.startswith("None")]
    assert kept == "None {}" and "torch's fallback to the host" in lost


class Close(HostWatch):
    """Knows whether the profiler looks."""

    def __init__(self) -> None:
        super().__init__(HostDevice(0))
        self.looks = False

    @contextmanager
    def profiled(self) -> Iterator[None]:
        self.looks = True
        yield
        self.looks = False


class Noting(ReferenceState):
    """Which of its calls were looked at, by name and whether each request got one token."""

    def __init__(self, watch: Close) -> None:
        self.watch, self.calls = watch, set[tuple[str, bool]]()

    def __getattribute__(self, name: str) -> Any:
        if name in ("write", "attend", "attend_chosen", "select", "advance") and self.watch.looks:
            return lambda views, meta, *rest: self._note(name, meta, views, *rest)
        return super().__getattribute__(name)

    def _note(self, name: str, meta: Any, views: Any, *rest: Any) -> Any:
        self.calls.add((name, meta.step.max_query == 1))
        return getattr(ReferenceState, name)(self, views, meta, *rest)


def test_every_call_of_a_provider_is_looked_at_for_prompts_and_for_single_tokens() -> None:
    watch = Close()
    provider = Noting(watch)
    shapes = [Shape(4, 2, 16, 16), Shape(3, 1, 24, 16, kind="latent", top=9), Shape(6, 1, 18, 18, kind="index", top=7)]
    assert check_provider(provider, HostDevice(0), shapes=shapes, watch=watch).problems == []
    names = ("write", "attend", "attend_chosen", "select", "advance")
    assert provider.calls == {(name, single) for name in names for single in (False, True)}


def test_every_callable_that_a_composites_kernel_builds_is_looked_at() -> None:
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

    kernel: Kernel = Wrapped(Expansion("mlp_block"), around)
    results = check_composite(kernel, BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=("grouped",), watch=watch)
    assert [r.outcome for r in results] == ["passed"]
    assert looked == {number for number, calls in enumerate(built) if calls} and looked


def test_memory_that_nobody_wrote_is_still_poisoned_where_the_profiler_looks() -> None:
    watch = Close()
    with watch.profiled(), watch():
        assert torch.empty(3).isnan().all()
