"""Every kernel under Triton's interpreter, against the references; the slow ones over whole layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from interpreted import host_kernels, host_states, schemas

from evener.testing.composite_check import check_composite
from evener.testing.op_check import check_kernel
from evener.testing.reference_device import HostDevice
from evener.testing.state_check import SHAPES, check_provider

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


@pytest.mark.slow
@pytest.mark.parametrize("kernel", host_kernels(composite=True), ids=lambda k: k.name)
def test_a_composite_agrees_with_its_expansion(kernel: Any) -> None:
    linears = [k for k in host_kernels(composite=False) if k.op == "linear"]
    results = check_composite(kernel, list(schemas().values()), HostDevice(0), host_states(), linears, DTYPES)
    assert not [str(r) for r in results if r.status == "failed"]
    assert any(r.status == "passed" for r in results)


def test_a_layer_with_windows_caps_and_norms_everywhere_agrees_with_its_expansion() -> None:
    kernel = next(k for k in host_kernels(composite=True) if k.op == "attention_block")
    linears = [k for k in host_kernels(composite=False) if k.op == "linear"]
    every = list(schemas().values())
    results = check_composite(kernel, every, HostDevice(0), host_states(), linears, ("bfloat16",), kinds=("windowed",))
    assert [r.status for r in results] == ["passed"], [str(r) for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_provider_keeps_the_contract(dtype: str) -> None:
    for provider in host_states():
        report = check_provider(provider, HostDevice(0), dtype)
        assert report.problems == []
        assert report.refused == []


def test_sinks_and_odd_heads_are_attended_to() -> None:
    odd = [s for s in SHAPES if s.sinks or s.head_dim == 10]
    for provider in host_states():
        report = check_provider(provider, HostDevice(0), "float32", odd)
        assert report.problems == []
        assert len(report.checked) == len(odd)
