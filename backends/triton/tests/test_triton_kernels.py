"""Every kernel under Triton's interpreter, against the references."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from interpreted import host_kernels, host_states, schemas

from evener.testing.composite_check import check_composite
from evener.testing.op_check import check_kernel
from evener.testing.reference_device import HostDevice
from evener.testing.state_check import check_provider

DTYPES = ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.mark.parametrize("kernel", host_kernels(composite=False), ids=lambda k: k.name)
def test_a_kernel_agrees_with_its_reference(kernel: Any) -> None:
    results = check_kernel(kernel, schemas()[kernel.op], HostDevice(0), DTYPES)
    assert not [str(r) for r in results if r.status == "failed"]
    passed = Counter(r.dtype for r in results if r.status == "passed")
    assert set(passed) == set(DTYPES), f"{kernel.name} was never computed: {sorted({r.detail for r in results})}"


@pytest.mark.parametrize("kernel", host_kernels(composite=True), ids=lambda k: k.name)
def test_a_composite_agrees_with_its_expansion(kernel: Any) -> None:
    linears = [k for k in host_kernels(composite=False) if k.op == "linear"]
    results = check_composite(kernel, list(schemas().values()), HostDevice(0), host_states(), linears, DTYPES)
    assert not [str(r) for r in results if r.status == "failed"]
    assert any(r.status == "passed" for r in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_provider_keeps_the_contract(dtype: str) -> None:
    for provider in host_states():
        report = check_provider(provider, HostDevice(0), dtype)
        assert report.problems == []
        assert report.refused == []
