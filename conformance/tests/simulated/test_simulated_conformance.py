"""The conformance kit on the simulated device: it passes with every constraint on, and fails if one is broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evener_conformance.graph.record import RecordedReplay
from evener_conformance.kit.checklist import Checklist, CheckRequest
from evener_conformance.kit.graphs import graph_results
from evener_conformance.kit.outcome import AREAS, Check
from evener_conformance.kit.run import run
from evener_conformance.kit.shapes import Shape
from evener_conformance.kit.state import check_provider
from evener_conformance.kit.subject import open_subject
from evener_conformance.simulated import kernels, rows  # noqa: F401  (imports `aligned_contiguous` before a test replaces it)
from evener_conformance.simulated.constraints import CHIPS, Constraints
from evener_conformance.simulated.device import ChipCapture, SimulatedDevice
from evener_conformance.simulated.state import SimulatedPaged

NORM, PAGED = CheckRequest(1, ("rms_norm",), ("float32",)), CheckRequest(1, ("simulated.paged",), ("float32",))


def wide_slots(self: SimulatedPaged, step: Any) -> torch.Tensor:
    return step.slot_mapping.long()  # type: ignore[no-any-return]


def reading(self: SimulatedPaged, step: Any) -> torch.Tensor:
    step.slot_mapping[:1].tolist()
    return step.slot_mapping  # type: ignore[no-any-return]


def sorting(value: Any, alignment: int) -> Any:
    if isinstance(value, torch.Tensor):
        torch.sort(value)
    return FITTING(value, alignment)


def stale(self: RecordedReplay, queries: Any, keys: Any) -> None:
    self._updated = True


FITTING = kernels.aligned_contiguous
MODEL, GRAPHS = CheckRequest(1, ("model",), ("float32",)), CheckRequest(1, ("graphs",), ("float32",))
#: The first four areas take seconds, so every switch but those of whole models is tested in each quick run.
BROKEN = [
    (kernels, "aligned_contiguous", lambda value, alignment: value, NORM, "simulated.alignment=32"),
    (SimulatedPaged, "block_sizes", lambda self, spec: (64,), PAGED, "simulated.block_128=true"),
    (SimulatedPaged, "_slots", wide_slots, PAGED, "simulated.int64=false"),
    (kernels, "aligned_contiguous", sorting, NORM, "ops that the device counted in host_fallbacks()"),
    pytest.param(SimulatedPaged, "_slots", reading, MODEL, "simulated.host_reads=false", marks=pytest.mark.slow),
    pytest.param(RecordedReplay, "update", stale, GRAPHS, "simulated.graph_update=true", marks=pytest.mark.slow),
]


@pytest.mark.slow
def test_the_whole_kit_passes_with_every_constraint_on(simulated: Path) -> None:
    result = run("simulated", CheckRequest(1, dtypes=("float32",)))
    odd = [str(c) for c in result.cases if c.outcome not in ("passed", "not applicable")]
    assert not odd and result.passed and result.to_json()["level"] == "L3"
    seen = {c.area for c in result.cases if c.outcome == "passed"}
    assert seen == set(AREAS) - {"composites"}, "everything but what the chip has no kernel for"


@pytest.mark.parametrize(("where", "name", "broken", "request_", "switch"), BROKEN)
def test_breaking_a_constraint_fails_the_kit_with_the_switch_name(
    simulated: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    broken: Any,
    request_: CheckRequest,
    switch: str,
) -> None:
    monkeypatch.setattr(where, name, broken)
    result = run("simulated", request_)
    assert not result.passed and any(switch in c.detail for c in result.cases if c.outcome == "failed"), [
        str(c) for c in result.wrong
    ][:3]


def test_the_kit_fails_a_device_that_claims_a_dtype_that_its_chip_lacks(
    simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = vars(Constraints)["capabilities"].fget
    every = property(lambda self: replace(honest(self), dtypes=CHIPS["newer"].dtypes))
    monkeypatch.setattr(Constraints, "capabilities", every)
    older = {"simulated": {"chip": "older"}}
    result = run("simulated", CheckRequest(1, ("rms_norm",), ("bfloat16",)), options=older)
    lost = [c.detail for c in result.cases if c.outcome == "failed"]
    assert not result.passed and any("simulated.chip=older: kernel simulated.rms_norm was given" in d for d in lost), (
        lost
    )


class Unturned(SimulatedPaged):
    """Exports values as if they had the layout of keys."""

    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys, values = super().export_blocks(views, blocks)
        return keys, values.permute(0, 2, 3, 1).contiguous().view(values.shape)


class Longest(SimulatedPaged):
    """Uses the length of the longest request for all requests."""

    def prepare(self, step: Any, *rest: Any) -> Any:
        return super().prepare(replace(step, host_kv_lens=[step.max_kv for _ in step.host_kv_lens]), *rest)


@pytest.mark.parametrize(
    ("provider", "options", "finding"),
    [
        (Unturned, {"transposed_values": True}, "export_blocks: value of request 0 is not what was written"),
        (Longest, {"host_lengths": True}, "simulated.host_lengths=true: attention has the lengths"),
    ],
    ids=["transposed_values", "host_lengths"],
)
def test_the_kit_fails_a_provider_with_the_wrong_state_layout(
    simulated: Path, provider: type[SimulatedPaged], options: dict[str, Any], finding: str
) -> None:
    def problems(made: type[SimulatedPaged], **switches: Any) -> list[str]:
        device = SimulatedDevice(0, Constraints.all_on(**switches))
        return check_provider(made(device), device, "float32", [Shape(4, 2, 32, 16)]).problems

    assert not problems(SimulatedPaged, **options), "who does not forget it passes"
    (first, *_) = problems(provider, **options)
    assert finding in first


def test_the_kit_fails_a_kernel_that_leaks_scratch_memory(
    simulated: Path, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, memory = [], used + (1 << 24)

    def hoarding(value: Any, alignment: int) -> Any:
        if isinstance(value, torch.Tensor):
            held.append(value.new_empty(1 << 18))
        return FITTING(value, alignment)

    check, *_ = Checklist(open_subject("simulated", options={"simulated": {"memory": memory}}), NORM).checks
    assert not [r for r in check.run() if r.outcome == "failed"]
    monkeypatch.setattr(kernels, "aligned_contiguous", hoarding)
    lost = [r.detail for r in check.run() if r.outcome == "failed"]
    held.clear()
    assert lost and f"simulated.memory={memory}: the simulated device 0 is out of memory" in lost[0]


def test_the_kit_fails_a_graph_method_that_leaks_captures(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_subject("simulated", options={"simulated": {"max_captures": 2}})

    def first_failure(wanted: int) -> str | None:
        """Each kernel is captured once, and this chip holds two captures, so one of the first kernels fails."""
        found = graph_results(Check("graphs", "simulated", "", lambda: []), subject, ("float32",), 1)
        return next((r.detail for _, r in zip(range(wanted), found, strict=False) if r.outcome == "failed"), None)

    assert first_failure(4) is None
    monkeypatch.setattr(ChipCapture, "release", lambda self: None)
    lost = first_failure(4)
    assert lost is not None and "simulated.max_captures=2: this device holds 2 captures at once" in lost
