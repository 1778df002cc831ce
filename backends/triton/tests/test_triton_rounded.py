"""Products of rounded activations under Triton's interpreter, against those of the reference's rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import every_access_checked, host_states
from test_triton_stored import part, values

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Kernel
from evener.contracts.quant import Rounding, WeightPart
from evener.ops.reference.rounding import rounded
from evener.ops.schemas import BUILTIN
from evener_conformance.kit import families as family_list
from evener_conformance.kit import formats
from evener_conformance.kit.cases import blocks
from evener_conformance.kit.composites import check_composite
from evener_conformance.kit.outcome import Check
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton import composites
from evener_kernels_triton.experts import grouped, sort
from evener_kernels_triton.plugin import evener_kernels
from evener_kernels_triton.primitives import act_rows, norm_rows
from evener_kernels_triton.rounded import (
    RoundedRows,
    act_round,
    norm_round,
    round_rows,
    rounded_bytes,
    rounded_linear,
    rounded_product,
    rounds,
)
from evener_kernels_triton.rounded_experts import rounded_grouped
from evener_kernels_triton.scaled import scaled_refusal
from evener_kernels_triton.stored import STORED, Form, StoredMatrix
from evener_kernels_triton.tuning import Tuning

HOST = torch.device("cpu")
SMALL, LARGE = Tuning(4, 48 << 10, False), Tuning(132, 227 << 10, False)
#: (storage, columns and rows that share a scale of the weight, columns that share one of activations).
FORMS = [
    ("float8_e4m3fn", 0, 1, 0), ("float8_e4m3fn", -1, 1, -1), ("float8_e4m3fn", 128, 128, 128),
    ("float8_e4m3fn", 0, 1, 64), ("float8_e4m3fn", 32, 16, 0), ("int8", 0, 1, 0), ("int8", -1, 1, -1),
    ("int8", 128, 128, 128),
]  # fmt: skip
FIXED = 0.011


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def rounding_part(rows: int, columns: int, form: tuple[str, int, int, int], seed: int = 0) -> WeightPart:
    storage, group, high, of_tokens = form
    one = part(rows, columns, storage, group, high, seed)
    more = {"activation_scale": torch.tensor(FIXED * (1 - 0.1 * seed))} if of_tokens < 0 else {}
    return replace(
        one, format=replace(one.format, activation=Rounding(storage, of_tokens)), tensors={**one.tensors, **more}
    )


def packed(parts: list[WeightPart]) -> StoredMatrix:
    assert STORED.supports(parts, "float32") is None
    made = STORED.pack(parts, "float32", HOST)
    assert made.nbytes == STORED.nbytes([replace(p, tensors={}) for p in parts], "float32")
    return made.data


def activations(tokens: int, columns: int, seed: int = 7) -> torch.Tensor:
    """Rows and columns of very different sizes; one row is zero."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=draw) * torch.logspace(-2, 1, tokens)[:, None]
    x[tokens // 2] = 0
    return x * torch.linspace(0.1, 3, columns)


def assert_rows_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Each row by its own size: sums of many products, added in another order."""
    off = (got - want).norm(dim=1)
    assert bool((off <= 1e-4 * want.norm(dim=1)).all()), float((off / want.norm(dim=1)).max())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("columns", [200, 256])
def test_activations_are_rounded_as_by_the_reference(form: tuple[str, int, int, int], columns: int) -> None:
    weight, x = packed([rounding_part(16, columns, form)]), activations(5, columns)
    with every_access_checked():
        made = round_rows(LARGE, x, weight)
    how = weight.activation
    assert how is not None
    wide = how.group if 0 < how.group < columns else columns
    scales = made.scales.T if weight.fixed is None else weight.fixed.expand(5, 1)
    got = made.elements.float() * scales.repeat_interleave(wide, 1)[:, :columns]
    torch.testing.assert_close(got, rounded(x, how, weight.fixed), rtol=0, atol=0)


@pytest.mark.parametrize("tuning", [pytest.param(SMALL, marks=pytest.mark.slow), LARGE], ids=["small", "large"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("tokens", "columns"), [(17, 200), pytest.param(70, 256, marks=pytest.mark.slow)])
def test_products_are_those_of_rounded_activations(
    tuning: Tuning, form: tuple[str, int, int, int], tokens: int, columns: int
) -> None:
    parts = [rounding_part(count, columns, form, seed) for seed, count in enumerate((128, 32))]
    weight, x = packed(parts), activations(tokens, columns)
    assert weight.activation is not None
    bias = torch.randn(160, generator=torch.Generator().manual_seed(1))
    want = rounded(x, weight.activation, weight.fixed) @ torch.cat([values(p) for p in parts]).T + bias
    with every_access_checked():
        got = rounded_linear(tuning, torch.float32, x, weight, bias)
    assert_rows_close(got, want)
    if weight.fixed is not None:
        assert weight.fixed.item() == pytest.approx(FIXED), "the larger of two"


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    "activation", [*(pytest.param(a, marks=pytest.mark.slow) for a in ("", "silu")), "clamped_swiglu"]
)
def test_products_of_experts_are_those_of_rounded_activations(form: tuple[str, int, int, int], activation: str) -> None:
    tokens, columns, experts, top, rows = 20, 256, 3, 2, 64
    matrices = [[rounding_part(rows * (2 if activation else 1), columns, form, seed)] for seed in range(experts)]
    weight = STORED.pack_stack(iter(matrices), experts, "float32", HOST).data
    x, draw = activations(tokens, columns), torch.Generator().manual_seed(3)
    slots = torch.stack([torch.randperm(experts, generator=draw)[:top] for _ in range(tokens)]).int()
    slots[3, 1] = -1
    assert weight.activation is not None
    near = rounded(x, weight.activation, None if weight.fixed is None else weight.fixed.max())
    # The kernel of exact activations, with rounded ones: it has tests of its own.
    want, got = (torch.zeros(tokens * top, rows) for _ in range(2))
    more = {"share": True, "activation": activation, "alpha": 1.7, "limit": 7.0}
    grouped(LARGE, near, weight, want, sort(LARGE, slots, experts, tokens), **more)  # type: ignore[arg-type]
    with every_access_checked():
        rounded_grouped(LARGE, x, weight, got, sort(LARGE, slots, experts, tokens), **more)  # type: ignore[arg-type]
    assert_rows_close(got, want)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("columns", [200, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_norms_and_activations_are_rounded_in_the_same_launch(
    form: tuple[str, int, int, int], columns: int, dtype: torch.dtype
) -> None:
    weight, x = packed([rounding_part(16, columns, form)]), activations(5, columns).to(dtype)
    gain, residual = torch.linspace(0.5, 2, columns).to(dtype), activations(5, columns, 8)
    rows, total = norm_rows(LARGE, x, residual.clone(), gain, 1e-5, 0.0, dtype)
    with every_access_checked():
        made, summed, kept = norm_round(LARGE, x, residual.clone(), gain, 1e-5, 0.0, dtype, weight, keep=True)
        alone, none, _ = norm_round(LARGE, x, None, gain, 1e-5, 0.0, dtype, weight)
        wide = torch.cat([x, x.flip(1)], 1)
        acted = act_round(LARGE, wide, columns, "silu", weight)
    assert torch.equal(kept, rows) and summed is not None and total is not None and torch.equal(summed, total)
    first, _ = norm_rows(LARGE, x, None, gain, 1e-5, 0.0, dtype)
    pairs = ((made, rows), (alone, first), (acted, act_rows(LARGE, wide, columns, "silu")))
    for got, exact in pairs:
        want = round_rows(LARGE, exact, weight)
        assert torch.equal(got.elements.view(torch.uint8), want.elements.view(torch.uint8))
        assert torch.equal(got.scales, want.scales) and got.group == want.group
    assert none is None


def test_a_row_of_rounded_activations_may_be_cut_from_a_wider_one() -> None:
    weight, wide = packed([rounding_part(32, 128, FORMS[0])]), activations(20, 300)
    got = rounded_linear(LARGE, torch.float32, wide[:, 5:133], weight)
    torch.testing.assert_close(got, rounded_linear(LARGE, torch.float32, wide[:, 5:133].contiguous(), weight))
    assert rounded_linear(LARGE, torch.float32, wide[:0, :128], weight).shape == (0, 32)


def able_device() -> HostDevice:
    """A host that says that its matrix unit multiplies elements of one byte."""
    device = HostDevice(0)
    device.capabilities = replace(device.capabilities, features=frozenset({"fp8", "int8"}))
    return device


def able_kernels(device: HostDevice, *ops: str) -> list[Kernel]:
    return [k for k in evener_kernels(device, {}) if k.op in ops]


#: The kit's formats whose activations may be rounded.
ROUNDING = tuple(name for name, form in blocks.SCALED.items() if form.activation is not None)


@pytest.mark.slow
@pytest.mark.parametrize("names", [ROUNDING[-1:], ROUNDING], ids=["integers", "every format"])
@pytest.mark.parametrize("op", ["linear", "grouped_linear"])
def test_the_kit_passes_products_of_rounded_activations(
    op: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "STORAGES", names)
    monkeypatch.setattr(blocks, "STORAGES", names)
    monkeypatch.setattr(blocks, "MIXES", ((names[0],) * 2,))
    device = able_device()
    (kernel,) = (k for k in able_kernels(device, op) if STORED in k.packings)
    schema = next(s for s in BUILTIN if s.name == op)
    monkeypatch.setattr(kernel, "packings", (STORED,))
    check = Check("formats", op, kernel.name, lambda: ())
    found = [result for packing in kernel.packings
             for result in formats.packing_results(check, kernel, packing, schema, device, ["float32"], 3)]  # fmt: skip
    assert not [str(r) for r in found if r.outcome == "failed"]
    rounding = [r for r in found if r.outcome == "passed" and r.case.startswith("37 tokens")]
    assert len(rounding) == len(names) + 1


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("attention_block", "int8 rounding quantized"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("mlp_block", "float8 rounding quantized"), ("moe_block", "float8 rounding quantized expert"))),
    ],
)  # fmt: skip
def test_the_kit_passes_blocks_that_round_activations(op: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_list, "STEPS", ((17, 5), (1, 1)))
    device = able_device()
    linears = able_kernels(device, "linear", "grouped_linear")
    (kernel,) = able_kernels(device, op)
    results = check_composite(kernel, list(BUILTIN), device, host_states(), linears, ("float32",), kinds=(kind,))
    assert not [str(r) for r in results if r.outcome == "failed"]
    assert "passed" in {r.outcome for r in results}


def judged_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the kit says of a layer that rounds activations to float8 and computes in bfloat16."""
    monkeypatch.setattr(family_list, "STEPS", ((17, 5),))
    device = able_device()
    (kernel,) = able_kernels(device, "mlp_block")
    found = check_composite(
        kernel, list(BUILTIN), device, host_states()[:1], able_kernels(device, "linear"), ("bfloat16",),
        kinds=("float8 rounding quantized",), seed=5,
    )  # fmt: skip
    return [result.outcome for result in found]


def test_the_kit_allows_the_jumps_of_rounding_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged_in_bfloat16(monkeypatch) == ["passed"]


@pytest.mark.parametrize("fault", ["groups", pytest.param("scales", marks=pytest.mark.slow)])
def test_the_kit_finds_wrong_scales_of_activations_in_bfloat16(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = composites.act_round

    def wrong(*args: Any) -> RoundedRows:
        made = right(*args)
        made.scales.copy_(made.scales.roll(1, 1) if fault == "groups" else made.scales * 1.5)
        return made

    monkeypatch.setattr(composites, "act_round", wrong)
    assert judged_in_bfloat16(monkeypatch) == ["failed"]


TORCH = replace(LARGE, float8=True, scaled_rows=True, scaled_blocks=True)


def stand_in(
    x: torch.Tensor, w: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """torch's product with scales of blocks, which it has for some GPUs only, with its rules for them."""
    (tokens, columns), rows = x.shape, w.shape[1]
    assert tokens % 16 == 0 and x.is_contiguous() and w.t().is_contiguous()
    assert (scale_a.shape, scale_a.stride()) == ((tokens, columns // 128), (1, tokens))
    assert (scale_b.shape, scale_b.stride()) == ((columns // 128, rows // 128), (1, columns // 128))
    wide = x.float() * scale_a.repeat_interleave(128, 1)
    return (wide @ (w.float() * scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1))).to(out_dtype)


@pytest.mark.parametrize(
    ("form", "columns", "tokens", "bias"),
    [(FORMS[0], 96, 65, True), (FORMS[1], 96, 65, True),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         (FORMS[2], 512, 66, True), (FORMS[0], 96, 65, False), (FORMS[1], 96, 65, False),
         (FORMS[2], 512, 66, False),
         (FORMS[2], 1024, 80, False), (FORMS[2], 1024, 80, True)
     ))], ids=str,
)  # fmt: skip
def test_many_tokens_are_multiplied_by_the_library_where_the_device_has_the_product(
    form: tuple[str, int, int, int], columns: int, tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, multiply = list[int](), torch._scaled_mm if form[1] <= 0 else stand_in

    def scaled_mm(x: torch.Tensor, w: torch.Tensor, **more: Any) -> torch.Tensor:
        asked.append(len(x))
        return multiply(x, w, **more)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    weight, x = packed([rounding_part(256, columns, form)]), activations(tokens, columns).to(torch.bfloat16)
    added = torch.linspace(-1, 1, 256).to(torch.bfloat16) if bias else None
    want = rounded_linear(LARGE, torch.bfloat16, x, weight, added)
    assert not asked
    got = rounded_linear(TORCH, torch.bfloat16, x, weight, added)
    assert asked == [-(-tokens // 16) * 16 if form[1] > 0 else tokens]
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    # Where one scale is for all tokens and one for all of the weight, the library is also for some fewer.
    for own in (64, 32) if form[1:] == (-1, 1, -1) else (64,):
        before = len(asked)
        few = rounded_linear(TORCH, torch.bfloat16, x[:own], weight, added)
        torch.testing.assert_close(
            few, rounded_linear(LARGE, torch.bfloat16, x[:own], weight, added), rtol=2e-2, atol=2e-2
        )
        assert len(asked) - before == (own == 64 and form[1:] == (-1, 1, -1))
    before = len(asked)
    rounded_linear(TORCH, torch.float32, x[:, :], weight, None)
    rounded_linear(TORCH.with_changes({"stages": 2}), torch.bfloat16, x, weight, added)
    assert len(asked) == before


@pytest.mark.parametrize("parts", [1, 2])
def test_a_fixed_scale_and_one_of_the_weight_are_given_as_one_number_each(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a scale for each part, as query, key and value have, all rows have theirs."""
    given, multiply = [], torch._scaled_mm

    def scaled_mm(x: torch.Tensor, w: torch.Tensor, **more: Any) -> torch.Tensor:
        given.append((tuple(more["scale_a"].shape), tuple(more["scale_b"].shape)))
        return multiply(x, w, **more)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    made = [rounding_part(64, 96, FORMS[1], seed) for seed in range(parts)]
    weight, x = packed(made), activations(65, 96).to(torch.bfloat16)
    want = rounded_linear(LARGE, torch.bfloat16, x, weight)
    torch.testing.assert_close(rounded_linear(TORCH, torch.bfloat16, x, weight), want, rtol=2e-2, atol=2e-2)
    assert given == [((1,), (1,)) if parts == 1 else ((65, 1), (1, 128))]
    again = STORED.restored(STORED.saved(STORED.pack(made, "bfloat16", HOST)), made, 0, "bfloat16", HOST).data
    assert again.one_scale == weight.one_scale == (parts == 1), "also of a cached weight"


def test_parts_with_the_same_scale_are_multiplied_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVIDIA's exporter writes query, key and value."""
    given, multiply = [], torch._scaled_mm

    def scaled_mm(x: torch.Tensor, w: torch.Tensor, **more: Any) -> torch.Tensor:
        given.append((tuple(more["scale_a"].shape), tuple(more["scale_b"].shape)))
        return multiply(x, w, **more)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    made = [rounding_part(64, 96, FORMS[1], seed) for seed in range(2)]
    shared = [replace(p, tensors={**p.tensors, "scale": made[0].tensors["scale"]}) for p in made]
    weight, x = packed(shared), activations(65, 96).to(torch.bfloat16)
    assert weight.one_scale and weight.scales.shape == (128, 1)
    want = rounded_linear(LARGE, torch.bfloat16, x, weight)
    torch.testing.assert_close(rounded_linear(TORCH, torch.bfloat16, x, weight), want, rtol=2e-2, atol=2e-2)
    assert given == [((1,), (1,))]
    stack = STORED.pack_stack([[made[0]], [made[1]]], 2, "bfloat16", HOST).data
    assert stack.one_scale and not STORED.pack_stack([made, made], 2, "bfloat16", HOST).data.one_scale


def test_a_norm_tells_a_fixed_scale_by_token_where_rows_of_the_weight_have_their_own() -> None:
    x, gain = activations(65, 96).to(torch.bfloat16), torch.linspace(0.5, 2, 96).to(torch.bfloat16)
    for parts, tokens, tuning, shape in (
        (2, 65, TORCH, (1, 65)), (2, 64, TORCH, (1,)), (2, 65, LARGE, (1,)), (1, 65, TORCH, (1,))
    ):  # fmt: skip
        weight = packed([rounding_part(64, 96, FORMS[1], seed) for seed in range(parts)])
        assert weight.fixed is not None
        with every_access_checked():
            rows, _, _ = norm_round(tuning, x[:tokens], None, gain, 1e-5, 0.0, torch.bfloat16, weight)
        assert rows.scales.shape == shape and torch.equal(rows.scales, weight.fixed.expand(shape))
        assert rows.group == (0 if len(shape) == 2 else -1)
        bare = rounded_product(LARGE, torch.bfloat16, replace(rows, scales=weight.fixed, group=-1), weight)
        torch.testing.assert_close(rounded_product(tuning, torch.bfloat16, rows, weight), bare, rtol=2e-2, atol=2e-2)


def test_a_plan_has_the_memory_that_the_library_may_take_for_partial_sums() -> None:
    bare = replace(rounding_part(256, 512, FORMS[2]), tensors={})
    weight = LinearWeight("w", (bare,), 256, 512, "bfloat16", layout=STORED.layout)
    allowed = replace(TORCH, scaled_bytes=1 << 30)
    assert rounded_bytes(allowed, 128, weight) - rounded_bytes(TORCH, 128, weight) == 1 << 30
    assert rounded_bytes(allowed, 64, weight) == rounded_bytes(TORCH, 64, weight), "not a product of the library"


@pytest.mark.parametrize(
    ("form", "rows", "columns", "word"),
    [
        (FORMS[3], 256, 512, "one scale for each row"), (FORMS[4], 256, 512, "one scale for each row"),
        (FORMS[5], 256, 512, "float8"), (FORMS[2], 256, 640, "512 columns"), (FORMS[2], 192, 512, "128 rows"),
        (FORMS[0], 24, 512, "multiples of 16"),
    ],
    ids=str,
)  # fmt: skip
def test_the_library_is_not_asked_for_products_that_it_does_not_have(
    form: tuple[str, int, int, int], rows: int, columns: int, word: str
) -> None:
    weight = packed([rounding_part(rows, columns, form)])
    assert word in str(scaled_refusal(TORCH, rows, columns, weight.form, form[3]))
    assert "device" in str(scaled_refusal(LARGE, 256, 512, Form("e4m3"), 0))
    assert "device" in str(scaled_refusal(LARGE, 256, 512, Form("e4m3", 128, 128), 128))


def rounds_weight(
    tuning: Tuning, tokens: int, form: tuple[str, int, int, int], rows: int, columns: int, dtype: str = "bfloat16"
) -> bool:
    """Whether products with a weight of this form are of rounded activations."""
    part = replace(rounding_part(rows, columns, form), tensors={})
    return rounds(tuning, tokens, LinearWeight("w", (part,), rows, columns, dtype, layout=STORED.layout))


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[5]], ids=str)
def test_a_gpu_that_adds_with_few_bits_rounds_no_activations_in_float32(form: tuple[str, int, int, int]) -> None:
    able = replace(LARGE, float8=True, integers=True)
    asked = [rounds_weight(replace(able, ptx=ptx), 64, form, 1024, 512, dtype)
             for ptx, dtype in ((True, "float32"), (True, "bfloat16"), (False, "float32"))]  # fmt: skip
    assert asked == [False, True, True]


def test_activations_are_rounded_only_where_that_is_faster() -> None:
    asked = rounds_weight
    own, block, row = replace(LARGE, float8=True), FORMS[2], FORMS[0]
    assert [asked(own, tokens, block, 512, 512) for tokens in (16, 64, 128, 8192)] == [False, True, False, False]
    assert [asked(own, tokens, block, 1024, 512) for tokens in (64, 1024, 8192)] == [True, True, False]
    assert [asked(own, tokens, row, 512, 512) for tokens in (64, 128, 8192)] == [True, False, True]
    assert all(asked(TORCH, tokens, form, 512, 512) for tokens in (64, 128, 8192) for form in (block, row))
    assert not asked(TORCH, 16, row, 512, 512)
    part = replace(rounding_part(512, 512, block), tensors={})
    stack = LinearWeight("w", (part,), 512, 512, "bfloat16", experts=8, layout=STORED.layout)
    assert [rounds(own, tokens, stack) for tokens in (1, 4, 5, 16)] == [False, False, True, True], "experts"


@pytest.mark.parametrize("storage", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_with_one_scale_are_rounded_in_chunks(storage: str, dtype: torch.dtype) -> None:
    weight, x = packed([rounding_part(16, 5000, (storage, 0, 1, 0))]), activations(3, 5000).to(dtype)
    x[1] = 0
    with every_access_checked():
        got = round_rows(LARGE, x, weight)
    want = rounded(x, Rounding(storage))
    assert torch.equal(got.elements.float() * got.scales.view(-1, 1), want)
