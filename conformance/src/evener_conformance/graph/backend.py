"""A backend whose device captures steps: host memory, reference ops, and a state provider that can be captured.

It is not registered: a test puts its entry point on the path with ``install_graph_backend``. A capture records torch's
calls over fixed addresses. So a capture fixes the same things as a real graph: host numbers, sizes, and the addresses
of memory that the segment did not allocate.
"""

from __future__ import annotations

from pathlib import Path

from evener.contracts.descriptor import Descriptor, Option
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener_conformance.distributions import write_distribution

descriptor = Descriptor(
    name="graphs",
    summary="host memory, reference ops, recorded steps; for tests",
    contracts={"descriptor": 1, "probe": 2, "device": 2, "state": 2, "graph": 1},
    probe="evener_conformance.graph.backend",
    module="evener_conformance.graph.device",
    serves=frozenset({"namespace:cpu"}),
    states=("graphs.paged",),
    options={
        "update": Option(type=bool, default=False, help="Replays need an update before each run."),
        "long_state": Option(
            type=int, default=0, help="Tokens of state from which decode steps have captures of their own; 0: none."
        ),
        "max_captures": Option(type=int, default=None, help="How many captures may exist at once."),
    },
)


def marks() -> Marks:
    """Always fit: every machine has a host."""
    return Marks(True, ("every machine has a host",))


def result_from_marks(marks: Marks) -> ProbeResult:
    """A low score: it is chosen only by name, or if it is alone."""
    return ProbeResult(1, (ProbedDevice(0, "host"),), ("recording runs anywhere",))


def install_graph_backend(folder: Path) -> Path:
    """Write the entry point of this backend; choose it with ``backend="graphs"``. Returns the ``.dist-info``."""
    return write_distribution(
        folder, "evener-backend-graphs", {"evener.backends": {"graphs": "evener_conformance.graph.backend:descriptor"}}
    )
