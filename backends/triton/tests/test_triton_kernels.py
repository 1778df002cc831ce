"""Every kernel under Triton's interpreter, against the references; the slow ones over whole layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from interpreted import host_kernels, host_states, schemas

from evener.layers.experts import MoEConfig
from evener.ops.reference.sampling import sample
from evener.ops.reference.state import ReferenceState
from evener.testing.composite_check import Family, TinyModel, check_composite, families
from evener.testing.op_check import check_kernel, no_other_op
from evener.testing.reference_device import HostDevice
from evener.testing.state_check import SHAPES, check_provider
from evener_kernels_triton.linear import gemv
from evener_kernels_triton.sampling import choose_filtered
from evener_kernels_triton.tuning import Tuning

DTYPES = ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def primitives() -> list[Any]:
    """The one that searches makes many passes, which the interpreter takes its time for."""
    slow = {"sample": [pytest.mark.slow]}
    return [pytest.param(k, id=k.name, marks=slow.get(k.op, [])) for k in host_kernels(composite=False)]


@pytest.mark.parametrize("kernel", primitives())
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [f for f in families() if isinstance(f.mlp, MoEConfig)], ids=lambda f: f.name)
def test_the_experts_of_one_token_alone_give_what_their_expansion_gives(family: Family, dtype: str) -> None:
    kernels = [k for k in host_kernels(composite=True) if k.op == "moe_block"]
    every, place, noise = list(schemas().values()), HostDevice(0), torch.Generator().manual_seed(6)
    model = TinyModel(place, dtype, family, kernels, ReferenceState(), every)
    reference = TinyModel(place, "float32", family, (), ReferenceState(), every, model)
    for before in range(3):
        x = torch.randn(1, 96, generator=noise).to(getattr(torch, dtype))
        with torch.inference_mode():
            got, want = (m.step(x, (before,), (1,))[0].float() for m in (model, reference))
        assert (got - want).abs().max() <= (1e-4 if dtype == "float32" else 3e-2) * want.abs().max()


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
        assert [reason for reason in report.refused if ": no kind " not in reason] == []


def test_sinks_and_odd_heads_are_attended_to() -> None:
    odd = [s for s in SHAPES if s.sinks or s.head_dim == 10]
    for provider in host_states():
        report = check_provider(provider, HostDevice(0), "float32", odd)
        assert report.problems == []
        assert len(report.checked) == len(odd)


def test_filters_keep_what_sorting_keeps() -> None:
    noise = torch.Generator().manual_seed(4)
    logits = (torch.randn(4, 37, generator=noise) * 4).round() / 4  # so that bounds fall on equal scores
    heat = torch.tensor([0.7, 1.0, 1.3, 0.0])
    top_k, top_p = torch.tensor([5, 0, 20, 3], dtype=torch.int32), torch.tensor([1.0, 0.8, 0.9, 0.5])
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0])
    seed, position = torch.tensor([3, -4, 5, 6], dtype=torch.int32), torch.tensor([0, 9, 77, 2], dtype=torch.int32)
    want = sample({"vocab": 37, "filters": True}, no_other_op)(logits, heat, top_k, top_p, min_p, seed, position)
    assert torch.equal(choose_filtered(logits, heat, top_k, top_p, min_p, seed, position), want)


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize(("rows", "columns"), [(6, 64), (7, 5000)])
def test_rows_of_any_length_are_multiplied_a_tile_at_a_time(rows: int, columns: int, activation: str) -> None:
    noise = torch.Generator().manual_seed(columns)
    halves = 2 if activation else 1
    x, w = torch.randn(1, columns, generator=noise), torch.randn(rows * halves, columns, generator=noise)
    bias = torch.randn(rows * halves, generator=noise)
    got = gemv(Tuning(0, 48 << 10, False), x, w, torch.float32, bias=bias, activation=activation)
    want = torch.nn.functional.linear(x, w, bias)
    if activation:
        want = torch.nn.functional.silu(want[:, :rows]) * want[:, rows:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
