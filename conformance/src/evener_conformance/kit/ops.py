"""Checking a kernel for a primitive op against the op's reference, over the op's own cases.

    for result in check_kernel(kernel, schema, device):
        print(result)

A kernel may refuse a case with a reason. For the cases that it accepts it must agree with the reference computed in
float32, not change inputs that are not donated, return results in new memory, accept rows that are slices of wider
ones, and keep its claims. Memory that it does not write holds NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, Kernel, OpCall, OpCase, OpFunction, OpSchema, Tensor, Use
from evener.contracts.quant import PackedWeight, Packing, WeightPart, plain
from evener.errors import DescriptorError
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.rounding import rounded
from evener.plugins.hook_check import check_supports
from evener.resolution.buckets import bucket_index
from evener_conformance.kit.cases import load_cases
from evener_conformance.kit.cases.blocks import TOLERANCE, reference_dequantize
from evener_conformance.kit.compare import bitwise_equal, difference, is_rounded, join_problems, shares_memory
from evener_conformance.kit.fallback_monitor import FallbackMonitor, poison_free_memory
from evener_conformance.kit.inputs import strided_rows
from evener_conformance.kit.outcome import CaseResult, Outcome, format_backend_exception

DTYPES = ("float32", "bfloat16")
_CPU = torch.device("cpu")
#: Numbers of rows around those at which kernels often take another path: a few, and many. Each size of a case gets all.
FEW_ROW_COUNTS, MANY_ROW_COUNTS = (33, 129, 17), (2, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 257)
#: A case with a larger input takes its time: it is checked in this many compute dtypes, and with fewer numbers of rows.
_LARGE, _DTYPES_OF_LARGE = 1 << 18, 2


def _first_matrix_parts(value: Sequence[Any]) -> Sequence[WeightPart]:
    """The parts of a packed input, or those of the first matrix of a stack."""
    return value if isinstance(value[0], WeightPart) else value[0]


#: From a part to its numbers, [rows, columns] of float32.
Dequantize = Callable[[WeightPart], torch.Tensor]


def _packed(
    packing: Packing, value: Sequence[Any], dtype: str, where: torch.device,
    change: Callable[[WeightPart], WeightPart] = lambda part: part,
) -> PackedWeight:  # fmt: skip
    """A case's packed input: parts, or a stack of parts."""
    if isinstance(value[0], WeightPart):
        return packing.pack([change(p) for p in value], dtype, where)
    return packing.pack_stack([[change(p) for p in parts] for parts in value], len(value), dtype, where)


def forbid_nested_ops(op: str, /, **static: Any) -> OpFunction:
    """The ``use`` of a primitive: it may call no other op."""
    raise DescriptorError(f"a primitive's reference asked for op {op!r}")


def expansion(schemas: Mapping[str, OpSchema]) -> Use:
    """The ``use`` of a composite that is expanded into reference ops only."""

    def use(op: str, /, *, any_rows: bool = False, sizes: Mapping[str, int] | None = None, **static: Any) -> OpFunction:
        return load_reference(schemas[op])(static, use)  # type: ignore[no-any-return]

    return use


def _in_float32(name: str, value: Any) -> Any:
    """A static parameter for a computation in float32."""
    if isinstance(value, LinearWeight):
        return replace(value, dtype="float32")
    return "float32" if name in ("dtype", "out") else value


def expected(
    schema: OpSchema, case: OpCase, held: Dequantize = reference_dequantize, use: Use = forbid_nested_ops,
    rounds: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The reference's outputs for a case, computed in float32 on the CPU; ``use``: for a composite; ``rounds``: of
    activations rounded as the weight allows."""

    def widened(part: WeightPart) -> WeightPart:
        return replace(part, format=plain("float32"), tensors={"weight": held(part)})

    static = {k: _in_float32(k, v) for k, v in case.static.items()}
    inputs = []
    for declared, value in zip(schema.inputs, case.inputs, strict=True):
        if declared.dtype == "packed":
            value = _packed(PLAIN, value, "float32", _CPU, widened)
        elif isinstance(value, torch.Tensor):
            value = value.to(torch.float32, copy=True) if value.is_floating_point() else value.clone()
        inputs.append(value)
    if rounds:  # x and the weight come first
        inputs[0] = round_as_allowed(inputs[0], case.inputs[1])
    return outputs_of(load_reference(schema)(static, use)(*inputs))


def round_as_allowed(x: torch.Tensor, parts: Sequence[Any]) -> torch.Tensor:
    """Activations [tokens, columns] rounded, in float32, as the parts of a weight, or of each matrix of a stack,
    allow."""
    every = parts if isinstance(parts[0], WeightPart) else [part for matrix in parts for part in matrix]
    how = every[0].format.activation
    return rounded(x, how, torch.stack([p.tensors["activation_scale"] for p in every]).max() if how.group < 0 else None)


def outputs_of(result: Any) -> tuple[Any, ...]:
    """A tuple of outputs; a kernel returns a single output bare."""
    return result if isinstance(result, tuple) else (result,)


def check_kernel(
    kernel: Kernel, schema: OpSchema, device: Device, dtypes: Iterable[str] = DTYPES, seed: int = 0, *,
    sizes: Sequence[int] = FEW_ROW_COUNTS, watch: FallbackMonitor | None = None, nearest: bool = True,
    use: Use = forbid_nested_ops, most_numbers: float = math.inf,
) -> list[CaseResult]:  # fmt: skip
    """Check a kernel over all cases of its op; one result for each case and dtype. Weights are plain here;
    ``evener_conformance.kit.formats`` checks the other formats.

    Args:
        sizes: further numbers of rows; each size that the op's cases have gets all of them, and a large matrix only
            the first, unless these are ``MANY_ROW_COUNTS``.
        watch: records fallbacks to the host.
        nearest: results must be rounded to nearest (an interpreter of kernels may truncate where a compiler rounds).
        use: for a composite, ``expansion``.
        most_numbers: cases with a larger input are left out (an interpreter of kernels takes its time for them).

    Raises:
        DescriptorError: the op has no cases.
    """
    make, watch = load_cases(schema), watch or FallbackMonitor(device)
    results = []
    for number, dtype in enumerate(dtypes):
        made = make(dtype, torch.Generator().manual_seed(seed))
        most = most_numbers if number < _DTYPES_OF_LARGE else min(most_numbers, _LARGE)
        cases = [case for case in made if _numbers(case) <= most]
        for case in [*cases, *_cases_with_more_rows(schema, cases, seed, sizes)]:
            results.append(_KernelCheck(kernel, schema, device, dtype, case, watch, nearest=nearest, use=use).result())
    return results


def check_case(
    kernel: Kernel, schema: OpSchema, device: Device, dtype: str, case: OpCase, packing: Packing, held: Dequantize,
    watch: FallbackMonitor,
) -> CaseResult:  # fmt: skip
    """Check a kernel with one case, whose weights are packed by ``packing`` and dequantized by ``held``."""
    nearest = not any(map(_moves_whole_rows, _parts_of(case)))
    return _KernelCheck(kernel, schema, device, dtype, case, watch, packing, held, nearest).result()


def _parts_of(case: OpCase) -> Iterator[WeightPart]:
    """The parts of a case's weights."""
    left = list(case.inputs)
    while left:
        each = left.pop()
        if isinstance(each, WeightPart):
            yield each
        elif isinstance(each, (tuple, list)):
            left += each


def _moves_whole_rows(part: WeightPart) -> bool:
    """Whether errors of many results may go to one side though all is rounded to nearest: all rows read the same table,
    whose 16 numbers may be rounded to 16 bits, and all read an activation, which may be rounded to its other
    neighbour."""
    return part.format.activation is not None or "table" in part.tensors


def _numbers(case: OpCase) -> int:
    """How many numbers the largest input has."""
    return max(map(_count, case.inputs), default=0)


def _count(value: Any) -> int:
    """How many numbers the largest tensor or part of an input has."""
    if isinstance(value, (tuple, list)):
        return max(map(_count, value), default=0)
    return value.rows * value.columns if isinstance(value, WeightPart) else getattr(value, "numel", int)()


def _batched(declared: Sequence[Tensor], values: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """Names of the inputs whose first axis is the batch: rows of output if an op picks some, else tokens."""
    firsts = [t.shape[0] if t.shape else "" for t in declared]
    batch = {"R"} if "R" in firsts else {"T", "…"}
    for index, (first, value) in enumerate(zip(firsts, values, strict=True)):
        if first in batch and isinstance(value, torch.Tensor):
            yield index, value


def _with_rows(schema: OpSchema, case: OpCase, pick: Callable[[torch.Tensor], torch.Tensor]) -> OpCase:
    """The case with these rows."""
    inputs = list(case.inputs)
    for index, value in _batched(schema.inputs, case.inputs):
        inputs[index] = pick(value)
    return OpCase(case.static, tuple(inputs))


def _rows(schema: OpSchema, case: OpCase) -> int:
    return max((len(v) for _, v in _batched(schema.inputs, case.inputs)), default=0)


def _cases_with_more_rows(
    schema: OpSchema, cases: Sequence[OpCase], seed: int, sizes: Sequence[int]
) -> Iterator[OpCase]:
    """Each case with these numbers of rows, made from its own; and one of no rows, if the op has none."""
    order = torch.Generator().manual_seed(seed)
    if cases and all(_rows(schema, case) for case in cases):
        yield _with_rows(schema, cases[0], lambda value: value[:0])
    for case in cases:
        rows = _rows(schema, case)
        if rows < 1:
            continue
        for size in sizes[:1] if _numbers(case) > _LARGE and sizes != MANY_ROW_COUNTS else sizes:
            picked = torch.randint(rows, (size,), generator=order)
            yield _with_rows(schema, case, lambda value, at=picked: value[at])  # type: ignore[misc]


def bucket_of(rows: int) -> Bucket:
    """The token bucket of a step with this many rows."""
    high = 1 << bucket_index(max(1, rows))
    return Bucket(high // 2 + 1 if high > 1 else 1, high)


class _KernelCheck:
    """One kernel with one case."""

    def __init__(
        self, kernel: Kernel, schema: OpSchema, device: Device, dtype: str, case: OpCase, watch: FallbackMonitor,
        packing: Packing | None = None, held: Dequantize = reference_dequantize, nearest: bool = True,
        use: Use = forbid_nested_ops,
    ) -> None:  # fmt: skip
        self._use = use
        self._kernel, self._schema, self._device, self._dtype, self._case = kernel, schema, device, dtype, case
        self._nearest, self._watch, self._rows = nearest, watch, _rows(schema, case)
        self._packing, self._held = packing or self._plain(), held
        self._quantized = packing is not None
        self._tolerance = TOLERANCE if packing else schema.tolerance

    def _plain(self) -> Packing:
        """The first packing that accepts the case's weights; if none does, the first one, for its reason."""
        weights = [
            _first_matrix_parts(value) for declared, value in zip(self._schema.inputs, self._case.inputs, strict=True)
            if declared.dtype == "packed"
        ]  # fmt: skip
        offered = self._kernel.packings or (PLAIN,)
        able = (p for p in offered if all(p.supports(parts, self._dtype) is None for parts in weights))
        return next(able, offered[0])

    def result(self) -> CaseResult:
        reason, problems = None, []
        try:
            reason = self._refusal()
            if reason is None:
                problems = self._problems()
        except Exception as error:  # the backend's exception is the failure
            problems = [format_backend_exception(error)]
        problems += self._watch.memory.problems()
        outcome: Outcome = "not applicable" if reason else "failed" if problems else "passed"
        sizes = ", ".join(f"{k}={v}" for k, v in self._case.static.items() if isinstance(v, (int, float, str)))
        sizes += f", in {self._packing.layout}" if self._kernel.packings else ""
        return CaseResult(
            "primitives", self._schema.name, self._kernel.name, self._dtype, f"{self._rows} rows, {sizes}", outcome,
            reason or join_problems(problems),
        )  # fmt: skip

    def _call(self, rows: int) -> OpCall:
        layouts = dict.fromkeys(self._schema.weights, self._packing.layout)
        # As resolution does, which sets the layout of a declared weight before it asks kernels.
        static = {
            name: replace(value, layout=layouts[name]) if isinstance(value, LinearWeight) and name in layouts else value
            for name, value in self._case.static.items()
        }
        return OpCall(self._schema.name, static, bucket_of(rows), self._device.capabilities, layouts)

    def _refusal(self) -> str | None:
        for declared, value in zip(self._schema.inputs, self._case.inputs, strict=True):
            if declared.dtype == "packed" and (
                reason := self._packing.supports(_first_matrix_parts(value), self._dtype)
            ):
                return f"packing {self._packing.layout}: {reason}"
        return check_supports(self._kernel, self._kernel.supports(self._call(self._rows)))

    def _problems(self) -> list[str]:
        call = self._call(self._rows)
        run = self._kernel.build(call)
        weight = call.static.get("weight")
        may = isinstance(weight, LinearWeight) and weight.parts[0].format.activation is not None
        self._rounds = may and self._kernel.rounds(call, "weight")
        want = expected(self._schema, self._case, self._held, self._use, self._rounds)
        poison_free_memory(self._device, want)
        inputs = self._inputs(self._case)
        before = [_snapshot(v) for v in inputs]
        made = self._run(run, inputs)
        got = self._read(made)
        problems = self._compare(got, want) + self._aliased_outputs(made, inputs)
        problems += [
            f"input {name} is not donated and was changed"
            for declared, was, value in zip(self._schema.inputs, before, inputs, strict=True)
            if not declared.donated
            for name in _changed(declared.name, was, value)
        ]
        problems += self._second_call(run)
        if not all(map(bitwise_equal, self._read(made), got)):
            problems.append("its results are changed by the next call: they need memory of their own")
        with self._watch.profiled():
            again = self._outputs(run, self._inputs(self._case))
        if self._kernel.deterministic and not all(map(bitwise_equal, got, again)):
            problems.append("it claims to be deterministic, but a second run gave other bits")
        if self._kernel.batch_invariant:
            problems += self._check_batch_invariance(got)
        return problems

    def _second_call(self, run: OpFunction) -> list[str]:
        """Call again with the rows in another order, and cut from wider ones."""
        other = _with_rows(self._schema, self._case, lambda value: value.roll(1, 0))
        want = expected(self._schema, other, self._held, self._use, self._rounds)
        if not (problems := self._compare(self._outputs(run, self._inputs(other, sliced=True)), want)):
            return []
        whole = self._compare(self._outputs(run, self._inputs(other)), want)
        return [f"a second call with other rows: {p}" for p in whole] or [
            f"rows cut from wider ones: {p}" for p in problems
        ]

    def _aliased_outputs(self, made: Sequence[Any], inputs: Sequence[Any]) -> list[str]:
        """Outputs that share memory with inputs that are not donated."""
        return [
            f"{output.name} shares memory with input {declared.name}, which is not donated"
            for output, value in zip(self._schema.outputs, made, strict=False)
            for declared, given in zip(self._schema.inputs, inputs, strict=True)
            if not declared.donated and shares_memory(value, given.data if isinstance(given, PackedWeight) else given)
        ]

    def _check_batch_invariance(self, whole: Sequence[torch.Tensor]) -> list[str]:
        """Rows must have the same bits when fewer rows are computed together."""
        for rows in {1, self._rows // 2, self._rows - 1} & set(range(1, self._rows)):
            few = _with_rows(self._schema, self._case, lambda value, n=rows: value[:n])  # type: ignore[misc]
            call = self._call(rows)
            if self._kernel.supports(call) is not None:
                continue
            got = self._outputs(self._kernel.build(call), self._inputs(few))
            if not all(bitwise_equal(a, b[:rows]) for a, b in zip(got, whole, strict=True)):
                return [
                    f"it claims batch invariance, but {rows} of {self._rows} rows have other bits when computed alone"
                ]
        return []

    def _inputs(self, case: OpCase, sliced: bool = False) -> list[Any]:
        """Fresh inputs on the device, with guards. ``sliced``: rows are cut from wider ones, at any address."""
        where, memory = self._device.torch_device, self._watch.memory
        batched = {index for index, _ in _batched(self._schema.inputs, case.inputs)}
        inputs: list[Any] = []
        for index, (declared, value) in enumerate(zip(self._schema.inputs, case.inputs, strict=True)):
            name = f"input {declared.name}"
            if declared.dtype == "packed":
                value = _packed(self._packing, value, self._dtype, where)
                value = replace(value, data=memory.place(value.data, name))
            elif isinstance(value, torch.Tensor):
                cut = sliced and index in batched
                made = strided_rows(value, memory, name) if cut and value.dim() > 1 else None
                value = memory.copy(value, name, flush=cut) if made is None else made
            inputs.append(value)
        return inputs

    def _run(self, run: OpFunction, inputs: Sequence[Any]) -> tuple[Any, ...]:
        with torch.inference_mode(), self._watch():
            return outputs_of(run(*inputs))

    def _read(self, made: Iterable[Any]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [self._device.readback(value).wait().clone() for value in made]

    def _outputs(self, run: OpFunction, inputs: Sequence[Any]) -> list[torch.Tensor]:
        return self._read(self._run(run, inputs))

    def _compare(self, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> list[str]:
        if len(got) != len(want):
            return [f"{len(got)} outputs instead of {len(want)}"]
        problems = []
        for declared, have, right in zip(self._schema.outputs, got, want, strict=True):
            wanted = declared.dtype if declared.dtype != "*" else self._dtype
            if wanted == "out":
                wanted = self._case.static["out"]
            # Inputs are the same in float32, so that a primitive's float32 result may not be rounded on the way.
            # A composite rounds what it passes from one op to the next; a product may round quantized weights.
            unrounded = wanted == "float32" and not self._schema.composite
            tight = unrounded and not self._quantized
            dtype = wanted if tight else self._dtype
            if have.dtype != getattr(torch, wanted):
                problems.append(f"{declared.name} is {have.dtype}, not {wanted}")
            elif problem := difference(have, right, self._tolerance, dtype, self._nearest):
                problems.append(f"{declared.name}: {problem}")
            elif unrounded and not tight and self._dtype != wanted and is_rounded(have, self._dtype):
                problems.append(f"{declared.name} is float32, but every number of it was rounded to {self._dtype}")
        return problems


class PreparedCase:
    """A kernel with one case, ready to be called repeatedly; of ``rows`` rows and in ``packing`` if these are given.

    Attributes:
        case, rows: what it is called with.
        reason: why the kernel refuses it; None if it does not.
        call: the ``OpCall``; run: the kernel's callable, unless it refuses.
    """

    def __init__(
        self, kernel: Kernel, schema: OpSchema, device: Device, dtype: str, case: OpCase, rows: int = 0,
        packing: Packing | None = None,
    ) -> None:  # fmt: skip
        own = _rows(schema, case)
        picked = torch.arange(rows or own) % max(1, own)
        self.case = _with_rows(schema, case, lambda value: value[picked]) if own else case
        self.rows = _rows(schema, self.case)
        watch = FallbackMonitor(device, guards=False)
        self._check = _KernelCheck(kernel, schema, device, dtype, self.case, watch, packing)
        self._schema, self.reason = schema, self._check._refusal()
        self.call = self._check._call(self.rows)
        if self.reason is None:
            self.run: OpFunction = kernel.build(self.call)

    def inputs(self, case: OpCase, sliced: bool = False) -> list[Any]:
        """New inputs on the device; ``sliced``: with rows cut from wider ones."""
        return self._check._inputs(case, sliced)

    def with_rolled_rows(self, by: int) -> OpCase:
        """The case with its rows in another order."""
        return _with_rows(self._schema, self.case, lambda value: value.roll(by, 0))

    def problems(self, made: Sequence[torch.Tensor], case: OpCase) -> list[str]:
        """What is wrong with these results."""
        return self._check._compare(self._check._read(made), expected(self._schema, case))


def _changed(name: str, was: Any, value: Any) -> Iterator[str]:
    """Names of the tensors in an input that are not what they were: ``weights.norm`` for one of several."""
    if isinstance(value, PackedWeight) or not isinstance(value, (tuple, list)):
        if not bitwise_equal(was, _snapshot(value)):
            yield name
        return
    fields = getattr(value, "_fields", range(len(value)))
    for field, before, each in zip(fields, was, value, strict=True):
        yield from _changed(f"{name}.{field}", before, each)


def _snapshot(value: Any) -> Any:
    data = value.data if isinstance(value, PackedWeight) else value
    if isinstance(data, (tuple, list)):
        return tuple(map(_snapshot, data))
    return data.clone() if isinstance(data, torch.Tensor) else data
