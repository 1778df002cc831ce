"""The smallest backend: host memory, every op from the reference. It is not registered: a test puts its entry point on
the path (``evener_conformance.distributions``).

With the option ``delay`` it behaves like an asynchronous device: results are not ready when a step was submitted, and
a value that is read before ``Readback.wait`` is poison. With ``reference.executor``, reading a value on the host
during a step is an error.
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult

descriptor = Descriptor(
    name="reference",
    summary="host memory, reference ops only; for tests",
    contracts={"descriptor": 1, "probe": 2, "device": 2},
    probe="evener_conformance.reference.backend",
    module="evener_conformance.reference.device",
    serves=frozenset({"namespace:cpu"}),
    options={"delay": Option(type=bool, default=False, help="Behave like an asynchronous device.")},
)


def marks() -> Marks:
    """Always fit: every machine has a host."""
    return Marks(True, ("every machine has a host",))


def result_from_marks(marks: Marks) -> ProbeResult:
    """A low score: it is chosen only by name, or if it is alone."""
    return ProbeResult(1, (ProbedDevice(0, "host"),), ("the reference runs anywhere",))
