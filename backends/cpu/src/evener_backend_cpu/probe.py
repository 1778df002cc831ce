"""The probe: there is always a CPU, so marks alone decide. Torch-free."""

from __future__ import annotations

from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener_backend_cpu import isa, memory


def marks() -> Marks:
    """Always fit."""
    processor = isa.usable()
    return Marks(True, (f"{processor.name}: {processor.variant}",), cache_key={"variant": processor.variant})


def result_from_marks(marks: Marks) -> ProbeResult:
    """One device, with a score below every accelerator's."""
    _, total = memory.free_and_total()
    return ProbeResult(10, (ProbedDevice(0, isa.read().name, total),), marks.reasons)
