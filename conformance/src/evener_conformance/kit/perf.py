"""Times of kernels and of the reference, on the same device in the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from evener.contracts.ops import Kernel, OpCase, OpSchema
from evener_conformance.kit.cases import load_cases
from evener_conformance.kit.checklist import CheckRequest, ReferenceKernel
from evener_conformance.kit.ops import PreparedCase, outputs_of
from evener_conformance.kit.outcome import CaseResult, format_backend_exception
from evener_conformance.kit.subject import Subject

_RUNS = 9
_ROWS = (1, 16, 129)


def timings(subject: Subject, dtypes: Sequence[str], request: CheckRequest) -> Iterator[CaseResult]:
    """One result for each kernel of a primitive, compute dtype and number of rows."""
    for provided in subject.kernels:
        kernel, schema = provided.value, subject.schemas[provided.value.op]
        label = f"{provided.package}/{kernel.name}"
        if schema.composite or (request.ops and not set(request.ops) & {schema.name, label, kernel.name, "primitives"}):
            continue
        for dtype in dtypes:
            for rows in _ROWS:
                yield _timed(subject, kernel, schema, label, dtype, rows, request.seed)


@dataclass(frozen=True)
class Measured:
    """Median seconds of a kernel and of the reference on the same inputs, which hold ``size`` numbers."""

    own: float
    reference: float
    size: int


def _timed(
    subject: Subject, kernel: Kernel, schema: OpSchema, label: str, dtype: str, rows: int, seed: int
) -> CaseResult:
    try:
        found = measure(subject, kernel, schema, dtype, rows, seed)
    except Exception as error:  # the backend's exception is the failure
        return CaseResult(
            "primitives", schema.name, label, dtype, f"{rows} rows", "failed", format_backend_exception(error)
        )
    if isinstance(found, str):
        return CaseResult("primitives", schema.name, label, dtype, f"{rows} rows", "not applicable", found)
    ratio = f"{found.reference / found.own:.2f} times as fast"
    text = f"{found.own * 1e6:.1f} us, the reference {found.reference * 1e6:.1f} us: {ratio}"
    return CaseResult("primitives", schema.name, label, dtype, f"{rows} rows of {found.size} numbers", "passed", text)


def measure(subject: Subject, kernel: Kernel, schema: OpSchema, dtype: str, rows: int, seed: int) -> Measured | str:
    """Time a kernel on the largest of its op's cases that it accepts, or say why it accepts none.

    Raises:
        Exception: whatever the kernel raises.
    """
    cases = sorted(load_cases(schema)(dtype, torch.Generator().manual_seed(seed)), key=_size, reverse=True)
    offered = (PreparedCase(kernel, schema, subject.device, dtype, each, rows) for each in cases)
    first = next(offered)
    mine = first if first.reason is None else next((each for each in offered if each.reason is None), first)
    if mine.reason is not None:
        return mine.reason
    theirs = PreparedCase(ReferenceKernel(schema), schema, subject.device, dtype, mine.case)
    own, reference = (_median(subject, each) for each in (mine, theirs))
    return Measured(own, reference, _size(mine.case))


def _size(case: OpCase) -> int:
    return sum(value.numel() for value in outputs_of(case.inputs) if isinstance(value, torch.Tensor))


def _median(subject: Subject, ready: PreparedCase) -> float:
    given = ready.inputs(ready.case)

    def call() -> None:
        with torch.inference_mode():
            ready.run(*given)

    call()
    return median(subject.device.measure(call) for _ in range(_RUNS))
