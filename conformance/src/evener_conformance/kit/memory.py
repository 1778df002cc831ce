"""Checking the peak memory of kernels and state providers, as the device counts it, against the memory plan: their
results (less donated inputs) and the ``workspace`` that they name.

Steps are large, so that an allocator's rounding is small in comparison. The first call of each is not counted: it may
compile, and fill caches that stay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCall, OpCase, OpFunction, OpSchema
from evener.contracts.quant import Packing
from evener.contracts.state import StateProvider
from evener_conformance.kit.cases import load_cases
from evener_conformance.kit.cases.blocks import format_mixes, make_case, mixed_parts, unit_of
from evener_conformance.kit.formats import OPS
from evener_conformance.kit.ops import PreparedCase, outputs_of
from evener_conformance.kit.outcome import CaseResult, Check
from evener_conformance.kit.shapes import SHAPES, Shape
from evener_conformance.kit.state import large_step
from evener_conformance.kit.wrapped_kernel import WrappedKernel

#: A power of two, the upper end of its token bucket: ``workspace`` is given that size.
_ROWS = 1024
#: Columns of a weight: 33 or more rows of this width exceed the slack in any dtype.
_COLUMNS = 2048
#: Bytes that allocators may add to a call's tensors by rounding up, in total.
_SLACK = 32 << 10
#: (requests, tokens that each has, new tokens of each): the last chunk of a prompt, and a batch that decodes.
_STEPS = ((1, 768, 256), (64, 255, 1))
#: A kernel that is not told how wide its rows are cannot name a workspace: it may hold inputs and results this many
#: times, for float32 copies and what is computed from them.
_UNKNOWN_WIDTH_FACTOR = 4
CASE = "takes no more than the memory plan has for it"


def memory_not_measurable(check: Check) -> Iterator[CaseResult]:
    """The result for a device that does not count."""
    yield check.result("all", "unknown", "the device does not count what a call takes: implement Device.peak_memory")


def kernel_memory(
    check: Check, kernel: Kernel, schema: OpSchema, device: Device, dtypes: Iterable[str], seed: int
) -> Iterator[CaseResult]:
    """One result for each compute dtype, over all cases of a primitive: rows contiguous, and cut from wider ones."""
    for dtype in dtypes:
        most, problems = 0, list[str]()
        for of, case, packing in _cases(kernel, schema, dtype, seed):
            ready = PreparedCase(kernel, schema, device, dtype, case, _ROWS, packing)
            if ready.reason is not None:
                continue
            for sliced in (False, True):
                taken, planned = _measure_call(ready, kernel, schema, device, sliced)
                most = max(most, taken)
                if taken > planned + _SLACK:
                    how = of + ("rows cut from wider ones: " if sliced else "")
                    problems.append(how + _describe_excess(taken, planned, kernel.workspace(ready.call), "Kernel"))
        if most or problems:
            yield check.result(f"{CASE}, {_ROWS} rows", *_outcome(most, problems), dtype)


def _cases(kernel: Kernel, schema: OpSchema, dtype: str, seed: int) -> Iterator[tuple[str, OpCase, Packing | None]]:
    """The op's own cases; for an op with weights also one case for each format and packing, so wide that a whole
    dequantized weight is seen."""
    generator = torch.Generator().manual_seed(seed)
    for case in load_cases(schema)(dtype, generator):
        yield "", case, None
    if schema.name not in OPS:
        return
    for mix in format_mixes(dtype):
        blocks = _COLUMNS // max(32, *map(unit_of, mix))
        matrices = [mixed_parts(mix, blocks, generator) for _ in range(3 if schema.name == "grouped_linear" else 1)]
        for packing in kernel.packings:
            what = f"weights of {' + '.join(mix)} in {packing.layout}: "
            yield what, make_case(schema.name, matrices, 37, dtype, generator), packing


def _measure_call(
    ready: PreparedCase, kernel: Kernel, schema: OpSchema, device: Device, sliced: bool
) -> tuple[int, int]:
    """(bytes that a call takes, bytes that the plan has for it, the part of these that the kernel names)."""
    made: list[Any] = []
    with torch.inference_mode():
        ready.run(*ready.inputs(ready.case, sliced))
        inputs = ready.inputs(ready.case, sliced)
        taken = _peak(device, lambda: made.append(ready.run(*inputs)))
    planned = _result_bytes(made[0], inputs, schema) + kernel.workspace(ready.call)
    if not _knows_row_widths(schema, ready):
        planned += _UNKNOWN_WIDTH_FACTOR * (_bytes(inputs) + _bytes(outputs_of(made[0])))
    return taken, planned


def _peak(device: Device, call: Callable[[], object]) -> int:
    """Bytes that a call takes at its peak. The garbage collector is off meanwhile: memory that it frees, such as
    that of an engine that was closed before, would be subtracted."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        taken = device.peak_memory(call)
    finally:
        if enabled:
            gc.enable()
    assert taken is not None, "the device counted before"
    return taken


def _bytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _result_bytes(made: Any, inputs: Sequence[Any], schema: OpSchema) -> int:
    """Bytes that the plan has for results, beyond the room in donated inputs."""
    donated = [value for value, declared in zip(inputs, schema.inputs, strict=False) if declared.donated]
    return max(0, _bytes(outputs_of(made)) - _bytes(donated))


def _knows_row_widths(schema: OpSchema, ready: PreparedCase) -> bool:
    """Whether the kernel is told the width of all rows, so that it can name copies of them. Rotary is not told the
    number of heads, log-probabilities not how many a request wants."""
    given = [pair for pair in zip(schema.inputs, ready.case.inputs, strict=True) if isinstance(pair[1], torch.Tensor)]
    wide = [*(declared for declared, _ in given), *schema.outputs]
    names = {part for each in wide for dim in each.shape[1:] for part in str(dim).split("*") if not part.isdigit()}
    return not names - ready.call.static.keys() and all(value.dim() <= len(each.shape) for each, value in given)


def _describe_excess(taken: int, planned: int, named: int, who: str) -> str:
    return (
        f"it takes {taken} bytes at its peak besides its inputs, but the plan has {planned}: {planned - named} for its "
        f"results and {named} that {who}.workspace names; let that name {taken - planned + named}, or take less"
    )


def _outcome(most: int, problems: Sequence[str]) -> tuple[Any, str]:
    return ("failed", problems[0]) if problems else ("passed", f"at most {most} bytes")


def provider_memory(
    check: Check, provider: StateProvider, device: Device, dtypes: Iterable[str], seed: int
) -> Iterator[CaseResult]:
    """One result for each compute dtype and shape of layer: a chunk of a long prompt, and a batch that decodes."""
    for dtype in dtypes:
        for shape in SHAPES:
            spec, how = shape.spec(dtype), shape.attention(dtype)
            if spec.kind in provider.kinds and provider.supports(spec, how, device.capabilities) is None:
                most, problems = _measure_attention(provider, device, shape, dtype, seed)
                yield check.result(f"{CASE}: {shape}", *_outcome(most, problems), dtype)


def _measure_attention(
    provider: StateProvider, device: Device, shape: Shape, dtype: str, seed: int
) -> tuple[int, list[str]]:
    most, problems = 0, list[str]()
    for requests, before, count in _STEPS:
        run = large_step(provider, device, shape, dtype, seed, [before] * requests, [count] * requests)
        made: list[torch.Tensor] = []
        with torch.inference_mode():
            run()
            taken = _peak(device, lambda run=run, made=made: made.append(run()))  # type: ignore[misc]
        tokens = requests * count + 1
        named = provider.workspace(shape.spec(dtype), shape.attention(dtype), tokens, before + count)
        planned = sum(value.nbytes for value in made) + named
        most = max(most, taken)
        if taken > planned + _SLACK:
            what = f"{requests} requests of {before + count} tokens, {count} of them new"
            problems.append(f"{what}: {_describe_excess(taken, planned, named, 'StateProvider')}")
    return most, problems


def composite_memory(
    check: Check, kernel: Kernel, schema: OpSchema, device: Device, dtypes: Iterable[str],
    run: Callable[[Kernel, str], object],
) -> Iterator[CaseResult]:  # fmt: skip
    """One result for each compute dtype, over the calls that ``run`` makes of the kernel that it is given."""
    for dtype in dtypes:
        calls: list[tuple[int, str]] = []
        run(WrappedKernel(kernel, partial(_measuring, kernel, schema, device, calls)), dtype)
        if calls:
            problems = [problem for _, problem in calls if problem]
            yield check.result(CASE, *_outcome(max(taken for taken, _ in calls), problems), dtype)


def _measuring(
    kernel: Kernel, schema: OpSchema, device: Device, calls: list[tuple[int, str]], call: OpCall, run: OpFunction
) -> OpFunction:
    """``run``, wrapped: every call after the first appends the bytes that it took, and what is wrong, to ``calls``."""
    named, warm = kernel.workspace(call), False

    def counted(*inputs: Any) -> Any:
        nonlocal warm
        made: list[Any] = []
        taken = _peak(device, lambda: made.append(run(*inputs)))
        planned = _result_bytes(made[0], inputs, schema) + named
        if warm:
            calls.append((taken, _describe_excess(taken, planned, named, "Kernel") if taken > planned + _SLACK else ""))
        warm = True
        return made[0]

    return counted
