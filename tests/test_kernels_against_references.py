"""Every kernel and state provider that an installed host backend registers, against the references. What is checked
follows from the registry: a kernel for an op without cases is a failure, and so is one that refuses all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from evener.builtin import BUILTINS
from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpSchema
from evener.contracts.state import StateProvider
from evener.engine.search import Search
from evener.plugins.discover import discover
from evener.plugins.load import Loaded
from evener.testing.block_cases import stored
from evener.testing.composite_check import check_composite
from evener.testing.op_check import CheckResult, check_kernel
from evener.testing.state_check import check_provider

DTYPES = ("float32", "bfloat16")
#: Accelerators answer to the kit on their own machines; what serves the host runs on all.
HOSTS = {p.name: p.descriptor for p in discover(builtins=BUILTINS).backends if "host" in p.descriptor.serves}
BACKENDS = sorted(HOSTS)


class Registered:
    """What one backend delivers here."""

    def __init__(self, backend: str) -> None:
        loaded: Loaded = Search(backend).load({})
        self.device: Device = loaded.open_device()
        self.device.select()
        self.device.limit_threads(1)
        self.kernels: Sequence[Kernel] = [p.value for p in loaded.kernels(self.device)]
        self.states: Sequence[StateProvider] = [p.value for p in loaded.state_providers(self.device)]
        self.schemas: dict[str, OpSchema] = {p.value.name: p.value for p in loaded.op_schemas()}

    def check(self, kernel: Kernel) -> list[CheckResult]:
        schema = self.schemas[kernel.op]
        if not schema.composite:
            return check_kernel(kernel, schema, self.device, DTYPES)
        linears = [k for k in self.kernels if k.op == "linear"]
        return check_composite(kernel, list(self.schemas.values()), self.device, self.states, linears, DTYPES)


@cache
def registered(backend: str) -> Registered:
    return Registered(backend)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def offers() -> list[Any]:
    return [pytest.param(b, op, id=f"{b}-{op}") for b in BACKENDS for op in HOSTS[b].ops]


def test_some_backend_runs_on_the_host() -> None:
    assert BACKENDS


@pytest.mark.parametrize(("backend", "op"), offers())
def test_a_kernel_agrees_with_its_reference(backend: str, op: str) -> None:
    kernels = [k for k in registered(backend).kernels if k.op == op]
    assert kernels
    for kernel in kernels:
        results = registered(backend).check(kernel)
        assert not [str(r) for r in results if r.status == "failed"]
        passed = Counter(r.dtype for r in results if r.status == "passed")
        assert set(passed) == set(DTYPES), f"{kernel.name} was never computed: {sorted({r.detail for r in results})}"


@pytest.mark.parametrize("op", ["linear", "grouped_linear"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_packing_that_takes_blocks_was_computed_with(backend: str, op: str) -> None:
    part = stored("q8_0", 16, 64, "float32", torch.Generator())
    for kernel in [k for k in registered(backend).kernels if k.op == op]:
        for packing in [p for p in kernel.packings if p.supports([part], "float32") is None]:
            mine = [r for r in registered(backend).check(kernel) if r.case.endswith(f"in {packing.layout}")]
            assert {r.dtype for r in mine} == set(DTYPES) and {r.status for r in mine} == {"passed"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_provider_keeps_the_contract(backend: str, dtype: str) -> None:
    assert registered(backend).states
    for provider in registered(backend).states:
        report = check_provider(provider, registered(backend).device, dtype)
        assert report.problems == []
        assert len(report.checked) >= 4, f"{provider.name} refuses most shapes: {report.refused}"
