"""Checking graph capture: replays of kernels with other inputs, and a tiny model's tokens against eager ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evener.contracts.graph import GraphCapture
from evener.contracts.ops import Kernel, OpSchema
from evener.errors import EngineError
from evener_conformance.kit.cases import load_cases
from evener_conformance.kit.model import FAMILY, WINDOWED, describe_divergence, engine, prompts, write_tiny_model
from evener_conformance.kit.ops import PreparedCase, outputs_of
from evener_conformance.kit.outcome import CaseResult, Check, format_backend_exception
from evener_conformance.kit.subject import Subject
from evener_conformance.oracle import generate

_REPLAYS = 4


def graph_results(check: Check, subject: Subject, dtypes: Sequence[str], seed: int) -> Iterator[CaseResult]:
    """Check each kernel that says it can be captured, then whole steps."""
    assert subject.graphs is not None, "a graph method is registered"
    capture = subject.graphs.value
    if not subject.device.capabilities.graphs:
        yield check.result("capabilities", "failed", "a graph method is registered, but capabilities.graphs is not set")
        return
    for provided in subject.kernels:
        kernel, schema = provided.value, subject.schemas[provided.value.op]
        if schema.composite or not kernel.capturable:
            continue
        for dtype in dtypes:
            label = f"{schema.name} by {kernel.name}"
            try:
                problems = _replayed(subject, capture, kernel, schema, dtype, seed)
            except EngineError as error:
                problems = [f"it says that it can be captured, but: {error}"]
            except Exception as error:  # the backend's; it is the finding
                problems = [format_backend_exception(error)]
            finally:
                capture.release()
            if problems is None:
                continue
            yield check.result(label, "failed" if problems else "passed", "; ".join(problems), dtype)
    yield from _steps(check, subject, seed, "", {})
    # A step tells the device its lengths once for each group of layers that share a block table.
    yield from _steps(check, subject, seed, " where every second layer has a window", WINDOWED)


def _replayed(
    subject: Subject, capture: GraphCapture, kernel: Kernel, schema: OpSchema, dtype: str, seed: int
) -> list[str] | None:
    """Problems of replays with inputs that change each time; None if the kernel accepts no case of several rows."""
    device = subject.device
    ready = None
    for case in load_cases(schema)(dtype, torch.Generator().manual_seed(seed)):
        found = PreparedCase(kernel, schema, device, dtype, case)
        # A stale input shows by the order of the rows, so there must be two at least.
        if found.reason is None and found.rows > (1 if ready is None else ready.rows):
            ready = found
    if ready is None:
        return None
    with torch.inference_mode():
        source = ready.inputs(ready.case)
        made = [torch.empty_like(t) for t in outputs_of(ready.run(*ready.inputs(ready.case)))]

        def segment() -> None:
            given = [
                s.clone() if t.donated and isinstance(s, torch.Tensor) else s
                for s, t in zip(source, schema.inputs, strict=True)
            ]
            for kept, value in zip(made, outputs_of(ready.run(*given)), strict=True):
                kept.copy_(value)

        segment()
        replay = capture.capture(segment)
        for number in range(_REPLAYS):
            other = ready.with_rolled_rows(number + 1)
            for kept, value in zip(source, ready.inputs(other), strict=True):
                if isinstance(kept, torch.Tensor):
                    kept.copy_(value)
            for kept in made:
                kept.zero_()
            if device.capabilities.graph_update:
                replay.update([1] * ready.rows, [1] * ready.rows)
            replay()
            if problems := ready.problems(made, other):
                return [f"replay {number} with other inputs: {p}" for p in problems]
    return []


def _steps(check: Check, subject: Subject, seed: int, of: str, shape: Mapping[str, Any]) -> Iterator[CaseResult]:
    """Check the tokens of captured steps: of decoding requests of different lengths that come and go, and of short
    prompts that come alone."""
    case, dtype = "tokens of captured steps equal eager ones" + of, subject.dtypes[0]
    [family] = shape.get("architectures", [FAMILY])
    if family not in subject.loaded.architectures:
        yield check.result(case, "unknown", f"no package brings {family}; type: pip install evener-models")
        return
    said: list[list[list[int]]] = []
    asked = prompts(seed)[:6]
    info: Any = {}
    for captured in (False, True):
        with tempfile.TemporaryDirectory() as name:
            write_tiny_model(subject, Path(name), shape)
            try:
                client = engine(subject, Path(name), dtype, **{"infer.use_cuda_graph": captured})
                info = client.receive(1)[0].info  # type: ignore[union-attr]
                alone = generate(client, asked, 2, every=3, tag="alone")
                said.append([*alone, *generate(client, asked, 24, every=9)])
                client.close()
            except Exception as error:  # the backend's; it is the finding
                yield check.result(case, "failed", format_backend_exception(error))
                return
    notes = "; ".join(info.manifest.notes)
    if "are captured" not in notes:
        yield check.result(case, "not applicable", notes)
        return
    differ = describe_divergence([*asked, *asked], {"eager": said[0], "captured": said[1]})
    yield check.result(case, "failed" if differ else "passed", differ or notes)
