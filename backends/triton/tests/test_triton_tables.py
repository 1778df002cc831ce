"""NVFP4, NF4 and FP4 under Triton's interpreter: every number, scale and table is the one that was stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from interpreted import every_access_checked

from evener.contracts.quant import NVFP4, QuantFormat, QuantScheme, WeightPart
from evener_conformance.kit.cases.blocks import random_table, reference_dequantize
from evener_formats.bitsandbytes import BitsAndBytesScheme
from evener_formats.modelopt import ModelOptScheme
from evener_kernels_triton.experts import grouped
from evener_kernels_triton.linear import dequantized, few_tokens_linear
from evener_kernels_triton.packed import PACKED, PackedMatrix
from evener_kernels_triton.packed_experts import ExpertAssignment
from evener_kernels_triton.tables import MOST, table_words
from evener_kernels_triton.tuning import Tuning

HOST = torch.device("cpu")
SIZES = Tuning(132, 227 << 10, False)
NF4 = QuantFormat("nf4", 64, scale="float32")
FORMS = {"nvfp4": NVFP4, "nf4": NF4, "fp4 by 512": QuantFormat("fp4", 512, scale="float32")}


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def part(form: QuantFormat, rows: int, columns: int, seed: int = 1) -> WeightPart:
    return random_table(form, rows, columns, torch.Generator().manual_seed(seed))


def packed(*parts: WeightPart) -> PackedMatrix:
    bare = [replace(each, tensors={}) for each in parts]
    assert PACKED.supports(bare, "bfloat16") is None
    made = PACKED.pack(parts, "bfloat16", HOST)
    assert made.nbytes == PACKED.nbytes(bare, "bfloat16") == sum(
        tensor.nbytes for one in made.data.segments for tensor in one.tensors()
    )  # fmt: skip
    matrix: PackedMatrix = made.data
    return matrix


def chosen(selector: int, low: int, high: int) -> int:
    """PTX's ``prmt.b32``: a byte of eight for each four bits, or its sign where the fourth of them is set."""
    data, out = [(low | high << 32) >> 8 * i & 255 for i in range(8)], 0
    for i in range(4):
        four = selector >> 4 * i & 15
        out |= (255 * (data[four & 7] >> 7) if four & 8 else data[four & 7]) << 8 * i
    return out


def test_the_words_of_a_table_give_its_numbers_as_the_instructions_look_them_up() -> None:
    table = random_table(NF4, 1, 64, torch.Generator().manual_seed(5)).tensors["table"]
    table = table / table.abs().max()
    words = [word & 0xFFFFFFFF for word in table_words(table).tolist()]
    assert words[:16] == [bits & 0xFFFFFFFF for bits in table.view(torch.int32).tolist()]
    for code in range(16):
        planes = [
            (chosen(code, *words[at : at + 2]) | chosen(code ^ 8, *words[at + 2 : at + 4])) & 255 for at in (16, 20)
        ]
        assert planes[0] * 128 + planes[1] == round(float(table[code]) * MOST) + MOST
        upper, lower = ((chosen(code & 7, *words[at + 2 * (code // 8) :][:2]) & 255) for at in (24, 28))
        bits = torch.tensor(upper << 24 | lower << 16, dtype=torch.int64).to(torch.int32)
        assert bits.view(torch.float32) == table[code].bfloat16()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_all_scales_of_eight_bits_and_signs_are_read(dtype: torch.dtype) -> None:
    """Of one token, of some, and of the matrix in full. A scale that is no number is refused when a checkpoint is
    read."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scale = torch.where(codes % 128 == 127, codes - 1, codes).view(torch.float8_e4m3fn)
    weight = torch.randint(0, 256, (16, 128), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    one = WeightPart("w", 16, 256, NVFP4, {"weight": weight, "scale": scale, "factor": torch.tensor(0.125)})
    matrix, values = packed(one), reference_dequantize(one)
    at = torch.arange(16) * 16 + torch.randperm(16, generator=torch.Generator().manual_seed(2))
    x = torch.zeros(16, 256, dtype=dtype)
    x[torch.arange(16), at] = 1.0
    with every_access_checked():
        assert torch.equal(dequantized(SIZES, matrix, torch.float32), values)
        assert torch.equal(few_tokens_linear(SIZES, torch.float32, x, matrix), values[:, at].T)
        got = torch.cat([few_tokens_linear(SIZES, torch.float32, row[None], matrix) for row in x])
        torch.testing.assert_close(got, values[:, at].T, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    "form", ["nvfp4", *(pytest.param(form, marks=pytest.mark.slow) for form in ("nf4", "fp4 by 512"))]
)
def test_parts_keep_their_own_tables_and_factors(form: str) -> None:
    """Rows that are a multiple of 32 share a launch, others have their own."""
    columns = max(256, FORMS[form].group)
    parts = [part(FORMS[form], rows, columns, rows) for rows in (64, 32, 9, 96, 32)]
    matrix, values = packed(*parts), torch.cat([reference_dequantize(p) for p in parts])
    assert len(matrix.segments) == (1 if form == "nvfp4" else 3)
    for tokens, dtype in ((1, torch.bfloat16), (2, torch.float32)):
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(2)).to(dtype)
        got = few_tokens_linear(SIZES, torch.float32, x, matrix)
        want = x.float() @ values.T
        assert (got - want).norm() < (1e-5 if dtype is torch.float32 else 1e-4) * want.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", [pytest.param("silu", marks=pytest.mark.slow), "clamped_swiglu"])
def test_each_expert_keeps_its_own_tables_and_factors(form: str, activation: str) -> None:
    columns = max(256, FORMS[form].group)
    experts = [[part(FORMS[form], 32, columns, 10 * i + half) for half in range(2)] for i in range(3)]
    stack = PACKED.pack_stack(iter(experts), 3, "float32", HOST)
    assert stack.nbytes == 3 * PACKED.nbytes(experts[0], "float32")
    values = torch.stack([torch.cat([reference_dequantize(p) for p in parts]) for parts in experts])
    draw = torch.Generator().manual_seed(3)
    for tokens in (1, 5):
        x, y = torch.randn(tokens, columns, generator=draw), torch.zeros(tokens * 2, 32)
        slots = torch.stack([torch.randperm(3, generator=draw)[:2] for _ in range(tokens)]).int()
        work = ExpertAssignment(slots, None, None)
        with every_access_checked():
            grouped(SIZES, x, stack.data, y, work, share=True, activation=activation, alpha=1.5, limit=2.0)
        want = torch.einsum("tc,tkrc->tkr", x, values[slots.long()])
        if activation == "silu":
            want = torch.nn.functional.silu(want[..., :32]) * want[..., 32:]
        else:
            gate, up = want[..., ::2].clamp(max=2.0), want[..., 1::2].clamp(-2.0, 2.0) + 1
            want = gate * torch.sigmoid(1.5 * gate) * up
        torch.testing.assert_close(y, want.flatten(0, 1), rtol=1e-4, atol=1e-4)


def cases() -> Iterator[tuple[QuantScheme, WeightPart]]:
    """Weights as checkpoints store them."""
    for scheme in (ModelOptScheme(), BitsAndBytesScheme()):
        for config, headers, tensors in scheme.examples("layer.weight", 3):
            read = Checkpoint(headers, tensors)
            own = scheme.configured(config, read)  # type: ignore[arg-type]
            found = own.part("layer.weight", headers)
            assert found is not None
            if found.format.storage in ("float4_e2m1", "nf4", "fp4"):
                roles = {role: tensors[name] for role, name in own.tensors("layer.weight", headers).items()}
                yield own, replace(found, tensors=roles)


class Checkpoint:
    """The part of a checkpoint that a scheme asks."""

    def __init__(self, headers: object, tensors: dict[str, torch.Tensor]) -> None:
        self.headers, self._tensors = headers, tensors

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def test_two_ranks_have_packed_pieces_of_a_checkpoint_s_weight() -> None:
    seen = []
    for scheme, whole in cases():
        values = scheme.dequantize(whole, "float32")
        x = torch.randn(2, whole.columns, generator=torch.Generator().manual_seed(4))
        middle = {"out": whole.rows // 2, "in": -(-whole.columns // 2 // whole.format.group) * whole.format.group}
        pieces = {}
        for axis, at, size in (("out", middle["out"], whole.rows), ("in", middle["in"], whole.columns)):
            for first, stop in ((0, at), (at, size)):
                cut = scheme.arrange(scheme.cut(whole, axis, first, stop))  # type: ignore[arg-type]
                pieces[axis, first] = packed(cut)
        rows = [few_tokens_linear(SIZES, torch.float32, x, pieces["out", at]) for at in (0, middle["out"])]
        torch.testing.assert_close(torch.cat(rows, 1), x @ values.T, rtol=1e-4, atol=1e-4)
        left, right = x[:, : middle["in"]].contiguous(), x[:, middle["in"] :].contiguous()
        total = few_tokens_linear(SIZES, torch.float32, left, pieces["in", 0])
        total += few_tokens_linear(SIZES, torch.float32, right, pieces["in", middle["in"]])
        torch.testing.assert_close(total, x @ values.T, rtol=1e-4, atol=1e-4)
        seen.append(whole.format.storage)
    assert set(seen) == {"float4_e2m1", "nf4", "fp4"}


@pytest.mark.parametrize("form", FORMS)
def test_packed_means_packed(form: str) -> None:
    """4.5 bits a weight as in the files' tensors, and little for factors and tables."""
    bits = 8 * PACKED.nbytes([WeightPart("w", 4096, 4096, FORMS[form])], "bfloat16") / 4096**2
    assert bits == {"nvfp4": 4.5 + 1 / 128, "nf4": 4.5 + 1 / 128, "fp4 by 512": 4.125 + 1 / 128}[form]


@pytest.mark.parametrize(
    ("form", "columns", "says"),
    [
        (NVFP4, 40, "a multiple of the group size"), (replace(NF4, group=48), 192, "groups of 32"),
        (replace(NF4, scale="float16"), 192, "in float32"), (replace(NF4, order="act"), 192, "in their order"),
        (replace(NF4, zero="uint8"), 192, "in float32"), (replace(NVFP4, scale="float16"), 64, "float4_e2m1"),
    ],
)  # fmt: skip
def test_another_format_is_refused(form: QuantFormat, columns: int, says: str) -> None:
    assert says in (PACKED.supports([WeightPart("w", 16, columns, form)], "float32") or "")


@pytest.mark.parametrize(
    "change",
    [lambda t: {**t, "weight": t["weight"][:-1]}, lambda t: {**t, "weight": t["weight"].to(torch.int8)},
     lambda t: {**t, "scale": t["scale"][:, :-1]}, lambda t: {"weight": t["weight"], "scale": t["scale"]}],
)  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_another_size_or_dtype_are_refused(
    form: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    one = part(FORMS[form], 16, 512)
    with pytest.raises(ValueError, match=r"part is .* not"):
        PACKED.pack([replace(one, tensors=change(dict(one.tensors)))], "bfloat16", HOST)
