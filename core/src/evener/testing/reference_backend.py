"""The smallest backend: host memory, every op from the reference. It is not registered: a test puts its entry point on
the path (``evener.testing.installed``).

With the option ``delay`` it behaves like an asynchronous device: results are not there when a step was submitted, and
whatever is read before ``Readback.wait`` is poison. ``reference_executor`` makes a look at a value inside a step an
error.
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult

descriptor = Descriptor(
    name="reference",
    summary="host memory, reference ops only; for tests",
    contracts={"descriptor": 1, "probe": 1, "device": 1},
    probe="evener.testing.reference_backend",
    module="evener.testing.reference_device",
    serves=frozenset({"namespace:cpu"}),
    options={"delay": Option(type=bool, default=False, help="Behave like an asynchronous device.")},
)


def marks() -> Marks:
    """Every machine has a host."""
    return Marks(True, ("every machine has a host",))


def result_from_marks(marks: Marks) -> ProbeResult:
    """Never chosen unless it is named, or alone."""
    return ProbeResult(1, (ProbedDevice(0, "host"),), ("the reference runs anywhere",))
