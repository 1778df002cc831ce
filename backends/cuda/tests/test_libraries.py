"""Optional kernel libraries: found or explained, called as published, and right over the state contract's cases."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import library_fakes as fakes
import pytest
import torch
from library_fakes import install

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec, StateTensor
from evener.ops.reference.linear import grouped_linear
from evener_backend_cuda import descriptor
from evener_backend_cuda.deep_gemm import DeepGemmGroupedLinear, DeepGemmLinear
from evener_backend_cuda.flash_attention import FlashAttentionState
from evener_backend_cuda.flash_mla import FlashMLAState
from evener_backend_cuda.flashinfer_attention import FlashInferState
from evener_backend_cuda.library import CudaLibrary as Library
from evener_conformance.kit.ops import forbid_nested_ops
from evener_conformance.kit.shapes import SHAPES, Shape
from evener_conformance.kit.state import check_provider
from evener_conformance.reference.device import HostDevice

PAIRS = (
    Shape(9, 3, 64, 64), Shape(4, 1, 64, 64, window=7), Shape(4, 2, 64, 64, window=24, softcap=5.0),
    Shape(2, 1, 256, 256),
)  # fmt: skip
LATENT = (Shape(5, 1, 576, 512, kind="latent"),)
FA, FI, MLA = ("flash-attn", "2.8.3"), ("flashinfer-python", "0.6.3"), ("flash-mla", "1.0.0+9edee0c")


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def hopper() -> HostDevice:
    """Host memory that says of itself what an H200 says."""
    device = HostDevice(0)
    dtypes = frozenset({"float32", "float16", "bfloat16"})
    device.capabilities = replace(device.capabilities, variant="sm_90", dtypes=dtypes)
    return device


def smaller(provider: StateProvider, size: int) -> StateProvider:
    """With blocks so small that sequences have several."""
    provider.block_sizes = lambda spec: (size,)  # type: ignore[method-assign]
    return provider


UNITS: list[Any] = [
    # With small blocks, and another release of the next library, the same is shown in less time.
    pytest.param(FlashAttentionState, fakes.flash_attn, {}, FA, PAIRS, id="flash-attn", marks=pytest.mark.slow),
    pytest.param(
        lambda: smaller(FlashAttentionState(), 16), fakes.flash_attn, {"page": 16}, FA, PAIRS, id="flash-attn, small"
    ),
    pytest.param(FlashInferState, fakes.flashinfer, {}, FI, PAIRS, id="flashinfer", marks=pytest.mark.slow),
    pytest.param(
        FlashInferState, fakes.flashinfer, {"release": "flashinfer_python-0.7.2.post1"}, FI, PAIRS[:1],
        id="flashinfer 0.7",
    ),
    pytest.param(FlashMLAState, fakes.flash_mla, {}, MLA, LATENT, id="flash-mla, 1.0.0.dev0"),
    pytest.param(
        FlashMLAState, fakes.flash_mla, {"release": "flash_mla-1.0.0+vllm0.24.0"}, MLA, LATENT,
        id="flash-mla, as in vLLM 0.24",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "fake", "options", "release", "shapes"), UNITS)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_library_provider_keeps_the_state_contract(
    make: Any, fake: Any, options: Any, release: tuple[str, str], shapes: Any, dtype: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    install(monkeypatch, tmp_path, fake(**options), *release)
    report = check_provider(make(), hopper(), dtype, shapes)
    assert report.problems == []
    assert report.refused == []


@pytest.mark.parametrize(
    "make",
    [FlashInferState, *(pytest.param(make, marks=pytest.mark.slow) for make in (FlashAttentionState, FlashMLAState))],
)
def test_shapes_without_a_kernel_are_refused_with_a_reason(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for fake, release in ((fakes.flash_attn, FA), (fakes.flashinfer, FI), (fakes.flash_mla, MLA)):
        install(monkeypatch, tmp_path, fake(), *release)
    odd = [s for s in SHAPES if s.head_dim not in (64, 256)]
    report = check_provider(make(), hopper(), "bfloat16", odd)
    assert report.problems == []
    assert len(report.refused) >= 8
    assert len(check_provider(make(), hopper(), "float32", (*PAIRS, *LATENT)).refused) == 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (FlashAttentionState, ["flash-attn 2.6 or later is not installed", "'evener-backend-cuda[flash-attn]'"]),
        (FlashInferState, ["flashinfer-python 0.6 or later is not installed", "'evener-backend-cuda[flashinfer]'"]),
        (FlashMLAState, ["flash-mla 1.0 or later is not installed", "pip install git+https://github.com/deepseek-ai"]),
    ],
)
def test_an_absent_library_says_which_version_to_install_and_how(make: Any, words: list[str]) -> None:
    (reason,) = check_provider(make(), hopper(), "bfloat16", (LATENT if make is FlashMLAState else PAIRS)[:1]).refused
    for word in words:
        assert word in reason


def one_library(**fields: Any) -> Library:
    return Library(**{"module": "some_library_of_ours", "distributions": ("some-library",), "min_version": "2.6",
                      "extra": "some", **fields})  # fmt: skip


def test_old_broken_and_unsupported_libraries_give_different_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, None, "some-library", "2.10.1rc1")
    assert "2.10.1rc1 is installed but does not import (No module named" in (one_library().refusal("sm_90") or "")
    old = one_library(min_version="2.11").refusal("sm_90") or ""
    assert "2.10.1rc1 is too old, 2.11 or later is needed; pip install 'evener-backend-cuda[some]'" in old
    assert "sm_80 and later, not for sm_75" in (one_library().refusal("sm_75") or "")
    assert "not for this device" in (one_library().refusal("") or "")
    assert "kernels for sm_90, not for sm_100" in (one_library(architectures=("sm_90",)).refusal("sm_100") or "")
    monkeypatch.setitem(sys.modules, "some_library_of_ours", fakes.ModuleType("some_library_of_ours"))
    assert one_library().refusal("sm_120") is None


def test_every_legacy_key_alias_names_a_provided_kernel_or_state_provider() -> None:
    wanted = {target.partition("=")[2] for target in descriptor.aliases.values()}
    assert wanted == {*descriptor.states, DeepGemmGroupedLinear.name}
    assert {"infer.attn_type=flash_attn", "infer.attn_type=flash_infer", "infer.attn_type=flash_mla"} <= set(
        descriptor.aliases
    )


def test_flashinfer_plans_once_per_step_and_skips_requests_without_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, fakes.flashinfer(), *FI)
    from evener.contracts.state import StateStep

    tensors = tuple(StateTensor(name, (2, 64), "bfloat16") for name in ("key", "value"))
    spec, attention = StateSpec("full", tensors), AttentionSpec(4, 64, 0.125, dtype="bfloat16")
    provider = FlashInferState()
    table = torch.tensor([[3, 9], [9, 9], [7, 5]], dtype=torch.int32)
    none = torch.zeros(3, dtype=torch.int32)
    slots = torch.tensor([50, 80, 81], dtype=torch.int32)
    step = StateStep(3, 3, 2, 32, torch.tensor([0, 1, 1, 3]).int(), torch.tensor([3, 0, 18]).int(), none, slots, table,
                     (1, 0, 2), (3, 0, 18))  # fmt: skip
    metas = [provider.prepare(step, spec, attention, 16) for _ in range(3)]
    plan = metas[0].wrapper.planned
    assert plan["qo_indptr"].tolist() == [0, 1, 3]
    assert plan["paged_kv_indptr"].tolist() == [0, 1, 3]
    assert plan["paged_kv_indices"].tolist() == [3, 7, 5]
    assert plan["paged_kv_last_page_len"].tolist() == [3, 2]
    assert metas[0].wrapper is not metas[1].wrapper
    assert metas[0].wrapper is metas[2].wrapper
    empty = replace(step, host_query_lens=(0, 0, 0), tokens=0)
    assert provider.prepare(empty, spec, attention, 16).wrapper is None


GEMM = ("sgl-deep-gemm", "0.2.5")
MANY = Bucket(64, 128)


def call_of(op: str, **static: Any) -> OpCall:
    return OpCall(op, {"dtype": "bfloat16", "columns": 64, "rows": 48, "experts": 5, **static}, MANY,
                  hopper().capabilities)  # fmt: skip


@pytest.mark.parametrize("tile", [8, 128])
def test_grouped_linear_matches_the_reference_for_any_routing(
    tile: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, fakes.deep_gemm(tile=tile), *GEMM)
    noise = torch.Generator().manual_seed(3)
    weight = torch.randn(5, 48, 64, generator=noise).bfloat16()
    bias = torch.randn(5, 48, generator=noise).bfloat16()
    packed = PackedWeight("plain", tuple(weight.shape), weight, weight.nbytes)
    kernel, call = DeepGemmGroupedLinear(), call_of("grouped_linear", experts=5)
    assert kernel.supports(call) is None
    run, want = kernel.build(call), grouped_linear(call.static, forbid_nested_ops)
    for slots in (
        torch.randint(-1, 5, (70, 3), generator=noise), torch.full((64, 2), 4), torch.full((64, 1), -1),
        torch.zeros(0, 2, dtype=torch.int64),
    ):  # fmt: skip
        x = torch.randn(len(slots), 64, generator=noise).bfloat16()
        for b in (None, bias):
            got = run(x, packed, slots.int(), b)
            wide = replace(packed, data=weight.float())
            expected = want(x.float(), wide, slots.int(), None if b is None else b.float())
            live = (slots >= 0)[..., None]
            torch.testing.assert_close(got.float() * live, expected * live, rtol=2e-2, atol=5e-2)
            assert not got[slots < 0].any()


def test_linear_matches_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, fakes.deep_gemm(), *GEMM)
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((70, 64), (48, 64), (48,)))
    packed = PackedWeight("plain", (48, 64), weight, weight.nbytes)
    run = DeepGemmLinear().build(call_of("linear"))
    for b in (None, bias):
        want = torch.nn.functional.linear(x.float(), weight.float(), None if b is None else b.float())
        torch.testing.assert_close(run(x, packed, b).float(), want, rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float16"}, "computes in bfloat16, not in float16"),
        ({"out": "float32"}, "not in bfloat16 to float32"),
        ({"rows": 33}, "needs rows and columns that are multiples of 8, not 33 x 64"),
    ],
)
@pytest.mark.parametrize("kernel", [DeepGemmLinear(), DeepGemmGroupedLinear()], ids=lambda k: k.op)
def test_unsupported_products_are_refused_with_the_reason(
    kernel: Any, change: Any, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent = "sgl-deep-gemm 0.2.5 or later is not installed; pip install 'evener-backend-cuda[deep-gemm]'"
    assert kernel.supports(call_of(kernel.op)) == absent
    install(monkeypatch, tmp_path, fakes.deep_gemm(), *GEMM)
    assert kernel.supports(call_of(kernel.op)) is None
    assert words in (kernel.supports(call_of(kernel.op, **change)) or "")
