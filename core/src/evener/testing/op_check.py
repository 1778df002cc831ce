"""Checking a kernel for a primitive op against the op's reference, over the op's own cases.

    for result in check_kernel(kernel, schema, device):
        print(result)

A kernel may refuse a case with a reason. What it accepts must agree with the reference computed in float32, leave every
input alone that is not donated, take rows that are slices of wider ones, and keep the claims that it makes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from evener.contracts.device import Device
from evener.contracts.ops import Bucket, CaseGenerator, Kernel, OpCall, OpCase, OpFunction, OpSchema, Tensor
from evener.contracts.quant import PackedWeight, Packing, WeightPart, plain
from evener.errors import DescriptorError
from evener.ops.reference.linear import PLAIN
from evener.resolution.resolver import load_reference
from evener.testing.block_cases import TOLERANCE, block_cases, numbers

DTYPES = ("float32", "bfloat16")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CheckResult:
    """What came of one case. ``detail`` is the reason of a refusal, or everything that is wrong."""

    kernel: str
    op: str
    dtype: str
    case: str
    status: Literal["passed", "refused", "failed"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} {self.op}[{self.dtype}] {self.case}: {self.status} {self.detail}".rstrip()


def load_cases(schema: OpSchema) -> CaseGenerator:
    """The function that ``schema.cases`` names.

    Raises:
        DescriptorError: the op has no cases, so nobody can say whether a kernel for it is right.
    """
    if not schema.cases:
        raise DescriptorError(
            f"op {schema.name!r} has no test cases; add cases='module:function' to it (see evener.testing.op_cases)"
        )
    module, _, name = schema.cases.partition(":")
    generator: CaseGenerator = getattr(importlib.import_module(module), name)
    return generator


def _one(value: Sequence[Any]) -> Sequence[WeightPart]:
    """The parts of a packed input, or those of the first matrix of a stack."""
    return value if isinstance(value[0], WeightPart) else value[0]


def _widened(part: WeightPart) -> WeightPart:
    values = part.tensors["weight"].float() if part.format.plain else numbers(part)
    return replace(part, format=plain("float32"), tensors={"weight": values})


def _packed(
    packing: Packing, value: Sequence[Any], dtype: str, where: torch.device,
    change: Callable[[WeightPart], WeightPart] = lambda part: part,
) -> PackedWeight:  # fmt: skip
    """A case's packed input: parts, or a stack of parts."""
    if isinstance(value[0], WeightPart):
        return packing.pack([change(p) for p in value], dtype, where)
    return packing.pack_stack([[change(p) for p in parts] for parts in value], len(value), dtype, where)


def no_other_op(op: str, /, **static: Any) -> OpFunction:
    """The ``use`` of a primitive, which has none."""
    raise DescriptorError(f"a primitive's reference asked for op {op!r}")


def expected(schema: OpSchema, case: OpCase) -> tuple[Any, ...]:
    """The reference's outputs for a case, computed in float32 on the CPU."""
    static = {k: "float32" if k in ("dtype", "out") else v for k, v in case.static.items()}
    inputs = []
    for declared, value in zip(schema.inputs, case.inputs, strict=True):
        if declared.dtype == "packed":
            value = _packed(PLAIN, value, "float32", _CPU, _widened)
        elif isinstance(value, torch.Tensor):
            value = value.to(torch.float32, copy=True) if value.is_floating_point() else value.clone()
        inputs.append(value)
    return outputs_of(load_reference(schema)(static, no_other_op)(*inputs))


def outputs_of(result: Any) -> tuple[Any, ...]:
    """One output is returned bare."""
    return result if isinstance(result, tuple) else (result,)


def check_kernel(
    kernel: Kernel, schema: OpSchema, device: Device, dtypes: Iterable[str] = DTYPES, seed: int = 0
) -> list[CheckResult]:
    """Check a kernel for a primitive over all cases of its op; one result a case and dtype. Packings that take weights
    in blocks are checked over ``block_cases`` too.

    Raises:
        DescriptorError: the op has no cases.
    """
    make = load_cases(schema)
    results = []
    for dtype in dtypes:
        for case in make(dtype, torch.Generator().manual_seed(seed)):
            results.append(_Checked(kernel, schema, device, dtype, case).result())
        for case in block_cases(schema.name, dtype, torch.Generator().manual_seed(seed)):
            parts = next(_one(v) for v in case.inputs if isinstance(v, tuple))
            for packing in kernel.packings:
                if packing.supports(parts, dtype) is None:
                    results.append(_Checked(kernel, schema, device, dtype, case, packing).result())
    return results


def wide_rows(value: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of wider rows, which is not contiguous and starts at an odd address."""
    wide = value.new_zeros(*value.shape[:-1], value.shape[-1] + 5) if value.dim() == 2 else None
    if wide is not None:
        part = wide[:, 3 : 3 + value.shape[1]]
    else:
        size = math.prod(value.shape[1:])
        flat = value.new_zeros(value.shape[0], size + 5)
        part = flat[:, 3 : 3 + size].unflatten(1, value.shape[1:])
    part.copy_(value)
    return part


class _Checked:
    """One kernel at one case."""

    def __init__(
        self, kernel: Kernel, schema: OpSchema, device: Device, dtype: str, case: OpCase, blocks: Packing | None = None
    ) -> None:
        self._kernel, self._schema, self._device, self._dtype, self._case = kernel, schema, device, dtype, case
        self._rows = max((len(v) for _, v in self._batched(schema.inputs, case.inputs)), default=0)
        self._packing = blocks or next(iter(kernel.packings), PLAIN)
        self._tolerance = TOLERANCE if blocks else schema.tolerance

    @staticmethod
    def _batched(declared: Sequence[Tensor], values: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """Tensors whose first axis is the batch: rows of output where an op picks some, else tokens."""
        firsts = [t.shape[0] if t.shape else "" for t in declared]
        batch = {"R"} if "R" in firsts else {"T", "…"}
        for index, (first, value) in enumerate(zip(firsts, values, strict=True)):
            if first in batch and isinstance(value, torch.Tensor):
                yield index, value

    def result(self) -> CheckResult:
        status: Literal["passed", "refused", "failed"]
        reason, problems = self._refusal(), []
        if reason is None:
            problems = self._problems()
        status = "refused" if reason else "failed" if problems else "passed"
        sizes = ", ".join(f"{k}={v}" for k, v in self._case.static.items() if isinstance(v, (int, float, str)))
        sizes += f", in {self._packing.layout}" if self._kernel.packings else ""
        return CheckResult(
            self._kernel.name, self._schema.name, self._dtype, f"{self._rows} rows, {sizes}", status,
            reason or "; ".join(problems),
        )  # fmt: skip

    def _call(self, low: int, high: int) -> OpCall:
        layouts = dict.fromkeys(self._schema.weights, self._packing.layout)
        return OpCall(self._schema.name, self._case.static, Bucket(low, high), self._device.capabilities, layouts)

    def _refusal(self) -> str | None:
        for declared, value in zip(self._schema.inputs, self._case.inputs, strict=True):
            if declared.dtype == "packed" and (reason := self._packing.supports(_one(value), self._dtype)):
                return f"packing {self._packing.layout}: {reason}"
        return self._kernel.supports(self._call(min(1, self._rows), self._rows))

    def _problems(self) -> list[str]:
        run = self._kernel.build(self._call(min(1, self._rows), self._rows))
        want = expected(self._schema, self._case)
        inputs = self._inputs()
        before = [_snapshot(v) for v in inputs]
        got = self._outputs(run, inputs)
        problems = self._compare(got, want)
        problems += [
            f"input {declared.name} is not donated and was changed"
            for declared, was, value in zip(self._schema.inputs, before, inputs, strict=True)
            if not declared.donated and not _same(was, _snapshot(value))
        ]
        sliced = self._outputs(run, self._inputs(sliced=True))
        problems += [f"rows cut from wider ones: {p}" for p in self._compare(sliced, want)]
        if self._kernel.deterministic:
            again = self._outputs(run, self._inputs())
            if not all(map(_same, got, again)):
                problems.append("it claims to be deterministic, but a second run has other bits")
        if self._kernel.batch_invariant:
            problems += self._company(got)
        return problems

    def _company(self, whole: Sequence[torch.Tensor]) -> list[str]:
        """A row's bits when fewer rows come along."""
        for rows in {1, self._rows // 2, self._rows - 1} & set(range(1, self._rows)):
            few = self._inputs()
            for index, value in list(self._batched(self._schema.inputs, few)):
                few[index] = value[:rows].clone()
            got = self._outputs(self._kernel.build(self._call(rows, rows)), few)
            if not all(_same(a, b[:rows]) for a, b in zip(got, whole, strict=True)):
                return [f"it claims batch invariance, but {rows} of {self._rows} rows alone have other bits"]
        return []

    def _inputs(self, sliced: bool = False) -> list[Any]:
        """Fresh inputs on the device."""
        where = self._device.torch_device
        inputs: list[Any] = []
        for declared, value in zip(self._schema.inputs, self._case.inputs, strict=True):
            if declared.dtype == "packed":
                value = _packed(self._packing, value, self._dtype, where)
            elif isinstance(value, torch.Tensor):
                value = value.to(where, copy=True)
            inputs.append(value)
        if sliced:
            for index, value in list(self._batched(self._schema.inputs, inputs)):
                inputs[index] = wide_rows(value) if value.dim() > 1 else value
        return inputs

    def _outputs(self, run: OpFunction, inputs: Sequence[Any]) -> list[torch.Tensor]:
        with torch.inference_mode():
            got = outputs_of(run(*inputs))
            return [self._device.readback(value).wait() for value in got]

    def _compare(self, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> list[str]:
        if len(got) != len(want):
            return [f"{len(got)} outputs instead of {len(want)}"]
        problems = []
        for declared, have, right in zip(self._schema.outputs, got, want, strict=True):
            wanted = declared.dtype if declared.dtype != "*" else self._dtype
            if wanted == "out":
                wanted = self._case.static["out"]
            if have.dtype != getattr(torch, wanted):
                problems.append(f"{declared.name} is {have.dtype}, not {wanted}")
            elif problem := difference(have, right, self._tolerance, self._dtype):
                problems.append(f"{declared.name}: {problem}")
        return problems


def difference(
    got: torch.Tensor, want: torch.Tensor, tolerance: Mapping[str, tuple[float, float]], dtype: str
) -> str | None:
    """What is wrong with a result; None if shapes agree, integers are equal and the rest is within tolerance."""
    relative, absolute = (0.0, 0.0) if not want.is_floating_point() else tolerance[dtype]
    exact: Callable[..., None] = torch.testing.assert_close
    try:
        exact(got.to(want.dtype), want, rtol=relative, atol=absolute, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _snapshot(value: Any) -> Any:
    data = value.data if isinstance(value, PackedWeight) else value
    return data.clone() if isinstance(data, torch.Tensor) else data


def _same(a: Any, b: Any) -> bool:
    """Equal bits; things that are no tensors count as equal."""
    if not isinstance(a, torch.Tensor):
        return True
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)
