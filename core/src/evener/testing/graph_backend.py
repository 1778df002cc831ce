"""A backend whose device captures steps: host memory, reference ops, and a state provider that may be captured.

It is not registered; a test puts its entry point on the path with ``install_graph_backend``. A capture is a recording
of torch's calls over fixed addresses, so whatever a real graph would bake in is baked in here: host numbers, sizes,
and the addresses of memory that the segment did not make itself.
"""

from __future__ import annotations

from pathlib import Path

from evener.contracts.descriptor import Descriptor, Option
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.testing.installed import write_distribution

descriptor = Descriptor(
    name="graphs",
    summary="host memory, reference ops, recorded steps; for tests",
    contracts={"descriptor": 1, "probe": 1, "device": 1, "state": 1, "graph": 1},
    probe="evener.testing.graph_backend",
    module="evener.testing.graph_device",
    serves=frozenset({"namespace:cpu"}),
    states=("graphs.paged",),
    options={
        "update": Option(type=bool, default=False, help="Replays need an update before each run."),
        "max_captures": Option(type=int, default=None, help="How many captures may live at once."),
    },
)


def marks() -> Marks:
    """Every machine has a host."""
    return Marks(True, ("every machine has a host",))


def result_from_marks(marks: Marks) -> ProbeResult:
    """Never chosen unless it is named, or alone."""
    return ProbeResult(1, (ProbedDevice(0, "host"),), ("recording runs anywhere",))


def install_graph_backend(folder: Path) -> Path:
    """The entry point of this backend; choose it with ``backend="graphs"``. Returns the ``.dist-info``."""
    return write_distribution(
        folder, "evener-backend-graphs", {"evener.backends": {"graphs": "evener.testing.graph_backend:descriptor"}}
    )
