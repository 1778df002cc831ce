"""The kit's area "formats": its own block formats, what it checks of packings and schemes, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch

from evener.contracts.ops import STATIC_DEFAULTS, Kernel, OpCall, OpFunction, OpSchema
from evener.contracts.quant import (
    BLOCKS,
    MXFP4,
    PackedWeight,
    Packing,
    QuantFormat,
    QuantScheme,
    Rounding,
    WeightPart,
)
from evener.errors import CheckpointError
from evener.loading.scheme import Unquantized
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.rounding import rounded
from evener.ops.schemas import BUILTIN, PRIMITIVES
from evener_conformance.kit import formats as kit_formats
from evener_conformance.kit.cases import blocks as kit_blocks
from evener_conformance.kit.cases.blocks import (
    GROUPED,
    SCALED,
    STORAGES,
    TABLES,
    format_of,
    is_known_format,
    random_part,
    reference_dequantize,
)
from evener_conformance.kit.checklist import ReferenceKernel
from evener_conformance.kit.composites import check_composite
from evener_conformance.kit.formats import packing_results, scheme_results
from evener_conformance.kit.ops import expansion
from evener_conformance.kit.outcome import CaseResult, Check
from evener_conformance.reference.device import HostDevice

SCHEMAS = {schema.name: schema for schema in PRIMITIVES}
#: Formats that the kit combines in one merged weight.
FEW = ("float32", "q8_0", "q4_1")
CHECK = Check("formats", "linear", "mine", lambda: ())


def kernel_results(
    check: Check, kernel: Kernel, schema: OpSchema, device: HostDevice, dtypes: Sequence[str], seed: int,
    schemes: Sequence[QuantScheme] = (),
) -> list[CaseResult]:  # fmt: skip
    """The results of all packings of a kernel."""
    return [
        result for packing in kernel.packings
        for result in packing_results(check, kernel, packing, schema, device, dtypes, seed, schemes)
    ]  # fmt: skip


def stored_bytes(part: WeightPart) -> int:
    """Bytes of a part's tensors, from its format alone."""
    return part.format.nbytes(part.rows, part.columns)


class Stored(Packing):
    """Weights in blocks, kept as they are; ``spoil`` changes the result of ``pack``."""

    layout = "stored"

    def __init__(self, spoil: Callable[[PackedWeight], PackedWeight] = lambda p: p, of: Sequence[str] = ()) -> None:
        self._spoil, self._of = spoil, of or ("float32", *(format_of(storage).storage for storage in STORAGES))

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return None if all(p.format.storage in self._of for p in parts) else "of no use here"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(map(stored_bytes, parts))

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        shape = sum(p.rows for p in parts), parts[0].columns
        formats = tuple(p.format for p in parts)
        return self._spoil(PackedWeight(self.layout, shape, Parts(parts), self.nbytes(parts, dtype), formats))

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return True


class Parts(tuple[Any, ...]):
    """Parts whose tensors the kit can see."""

    def __new__(cls, parts: Sequence[WeightPart]) -> Parts:
        made = super().__new__(cls, [dict(p.tensors) for p in parts])
        made.parts = parts  # type: ignore[attr-defined]
        return made


class Saved(Stored):
    """``Stored`` of q8_0 that a model cache can save; ``spoil_restored`` changes what is restored."""

    def __init__(self, spoil_restored: Callable[[torch.Tensor], torch.Tensor], strict: bool = True) -> None:
        super().__init__(of=("q8_0",))
        self._change, self._strict = spoil_restored, strict

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor]:
        return [part["weight"] for part in packed.data]

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        if self._strict and len(tensors) < len(parts):
            raise ValueError("too few tensors")
        lacking = [torch.zeros(p.rows, p.columns // 32 * 34, dtype=torch.uint8) for p in parts[len(tensors) :]]
        filled = zip(parts, (*tensors, *lacking), strict=True)
        return self.pack([replace(p, tensors={"weight": self._change(t)}) for p, t in filled], dtype, device)


class Widening(Kernel):
    """``linear`` or ``grouped_linear`` over ``Stored``: it dequantizes in each call."""

    name = "widening"

    def __init__(
        self, op: str, packing: Packing, held: Callable[[WeightPart], torch.Tensor] = reference_dequantize
    ) -> None:
        self.op, self.packings, self._held, self._plain = op, (packing,), held, ReferenceKernel(SCHEMAS[op])

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        run, dtype = self._plain.build(call), getattr(torch, call.static["dtype"])

        def matrix(data: Any) -> torch.Tensor:
            return torch.cat([self._held(p) for p in data.parts]).to(dtype)

        def go(x: torch.Tensor, weight: PackedWeight, *rest: Any) -> Any:
            data = matrix(weight.data) if self.op == "linear" else [matrix(each) for each in weight.data]
            return run(x, PackedWeight("plain", weight.shape, data, 0), *rest)

        return go


def results(
    packing: Packing, held: Any = reference_dequantize, op: str = "linear", schemes: Sequence[QuantScheme] = ()
) -> list[CaseResult]:
    kernel = Widening(op, packing, held)
    return list(kernel_results(CHECK, kernel, SCHEMAS[op], HostDevice(0), ["float32"], 3, schemes))


def failures(found: Sequence[CaseResult]) -> str:
    return "\n".join(str(r) for r in found if r.outcome == "failed")


def failed_cases(found: Sequence[CaseResult]) -> list[str]:
    return sorted(r.case for r in found if r.outcome == "failed")


@pytest.mark.parametrize(
    ("op", "whole"),
    [("linear", False),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("grouped_linear", False), ("linear", True), ("grouped_linear", True)))],
)  # fmt: skip
def test_a_correct_packing_is_asked_for_every_format_and_for_merged_weights_of_several(
    op: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:  # deep and wide matrices of a few blocks
        monkeypatch.setattr(kit_formats, "_DEEP", 768)
        monkeypatch.setattr(kit_formats, "_WIDE", 273)
        monkeypatch.setattr(kit_formats, "_large_parts", kit_formats._large_parts.__wrapped__)  # others keep theirs
    found = results(Stored(), op=op)
    assert {r.outcome for r in found} == {"passed"}, failures(found)
    for name in (*STORAGES, "q4_k + q4_k + q6_k"):
        assert any(f" {name}, " in r.case for r in found), name


def test_a_model_cache_must_restore_the_packed_weights() -> None:
    found = results(Saved(lambda tensor: tensor))
    assert {r.outcome for r in found} <= {"passed", "not applicable"}, failures(found)
    assert "saved gives other tensors of what restored made" in failures(results(Saved(lambda tensor: tensor ^ 1)))
    assert "it should raise ValueError" in failures(results(Saved(lambda tensor: tensor, strict=False)))


def test_a_wrong_dequantization_is_reported_with_the_format_name() -> None:
    def wrong(part: WeightPart) -> torch.Tensor:
        return reference_dequantize(part) * (1.1 if part.format.storage == "q5_k" else 1)

    found = [r for r in results(Stored(of=("q4_k", "q5_k")), wrong) if r.outcome == "failed"]
    assert found and all("q5_k" in r.case and "elements differ" in r.detail for r in found)


def rolled(part: WeightPart, role: str, axis: int) -> WeightPart:
    """A part whose ``role`` is one place further along ``axis``; unchanged if it has no such tensor."""
    if role not in part.tensors:
        return part
    return replace(part, tensors={**part.tensors, role: part.tensors[role].roll(1, axis)})


def with_tensor(part: WeightPart, role: str, change: Callable[[torch.Tensor], torch.Tensor]) -> WeightPart:
    """A part with another tensor for ``role``; unchanged if it has none."""
    return replace(part, tensors={**part.tensors, role: change(part.tensors[role])}) if role in part.tensors else part


def doubled(table: torch.Tensor) -> torch.Tensor:
    """A table whose last number is twice as large."""
    return torch.cat((table[:-1], 2 * table[-1:]))


def of_the_even_group(scale: torch.Tensor) -> torch.Tensor:
    """Scales of pairs of groups, as of groups of twice the size."""
    return scale[:, ::2].repeat_interleave(2, 1)[:, : scale.shape[1]]


def of_the_block_before(scale: torch.Tensor, axis: int) -> torch.Tensor:
    """Scales of blocks, the last of which has that of its neighbour along ``axis``."""
    last = scale.shape[axis] - 1
    index = torch.arange(last + 1).clamp(max=max(0, last - 1))
    return scale.index_select(axis, index)


#: What a kernel for numbers with scales, for integers in groups or for numbers of a table may get wrong, and a storage
#: of ``SCALED``, ``GROUPED`` or ``TABLES`` in which that shows.
FAULTS: dict[str, tuple[str, Callable[[WeightPart], WeightPart]]] = {
    "scales of the next group": ("uint4 by 32, zeros", lambda p: rolled(p, "scale", 1)),
    "scales of the next row": ("uint4 by row", lambda p: rolled(p, "scale", 0)),
    "zero points of the next group": ("uint4 by 32, zeros", lambda p: rolled(p, "zero", 1)),
    "zero points less one": ("uint4 by 32, zeros", lambda p: with_tensor(p, "zero", lambda z: z - (z > 0).to(z.dtype))),
    "no zero points": ("uint4 by 32, zeros", lambda p: with_tensor(p, "zero", lambda z: z * 0 + 8)),
    "zero points of eight bits left out": ("int8 by 64, zeros", lambda p: with_tensor(p, "zero", lambda z: z * 0)),
    "halves of a byte exchanged": ("uint4 by 128", lambda p: with_tensor(p, "weight", lambda w: w >> 4 | w << 4)),
    "groups in the order of the columns": (
        "uint4 by 64, act", lambda p: with_tensor(p, "group_index", lambda g: g.sort().values)
    ),
    "the index of eight bits ignored": (
        "int8 by 128, act", lambda p: with_tensor(p, "group_index", lambda g: g.sort().values)
    ),
    "a piece's groups taken as a whole's": (
        "uint4 by 128, zeros, act, piece",
        lambda p: with_tensor(p, "group_index", lambda g: torch.arange(len(g)).int() // p.format.group),
    ),
    "scales of the next block of rows": ("e4m3 by block", lambda p: rolled(p, "scale", 0)),
    "scales of the next block of columns": ("e4m3 by block", lambda p: rolled(p, "scale", 1)),
    "scales of blocks in the order of columns": (
        "e4m3 by block", lambda p: with_tensor(p, "scale", lambda s: s.T.reshape(s.shape))
    ),
    "one scale for all blocks": ("e4m3 by block", lambda p: with_tensor(p, "scale", lambda s: s[:1, :1].expand_as(s))),
    "the last rows with the scale of the block before": (
        "e4m3 by block", lambda p: with_tensor(p, "scale", lambda s: of_the_block_before(s, 0))
    ),
    "the last columns with the scale of the block before": (
        "e4m3 by block", lambda p: with_tensor(p, "scale", lambda s: of_the_block_before(s, 1))
    ),
    "scales of blocks inverted": ("e4m3 by block", lambda p: with_tensor(p, "scale", torch.reciprocal)),
    "E2M1 without signs": ("nvfp4", lambda p: with_tensor(p, "weight", lambda w: w & 0x77)),
    "E2M1's halves of a byte exchanged": ("nvfp4", lambda p: with_tensor(p, "weight", lambda w: w >> 4 | w << 4)),
    "E4M3 scales of the next group": ("nvfp4", lambda p: rolled(p, "scale", 1)),
    "E4M3 scales of the next row": ("nvfp4", lambda p: rolled(p, "scale", 0)),
    "E4M3 scales of 32 columns": ("nvfp4", lambda p: with_tensor(p, "scale", of_the_even_group)),
    "the whole tensor's scale inverted": ("nvfp4", lambda p: with_tensor(p, "factor", torch.reciprocal)),
    "the whole tensor's scale left out": ("nvfp4", lambda p: with_tensor(p, "factor", torch.ones_like)),
    "the table's last number": ("nf4 by 64", lambda p: with_tensor(p, "table", doubled)),
    "the table one place further": ("fp4 by 128", lambda p: with_tensor(p, "table", lambda t: t.roll(1))),
    "a table of eight bits": ("nf4 by 64", lambda p: with_tensor(p, "table", lambda t: (t * 127).round() / 127)),
    "absmax of the next group": ("nf4 by 64", lambda p: rolled(p, "scale", 1)),
    "absmax of 128 columns": ("nf4 by 64", lambda p: with_tensor(p, "scale", of_the_even_group)),
    "the first number of a pair in the upper half": (
        "fp4 by 128", lambda p: with_tensor(p, "weight", lambda w: w >> 4 | w << 4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", ["linear", pytest.param("grouped_linear", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_scales_zero_points_order_or_a_table_is_found(fault: str, op: str) -> None:
    storage, spoil = FAULTS[fault]
    assert without_fault(storage, op) == ""
    wrong = results(Only(storage), lambda part: reference_dequantize(spoil(part)), op)
    found = [r for r in wrong if r.outcome == "failed"]
    assert found and all("elements differ" in r.detail for r in found)


class Only(Stored):
    """``Stored`` of one storage of ``SCALED``, ``GROUPED`` or ``TABLES``."""

    def __init__(self, storage: str) -> None:
        super().__init__()
        self._only = {**SCALED, **GROUPED, **TABLES}[storage]

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return None if all(part.format == self._only for part in parts) else "of no use here"


@cache
def without_fault(storage: str, op: str) -> str:
    """The failures of a correct kernel, which several faults are compared with."""
    return failures(results(Only(storage), op=op))


def other_order(packed: PackedWeight) -> PackedWeight:
    return replace(packed, data=Parts(packed.data.parts[::-1]))


def copied(packed: PackedWeight) -> PackedWeight:
    tensors = ({role: t.clone() for role, t in p.tensors.items()} for p in packed.data.parts)
    return replace(packed, data=Parts([replace(p, tensors=t) for p, t in zip(packed.data.parts, tensors, strict=True)]))


def written(packed: PackedWeight) -> PackedWeight:
    packed.data[0]["weight"].zero_()
    return packed


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (other_order, "elements differ"),
        (copied, "keeps_storage(parts) says that the parts' own storage is kept"),
        (written, "pack changed the tensors of the parts"),
        (lambda packed: replace(packed, nbytes=packed.nbytes + 1), "which the memory plan uses, says"),
        (lambda packed: replace(packed, nbytes=1), "returned nbytes 1, but"),
        (lambda packed: replace(packed, formats=packed.formats[:1]), "returned formats"),
        (lambda packed: replace(packed, layout="other"), "returned layout other"),
        (lambda packed: replace(packed, shape=packed.shape[::-1]), "returned shape"),
    ],
    ids=["order", "copy", "write", "too many bytes", "too few bytes", "formats", "layout", "shape"],
)
def test_a_defect_of_a_packing_is_found(spoil: Callable[[PackedWeight], PackedWeight], found: str) -> None:
    assert found in failures(results(Stored(spoil, FEW)))


@pytest.mark.parametrize("op", ["linear", "grouped_linear"])
@pytest.mark.parametrize(("rows", "columns", "size"), [(None, 4096, "33 x 4352"), (8192, None, "8209 x 32")])
def test_a_kernel_that_drops_the_end_of_a_large_quantized_matrix_is_found(
    op: str, rows: int | None, columns: int | None, size: str
) -> None:
    def held(part: WeightPart) -> torch.Tensor:
        values = torch.zeros(part.rows, part.columns)
        values[:rows, :columns] = reference_dequantize(part)[:rows, :columns]
        return values

    found = failed_cases(results(Stored(of=("q8_0", "q4_1")), held, op=op))
    assert found == [f"2 tokens, {storage}, {size}, in stored" for storage in ("q4_1", "q8_0")]


class Dequantizing(Kernel):
    """An MLP block over ``Stored`` weights, whose numbers it reads ``factor`` times too large."""

    op, name, non_default = "mlp_block", "dequantizing", frozenset(STATIC_DEFAULTS)

    def __init__(self, packing: Packing, factor: float) -> None:
        self.packings, self._factor = (packing,), factor

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        schemas = {schema.name: schema for schema in BUILTIN}
        run = load_reference(schemas["mlp_block"])(call.static, expansion(schemas))

        def plain(weight: PackedWeight) -> PackedWeight:
            numbers = torch.cat([reference_dequantize(p) for p in weight.data.parts]) * self._factor
            return PackedWeight("plain", weight.shape, numbers, 0)

        return lambda x, residual, w: run(x, residual, w._replace(gate_up=plain(w.gate_up), down=plain(w.down)))


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "passed"), (1.02, "failed")])
def test_a_composite_is_checked_with_weights_in_blocks_if_its_packing_takes_them(factor: float, outcome: str) -> None:
    packing = Stored(of=("q8_0",))
    kernel, linear = Dequantizing(packing, factor), Widening("linear", packing)
    found = check_composite(kernel, BUILTIN, HostDevice(0), [], [linear], ["float32"], ("quantized",))
    assert [(r.outcome, r.case.partition(" layers")[0]) for r in found] == [(outcome, "quantized")], found
    none = Dequantizing(Stored(of=("q4_0",)), factor)
    assert check_composite(none, BUILTIN, HostDevice(0), [], [linear], ["float32"], ("quantized",)) == []


def test_a_quantized_product_without_a_bias_that_rounds_its_float32_result_is_found() -> None:
    class Rounded(Widening):
        def build(self, call: OpCall) -> OpFunction:
            run = super().build(call)
            return lambda x, weight, bias: (
                run(x, weight, bias) if bias is not None else run(x, weight).bfloat16().float()
            )

    kernel = Rounded("linear", Stored(of=("q8_0",)))
    found = failed_cases(list(kernel_results(CHECK, kernel, SCHEMAS["linear"], HostDevice(0), ["float32"], 3)))
    assert found == ["5 tokens, q8_0, 33 x 64, in stored, no bias, out=float32"]


@pytest.mark.parametrize("rounds", [False, True], ids=["weights", "results too"])
def test_a_product_in_bfloat16_may_round_quantized_weights_but_not_its_float32_result(rounds: bool) -> None:
    class Rounding(Widening):
        def build(self, call: OpCall) -> OpFunction:
            out, run = getattr(torch, call.static.get("out") or call.static["dtype"]), super().build(call)
            plain = self._plain.build(replace(call, static={**call.static, "dtype": "float32", "out": "float32"}))

            def go(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
                if out != torch.float32 or bias is not None:
                    made: torch.Tensor = run(x, weight, bias)
                    return made
                rounded = torch.cat([self._held(p) for p in weight.data.parts]).bfloat16().float()
                made = plain(x.float(), PackedWeight("plain", weight.shape, rounded, 0))
                return made.bfloat16().float() if rounds else made

            return go

    kernel = Rounding("linear", Stored(of=("q8_0", "q4_k")))
    found = list(kernel_results(CHECK, kernel, SCHEMAS["linear"], HostDevice(0), ["bfloat16"], 3))
    wrong = [r for r in found if r.outcome == "failed"]
    assert bool(wrong) == rounds
    assert all("out=float32" in r.case and "was rounded to bfloat16" in r.detail for r in wrong)


@pytest.mark.parametrize("op", ["linear", "grouped_linear"])
def test_a_kernel_is_asked_with_the_layout_in_the_declared_weight_as_resolution_asks(op: str) -> None:
    class Asking(Widening):
        def supports(self, call: OpCall) -> str | None:
            assert call.static["weight"].layout == call.layouts["weight"] == "stored"
            return None

    kernel = Asking(op, Stored(of=("q8_0",)))
    found = list(kernel_results(CHECK, kernel, SCHEMAS[op], HostDevice(0), ["float32"], 3))
    assert "passed" in {r.outcome for r in found} and not failed_cases(found)


def test_large_quantized_matrices_are_checked_in_the_first_dtype_that_takes_them() -> None:
    packing = Stored(of=("q8_0",))
    packing.supports = lambda parts, dtype: (  # type: ignore[method-assign]
        "not in float32" if dtype == "float32" else Stored.supports(packing, parts, dtype)
    )
    dtypes = ["float32", "bfloat16", "float16"]
    kernel = Widening("linear", packing)
    found = list(kernel_results(CHECK, kernel, SCHEMAS["linear"], HostDevice(0), dtypes, 3))
    assert {r.dtype for r in found if r.outcome == "passed" and "33 x 4352" in r.case} == {"bfloat16"}


class Last(Stored):
    """Its stack holds only the last matrix."""

    def pack_stack(self, matrices: Any, count: int, dtype: str, device: torch.device) -> PackedWeight:
        packed = super().pack_stack(matrices, count, dtype, device)
        return replace(packed, data=packed.data[-1:] * count)


def test_a_stack_of_one_matrix_only_is_found() -> None:
    assert "elements differ" in failures(results(Last(of=FEW), op="grouped_linear"))


def test_a_packing_that_supports_no_known_format_fails() -> None:
    packing = Stored()
    asked = iter(range(100_000))
    reason = "on Sundays only"
    packing.supports = lambda parts, dtype: reason if next(asked) else "a rare reason"  # type: ignore[method-assign]
    assert failures(results(packing)).endswith(
        "stored accepts no format that the kit has, so it could not be checked: on Sundays only"
    )


class Halves(Unquantized):
    """A scheme of its own: 8-bit integers, one scale for four columns."""

    name = "halves"
    form = QuantFormat("halves", group=4, scale="float32", bits=16)

    def detect(self, config: Mapping[str, Any]) -> bool:
        return config.get("quantization_config") == "halves"

    def part(self, name: str, headers: Any) -> WeightPart | None:
        return WeightPart(name, *headers[name][1], self.form) if name in headers else None

    def tensors(self, name: str, headers: Any) -> Mapping[str, str]:
        return {"weight": name, "scale": f"{name}.scale"}

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        scale = part.tensors["scale"].repeat_interleave(4, 1)
        return (part.tensors["weight"].float() * scale).to(getattr(torch, dtype))

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        unit, extent = (1, part.rows) if axis == "out" else (4, part.columns)
        if start % unit or stop % unit or not 0 <= start < stop <= extent:
            raise CheckpointError(f"{start}..{stop} of {extent}: multiples of 4 fit")
        one = super().cut(replace(part, tensors={"weight": part.tensors["weight"]}), axis, start, stop)
        scale = part.tensors["scale"]
        scale = scale[start:stop] if axis == "out" else scale[:, start // 4 : stop // 4]
        return replace(one, tensors={**one.tensors, "scale": scale})

    def examples(self, name: str, seed: int) -> Iterator[Any]:
        random = torch.Generator().manual_seed(seed)
        weight = torch.randint(-128, 128, (6, 12), generator=random, dtype=torch.int8)
        headers = {name: ("int8", (6, 12)), f"{name}.scale": ("float32", (6, 3))}
        scale = torch.rand(6, 3, generator=random) / 256
        yield {"quantization_config": "halves"}, headers, {name: weight, f"{name}.scale": scale}


def scheme_failures(scheme: QuantScheme) -> str:
    found = list(scheme_results(CHECK, scheme, 5))
    assert found
    return failures(found)


@pytest.mark.parametrize("scheme", [Unquantized(), Halves()], ids=lambda s: s.name)
def test_a_correct_scheme_passes(scheme: QuantScheme) -> None:
    assert scheme_failures(scheme) == ""


def test_a_packing_for_a_scheme_s_own_format_is_asked_for_it() -> None:
    scheme, packing = Halves(), Stored()
    packing.supports = lambda parts, dtype: None if parts[0].format == Halves.form else "no"  # type: ignore[method-assign]
    right = results(packing, lambda part: scheme.dequantize(part, "float32"), schemes=[scheme])
    assert failures(right) == "" and any("example 0 of halves" in r.case for r in right if r.outcome == "passed")
    wrong = results(packing, lambda part: scheme.dequantize(part, "float32") * 1.2, schemes=[scheme])
    assert "elements differ" in failures(wrong)


_CUT = Halves.cut


def narrow(self: Halves, part: WeightPart, axis: Any, start: int, stop: int) -> WeightPart:
    """Drops columns that do not fill a group of four."""
    return _CUT(self, part, axis, start, stop - stop % 4)


def wide(self: Halves, part: WeightPart, axis: Any, start: int, stop: int) -> WeightPart:
    """Widens a cut to whole groups."""
    if axis == "out":
        return _CUT(self, part, axis, start, stop)
    return _CUT(self, part, axis, start // 4 * 4, -(-stop // 4) * 4)


DEFECTS: list[tuple[str, Callable[..., Any], str]] = [
    ("examples", lambda self, name, seed: (), "implement QuantScheme.examples"),
    ("detect", lambda self, config: False, "detect(config) of its own example is False"),
    ("part", lambda self, name, headers: None, "of its own example is None"),
    ("part", lambda self, name, headers: WeightPart(name, 6, 12, Halves.form), "of a name that is not stored"),
    ("tensors", lambda self, name, headers: {"weight": "x"}, "which its own example does not hold"),
    ("dequantize", lambda self, part, dtype: part.tensors["weight"].float(), "to bfloat16 gives torch.float32"),
    ("form", replace(Halves.form, bits=8.0), "format.nbytes says 72 bytes"),
    ("cut", narrow, "raised CheckpointError"),
    ("cut", wide, "is cut, but groups along in have 4"),
]


@pytest.mark.parametrize(("name", "wrong", "found"), DEFECTS)
def test_a_defect_of_a_scheme_is_found(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any, found: str) -> None:
    scheme = Halves()
    monkeypatch.setattr(Halves, name, wrong)
    assert found in scheme_failures(scheme)


def test_a_refused_cut_must_name_the_group_size(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Halves.cut

    def terse(self: Halves, part: WeightPart, axis: Any, start: int, stop: int) -> WeightPart:
        try:
            return right(self, part, axis, start, stop)
        except CheckpointError:
            raise CheckpointError("no") from None

    monkeypatch.setattr(Halves, "cut", terse)
    assert "is refused without naming the group size, 4" in scheme_failures(Halves())


def test_random_parts_of_every_block_format_have_rows_of_about_unit_norm() -> None:
    assert set(STORAGES) == {*BLOCKS, MXFP4.storage, *SCALED, *GROUPED, *TABLES}
    for storage in STORAGES:
        part = random_part(storage, 4, 512, torch.Generator().manual_seed(1))
        assert is_known_format(part) and 0.5 < float(reference_dequantize(part).norm(dim=1).mean()) < 2
        assert stored_bytes(part) == sum(t.nbytes for t in part.tensors.values())


def test_a_plain_packing_is_right() -> None:
    reference = ReferenceKernel(SCHEMAS["linear"])
    found = list(kernel_results(CHECK, reference, SCHEMAS["linear"], HostDevice(0), ["float32", "bfloat16"], 3))
    assert reference.packings == (PLAIN,) and failures(found) == ""
    assert any(r.outcome == "not applicable" for r in found) and any(r.outcome == "passed" for r in found)


#: (activations, how, fixed scales of all parts of all matrices) to rounded activations.
Round = Callable[[torch.Tensor, Rounding, "torch.Tensor | None"], torch.Tensor]
#: The kit's formats with fixed scales of activations.
FIXED = tuple(name for name, form in SCALED.items() if form.activation is not None and form.activation.group < 0)


def nearest(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    """As the reference: parts and matrices share the largest fixed scale."""
    return rounded(x, how, None if scales is None else scales.max())


class RoundsActivations(Widening):
    """A kernel that rounds the activations of more than 16 tokens with ``how``; ``says``: what ``rounds`` answers."""

    def __init__(self, op: str, how: Round, says: bool = True) -> None:
        super().__init__(op, Stored())
        self._how, self._says = how, says

    def rounds(self, call: OpCall, weight: str) -> bool:
        return self._says and call.bucket.high > 16

    def build(self, call: OpCall) -> OpFunction:
        exact, form = super().build(call), call.static["weight"].parts[0].format.activation

        def run(x: torch.Tensor, weight: PackedWeight, *rest: Any) -> Any:
            if form is None or call.bucket.high <= 16 or not len(x):
                return exact(x, weight, *rest)
            matrices = [weight.data] if self.op == "linear" else list(weight.data)
            scales = [part.tensors["activation_scale"] for each in matrices for part in each.parts if form.group < 0]
            near = self._how(x, form, torch.stack(scales) if scales else None)
            return exact(near.to(x.dtype), weight, *rest)

        return run


def rounding_results(op: str, how: Round, says: bool, monkeypatch: pytest.MonkeyPatch) -> list[CaseResult]:
    """Results of the kit's cases whose activations may be rounded."""
    names = tuple(name for name, form in SCALED.items() if form.activation is not None)
    monkeypatch.setattr(kit_formats, "STORAGES", names)
    monkeypatch.setattr(kit_blocks, "STORAGES", names)
    # The kit's own mixes with fixed scales, and one with blocks.
    fixed = tuple(mix for mix in kit_blocks.MIXES if set(mix) <= set(FIXED))
    monkeypatch.setattr(kit_blocks, "MIXES", ((names[0],) * 2, *fixed))
    kernel = RoundsActivations(op, how, says)
    return list(kernel_results(CHECK, kernel, SCHEMAS[op], HostDevice(0), ["float32", "bfloat16"], 3))


def of_the_next_token(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    """Elements divided by their token's scale, and multiplied with that of the next."""
    factors = x.abs().amax(1, keepdim=True) / x.roll(-1, 0).abs().amax(1, keepdim=True)
    return nearest(x, how, scales) / factors if how.group >= 0 else nearest(x, how, scales)


def of_the_other_group(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    """The scales of groups, in reverse."""
    if how.group <= 0:
        return nearest(x, how, scales)
    most = x.float().unflatten(1, (-1, how.group)).abs().amax(-1)
    return nearest(x, how, scales) * (most.flip(1) / most).repeat_interleave(how.group, 1)


def without_the_fixed_scale(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    return nearest(x, Rounding(how.storage) if how.group < 0 else how, scales)


def of_the_first_part(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    return nearest(x, how, None if scales is None else scales[:1])


def of_the_last_part(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    return nearest(x, how, None if scales is None else scales[-1:])


def of_the_smallest_part(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    return nearest(x, how, None if scales is None else scales.min())


def towards_zero(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    """Integers are cut off."""
    if how.storage != "int8":
        return nearest(x, how, scales)
    most = x.float().abs().amax(1, keepdim=True) / 127 if scales is None else scales.max()
    return (x.float() / most).clamp(-128, 127).trunc() * most


def squared(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    """Multiplied with a fixed scale twice, so 42 to 224 times too small: the product's scale had it already."""
    return nearest(x, how, scales) * (1 if scales is None else scales.max())


def of_each_token(x: torch.Tensor, how: Rounding, scales: torch.Tensor | None) -> torch.Tensor:
    """Numbers that a fixed scale cuts off are not."""
    return x if how.group < 0 else nearest(x, how, scales)


@pytest.mark.parametrize("op", ["linear", pytest.param("grouped_linear", marks=pytest.mark.slow)])
def test_a_kernel_that_rounds_activations_as_the_reference_passes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rounding_results(op, nearest, True, monkeypatch)
    assert not failures(found)
    assert sum(r.case.startswith("37 tokens") and r.outcome == "passed" for r in found) >= 8


#: Faults in the rounding of activations, and formats in which each shows.
ROUNDING_FAULTS: dict[Round, tuple[str, ...]] = {
    of_the_other_group: ("e4m3 by block, x by 128",),
    of_the_next_token: ("e4m3 by block, x by 128", "e4m3 by row, x by token", "int8 by row, x by token"),
    towards_zero: tuple(name for name, form in SCALED.items() if form.activation and form.storage == "int8"),
    **dict.fromkeys((without_the_fixed_scale, squared, of_each_token), FIXED),
}


@pytest.mark.parametrize(
    "fault",
    [of_the_other_group, without_the_fixed_scale,
     *(pytest.param(fault, marks=pytest.mark.slow) for fault in (of_the_next_token, towards_zero, squared,
                                                                 of_each_token))],
    ids=lambda fault: fault.__name__,
)  # fmt: skip
def test_wrongly_rounded_activations_are_found(fault: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ROUNDING_FAULTS[fault]
    found = failed_cases(rounding_results("linear", fault, True, monkeypatch))
    assert all(any(name in case for name in names) for case in found)
    for name in names:
        assert any(case.startswith(f"37 tokens, {name}, ") for case in found), name


@pytest.mark.parametrize(
    ("op", "fault"),
    [("linear", of_the_first_part),
     *(pytest.param(op, fault, marks=pytest.mark.slow) for op, fault in (
         ("linear", of_the_last_part), ("linear", of_the_smallest_part), ("grouped_linear", of_the_first_part),
         ("grouped_linear", of_the_last_part)))],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_the_fixed_scale_of_a_wrong_part_is_found_in_merged_weights_of_every_format(
    op: str, fault: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = failed_cases(rounding_results(op, fault, True, monkeypatch))
    for name in FIXED:
        assert any(case.startswith(f"37 tokens, {' + '.join([name] * 3)}, ") for case in found), name


@pytest.mark.parametrize("says", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_kernel_that_says_otherwise_than_it_rounds_is_found(says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(x: torch.Tensor, how: Rounding, scale: torch.Tensor | None) -> torch.Tensor:
        return x

    found = failed_cases(rounding_results("linear", kept if says else nearest, says, monkeypatch))
    for word in ("x by 128", "x by token", "x fixed"):
        assert any(word in case and case.startswith("37 tokens") for case in found)


@pytest.mark.parametrize("stored", ["q8_0", "nothing"])
def test_the_parts_of_the_dtypes_are_the_results_of_all_and_say_once_that_nothing_is_accepted(stored: str) -> None:
    dtypes, packing = ("float32", "bfloat16"), Stored(of=(stored,))
    kernel = Widening("linear", packing)

    def part_of(only: str | None) -> list[str]:
        schema, device = SCHEMAS["linear"], HostDevice(0)
        return [str(each) for each in packing_results(CHECK, kernel, packing, schema, device, dtypes, 3, only=only)]

    parts = [part_of(dtype) for dtype in dtypes]
    assert sorted(parts[0] + parts[1]) == sorted(part_of(None))
    said = [sum("accepts no format" in result for result in part) for part in parts]
    assert said == [int(stored == "nothing"), 0]
