"""Packed weights under Triton's interpreter, against the numbers that their formats say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from interpreted import every_access_checked

from evener.contracts.quant import BLOCKS, MXFP4, QuantFormat, Rounding, WeightPart
from evener.ops.reference.rounding import rounded
from evener.ops.schemas import BUILTIN
from evener_conformance.kit import formats
from evener_conformance.kit.cases import blocks
from evener_conformance.kit.cases.blocks import GROUPED, TABLES, random_part, reference_dequantize, unit_of
from evener_conformance.kit.outcome import Check
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.experts import ExpertAssignment, grouped, sort
from evener_kernels_triton.linear import dequantized, few_tokens_linear
from evener_kernels_triton.packed import PACKED, PackedMatrix
from evener_kernels_triton.packed_experts import packed_grouped
from evener_kernels_triton.plugin import evener_kernels
from evener_kernels_triton.rounded_values import round_values
from evener_kernels_triton.tuning import Tuning

HOST = torch.device("cpu")
SMALL, LARGE = Tuning(4, 48 << 10, False), Tuning(132, 227 << 10, False)
GROUPS = (
    "uint4 by 128", "uint4 by row", "uint4 by 32, zeros", "uint4 by 64, act", "int8 by 64, zeros", "int8 by 128, act",
)  # fmt: skip
STORAGES = (*BLOCKS, MXFP4.storage, *GROUPS, *TABLES)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def random_parts(storages: Sequence[str], columns: int, rows: Sequence[int], seed: int = 0) -> list[WeightPart]:
    draw = torch.Generator().manual_seed(seed)
    return [random_part(storage, count, columns, draw) for storage, count in zip(storages, rows, strict=True)]


def packed(parts: Sequence[WeightPart]) -> PackedMatrix:
    assert PACKED.supports([replace(p, tensors={}) for p in parts], "float32") is None
    made = PACKED.pack(parts, "float32", HOST)
    assert made.nbytes == PACKED.nbytes([replace(p, tensors={}) for p in parts], "float32")
    assert made.shape == (sum(p.rows for p in parts), parts[0].columns)
    matrix: PackedMatrix = made.data
    return matrix


def widths(storage: str) -> tuple[int, ...]:
    """Whole spans of columns, and torn ones where a format's blocks allow them."""
    if storage in TABLES:
        return (256, 3 * unit_of(storage))
    return (512,) if unit_of(storage) == 256 else (256, 96)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_packed_matrix_of_two_parts_has_their_values(storage: str) -> None:
    for columns in widths(storage):
        parts = random_parts([storage] * 2, columns, (20, 13))
        want = torch.cat([reference_dequantize(p) for p in parts])
        with every_access_checked():
            got = dequantized(SMALL, packed(parts), torch.float32)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


#: One form of each way to store numbers, scales and order; the others differ in sizes, which the test above reads all.
QUICK = ("uint4 by 64, act", "int8 by 64, zeros", "uint4 by 32, zeros", "q4_k", "q6_k", "nf4 by 64", "nvfp4")


@pytest.mark.parametrize("storage", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in STORAGES])
def test_products_with_a_packed_matrix_are_those_of_its_values(storage: str) -> None:
    """One token, whose sums are scaled, over columns in several splits; and so many that weights are scaled."""
    columns = 1024 if unit_of(storage) == 256 else 640 if storage in TABLES else 544
    parts = random_parts([storage] * 2, columns, (19, 14))
    values, matrix = torch.cat([reference_dequantize(p) for p in parts]), packed(parts)
    draw = torch.Generator().manual_seed(7)
    for tuning, tokens, dtype in ((LARGE, 1, torch.float32), (SMALL, 17, torch.float32), (LARGE, 1, torch.bfloat16)):
        x, bias = torch.randn(tokens, columns, generator=draw), torch.randn(33, generator=draw)
        with every_access_checked():
            got = few_tokens_linear(tuning, dtype, x.to(dtype), matrix, bias.to(dtype))
        want = x.to(dtype).float() @ values.T + bias.to(dtype).float()
        assert (got.float() - want).norm() < (1e-5 if dtype is torch.float32 else 1e-2) * want.norm()


@pytest.mark.parametrize("mix", [("q4_k", "q4_k", "q6_k"), ("q5_0", "q5_0", "q8_0"), ("uint4 by 64, act",) * 3])
def test_parts_of_several_types_are_one_weight(mix: tuple[str, ...]) -> None:
    parts = random_parts(mix, 512, (33, 17, 16))
    matrix = packed(parts)
    assert len(matrix.segments) == (3 if "act" in mix[0] else 2), "those that are stored alike are one segment"
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    want = torch.cat([reference_dequantize(p) for p in parts])
    torch.testing.assert_close(few_tokens_linear(LARGE, torch.float32, x, matrix), x @ want.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dequantized(LARGE, matrix, torch.float32), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", ["uint4 by 128", "uint4 by 32, zeros", "int8 by 64, zeros"])
def test_scales_of_a_single_group_may_be_transposed_as_gptq_stores_them(storage: str) -> None:
    (part,) = random_parts([storage], GROUPED[storage].group, (20,))
    turned = {
        role: tensor.T.clone(memory_format=torch.contiguous_format).T for role, tensor in part.tensors.items()
    }  # fmt: skip
    got = dequantized(SMALL, packed([replace(part, tensors=turned)]), torch.float32)
    torch.testing.assert_close(got, reference_dequantize(part), rtol=1e-5, atol=1e-6)


def test_packed_means_packed() -> None:
    """No more than a few percent above the files' bytes."""
    for storage in STORAGES:
        (part,) = random_parts([storage], 1024, (16,))
        held = PACKED.nbytes([part], "bfloat16")
        most = 1.09 if part.format.zero else 1.04  # a zero point of four bits has a byte, and a word with its scale
        assert held <= most * part.format.nbytes(16, 1024), storage


def test_a_stack_is_indexed_by_matrix() -> None:
    for storage in ("q6_k", "uint4 by 64, act"):
        matrices = [random_parts([storage], 256, (18,), seed) for seed in range(2)]
        made = PACKED.pack_stack(iter(matrices), 2, "float32", HOST)
        assert made.shape == (2, 18, 256)
        assert made.nbytes == 2 * PACKED.nbytes(matrices[0], "float32")
        for index, parts in enumerate(matrices):
            want = reference_dequantize(parts[0])
            torch.testing.assert_close(dequantized(SMALL, made.data[index], torch.float32), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_each_matrix_of_a_stack_in_act_order_has_its_own_order_of_columns(tokens: int) -> None:
    """Of its two parts, too; rows of x for each token and for each pair, with and without factors."""
    storage = "uint4 by 64, act"
    matrices = [random_parts([storage] * 2, 256, (9, 9), seed) for seed in range(3)]
    stack = PACKED.pack_stack(iter(matrices), 3, "float32", HOST).data
    assert len({tuple(one.order[i].tolist()) for one in stack.segments for i in range(3)}) == 6
    values = torch.stack([torch.cat([reference_dequantize(p) for p in parts]) for parts in matrices])
    draw = torch.Generator().manual_seed(2)
    bias, slots = torch.randn(3, 18, generator=draw), torch.full((tokens, 2), -1, dtype=torch.int32)
    for token in range(tokens):
        slots[token] = torch.randperm(3, generator=draw)[:2]
    slots[0, 0] = -1
    work = sort(SMALL, slots, 3, tokens) if tokens > 16 else ExpertAssignment(slots, None, None)
    own = slots.clamp(min=0).long()
    for share in (True, False):
        x, y = torch.randn(tokens if share else tokens * 2, 256, generator=draw), torch.full((tokens * 2, 18), 5.0)
        factors = torch.rand(x.shape[0], generator=draw) if share else None
        with every_access_checked():
            packed_grouped(SMALL, x, stack, y, work, share=share, bias=bias, factors=factors)
        assert (y[0] == 5.0).all(), "a pair without a matrix is not written"
        x = x if factors is None else x * factors[:, None]
        pairs = x.repeat_interleave(2, 0) if share else x
        want = torch.einsum("pc,prc->pr", pairs, values[own].flatten(0, 1)) + bias[own].flatten(0, 1)
        torch.testing.assert_close(y[1:], want[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("storage", ["q4_k", "uint4 by 32, zeros", "int8 by 64, zeros"])
def test_products_with_a_stack_are_those_of_each_pairs_matrix(storage: str) -> None:
    """One token, whose programs take a pair each; a few, which programs search; and lists."""
    matrices = [random_parts([storage] * 2, 256, (9, 9), seed) for seed in range(3)]
    stack = PACKED.pack_stack(iter(matrices), 3, "float32", HOST).data
    values = torch.stack([torch.cat([reference_dequantize(p) for p in parts]) for parts in matrices])
    draw = torch.Generator().manual_seed(2)
    bias = torch.randn(3, 18, generator=draw)
    for tokens, activation in ((1, "silu"), (3, ""), (3, "clamped_swiglu"), (20, "silu")):
        x, y = torch.randn(tokens, 256, generator=draw), torch.full((tokens * 2, 9 if activation else 18), 5.0)
        slots = torch.stack([torch.randperm(3, generator=draw)[:2] for _ in range(tokens)]).int()
        slots[0, 0] = -1
        work = sort(SMALL, slots, 3, tokens) if tokens > 16 else ExpertAssignment(slots, None, None)
        with every_access_checked():
            grouped(SMALL, x, stack, y, work, share=True, bias=bias, activation=activation, alpha=1.5, limit=2.0)
        assert (y[0] == 5.0).all(), "a pair without a matrix is not written"
        own = slots.clamp(min=0).long()
        want = torch.einsum("tc,tkrc->tkr", x, values[own]) + bias[own]
        if activation == "silu":
            want = torch.nn.functional.silu(want[..., :9]) * want[..., 9:]
        elif activation:
            gate, up = want[..., ::2].clamp(max=2.0), want[..., 1::2].clamp(-2.0, 2.0) + 1
            want = gate * torch.sigmoid(1.5 * gate) * up
        torch.testing.assert_close(y[1:], want.flatten(0, 1)[1:], rtol=1e-4, atol=1e-4)


def test_stacks_that_the_kernel_cannot_read_are_refused() -> None:
    """By the kernel, if they get there: resolution asks before."""
    x, y = torch.zeros(1, 256), torch.zeros(2, 9)
    work = ExpertAssignment(torch.zeros(1, 2, dtype=torch.int32), None, None)
    for parts in (random_parts(["q4_k", "q6_k"], 256, (9, 9)), random_parts(["uint4 by 64, act"], 256, (18,))):
        stack = PACKED.pack_stack(iter([parts]), 1, "float32", HOST).data
        with pytest.raises(ValueError, match="one format"):
            grouped(SMALL, x, stack, y, work, share=True, activation="silu")
        with pytest.raises(ValueError, match="do not fit"):
            grouped(SMALL, x, stack, y[:, :5], work, share=True, activation="silu")


def test_formats_that_the_kernels_cannot_read_are_refused() -> None:
    draw = torch.Generator().manual_seed(0)
    part = random_part("uint4 by 128", 16, 256, draw)
    piece = random_part("uint4 by 128, zeros, act, piece", 16, 256, draw)

    def changed(**what: object) -> WeightPart:
        return replace(part, format=replace(part.format, **what))

    for one, said in (
        (piece, "whole groups"), (changed(zero="int8"), "zero points"), (changed(scale="float32"), "scales"),
        (changed(group=48), "groups"), (changed(group_out=2), "several rows"),
        (WeightPart("p", 16, 64, QuantFormat("bfloat16")), "bfloat16"),
        (random_part("e4m3 by row", 16, 256, draw), "float8_e4m3fn"),
    ):  # fmt: skip
        assert said in (PACKED.supports([part, one], "float32") or "")
    assert "float64" in (PACKED.supports([part], "float64") or "")
    assert set(GROUPS) < set(GROUPED)


def test_tensors_that_do_not_fit_are_refused() -> None:
    (part,) = random_parts(["q4_k"], 256, (16,))
    with pytest.raises(ValueError, match="part"):
        PACKED.pack([replace(part, columns=512)], "float32", HOST)
    (grouped,) = random_parts(["uint4 by 128"], 256, (16,))
    with pytest.raises(ValueError, match="scale"):
        PACKED.pack([replace(grouped, tensors={**grouped.tensors, "scale": torch.ones(16, 3)})], "float32", HOST)
    matrix = packed([part])
    with pytest.raises(ValueError, match="16 x 256"):
        few_tokens_linear(SMALL, torch.float32, torch.ones(1, 512), matrix)


@pytest.mark.parametrize(
    ("op", "kind", "whole"),
    [("linear", "tables", False),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (
         ("grouped_linear", "rounded", False), ("linear", "rounded", False), ("linear", "rounded", True),
         ("grouped_linear", "rounded", True), ("grouped_linear", "act", True),
         ("linear", "tables", True), ("grouped_linear", "tables", True)))],
)  # fmt: skip
def test_the_kit_passes_products_of_four_bits_with_rounded_activations_of_tables_and_of_experts_in_act_order(
    op: str, kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deep and wide matrices of a few blocks; ``whole``: as large as the kit has them."""
    if not whole:
        monkeypatch.setattr(formats, "_DEEP", 640)
        monkeypatch.setattr(formats, "_WIDE", 273)
        monkeypatch.setattr(formats, "_large_parts", formats._large_parts.__wrapped__)  # others keep theirs
    names = [name for name, form in GROUPED.items() if form.activation is not None]
    if kind == "act":
        names = [name for name in GROUPED if name.endswith(", act")]
    elif kind == "tables":
        names = list(TABLES)
    monkeypatch.setattr(formats, "STORAGES", names)
    monkeypatch.setattr(blocks, "STORAGES", names)
    monkeypatch.setattr(blocks, "MIXES", ((names[0],) * 2,))
    device = HostDevice(0)
    (kernel,) = (k for k in evener_kernels(device, {}) if k.op == op and PACKED in k.packings)
    schema = next(s for s in BUILTIN if s.name == op)
    check = Check("formats", op, kernel.name, lambda: ())
    found = list(formats.packing_results(check, kernel, PACKED, schema, device, ["float32"], 3))
    assert not [str(r) for r in found if r.outcome == "failed"]
    assert len([r for r in found if r.outcome == "passed"]) > len(names)


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn"])
def test_activations_are_rounded_as_the_reference_does(storage: str) -> None:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(7, 5000, generator=draw) * torch.logspace(-6, 3, 7)[:, None]
    x[2] = 0.0
    with every_access_checked():
        for wide in (x, x[:, ::2], x[:, :96]):
            rows, factors = round_values(SMALL, wide, Rounding(storage))
            got = rows * factors[:, None]
            torch.testing.assert_close(got, rounded(wide, Rounding(storage)), rtol=1e-6, atol=0)
        x[3, 17] = torch.nan  # sums with it are NaN
        assert bool(round_values(SMALL, x, Rounding(storage))[0][3].isnan().any())
