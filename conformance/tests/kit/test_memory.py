"""Memory figures: what kernels and providers take, as the simulated chip counts it, against what they name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener.contracts.state import AttentionSpec, StateSpec
from evener.ops.reference.linear import PLAIN
from evener.ops.schemas import PRIMITIVES
from evener_conformance.kit import memory
from evener_conformance.kit.cases.basic import act_and_mul
from evener_conformance.kit.memory import composite_memory, kernel_memory, memory_not_measurable, provider_memory
from evener_conformance.kit.ops import bucket_of
from evener_conformance.kit.outcome import CaseResult, Check
from evener_conformance.kit.shapes import Shape
from evener_conformance.reference.device import HostDevice
from evener_conformance.simulated.constraints import Constraints
from evener_conformance.simulated.device import SimulatedDevice
from evener_conformance.simulated.state import SimulatedPaged

SCHEMAS = {schema.name: schema for schema in PRIMITIVES}
CHECK = Check("memory", "act_and_mul", "chip/twice", lambda: [])


@pytest.fixture
def device() -> SimulatedDevice:
    """A chip on which kernels may be made of torch ops; engines of earlier tests are collected first."""
    gc.collect()
    return SimulatedDevice(0, Constraints.all_on(host_reads=True, missing="none"))


class Doubling(Kernel):
    """Takes ``factor`` times the workspace that it names."""

    op, name = "act_and_mul", "twice"

    def __init__(self, factor: int, device: torch.device) -> None:
        self._factor, self._device = factor, device

    def supports(self, call: OpCall) -> str | None:
        return None

    def workspace(self, call: OpCall) -> int:
        return 4 * call.bucket.high * int(call.static["inner"])

    def build(self, call: OpCall) -> OpFunction:
        nbytes, inner = self._factor * self.workspace(call), call.static["inner"]

        def run(x: torch.Tensor) -> torch.Tensor:
            held = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            made = torch.empty(x.shape[0], inner, dtype=x.dtype, device=self._device)
            return made if held.numel() else made.clone()

        return run


def measured(kernel: Kernel, device: SimulatedDevice) -> CaseResult:
    (found,) = kernel_memory(CHECK, kernel, SCHEMAS["act_and_mul"], device, ("float32",), 1)
    return found


def test_a_kernel_that_takes_what_it_names_passes_with_the_figure(device: SimulatedDevice) -> None:
    found = measured(Doubling(1, device.torch_device), device)
    most = 1024 * max(case.static["inner"] for case in act_and_mul("float32", torch.Generator()))
    assert found.outcome == "passed" and found.detail == f"at most {(4 + 4) * most} bytes", "a result and the scratch"


def test_a_kernel_that_takes_ten_times_what_it_names_fails_and_is_told_what_to_name(device: SimulatedDevice) -> None:
    found = measured(Doubling(10, device.torch_device), device)
    assert found.outcome == "failed"
    named = 4 * 1024 * 64
    assert f"and {named} that Kernel.workspace names; let that name {10 * named}, or take less" in found.detail
    assert f"takes {11 * named} bytes at its peak besides its inputs, but the plan has {2 * named}" in found.detail


class Ring(Doubling):
    """Leaves its scratch to the garbage collector, which would run during the next call."""

    def build(self, call: OpCall) -> OpFunction:
        inner, nbytes = super().build(call), self._factor * self.workspace(call)

        def run(x: torch.Tensor) -> torch.Tensor:
            if gc.isenabled():
                gc.collect()
            made: torch.Tensor = inner(x)
            ring: list[Any] = [torch.empty(nbytes, dtype=torch.uint8, device=x.device)]
            ring.append(ring)
            return made

        return run


def test_memory_freed_by_the_garbage_collector_is_not_subtracted(device: SimulatedDevice) -> None:
    assert measured(Ring(10, device.torch_device), device).outcome == "failed"


class Widening(Kernel):
    """Dequantizes a whole weight to float32 in each call, and names ``named`` bytes for it."""

    op, name = "linear", "widening"

    def __init__(self, packing: Packing, named: Callable[[int], int]) -> None:
        self.packings, self._named = (packing,), named

    def supports(self, call: OpCall) -> str | None:
        return None

    def workspace(self, call: OpCall) -> int:
        return self._named(4 * call.static["rows"] * call.static["columns"])

    def build(self, call: OpCall) -> OpFunction:
        rows, columns, out = call.static["rows"], call.static["columns"], getattr(torch, call.static["out"])

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
            held = torch.empty(rows, columns, device=x.device)
            made = torch.empty(x.shape[0], rows, dtype=out, device=x.device)
            return made if held.numel() else made.clone()

        return run


class Eighths(Packing):
    """A packing of q8_0 only."""

    layout = "eighths"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return None if all(p.format.storage == "q8_0" for p in parts) else "not q8_0"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(p.format.nbytes(p.rows, p.columns) for p in parts)

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        shape = sum(p.rows for p in parts), parts[0].columns
        return PackedWeight(self.layout, shape, (), self.nbytes(parts, dtype), tuple(p.format for p in parts))


@pytest.mark.parametrize("packing", [PLAIN, Eighths()], ids=["plain", "blocks only"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_linear_kernel_that_widens_a_weight_and_names_no_workspace_fails(
    device: SimulatedDevice, packing: Packing, dtype: str
) -> None:
    outcomes = []
    for named in (lambda need: need, lambda need: 0):
        kernel = Widening(packing, named)
        (found,) = kernel_memory(CHECK, kernel, SCHEMAS["linear"], device, (dtype,), 1)
        outcomes.append(found)
    assert [found.outcome for found in outcomes] == ["passed", "failed"], outcomes
    assert "and 0 that Kernel.workspace names" in outcomes[1].detail
    assert packing is PLAIN or "weights of q8_0 in eighths: " in outcomes[1].detail


def test_memory_that_a_composite_holds_in_a_layer_is_compared_too(device: SimulatedDevice) -> None:
    def outcome(factor: int) -> str:
        kernel = Doubling(factor, device.torch_device)
        call = OpCall(kernel.op, {"inner": 512, "activation": "silu"}, bucket_of(64), device.capabilities)

        def layers(given: Kernel, dtype: str) -> None:
            run, x = given.build(call), torch.zeros(64, 1024, device=device.torch_device)
            for _ in range(2):
                run(x)

        schema = SCHEMAS["act_and_mul"]
        (found,) = composite_memory(CHECK, kernel, schema, device, ("float32",), layers)
        return found.outcome

    assert [outcome(factor) for factor in (1, 10)] == ["passed", "failed"]


class Forgetful(SimulatedPaged):
    """Names no workspace, and holds scores of every query and key."""

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        return 0

    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        held = query.new_empty(query.shape[1], query.shape[0], meta.step.max_kv)
        return super().attend(views, meta, query + held[0, 0, 0] * 0, sinks)


def test_a_state_provider_that_names_no_scores_fails(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHAPES", (Shape(4, 2, 32, 16), Shape(4, 1, 32, 32, window=7)))

    def outcomes(provider: SimulatedPaged) -> set[str]:
        return {r.outcome for r in provider_memory(CHECK, provider, device, ("float32",), 1)}

    assert outcomes(SimulatedPaged(device)) == {"passed"}
    assert outcomes(Forgetful(device)) == {"failed"}


def test_memory_is_unknown_on_a_device_without_peak_memory(device: SimulatedDevice) -> None:
    assert HostDevice(0).peak_memory(lambda: pytest.fail("it is not run")) is None
    (found,) = memory_not_measurable(CHECK)
    assert found.outcome == "unknown" and "implement Device.peak_memory" in found.detail


def test_the_chip_counts_the_most_that_was_held_at_once(device: SimulatedDevice) -> None:
    def work() -> None:
        for _ in range(3):
            first = torch.empty(1 << 20, dtype=torch.uint8, device=device.torch_device)
            second = torch.empty(1 << 18, dtype=torch.uint8, device=device.torch_device)
            del first, second

    held = torch.empty(1 << 21, dtype=torch.uint8, device=device.torch_device)
    assert device.peak_memory(work) == (1 << 20) + (1 << 18)
    assert device.peak_memory(lambda: None) == 0
    assert device.namespace.memory_allocated(0) >= held.nbytes
