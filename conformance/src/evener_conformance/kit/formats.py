"""Checking quantization formats: a package's packings of stored weights, and its schemes.

A packing is given every format that core knows, merged weights of several formats, and the formats of the schemes'
examples. The kernel must compute with all that it accepts. The expected numbers of a format that core knows are
computed by the kit; for other formats by their scheme's ``dequantize``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCase, OpSchema
from evener.contracts.quant import PackedWeight, Packing, QuantFormat, QuantScheme, WeightPart, plain
from evener.errors import CheckpointError
from evener.plugins.hook_check import check_supports
from evener_conformance.kit.cases.blocks import (
    STORAGES,
    format_mixes,
    format_of,
    is_known_format,
    make_case,
    mixed_parts,
    random_part,
    reference_dequantize,
    unit_of,
)
from evener_conformance.kit.compare import bitwise_equal, join_problems, shares_memory
from evener_conformance.kit.composites import tensors_in
from evener_conformance.kit.fallback_monitor import FallbackMonitor
from evener_conformance.kit.ops import check_case
from evener_conformance.kit.outcome import CaseResult, Check, format_backend_exception, most_common

#: Ops whose weights may have any format.
OPS = ("linear", "grouped_linear")


@dataclass(frozen=True)
class _Size:
    """Tokens of a step, blocks of a row; ``unbiased`` as in ``make_case``."""

    tokens: int
    blocks: int = 0
    unbiased: bool = False
    #: Whether the weight is a scheme's example, whose rows may have any norm.
    any_norm: bool = False


#: Few sizes and many.
_FEW = (_Size(1, 1), _Size(37, 3), _Size(5, 2, unbiased=True))
_MANY = (*_FEW, _Size(2, 5), _Size(9, 2), _Size(130, 4), _Size(33, 1, unbiased=True))
#: Columns of a deep matrix, rows of a wide one, and the tokens of their step; more where activations may be rounded,
#: which kernels do for many tokens.
_DEEP, _WIDE, _LARGE_TOKENS, _ROUNDED_TOKENS = 4352, 8209, 2, 33
#: Rows, and blocks of columns, of a matrix whose scales are in a table of two dimensions; the last rows are no whole
#: block.
_TABLE_ROWS, _TABLE_BLOCKS = 300, 5
_NAME = "layers.0.example.weight"
_DTYPES = ("float32", "bfloat16", "float16")
Matrices = Sequence[tuple[WeightPart, ...]]


@dataclass(frozen=True)
class Example:
    """A scheme's example: a part with its tensors as they are stored, and what it was read from."""

    scheme: QuantScheme
    config: Mapping[str, Any]
    headers: Mapping[str, tuple[str, tuple[int, ...]]]
    stored: Mapping[str, torch.Tensor]
    part: WeightPart

    def dequantized(self) -> torch.Tensor:
        """The part's numbers, [rows, columns] of float32."""
        return self.scheme.dequantize(self.part, "float32")

    @cached_property
    def arranged(self) -> WeightPart:
        """The part as packings get it."""
        return self.scheme.arrange(self.part)


class HeldCheckpoint(Checkpoint):
    """An example as a checkpoint; a key of its config that ends in .json is a file of its own."""

    def __init__(self, config: Mapping[str, Any], headers: Headers, stored: Mapping[str, torch.Tensor]) -> None:
        self.path, self._headers, self._stored = Path("example"), headers, stored
        files = {"config.json": config, **{name: each for name, each in config.items() if name.endswith(".json")}}
        self._texts = {name: json.dumps(each) for name, each in files.items()}

    @property
    def headers(self) -> Headers:
        return self._headers

    def tensor(self, name: str) -> torch.Tensor:
        return self._stored[name]

    def text(self, name: str) -> str | None:
        return self._texts.get(name)


def examples_of(scheme: QuantScheme, seed: int) -> list[Example]:
    """A scheme's examples, as the loader reads them.

    Raises:
        CheckpointError: the scheme says that its own example holds no such part, or names tensors that it lacks.
    """
    found = []
    for config, headers, stored in scheme.examples(_NAME, seed):
        scheme = scheme.configured(config, HeldCheckpoint(config, headers, stored))
        part, roles = scheme.part(_NAME, headers), scheme.tensors(_NAME, headers)
        if part is None:
            raise CheckpointError(f"part({_NAME!r}, …) of its own example is None; its headers name {sorted(headers)}")
        if absent := set(roles.values()) - (headers.keys() & stored.keys()):
            raise CheckpointError(f"tensors(…) names {sorted(absent)}, which its own example does not hold")
        part = replace(part, tensors={role: stored[name] for role, name in roles.items()})
        found.append(Example(scheme, config, headers, stored, part))
    return found


def packing_results(
    check: Check, kernel: Kernel, packing: Packing, schema: OpSchema, device: Device, dtypes: Sequence[str], seed: int,
    schemes: Iterable[QuantScheme] = (), thorough: bool = False, watch: FallbackMonitor | None = None,
    only: str | None = None,
) -> Iterator[CaseResult]:  # fmt: skip
    """Check a packing of a kernel for ``linear`` or ``grouped_linear`` with every format that it accepts, in each
    compute dtype.

    Args:
        packing: one of ``kernel.packings``.
        schemes: their examples add further formats.
        thorough: many sizes instead of a few.
        only: one of ``dtypes``, for its part of the results; all if None.
    """
    # Those that no weight of the kit's own has, also if it could read them.
    own = {format_of(storage) for storage in STORAGES}
    foreign = [
        example for scheme in schemes for example in _readable(scheme, seed)
        if not example.part.format.plain and example.arranged.format not in own
    ]  # fmt: skip

    def held(part: WeightPart) -> torch.Tensor:
        if part.format.plain or part.format in own:
            return reference_dequantize(part)
        return _dequantize_by_scheme(foreign, part)

    refused: list[str] = []
    for dtype in dtypes:
        # The first dtype's part says whether the packing accepts anything at all.
        if only not in (None, dtype) and (only != dtypes[0] or not all(refused)):
            continue
        ready = _PackingCheck(check, kernel, schema, device, dtype, packing, held, watch or FallbackMonitor(device))
        before = dtypes[: dtypes.index(dtype)]
        for name, size, matrices in _asked(schema.name, dtype, before, packing, seed, foreign, thorough):
            if only in (None, dtype):
                yield from ready.results(name, size, matrices)
            refused.append(_refusal(packing, matrices[0], dtype) or "")
    if all(refused) and only in (None, dtypes[0]):
        detail = f"{packing.layout} accepts no format that the kit has, so it could not be checked"
        absent = all("not installed" in reason for reason in refused)
        yield check.result("all", "not applicable" if absent else "failed", f"{detail}: {most_common(refused)}")


def _asked(
    op: str, dtype: str, before: Sequence[str], packing: Packing, seed: int, foreign: Sequence[Example], thorough: bool
) -> Iterator[tuple[str, _Size, Matrices]]:
    """(case name, size, matrices) of a compute dtype. A deep and a wide weight of each storage come in the
    first dtype that the packing takes it in; ``before``: dtypes that come earlier."""
    yield from _weights(op, dtype, seed, foreign, _MANY if thorough else _FEW)
    for storage in STORAGES:
        if not thorough and any(_takes(packing, storage, each, seed) for each in before):
            continue
        tokens = _LARGE_TOKENS if format_of(storage).activation is None else _ROUNDED_TOKENS
        for matrices in _large_weights(storage, seed):
            yield storage, _Size(tokens), matrices


def _takes(packing: Packing, storage: str, dtype: str, seed: int) -> bool:
    """Whether a packing takes a large weight."""
    return any(_refusal(packing, (part,), dtype) is None for part in _large_parts(storage, seed))


def _refusal(packing: Packing, parts: Sequence[WeightPart], dtype: str) -> str | None:
    """Why a packing refuses a weight. Its exception is no refusal: the case reports it."""
    try:
        return check_supports(packing, packing.supports([replace(part, tensors={}) for part in parts], dtype))
    except Exception:
        return None


def _readable(scheme: QuantScheme, seed: int) -> list[Example]:
    """The scheme's examples; none if they cannot be read, which ``scheme_results`` reports."""
    try:
        return examples_of(scheme, seed)
    except Exception:
        return []


def _dequantize_by_scheme(foreign: Sequence[Example], part: WeightPart) -> torch.Tensor:
    def same(example: Example) -> bool:
        own = example.arranged
        return own.format == part.format and all(bitwise_equal(t, part.tensors[r]) for r, t in own.tensors.items())

    return next(filter(same, foreign)).dequantized()


def _weights(
    op: str, dtype: str, seed: int, foreign: Sequence[Example], sizes: Sequence[_Size]
) -> Iterator[tuple[str, _Size, Matrices]]:
    """(case name, size, matrices)."""
    generator = torch.Generator().manual_seed(seed)
    count = 3 if op == "grouped_linear" else 1
    for mix in format_mixes(dtype):
        for size in sizes:
            yield " + ".join(mix), size, [mixed_parts(mix, size.blocks, generator) for _ in range(count)]
    for number, example in enumerate(foreign):
        size = _Size(17, 1, any_norm=True)
        yield f"example {number} of {example.scheme.name}", size, [(example.arranged,)] * count


@cache
def _large_parts(storage: str, seed: int) -> tuple[WeightPart, ...]:
    """A deep and a wide matrix, and one of several blocks along both axes where rows share scales. Plain ones are among
    the op's own cases."""
    generator, unit = torch.Generator().manual_seed(seed), unit_of(storage)
    wide = random_part(storage, _WIDE, unit, generator)
    made = random_part(storage, 33, _DEEP, generator), wide
    if format_of(storage).group_out == 1:
        return made
    return *made, random_part(storage, _TABLE_ROWS, _TABLE_BLOCKS * unit, generator)


def _large_weights(storage: str, seed: int) -> Iterator[Matrices]:
    """The large matrices, each alone; copies, as a packing may change them by mistake."""
    for part in _large_parts(storage, seed):
        yield [(replace(part, tensors={role: t.clone() for role, t in part.tensors.items()}),)]


def _with_small_results(
    case: OpCase, matrices: Matrices, held: Callable[[WeightPart], torch.Tensor]
) -> OpCase:  # fmt: skip
    """The case with activations that are smaller by a power of two, so that results are about normal, as tolerances
    expect: rows of a scheme's example may have any norm."""
    norm = max(float(held(part).norm(dim=1).max()) for parts in matrices for part in parts)
    x, *others = case.inputs
    return replace(case, inputs=(x * 2.0 ** -math.ceil(math.log2(max(1.0, norm))), *others))


class _PackingCheck:
    """One packing of a kernel, in one compute dtype."""

    def __init__(
        self, check: Check, kernel: Kernel, schema: OpSchema, device: Device, dtype: str, packing: Packing,
        held: Callable[[WeightPart], torch.Tensor], watch: FallbackMonitor,
    ) -> None:  # fmt: skip
        self._check, self._kernel, self._schema, self._device, self._dtype = check, kernel, schema, device, dtype
        self._packing, self._held, self._watch = packing, held, watch

    def results(self, name: str, size: _Size, matrices: Matrices) -> Iterator[CaseResult]:
        """Check the packed weight, then what the kernel computes with it."""
        packing, dtype, tokens, unbiased = self._packing, self._dtype, size.tokens, size.unbiased
        rows, columns = sum(p.rows for p in matrices[0]), matrices[0][0].columns
        case = f"{name}, {rows} x {columns}, in {packing.layout}"
        try:
            bare = [replace(p, tensors={}) for p in matrices[0]]
            if reason := check_supports(packing, packing.supports(bare, dtype)):
                yield self._check.result(case, "not applicable", reason, dtype)
                return
            problems = self._problems(bare, matrices)
        except Exception as error:  # the backend's exception is the failure
            problems = [format_backend_exception(error)]
        yield self._check.result(
            f"packing of {case}", "failed" if problems else "passed", join_problems(problems), dtype
        )
        generator = torch.Generator().manual_seed(tokens)
        made = make_case(self._schema.name, matrices, tokens, dtype, generator, unbiased)
        if size.any_norm:
            made = _with_small_results(made, matrices, self._held)
        found = check_case(self._kernel, self._schema, self._device, dtype, made, packing, self._held, self._watch)
        more = ", no bias, out=float32" if unbiased and self._schema.name == "linear" else ", no bias" * unbiased
        yield replace(found, case=f"{tokens} tokens, {case}{more}")

    def _problems(self, bare: Sequence[WeightPart], matrices: Matrices) -> list[str]:
        packing, dtype, where = self._packing, self._dtype, self._device.torch_device
        parts = matrices[0]
        before = [{role: t.clone() for role, t in p.tensors.items()} for p in parts]
        packed, expected = packing.pack(parts, dtype, where), packing.nbytes(bare, dtype)
        shape = (sum(p.rows for p in parts), parts[0].columns)
        formats = tuple(p.format for p in parts)
        problems = self._check_description(packed, "pack", shape, expected, formats)
        problems += self._check_saved(packed, bare, 0)
        if any(
            not bitwise_equal(t, was[role])
            for p, was in zip(parts, before, strict=True)
            for role, t in p.tensors.items()
        ):
            problems.append("pack changed the tensors of the parts, which may be mapped files or shared")
        if self._schema.name == "grouped_linear":
            stack = packing.pack_stack(iter(matrices), len(matrices), dtype, where)
            problems += self._check_description(
                stack, "pack_stack", (len(matrices), *shape), expected * len(matrices), formats
            )
            problems += self._check_saved(stack, bare, len(matrices))
            try:
                stack.data[len(matrices) - 1]
            except (TypeError, IndexError, KeyError):
                problems.append("data of pack_stack cannot be indexed by matrix")
        if packing.keeps_storage(bare) and where.type == "cpu":
            problems += self._check_keeps(packed, parts)
        return problems

    def _check_description(
        self, packed: PackedWeight, by: str, shape: tuple[int, ...], nbytes: int, formats: tuple[QuantFormat, ...]
    ) -> list[str]:
        """Compare the attributes of what ``pack`` returns with what was announced and with the tensors."""
        facts = (
            ("layout", packed.layout, self._packing.layout),
            ("shape", tuple(packed.shape), shape),
            ("nbytes", packed.nbytes, nbytes),
            ("formats", packed.formats, formats),
        )
        names = {"nbytes": "nbytes(parts, dtype), which the memory plan uses, says"}
        found = [
            f"{by} returned {what} {have}, but {names.get(what, 'it should be')} {want}"
            for what, have, want in facts
            if have != want
        ]
        held = sum({t.data_ptr(): t.nbytes for t in tensors_in(packed.data)}.values())
        if held > packed.nbytes:
            found.append(f"{by} returned nbytes {packed.nbytes}, but its tensors hold {held}")
        return found

    def _check_saved(self, packed: PackedWeight, bare: Sequence[WeightPart], count: int) -> list[str]:
        """Whether ``restored`` makes the weight again, and notices what is missing."""
        packing, dtype, where = self._packing, self._dtype, self._device.torch_device
        saved = packing.saved(packed)
        if saved is None:
            return []
        again = packing.restored([t.clone() for t in saved], bare, count, dtype, where)
        found = self._check_description(again, "restored", packed.shape, packed.nbytes, packed.formats)
        twice = packing.saved(again) or ()
        if len(twice) != len(saved) or not all(map(bitwise_equal, saved, twice)):
            found.append("saved gives other tensors of what restored made than of what pack made")
        try:
            packing.restored([t.clone() for t in saved[:-1]], bare, count, dtype, where)
            found.append("restored took too few tensors; it should raise ValueError")
        except ValueError:
            pass
        return found

    def _check_keeps(self, packed: PackedWeight, parts: Sequence[WeightPart]) -> list[str]:
        """A copy although ``keeps_storage`` promises none."""
        if any(p.format.plain and p.format != plain(self._dtype) for p in parts):
            return []  # it is converted first, which copies
        stored, held = [t for p in parts for t in p.tensors.values()], list(tensors_in(packed.data))
        # Beside plain parts there may be more, such as codes of them.
        kept, among = (stored, held) if all(p.format.plain for p in parts) else (held, stored)
        if not held or all(shares_memory(t, among) for t in kept):
            return []
        return ["keeps_storage(parts) says that the parts' own storage is kept, and pack made a copy"]


def scheme_results(check: Check, scheme: QuantScheme, seed: int) -> Iterator[CaseResult]:
    """Check a scheme with its own examples: what it reads, the numbers, and its cuts against slices of the numbers."""
    try:
        examples = examples_of(scheme, seed)
    except Exception as error:  # the scheme's exception is the failure
        yield check.result("examples", "failed", format_backend_exception(error))
        return
    if not examples:
        yield check.result(
            "examples", "failed", "it gives none, so it could not be checked; implement QuantScheme.examples"
        )
    for number, example in enumerate(examples):
        form = example.part.format
        name = f"example {number}: {form.storage}, {example.part.rows} x {example.part.columns}"
        aspects: tuple[tuple[str, Callable[[Example], Iterator[str]]], ...] = (
            ("reading", _reading), ("numbers", _numbers), ("cuts along out", _cuts_out), ("cuts along in", _cuts_in),
        )  # fmt: skip
        for aspect, find in aspects:
            try:
                problems = list(find(example))
            except Exception as error:  # the scheme's exception is the failure
                problems = [format_backend_exception(error)]
            yield check.result(f"{aspect}, {name}", "failed" if problems else "passed", join_problems(problems))


def _reading(example: Example) -> Iterator[str]:
    scheme, part = example.scheme, example.part
    if not scheme.detect(example.config):
        yield "detect(config) of its own example is False"
    if (absent := scheme.part("no.such.weight", example.headers)) is not None:
        yield f"part() of a name that is not stored is {absent}, not None"
    if min(part.rows, part.columns) < 1:
        yield f"part() says {part.rows} rows and {part.columns} columns"
    held = sum(t.nbytes for t in example.arranged.tensors.values())
    if part.format.nbytes(part.rows, part.columns) != held:
        yield f"format.nbytes says {part.format.nbytes(part.rows, part.columns)} bytes, and its tensors hold {held}"


def _numbers(example: Example) -> Iterator[str]:
    part, held = example.part, example.dequantized()
    if tuple(held.shape) != (part.rows, part.columns):
        yield f"dequantize gives the shape {list(held.shape)}, not {[part.rows, part.columns]}"
        return
    if not held.isfinite().all() or len(held.unique()) < 4:
        yield "its numbers are not finite, or almost all equal, so the example shows nothing"
    yield from _compare_arranged(example, part, held)
    for dtype in _DTYPES:
        made, wanted = example.scheme.dequantize(part, dtype), getattr(torch, dtype)
        if made.dtype != wanted:
            yield f"dequantize to {dtype} gives {made.dtype}"
        elif not bitwise_equal(made, held.to(wanted)):
            yield f"dequantize to {dtype} differs from the rounded float32 numbers"


def _compare_arranged(example: Example, part: WeightPart, held: torch.Tensor) -> Iterator[str]:
    """Compare what packings get of ``part`` with ``held``, its numbers; only of formats that the kit knows."""
    made = example.scheme.arrange(part)
    if (made.format, made.rows, made.columns) != (part.format, part.rows, part.columns):
        yield f"arrange gives {made.format} {made.rows} x {made.columns}, of {part.format} {part.rows} x {part.columns}"
    elif is_known_format(made) and not torch.allclose(held, reference_dequantize(made), rtol=1e-5, atol=1e-7):
        worst = float((held - reference_dequantize(made)).abs().max())
        yield f"dequantize differs by up to {worst:.3g} from the format's numbers"


def _cuts_out(example: Example) -> Iterator[str]:
    return _cuts(example, "out", example.part.rows, example.part.format.cut_unit(0))


def _cuts_in(example: Example) -> Iterator[str]:
    return _cuts(example, "in", example.part.columns, example.part.format.cut_unit(1))


def _cuts(example: Example, axis: Literal["out", "in"], extent: int, unit: int) -> Iterator[str]:
    """Cuts at multiples of ``unit`` must equal slices of the numbers; others must be refused, with that number in the
    message."""
    held = example.dequantized()
    whole = [*range(0, extent, unit), extent]
    if len(whole) < 3:
        yield f"the example has one group along {axis}, so that no cut can be tried; give a larger one"
    ends = [(0, extent), *((0, at) for at in whole[1:-1][:2]), *((at, extent) for at in whole[1:-1][-2:])]
    for start, stop in ends:
        piece = example.scheme.cut(example.part, axis, start, stop)
        want = held.narrow(0 if axis == "out" else 1, start, stop - start)
        got, sizes = example.scheme.dequantize(piece, "float32"), (piece.rows, piece.columns)
        if sizes != tuple(want.shape) or tuple(got.shape) != tuple(want.shape):
            yield f"{start}..{stop} says {list(sizes)} and has {list(got.shape)} numbers, not {list(want.shape)}"
        elif not torch.equal(got, want):
            yield f"{start}..{stop} holds other numbers than that slice of the whole"
        else:
            yield from (f"{start}..{stop}: {problem}" for problem in _compare_arranged(example, piece, want))
    inside = [(0, unit // 2), (unit // 2, extent)] if unit > 1 else []
    for start, stop in [*inside, (0, extent + unit), (unit, unit)]:
        try:
            example.scheme.cut(example.part, axis, start, stop)
        except CheckpointError as error:
            if (start, stop) in inside and not re.search(rf"\b{unit}\b", str(error)):
                yield f"{start}..{stop} is refused without naming the group size, {unit}: {error}"
        else:
            yield f"{start}..{stop} is cut, but groups along {axis} have {unit} and the extent is {extent}"
