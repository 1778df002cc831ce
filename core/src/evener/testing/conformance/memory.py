"""Checking what kernels and state providers take of the device's memory, by the device's own count, against what the
memory plan has for them: their results, in donated inputs where there are any, and the ``workspace`` that they name.

Steps are large here, so that what allocators round up to is small beside the rest. The first call of each is not
counted: it may compile, and fill caches that stay.
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
from evener.testing.conformance.cases.blocks import case_of, mixed, mixes, unit_of
from evener.testing.conformance.composites import Wrapped
from evener.testing.conformance.formats import OPS
from evener.testing.conformance.ops import Prepared, load_cases, outputs_of
from evener.testing.conformance.outcome import CaseResult, Check
from evener.testing.conformance.state import SHAPES, Shape, large_step

#: A power of two, which is the upper end of its bucket: what ``workspace`` answers for.
_ROWS = 1024
#: Of a weight: 33 or more rows of so many numbers are beyond what is let pass, in any type.
_COLUMNS = 2048
#: What allocators may round a call's tensors up by, altogether.
_SLACK = 32 << 10
#: Requests, tokens that each has, and tokens that each gets: a prompt's last chunk, and a batch that decodes.
_STEPS = ((1, 768, 256), (64, 255, 1))
#: How often inputs and results may be held by a kernel that is not told how wide its rows are, and can name nothing:
#: as float32, and as what becomes of that.
_UNTOLD = 4
CASE = "takes what the memory plan has for it"


def not_counted(check: Check) -> Iterator[CaseResult]:
    """Of a device that does not count."""
    yield check.result("all", "unknown", "the device does not count what a call takes: implement Device.peak_memory")


def kernel_memory(
    check: Check, kernel: Kernel, schema: OpSchema, device: Device, dtypes: Iterable[str], seed: int
) -> Iterator[CaseResult]:
    """One result a compute type, over all cases of a primitive, with rows that lie together and rows cut from wider
    ones."""
    for dtype in dtypes:
        most, problems = 0, list[str]()
        for of, case, packing in _cases(kernel, schema, dtype, seed):
            ready = Prepared(kernel, schema, device, dtype, case, _ROWS, packing)
            if ready.reason is not None:
                continue
            for sliced in (False, True):
                taken, planned = _called(ready, kernel, schema, device, sliced)
                most = max(most, taken)
                if taken > planned + _SLACK:
                    how = of + ("rows cut from wider ones: " if sliced else "")
                    problems.append(how + _excess(taken, planned, kernel.workspace(ready.call), "Kernel"))
        if most or problems:
            yield check.result(f"{CASE}, {_ROWS} rows", *_outcome(most, problems), dtype)


def _cases(
    kernel: Kernel, schema: OpSchema, dtype: str, seed: int
) -> Iterator[tuple[str, OpCase, Packing | None]]:  # fmt: skip
    """The op's own cases; of an op with weights also one of each format in each packing, wide enough that numbers made
    of a whole weight are seen."""
    generator = torch.Generator().manual_seed(seed)
    for case in load_cases(schema)(dtype, generator):
        yield "", case, None
    if schema.name not in OPS:
        return
    for mix in mixes(dtype):
        blocks = _COLUMNS // max(32, *map(unit_of, mix))
        matrices = [mixed(mix, blocks, generator) for _ in range(3 if schema.name == "grouped_linear" else 1)]
        for packing in kernel.packings:
            what = f"weights of {' + '.join(mix)} in {packing.layout}: "
            yield what, case_of(schema.name, matrices, 37, dtype, generator), packing


def _called(ready: Prepared, kernel: Kernel, schema: OpSchema, device: Device, sliced: bool) -> tuple[int, int]:
    """Bytes that a call takes, and those that the plan has for it."""
    made: list[Any] = []
    with torch.inference_mode():
        ready.run(*ready.inputs(ready.case, sliced))
        inputs = ready.inputs(ready.case, sliced)
        taken = _peak(device, lambda: made.append(ready.run(*inputs)))
    planned = _results(made[0], inputs, schema) + kernel.workspace(ready.call)
    if not _told(schema, ready):
        planned += _UNTOLD * (_bytes(inputs) + _bytes(outputs_of(made[0])))
    return taken, planned


def _peak(device: Device, call: Callable[[], object]) -> int:
    """Bytes that a call takes. The collector rests meanwhile: what it gave back of others, such as an engine that was
    closed before, would be taken off."""
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


def _results(made: Any, inputs: Sequence[Any], schema: OpSchema) -> int:
    """Bytes that the plan has for results: those that donated inputs have no room for."""
    donated = [value for value, declared in zip(inputs, schema.inputs, strict=False) if declared.donated]
    return max(0, _bytes(outputs_of(made)) - _bytes(donated))


def _told(schema: OpSchema, ready: Prepared) -> bool:
    """Whether the kernel is told how wide all rows are, so that it can name a copy of them; of rotary it is not told
    the heads, and of log-probabilities not how many a request wants."""
    given = [pair for pair in zip(schema.inputs, ready.case.inputs, strict=True) if isinstance(pair[1], torch.Tensor)]
    wide = [*(declared for declared, _ in given), *schema.outputs]
    names = {part for each in wide for dim in each.shape[1:] for part in str(dim).split("*") if not part.isdigit()}
    return not names - ready.call.static.keys() and all(value.dim() <= len(each.shape) for each, value in given)


def _excess(taken: int, planned: int, named: int, who: str) -> str:
    return (
        f"it takes {taken} bytes at its peak beside its inputs, and the plan has {planned}: {planned - named} for its "
        f"results and {named} that {who}.workspace names; let that name {taken - planned + named}, or take less"
    )


def _outcome(most: int, problems: Sequence[str]) -> tuple[Any, str]:
    return ("failed", problems[0]) if problems else ("passed", f"at most {most} bytes")


def provider_memory(
    check: Check, provider: StateProvider, device: Device, dtypes: Iterable[str], seed: int
) -> Iterator[CaseResult]:
    """One result a compute type and shape of layer: a long prompt's chunk and a batch that decodes."""
    for dtype in dtypes:
        for shape in SHAPES:
            spec, how = shape.spec(dtype), shape.attention(dtype)
            if spec.kind in provider.kinds and provider.supports(spec, how, device.capabilities) is None:
                most, problems = _attended(provider, device, shape, dtype, seed)
                yield check.result(f"{CASE}: {shape}", *_outcome(most, problems), dtype)


def _attended(
    provider: StateProvider, device: Device, shape: Shape, dtype: str, seed: int
) -> tuple[int, list[str]]:  # fmt: skip
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
            problems.append(f"{what}: {_excess(taken, planned, named, 'StateProvider')}")
    return most, problems


def composite_memory(
    check: Check, kernel: Kernel, schema: OpSchema, device: Device, dtypes: Iterable[str],
    run: Callable[[Kernel, str], object],
) -> Iterator[CaseResult]:  # fmt: skip
    """One result a compute type, over the calls that ``run`` makes of the kernel that it is given, in that type."""
    for dtype in dtypes:
        calls: list[tuple[int, str]] = []
        run(Wrapped(kernel, partial(_counted, kernel, schema, device, calls)), dtype)
        if calls:
            problems = [problem for _, problem in calls if problem]
            yield check.result(CASE, *_outcome(max(taken for taken, _ in calls), problems), dtype)


def _counted(
    kernel: Kernel, schema: OpSchema, device: Device, calls: list[tuple[int, str]], call: OpCall, run: OpFunction
) -> OpFunction:
    """``run``, which adds to ``calls`` what each but the first took, and what is wrong with that."""
    named, warm = kernel.workspace(call), False

    def counted(*inputs: Any) -> Any:
        nonlocal warm
        made: list[Any] = []
        taken = _peak(device, lambda: made.append(run(*inputs)))
        planned = _results(made[0], inputs, schema) + named
        if warm:
            calls.append((taken, _excess(taken, planned, named, "Kernel") if taken > planned + _SLACK else ""))
        warm = True
        return made[0]

    return counted
