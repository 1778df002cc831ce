"""The package's calls against the recorded schemas of torch_npu's releases, with its documentation as plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import npu_reference
import pytest
import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight, QuantFormat, Rounding, WeightPart, plain
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec, StateStep, StateTensor
from evener.contracts.weights import LatentWeights
from evener.errors import EngineError
from evener.ops.reference import basic, experts, linear, norm, rotary
from evener.ops.reference.rounding import rounded
from evener.ops.reference.state import ReferenceState
from evener_backend_ascend import calls
from evener_backend_ascend.blocked_state import BlockedState
from evener_backend_ascend.chip import CHIPS, capabilities
from evener_backend_ascend.kernels import (
    KERNELS,
    NpuAddRmsNorm,
    NpuGroupedLinear,
    NpuRmsNorm,
    NpuRotary,
    NpuRoute,
    NpuSwiGlu,
)
from evener_backend_ascend.prolog import LATENT_WEIGHTS, NpuLatentAttentionBlock, NpuLatentLinear
from evener_backend_ascend.quantized import NpuInt8GroupedLinear, NpuInt8Linear
from evener_backend_ascend.state import LatentState, PagedState

FIXED = Rounding("int8", -1)
#: How activations of int8 products may be rounded.
ACTIVATIONS = (None, Rounding("int8"), FIXED)
A2, OLD, NEW = (next(capabilities(chip) for chip in CHIPS if chip.name == name) for name in ("910b", "310p", "950"))


@pytest.fixture(params=npu_reference.RELEASES, ids=[f"torch_npu-{r}" for r in npu_reference.RELEASES])
def npu(request: pytest.FixtureRequest) -> Iterator[None]:
    """``torch.ops.npu`` with a release's schemas."""
    library = npu_reference.register(request.param)
    yield
    library.close()


@pytest.fixture
def rows() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def check(
    kernel: Any, reference: Any, static: dict[str, Any], *inputs: Any, atol: float = 1e-5,
    device: DeviceCapabilities = A2,
) -> None:  # fmt: skip
    """A kernel gives what the reference gives."""
    call = OpCall(kernel.op, static, Bucket(1, 64), device)
    assert kernel.supports(call) is None
    expected = reference(static, None)(*inputs)
    found = kernel.build(call)(*inputs)
    torch.testing.assert_close(found, expected, rtol=2e-2 if atol > 1e-4 else 1e-5, atol=atol)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_equal_the_reference_L1(npu: None, rows: torch.Generator, dtype: str, offset: float) -> None:
    kind = getattr(torch, dtype)
    static = {"hidden": 32, "eps": 1e-6, "offset": offset, "dtype": dtype}
    x, weight = torch.randn(5, 32, generator=rows).to(kind), torch.randn(32, generator=rows).to(kind)
    atol = 1e-5 if dtype == "float32" else 1e-2
    check(NpuRmsNorm(), norm.rms_norm, static, x, weight, atol=atol)
    check(NpuRmsNorm(), norm.rms_norm, static, x.view(5, 4, 8)[..., :8].reshape(5, 32), weight, atol=atol)
    check(NpuAddRmsNorm(), norm.add_rms_norm, static, x, torch.randn(5, 32, generator=rows), weight, atol=atol)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [16, 8])
def test_rotation_equals_the_reference_L1(npu: None, rows: torch.Generator, interleaved: bool, size: int) -> None:
    static = {"head_dim": 16, "rotary_dim": size, "interleaved": interleaved, "dtype": "float32"}
    query, key = torch.randn(6, 4, 16, generator=rows), torch.randn(6, 2, 16, generator=rows)
    positions, table = torch.arange(6, dtype=torch.int32) + 3, torch.randn(20, size, generator=rows)
    check(NpuRotary(), rotary.rotary, static, positions, query, key, table)


@pytest.mark.parametrize("device", [A2, OLD], ids=["910b", "310p"])
def test_swiglu_equals_the_reference_L1(npu: None, rows: torch.Generator, device: DeviceCapabilities) -> None:
    static = {"inner": 24, "activation": "silu", "dtype": "float32"}
    check(NpuSwiGlu(), basic.act_and_mul, static, torch.randn(5, 48, generator=rows), device=device)
    x = torch.randn(5, 48, generator=rows).half()
    check(NpuSwiGlu(), basic.act_and_mul, {**static, "dtype": "float16"}, x, atol=1e-2, device=device)


@pytest.mark.parametrize(
    ("scoring", "renormalize", "groups", "top_groups", "group_best", "biased"),
    [
        ("softmax", True, 1, 1, 1, False), ("softmax", False, 1, 1, 1, False), ("softmax", False, 4, 2, 1, False),
        ("sigmoid", True, 4, 2, 2, True), ("sigmoid", True, 1, 1, 2, True),
    ],
)  # fmt: skip
def test_routing_equals_the_reference_L1(
    npu: None, rows: torch.Generator, scoring: str, renormalize: bool, groups: int, top_groups: int, group_best: int,
    biased: bool,
) -> None:  # fmt: skip
    static = {
        "experts": 16, "top": 4, "scoring": scoring, "groups": groups, "top_groups": top_groups,
        "group_best": group_best, "renormalize": renormalize, "scale": 2.5,
    }  # fmt: skip
    bias = torch.randn(16, generator=rows) if biased else None
    check(NpuRoute(), experts.route, static, torch.randn(7, 16, generator=rows), bias)


@pytest.mark.parametrize("biased", [False, True])
def test_products_of_experts_equal_the_reference_and_pairs_without_an_expert_are_zero_L1(
    npu: None, rows: torch.Generator, biased: bool
) -> None:
    stack = torch.randn(4, 24, 16, generator=rows)
    weight = PackedWeight("plain", (4, 24, 16), stack, stack.nbytes)
    slots = torch.tensor([[0, 3], [-1, 2], [3, 3], [-1, -1]], dtype=torch.int32)
    static = {"experts": 4, "columns": 16, "rows": 24, "dtype": "float32"}
    bias = torch.randn(4, 24, generator=rows) if biased else None
    x = torch.randn(4, 16, generator=rows)
    check(NpuGroupedLinear(), linear.grouped_linear, static, x, weight, slots, bias, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shared", [False, True], ids=["by row", "by tensor"])
def test_experts_with_int8_weights_equal_dequantized_ones_L1(
    npu: None, rows: torch.Generator, activation: Rounding | None, dtype: str, shared: bool
) -> None:
    kernel, kind = NpuInt8GroupedLinear(), getattr(torch, dtype)
    (packing,) = kernel.packings
    stack = [[int8_part(24, 64, activation, rows, f"{part}{expert}", shared) for part in "gu"] for expert in range(4)]
    packed = packing.pack_stack(stack, 4, dtype, torch.device("cpu"))
    assert packed.shape == (4, 48, 64)
    tensors = [packed.data.codes, packed.data.scales, packed.data.fixed]
    assert packed.nbytes == 4 * packing.nbytes(stack[0], dtype) == sum(t.nbytes for t in tensors if t is not None)
    first = packing.pack(stack[2], dtype, torch.device("cpu"))
    assert all(torch.equal(mine, own) for mine, own in zip(packed.data[2][:2], first.data[:2], strict=True))
    assert len(packed.data[2]) == len(first.data)
    static = {"weight": SimpleNamespace(parts=stack[0]), "experts": 4, "columns": 64, "rows": 48, "dtype": dtype}
    call = OpCall("grouped_linear", static, Bucket(1, 9), A2)
    assert kernel.supports(call) is None
    x, slots = torch.randn(5, 64, generator=rows).to(kind), torch.tensor([[0, 3], [-1, 2], [3, 3], [-1, -1], [1, 0]])
    found = kernel.build(call)(x, packed, slots.int())
    wide = torch.stack([torch.cat([p.tensors["weight"].double() * p.tensors["scale"].double() for p in one])
                        for one in stack])  # fmt: skip
    near = x.double()
    if activation == FIXED:  # the largest scale of all parts of all matrices
        scale = torch.stack([p.tensors["activation_scale"] for one in stack for p in one]).max()
        assert packed.data.fixed is not None and torch.equal(packed.data.fixed[:, 0], scale.expand(4))
        near = near_fixed(x, scale)
    want = torch.einsum("tc,tkrc->tkr", near, wide[slots.clamp_min(0)]).masked_fill((slots < 0)[..., None], 0)
    torch.testing.assert_close(found.double(), want, rtol=3e-2, atol=3e-2)
    assert bool((found[3] == 0).all()) and ((found.double() - want).abs().max() > 1e-4)


def test_310p_multiplies_experts_in_float16_by_multiples_of_sixteen_rows_and_int8_without_rounding_activations_L1(
    npu: None, rows: torch.Generator
) -> None:
    static = {"experts": 4, "columns": 16, "rows": 24, "dtype": "float16"}
    assert "multiple of 16 rows, not 24" in (
        NpuGroupedLinear().supports(OpCall("grouped_linear", static, Bucket(1, 9), OLD)) or ""
    )
    stack = torch.randn(4, 32, 16, generator=rows).half()
    weight = PackedWeight("plain", (4, 32, 16), stack, stack.nbytes)
    slots = torch.tensor([[0, 3], [-1, 2]], dtype=torch.int32)
    x = torch.randn(2, 16, generator=rows).half()
    check(NpuGroupedLinear(), linear.grouped_linear, {**static, "rows": 32}, x, weight, slots, None, atol=2e-2,
          device=OLD)  # fmt: skip
    linear_static = {"rows": 8, "columns": 64, "dtype": "float16", "out": "float16"}
    for activation in ACTIVATIONS:
        part = SimpleNamespace(parts=[int8_part(8, 64, activation, rows)])
        for device in (OLD, A2):
            call = OpCall("linear", {**linear_static, "weight": part}, Bucket(1, 9), device)
            assert NpuInt8Linear().supports(call) is None
            assert NpuInt8Linear().rounds(call, "weight") == (activation is not None and device is A2)


def near_fixed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x rounded to int8 with one scale for all tokens, by the formula."""
    return (x.double() / scale.double()).round().clamp(-127, 127) * scale.double()


def int8_part(
    rows: int, columns: int, how: Rounding | None, noise: torch.Generator, name: str = "w", shared: bool = False
) -> WeightPart:  # fmt: skip
    """``shared``: one scale for the whole tensor, else one a row."""
    codes = torch.randint(-127, 128, (rows, columns), generator=noise, dtype=torch.int8)
    tensors = {"weight": codes, "scale": torch.rand(rows, 1, generator=noise) / 500 + 1e-4}
    if shared:
        tensors["scale"] = torch.rand((), generator=noise) / 500 + 1e-4
    if how == FIXED:  # each part has its own; some numbers are cut off
        tensors["activation_scale"] = (1.5 + torch.rand((), generator=noise) / 2) / 127
    form = QuantFormat("int8", group=-1 if shared else 0, scale="float32", activation=how)
    return WeightPart(name, rows, columns, form, tensors)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["by row", "by tensor"])
def test_products_with_int8_weights_equal_dequantized_ones_L1(
    npu: None, rows: torch.Generator, activation: Rounding | None, dtype: str, biased: bool, shared: bool
) -> None:
    kernel, kind = NpuInt8Linear(), getattr(torch, dtype)
    (packing,) = kernel.packings
    parts = [int8_part(size, 64, activation, rows, f"{size}", shared) for size in (24, 8)]
    assert packing.supports(parts, dtype) is None
    packed = packing.pack(parts, dtype, torch.device("cpu"))
    assert packed.nbytes == packing.nbytes(parts, dtype) == sum(each.nbytes for each in packed.data)
    weight = SimpleNamespace(parts=parts)
    call = OpCall(
        "linear", {"weight": weight, "rows": 32, "columns": 64, "dtype": dtype, "out": dtype}, Bucket(1, 9), A2
    )
    assert kernel.supports(call) is None
    x = torch.randn(7, 64, generator=rows).to(kind)
    x[3] = 0
    bias = torch.randn(32, generator=rows).to(kind) if biased else None
    found = kernel.build(call)(x, packed, bias)
    assert found.dtype == kind and kernel.build(call)(x[:0], packed, bias).shape == (0, 32)
    wide = torch.cat([part.tensors["weight"].double() * part.tensors["scale"].double() for part in parts])
    exact = x.double() @ wide.T + (0 if bias is None else bias.double())
    want = exact
    if activation == FIXED:
        near = near_fixed(x, torch.stack([part.tensors["activation_scale"] for part in parts]).max())
        want = near @ wide.T + (0 if bias is None else bias.double())
    # Half a step of each activation's code, where it is not known; a half's rounding of the result, and of the scale
    # where x has the scale's.
    dynamic = activation == Rounding("int8")
    step = x.double().abs().amax(-1, keepdim=True) / 127 / 2 if dynamic else torch.zeros(7, 1).double()
    allowed = step * wide.abs().sum(1) + (want.abs() + x.double().abs() @ wide.abs().T) * torch.finfo(kind).eps
    assert bool(((found.double() - want).abs() <= allowed + 1e-6).all())
    if activation:
        error = (found.double() - exact).abs().max()
        assert error > 1e-4, "activations were not quantized"


def test_activations_far_below_a_fixed_scale_are_cut_off_at_minus_127_as_by_the_reference_L1(npu: None) -> None:
    """The vendor's own range ends at -128."""
    x = torch.tensor([[-300.0, 300.0, -127.4, -126.6]], dtype=torch.float16)
    codes, scales = torch.eye(4, dtype=torch.int8), torch.ones(4)
    found = calls.int8_matmul(x, codes, scales, None, torch.tensor([1.0, 1.0, -127.0]))
    assert found.tolist() == [[-127.0, 127.0, -127.0, -127.0]]
    assert found.float().equal(rounded(x, FIXED, torch.tensor(1.0)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"zero": "int8"}, "no zero points"), ({"group": 32}, "32 columns x 1 rows share one"),
        ({"storage": "int4"}, "stored as int4"),
        ({"order": "act"}, "stored as int8"), ({"group_out": 128}, "128 rows share one"),
    ],
)  # fmt: skip
def test_int8_weights_of_another_form_are_refused_with_the_reason_L1(change: dict[str, Any], reason: str) -> None:
    (packing,) = NpuInt8Linear.packings
    part = int8_part(8, 64, None, torch.Generator())
    assert reason in (packing.supports([replace(part, format=replace(part.format, **change))], "float16") or "")
    mixed = [part, replace(part, format=replace(part.format, activation=Rounding("int8")))]
    assert packing.supports(mixed, "float16") == "its parts are stored in different formats"
    assert packing.supports([part], "float32") == "computes in float16 or bfloat16, not in float32"
    assert "at most 65535 each" in (packing.supports([replace(part, rows=70000)], "float16") or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8)}, r"x is torch\.float32"),
        ({"codes": torch.zeros(9, 4, dtype=torch.int8)}, r"codes \[9, 4\]"),
        ({"scales": torch.zeros(4, dtype=torch.float16)}, "scales"),
        ({"bias": torch.zeros(5)}, "the bias"),
    ],
)
def test_wrong_operands_of_int8_products_are_errors_L1(npu: None, change: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "x": torch.ones(2, 8, dtype=torch.float16), "codes": torch.ones(8, 4, dtype=torch.int8),
        "scales": torch.ones(4), "bias": None,
    }  # fmt: skip
    with pytest.raises(EngineError, match=r"fixed \[1\]"):
        calls.int8_matmul(**right, fixed=torch.ones(1))
    for product in (calls.int8_matmul, calls.int8_weight_matmul):
        torch.testing.assert_close(product(**right), torch.full((2, 4), 8.0, dtype=torch.float16), rtol=1e-3, atol=0)
        with pytest.raises(EngineError, match=message):
            product(**{**right, **change})


def prolog_arguments(tokens: int = 2, heads: int = 2) -> dict[str, Any]:
    shapes = {
        "x": (tokens, 6144), "down_q": (6144, 1536), "up_q": (1536, heads * 192), "up_keys": (heads, 128, 512),
        "down_kv": (6144, 576), "q_gamma": (1536,), "kv_gamma": (512,), "sin": (tokens, 64), "cos": (tokens, 64),
    }  # fmt: skip
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()} | {"eps": 1e-6}


def test_the_fused_way_into_latent_space_equals_the_reference_but_for_the_order_of_rotated_elements_L1(
    npu: None, rows: torch.Generator
) -> None:
    given, heads = prolog_arguments(tokens=18), 2
    for name, each in given.items():
        if name != "eps" and name not in ("sin", "cos"):
            each.copy_(torch.randn(each.shape, generator=rows) / (each.shape[-2] ** 0.5 if each.dim() > 1 else 1))
    table = torch.randn(99, 64, generator=rows)
    positions = torch.randperm(99, generator=rows)[:18].int()
    cos, sin = table[positions.long()].chunk(2, -1)
    query, turned, latent, key = calls.latent_prolog(**{**given, "cos": torch.cat((cos, cos), -1).bfloat16(),
                                                        "sin": torch.cat((sin, sin), -1).bfloat16()})  # fmt: skip
    x = given["x"].float()

    def normed(y: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.float()

    wide = (normed(x @ given["down_q"].float(), given["q_gamma"]) @ given["up_q"].float()).unflatten(-1, (heads, -1))
    content = torch.einsum("thd,hdr->thr", wide[..., :128], given["up_keys"].float())
    latents, keys = (x @ given["down_kv"].float()).split([512, 64], -1)
    static = {"head_dim": 64, "rotary_dim": 64, "interleaved": True, "dtype": "float32"}
    found = rotary.rotary(static, None)(positions, wide[..., 128:], keys[:, None], table)  # type: ignore[arg-type]
    halves = [torch.cat((each[..., ::2], each[..., 1::2]), -1) for each in found]
    for ours, theirs in (query, content), (latent, normed(latents, given["kv_gamma"])), (turned, halves[0]), (
        key, halves[1][:, 0]
    ):  # fmt: skip
        assert ours.dtype == torch.bfloat16 and ours.shape == theirs.shape
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 6144)}, "not all of its inputs are bfloat16"),
        ({"down_q": torch.zeros(1536, 6144, dtype=torch.bfloat16)}, r"\[1536, 6144\] where it takes \[6144, 1536\]"),
        ({"cos": torch.zeros(2, 32, dtype=torch.bfloat16)}, r"\[2, 32\] where it takes \[2, 64\]"),
        ({"up_keys": torch.zeros(2, 512, 128, dtype=torch.bfloat16).transpose(1, 2)}, "has gaps"),
        (prolog_arguments(heads=3), "3 heads over 6144 elements"),
        ({"x": torch.zeros(2, 96, dtype=torch.bfloat16), "down_q": torch.zeros(96, 1536, dtype=torch.bfloat16),
          "down_kv": torch.zeros(96, 576, dtype=torch.bfloat16)}, "2 heads over 96 elements"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_the_fused_way_into_latent_space_are_errors_L1(
    npu: None, change: dict[str, Any], message: str
) -> None:
    assert calls.latent_prolog(**prolog_arguments())[0].shape == (2, 2, 512)
    with pytest.raises(EngineError, match=message):
        calls.latent_prolog(**{**prolog_arguments(), **change})


#: For each weight of latent attention the rows of its parts, and columns.
LATENT_PARTS = {"down": ((1536, 576), 6144), "q": ((2 * 192,), 1536), "kv_b": ((2 * 256,), 512)}


def bfloat16_parts(rows: tuple[int, ...], columns: int, noise: torch.Generator) -> list[WeightPart]:
    return [
        WeightPart(f"w{n}", n, columns, plain("bfloat16"),
                   {"weight": torch.randn(n, columns, generator=noise).bfloat16()})
        for n in rows
    ]  # fmt: skip


@pytest.mark.parametrize("name", LATENT_PARTS)
def test_products_with_packed_weights_of_latent_attention_equal_plain_ones_L1(
    npu: None, rows: torch.Generator, name: str
) -> None:
    parts = bfloat16_parts(*LATENT_PARTS[name], rows)
    packed = LATENT_WEIGHTS.pack(parts, "bfloat16", torch.device("cpu"))
    assert LATENT_WEIGHTS.supports(parts, "bfloat16") is None
    assert packed.nbytes == LATENT_WEIGHTS.nbytes(parts, "bfloat16") == sum(each.nbytes for each in packed.data)
    count, columns = packed.shape
    static = {"rows": count, "columns": columns, "dtype": "bfloat16", "out": "bfloat16"}
    call = OpCall("linear", static, Bucket(1, 9), A2)
    assert NpuLatentLinear().supports(call) is None
    assert "not for 950" in (NpuLatentLinear().supports(replace(call, device=NEW)) or "")
    x, bias = (torch.randn(size, generator=rows).bfloat16() for size in ((5, columns), (count,)))
    whole = torch.cat([part.tensors["weight"] for part in parts])
    found = NpuLatentLinear().build(call)(x, packed, bias)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, whole, bias), rtol=2e-2, atol=0.5)


def test_other_weights_are_not_packed_for_latent_attention_L1() -> None:
    noise = torch.Generator()
    for sizes in ((1536, 576), 96), ((576, 1536), 6144), ((192 * 3,), 1536), ((300,), 512), ((2112,), 6144):
        assert "DeepSeek V3's sizes" in (LATENT_WEIGHTS.supports(bfloat16_parts(*sizes, noise), "bfloat16") or "")
    assert "not bfloat16 for float16" in (
        LATENT_WEIGHTS.supports(bfloat16_parts(*LATENT_PARTS["q"], noise), "float16") or ""
    )


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({}, A2, None), ({}, NEW, "npu_mla_prolog_v3 for 910b and 910_93, not for 950"),
        ({}, OLD, "310p has no bfloat16"),
        ({"dtype": "float16"}, A2, "in bfloat16, not in float16"), ({"hidden": 5120}, A2, "(6144, 7168, 7680)"),
        ({"q_rank": None}, A2, "no kernel for these sizes"), ({"value_dim": 64}, A2, "no kernel for these sizes"),
        ({"absorb": "none"}, A2, "mla_absorb is none"), ({"interleaved": False}, A2, "rotates neighbours"),
        ({"norm": "layer"}, A2, "after an RMS norm"), ({"layouts": "plain"}, A2, "these sizes or weights"),
        ({"bucket": Bucket(1, 512)}, A2, "up to 256 tokens"),
    ],
)  # fmt: skip
def test_the_fused_latent_attention_refuses_what_its_kernel_does_not_take_with_the_reason_L1(
    change: dict[str, Any], device: DeviceCapabilities, reason: str | None
) -> None:
    static = {
        "dtype": "bfloat16", "hidden": 7168, "q_rank": 1536, "rank": 512, "nope_dim": 128, "rope_dim": 64, "heads": 128,
        "value_dim": 128, "absorb": "absorb-without-precomp", "interleaved": True, "norm": "rms",
    }  # fmt: skip
    change = dict(change)
    layouts = dict.fromkeys(LATENT_PARTS, change.pop("layouts", LATENT_WEIGHTS.layout)) | {"o": "plain"}
    bucket = change.pop("bucket", Bucket(1, 16))
    call = OpCall("latent_attention_block", {**static, **change}, bucket, device, layouts)
    said = NpuLatentAttentionBlock().supports(call)
    assert said is None if reason is None else reason in (said or "")


def test_the_fused_latent_attention_takes_no_bias_and_says_what_serves_it_L1() -> None:
    static = {"hidden": 7168, "dtype": "bfloat16", "eps": 1e-6, "offset": 0.0, "state": SimpleNamespace(provider=None)}
    run = NpuLatentAttentionBlock().build(OpCall("latent_attention_block", static, Bucket(1, 1), A2))
    nothing = torch.zeros(0)
    weights = LatentWeights(*(Any for _ in range(6)), down_bias=nothing)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"takes no bias; set ops\.latent_attention_block=reference"):
        run(nothing, None, nothing, weights, None, None)


def step_of(counts: list[int], lengths: list[int]) -> StateStep:
    """A step whose requests have pages of their own, from block 1 on and in no order."""
    columns = max(-(-n // calls.PAGE) for n in lengths)
    table = torch.zeros(len(counts), columns, dtype=torch.int32)
    free = iter(torch.randperm(40, generator=torch.Generator().manual_seed(1)).add(1).tolist())
    slots, positions = [], []
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for column in range(-(-length // calls.PAGE)):
            table[row, column] = next(free)
        for at in range(length - count, length):
            slots.append(int(table[row, at // calls.PAGE]) * calls.PAGE + at % calls.PAGE)
            positions.append(at)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return StateStep(
        tokens=sum(counts), requests=len(counts), max_query=max(counts), max_kv=max(lengths), query_start=starts,
        kv_lens=torch.tensor(lengths, dtype=torch.int32), positions=torch.tensor(positions, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int32), block_table=table, host_query_lens=counts,
        host_kv_lens=lengths,
    )  # fmt: skip


def compare_state(
    provider: StateProvider, spec: StateSpec, attention: AttentionSpec, rows: torch.Generator,
    device: DeviceCapabilities = A2,
) -> None:  # fmt: skip
    """Prompts of several lengths, then a step that adds one token to each and a piece to one."""
    assert provider.supports(spec, attention, device) is None
    (size,) = provider.block_sizes(spec)
    reference, dtype = ReferenceState(), getattr(torch, attention.dtype)
    ours = provider.bind(torch.empty(42, 0, dtype=torch.uint8), spec, size)
    pool = torch.zeros(42, reference.bytes_per_block(spec, size), dtype=torch.uint8)
    theirs = reference.bind(pool, spec, size)
    for counts, lengths in (([3, 130, 300], [3, 130, 300]), ([1, 1, 1], [4, 131, 301]), ([1, 7, 2], [5, 138, 303])):
        step = step_of(counts, lengths)
        fresh = [torch.randn(step.tokens, *t.shape, generator=rows).to(dtype) for t in spec.tensors]
        query = torch.randn(step.tokens, attention.heads, attention.head_dim, generator=rows).to(dtype)
        found = []
        for each, views in ((provider, ours), (reference, theirs)):
            meta = each.prepare(step, spec, attention, size)
            each.write(views, meta, *fresh)
            found.append(each.attend(views, meta, query))
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    blocks = torch.arange(1, 42, dtype=torch.int32)
    for mine, other in zip(provider.export_blocks(ours, blocks), reference.export_blocks(theirs, blocks), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("kind", "window"), [("full", None), ("window", 9), ("window", 200)])
def test_paged_attention_equals_the_reference_L1(
    npu: None, rows: torch.Generator, dtype: str, kind: str, window: int | None
) -> None:
    tensors = (StateTensor("key", (2, 32), dtype), StateTensor("value", (2, 32), dtype))
    provider = PagedState(calls.causal_mask(torch.device("cpu")))
    spec = StateSpec(kind, tensors, window=window)
    compare_state(provider, spec, AttentionSpec(8, 32, 0.2, dtype=dtype), rows)


def test_latent_attention_equals_the_reference_L1(npu: None, rows: torch.Generator) -> None:
    tensors = (StateTensor("latent", (512,), "bfloat16"), StateTensor("rope", (64,), "bfloat16"))
    provider = LatentState(calls.causal_mask(torch.device("cpu")))
    compare_state(provider, StateSpec("latent", tensors), AttentionSpec(32, 576, 0.05, dtype="bfloat16"), rows)


def test_state_of_310p_equals_the_reference_L1(npu: None, rows: torch.Generator) -> None:
    tensors = (StateTensor("key", (2, 32), "float16"), StateTensor("value", (2, 32), "float16"))
    compare_state(
        BlockedState(), StateSpec("full", tensors), AttentionSpec(8, 32, 0.2, dtype="float16"), rows, device=OLD
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "in float16, not in float32"),
        ({"sinks": True}, "neither sinks"),
        ({"heads": 7}, "no kernel for 7 query heads"),
    ],
)
def test_state_that_310p_cannot_hold_is_refused_with_the_reason_L1(
    npu: None, change: dict[str, Any], reason: str
) -> None:
    tensors = (StateTensor("key", (4, 32), "float16"), StateTensor("value", (4, 32), "float16"))
    wanted = {"heads": 8, "head_dim": 32, "scale": 1.0, "dtype": "float16", **change}
    spec, provider = StateSpec("full", tensors), BlockedState()
    assert reason in (provider.supports(spec, AttentionSpec(**wanted), OLD) or "")
    assert "not for 910b" in (provider.supports(spec, AttentionSpec(**wanted), A2) or "")


def test_without_huaweis_transformer_library_310p_says_what_to_type_L1() -> None:
    tensors = (StateTensor("key", (4, 32), "float16"), StateTensor("value", (4, 32), "float16"))
    reason = BlockedState().supports(StateSpec("full", tensors), AttentionSpec(8, 32, 1.0, dtype="float16"), OLD)
    assert "source /usr/local/Ascend/nnal/atb/set_env.sh" in (reason or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": torch.ones(2, 1, dtype=torch.int64)}, r"table is torch\.int64"),
        ({"kv_lens": torch.ones(2, dtype=torch.int64)}, r"lengths torch\.int64"),
        ({"kv_lens": torch.ones(3, dtype=torch.int32)}, "3 lengths for 2 queries"),
        ({"longest": 200}, "200 tokens in 1 columns"),
        ({"kv_heads": 1}, "for 1 x 32"),
        ({"query": torch.zeros(2, 4, 32)}, r"torch\.float32"),
        ({"keys": torch.zeros(3, 4, 16, 16, dtype=torch.float16)}, "pages"),
    ],
)
def test_wrong_arguments_of_310ps_attention_are_errors_L1(npu: None, change: dict[str, Any], message: str) -> None:
    pages = torch.zeros(3, 4, 128, 16, dtype=torch.float16)
    right: dict[str, Any] = {
        "query": torch.zeros(2, 4, 32, dtype=torch.float16), "keys": pages, "values": pages, "kv_heads": 2,
        "scale": 1.0, "table": torch.ones(2, 1, dtype=torch.int32), "kv_lens": torch.ones(2, dtype=torch.int32),
        "longest": 1,
    }  # fmt: skip
    assert calls.blocked_attention(**right).shape == (2, 4, 32)
    with pytest.raises(EngineError, match=message):
        calls.blocked_attention(**{**right, **change})


def test_wrong_pages_of_310p_are_not_written_L1(npu: None) -> None:
    key, pages, slots = (
        torch.zeros(1, 2, 32, dtype=torch.float16), torch.zeros(3, 4, 128, 16, dtype=torch.float16),
        torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    calls.write_blocked(key, key, pages, pages, slots)
    for given in ((key.float(), key, pages, pages, slots), (key, key, pages[:, :2], pages, slots),
                  (key, key, pages, pages, slots.long())):  # fmt: skip
        with pytest.raises(EngineError, match="_npu_reshape_and_cache"):
            calls.write_blocked(*given)


def attention_arguments() -> dict[str, Any]:
    pages = torch.zeros(3, 128, 2 * 32, dtype=torch.float16)
    return {
        "query": torch.zeros(2, 4, 32, dtype=torch.float16), "keys": pages, "values": pages, "kv_heads": 2,
        "scale": 1.0, "table": torch.ones(2, 1, dtype=torch.int32), "query_ends": [1, 2], "kv_lens": [1, 1],
        "mask": calls.causal_mask(torch.device("cpu")),
    }  # fmt: skip


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mask-dtype": ({"mask": torch.ones(2048, 2048)}, "the mask"),
    "mask-size": ({"mask": torch.ones(8, 8, dtype=torch.int8)}, "the mask"),
    "table-dtype": ({"table": torch.ones(2, 1, dtype=torch.int64)}, "block table is torch.int64"),
    "page-size": ({"keys": torch.zeros(3, 7, 64, dtype=torch.float16)}, "keys"),
    "pages-of-seven": (
        {k: torch.zeros(3, 7, 64, dtype=torch.float16) for k in ("keys", "values")}, r"pages \[3, 7, 64\]",
    ),
    "kv-heads": ({"kv_heads": 3}, "for 3 x 32"),
    "dtypes": ({k: torch.zeros(3, 128, 64) for k in ("keys", "values")}, "torch.float32"),
    "lengths": ({"kv_lens": [1]}, "1 lengths"),
    "query-ends": ({"query_ends": [1, 3]}, "2 tokens, but queries end at"),
    "columns": ({"kv_lens": [1, 200]}, "200 tokens in 1 columns"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_the_vendors_silent_mistakes_are_errors_L1(npu: None, wrong: str) -> None:
    calls.attention(**attention_arguments())
    change, message = WRONG[wrong]
    with pytest.raises(EngineError, match=message):
        calls.attention(**{**attention_arguments(), **change})


def test_a_gamma_of_another_size_or_dtype_is_an_error_L1(npu: None) -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(EngineError, match=r"gamma \[9\] for rows of 8"):
        calls.rms_norm(x, torch.zeros(9), 1e-6)
    with pytest.raises(EngineError, match=r"gamma is torch\.float16"):
        calls.rms_norm(x, torch.zeros(8, dtype=torch.float16), 1e-6)


def test_pages_of_another_size_are_not_written_L1(npu: None) -> None:
    rows, pages = torch.zeros(1, 2, 8), torch.zeros(3, 16, 2, 8)
    with pytest.raises(EngineError, match="pages of 16 tokens, not 128"):
        calls.write_pages(rows, rows, pages, pages, torch.zeros(1, dtype=torch.int32))


def test_a_planted_wrong_argument_is_refused_by_the_schema_L1(npu: None) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)unknown keyword"):
        torch.ops.npu.npu_rms_norm(torch.zeros(2, 8), torch.zeros(8), eps=1e-6)


@pytest.mark.parametrize(
    ("variant", "documented"),
    [
        ("310p", {"rms_norm", "add_rms_norm", "act_and_mul", "grouped_linear"}),
        ("950", {"rms_norm", "add_rms_norm", "act_and_mul", "rotary", "route", "grouped_linear"}),
        ("910_93", {kind.op for kind in KERNELS}), ("unknown", set()),
    ],
)  # fmt: skip
def test_a_chip_gets_the_kernels_that_the_vendor_documents_for_it_L1(variant: str, documented: set[str]) -> None:
    device = replace(OLD, variant=variant)
    static = {"dtype": "float16", "activation": "silu", "rotary_dim": 64, "experts": 16, "groups": 1, "top_groups": 1,
              "scoring": "softmax", "renormalize": True, "group_best": 1, "top": 2, "rows": 32}  # fmt: skip
    reasons = {kind.op: kind().supports(OpCall(kind.op, static, Bucket(1, 1), device)) for kind in KERNELS}
    assert {op for op, reason in reasons.items() if reason is None} == documented
    assert all(f"not for {variant}" in reason for reason in reasons.values() if reason)


def test_950_has_paged_attention_and_neither_latents_nor_int8_L1(npu: None) -> None:
    tensors = (StateTensor("key", (4, 32), "bfloat16"), StateTensor("value", (4, 32), "bfloat16"))
    mask, heads = torch.zeros(0), AttentionSpec(8, 32, 1.0, dtype="bfloat16")
    paged = PagedState(mask).supports(StateSpec("full", tensors), heads, NEW)
    latents = (StateTensor("latent", (512,), "bfloat16"), StateTensor("rope", (64,), "bfloat16"))
    wide = AttentionSpec(32, 576, 1.0, dtype="bfloat16")
    latent = LatentState(mask).supports(StateSpec("latent", latents), wide, NEW)
    assert paged is None and "over latents for 910b and 910_93, not for 950" in (latent or "")
    for kernel in (NpuInt8Linear(), NpuInt8GroupedLinear()):
        assert "not for 950" in (kernel.supports(OpCall(kernel.op, {"dtype": "float16"}, Bucket(1, 1), NEW)) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "computes in float16 or bfloat16, not in float32"),
        ({"softcap": 30.0}, "soft cap"),
        ({"sinks": True}, "neither sinks"),
        ({"heads": 6}, "no kernel for 6 query heads"),
    ],
)
def test_state_that_the_kernel_cannot_read_is_refused_with_the_reason_L1(change: dict[str, Any], reason: str) -> None:
    tensors = (StateTensor("key", (4, 32), "float16"), StateTensor("value", (4, 32), "float16"))
    wanted = {"heads": 8, "head_dim": 32, "scale": 1.0, "dtype": "float16", **change}
    provider = PagedState(torch.zeros(0))
    assert reason in (provider.supports(StateSpec("full", tensors), AttentionSpec(**wanted), A2) or "")
