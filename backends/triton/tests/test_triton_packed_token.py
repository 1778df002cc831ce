"""One token over packed weights of four bits under Triton's interpreter, against the numbers that their formats say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from interpreted import every_access_checked, host_kernels, host_states, schemas

from evener.contracts.quant import QuantFormat, WeightPart
from evener_conformance.kit import families as family_list
from evener_conformance.kit.cases.blocks import TABLES, format_of, random_grouped, random_part, reference_dequantize
from evener_conformance.kit.composites import check_composite
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.linear import few_tokens_linear
from evener_kernels_triton.packed import PACKED, PackedMatrix
from evener_kernels_triton.packed_token import enters_token, packed_token
from evener_kernels_triton.tuning import Tuning

HOST = torch.device("cpu")
SMALL, LARGE = Tuning(1, 48 << 10, False), Tuning(132, 227 << 10, False)
#: A form of scales each, with its columns: whole spans, and torn ones where blocks allow them.
FORMS = {
    "uint4 by 128": (384, 256), "uint4 by row": (300,), "q4_0": (352,), "q4_k": (512,),
    "uint4 by 64": (192,), "uint4 by 64, zeros": (320,), "uint4 by 128, zeros": (256,),
    "nvfp4": (304, 256), "float4_e2m1": (352,), "nf4 by 64": (192, 512), "fp4 by 128": (384,),
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def part(storage: str, rows: int, columns: int, seed: int) -> WeightPart:
    draw = torch.Generator().manual_seed(seed)
    if storage in (*TABLES, "float4_e2m1", "q4_0", "q4_k", "uint4 by 128", "uint4 by row"):
        return random_part(storage, rows, columns, draw)
    group, zero = int(storage.split()[2].strip(",")), "uint8" if "zeros" in storage else None
    return random_grouped(QuantFormat("uint4", group, scale="bfloat16", zero=zero), rows, columns, draw)


def packed(parts: Sequence[WeightPart]) -> PackedMatrix:
    matrix: PackedMatrix = PACKED.pack(parts, "bfloat16", HOST).data
    return matrix


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative to the size of what is wanted."""
    return float((got.float() - want).norm() / want.norm())


#: One form of each way to store numbers. A table of sixteen numbers is looked up in another quick test
#: (``test_triton_tables.py``).
QUICK = ("uint4 by 64, zeros", "q4_k", "nvfp4", "float4_e2m1")


@pytest.mark.parametrize("storage", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FORMS])
def test_a_norm_before_and_an_activation_after_are_in_the_launch(storage: str) -> None:
    """Programs with several tiles of rows, and with one."""
    draw = torch.Generator().manual_seed(7)
    rows = 32 if storage.split()[0] in ("nf4", "fp4") else 9  # a program reads one table
    for columns in FORMS[storage]:
        parts = [part(storage, rows, columns, seed) for seed in range(2)]
        assert enters_token(LARGE, parts, 2, 2) and not enters_token(LARGE, parts, 4, 2), "float32 has more bits"
        values, matrix = torch.cat([reference_dequantize(p) for p in parts]), packed(parts)
        x, gain, bias = (
            torch.randn(*size, generator=draw).bfloat16() for size in ((1, columns), (columns,), (2 * rows,))
        )
        residual = torch.randn(1, columns, generator=draw)
        for tuning in (SMALL, LARGE):
            total = torch.full((1, columns), torch.nan)
            with every_access_checked() as programs:
                got = packed_token(
                    tuning, torch.float32, x, matrix, bias=bias, activation="silu", residual=residual, total=total,
                    gain=gain, eps=0.1, offset=1.0,
                )  # fmt: skip
            stream = x.float() + residual
            normed = stream * (stream.square().mean() + 0.1).rsqrt() * (gain.float() + 1)
            gate, up = (normed @ values.T + bias.float()).chunk(2, 1)
            assert torch.equal(total, stream)
            assert off(got, torch.nn.functional.silu(gate) * up) < 5e-4
            assert set(programs) == {"packed_token_kernel"}


def test_x_loses_less_than_rounding_to_bfloat16_would() -> None:
    """Numbers of one size, and some that are a thousand times as large as their neighbours."""
    draw = torch.Generator().manual_seed(3)
    parts = [part("uint4 by 128", 24, 1280, 1)]
    values, matrix = reference_dequantize(parts[0]).double(), packed(parts)
    x = torch.randn(1, 1280, generator=draw)
    large = x.clone()
    large[0, ::97] *= 1000
    for each in (x.bfloat16(), large.bfloat16(), (x * 1e-20).bfloat16(), (x * 1e20).bfloat16()):
        got = few_tokens_linear(LARGE, torch.float32, each, matrix)
        want = each.double() @ values.T
        assert float((got.double() - want).norm() / want.norm()) < 1e-4, "a bfloat16 loses 1e-3"
    assert not few_tokens_linear(LARGE, torch.float32, torch.zeros(1, 1280).bfloat16(), matrix).any()


def test_a_number_just_below_a_power_of_two_keeps_its_sign() -> None:
    """In 16 bits it would be rounded to the power, which they do not hold."""
    (one,) = parts = [part("uint4 by 128", 16, 128, 1)]
    x, gain = torch.zeros(1, 128).bfloat16(), torch.ones(128)
    x[0, 5], gain[5] = 1.0, 2.0 - 2.0**-20
    got = packed_token(LARGE, torch.float32, x, packed(parts), gain=gain, eps=1.0)
    want = (x.float() * (1 / 128 + 1.0) ** -0.5 * gain) @ reference_dequantize(one).T
    assert off(got, want) < 1e-4


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_infinities_and_nans_make_no_numbers(odd: float) -> None:
    x = torch.ones(1, 128).bfloat16()
    x[0, 77] = odd
    assert not few_tokens_linear(LARGE, torch.float32, x, packed([part("q4_0", 16, 128, 1)])).isfinite().any()


def test_other_weights_have_launches_of_their_own() -> None:
    mixed = [part("q4_k", 16, 256, 0), replace(part("q4_k", 16, 256, 0), format=format_of("q6_k"))]
    assert not enters_token(LARGE, mixed, 2, 1), "six bits"
    two = [part("uint4 by 128", 16, 256, 0), part("uint4 by 128, zeros", 16, 256, 0)]
    assert enters_token(LARGE, two, 2, 1) and not enters_token(LARGE, two, 2, 2), "gate and up are one segment"
    for name in ("uint4 by 64, act", "uint4 by 128, x int8", "uint4 by 32, zeros"):
        assert not enters_token(LARGE, [WeightPart("w", 16, 256, format_of(name))], 2, 1), name
    assert not enters_token(LARGE, [WeightPart("w", 16, 1 << 15, format_of("uint4 by 128"))], 2, 1), "too long"


@pytest.mark.slow
@pytest.mark.parametrize("op", ["attention_block", "mlp_block"])
def test_a_block_with_integers_of_four_bits_agrees_with_its_expansion(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = (k for k in host_kernels(composite=True) if k.op == op)
    linears = [k for k in host_kernels(composite=False) if k.op in ("linear", "grouped_linear")]
    kinds = ("int4 quantized",)
    monkeypatch.setattr(family_list, "STEPS", ((3, 1), (1,), (1,)))
    every = list(schemas().values())
    with every_access_checked() as programs:
        results = check_composite(kernel, every, HostDevice(0), host_states(), linears, ("bfloat16",), kinds=kinds)
    assert not [str(r) for r in results if r.outcome == "failed"]
    assert "passed" in {r.outcome for r in results}
    assert "packed_token_kernel" in programs
