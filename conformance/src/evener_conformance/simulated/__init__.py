"""A simulated accelerator: a torch namespace of its own over host memory, with the constraints of hard vendors as
switches. Torch-free: the descriptor, and how a test installs it.

Each option is one constraint of a chip. All are on by default; ``simulated.block_128=false`` switches one off. When the
engine or a kernel breaks a constraint, the device raises ``ConstraintError``, which names the switch.
``docs/simulated-devices.md`` says how a vendor models a chip with it.
"""

from __future__ import annotations

from pathlib import Path

from evener.contracts.descriptor import Descriptor, Option
from evener_conformance.distributions import write_distribution

#: Name of the torch namespace and of the backend.
NAME = "simulated"
#: Number of devices; one if the device is the Python one.
DEVICES = 4

_OPTIONS = {
    "chip": Option(type=str, default="newer", choices=("newer", "older"), help="Which of the backend's two chips: the "
                   "older one has no bfloat16 and holds 8 captures, the newer one 64."),
    "block_128": Option(type=bool, default=True, help="State has blocks of 128 tokens only."),
    "transposed_values": Option(type=bool, default=True, help="A block holds values as [heads, dim, tokens]."),
    "host_lengths": Option(type=bool, default=True, help="Attention takes lengths from the host, and they must be the "
                           "device's."),
    "alignment": Option(type=int, default=32, help="Alignment of a kernel's arguments, in bytes."),
    "int64": Option(type=bool, default=False, help="Kernels take int64 tensors."),
    "graphs": Option(type=bool, default=True, help="Decode steps can be captured."),
    "host_calls": Option(type=bool, default=True, help="The chip calls the host between its own work."),
    "graph_update": Option(type=bool, default=True, help="A capture fixes the lengths; replays need an update."),
    "max_captures": Option(type=int, default=None, help="Captures that may exist at once; default: the chip's."),
    "int8_state": Option(type=bool, default=True, help="State in eight bits is int8, whatever float8 was asked for."),
    "missing": Option(type=str, default="count", choices=("count", "refuse", "none"), help="Torch's ops that the chip "
                      "has no kernel for: run on the host and counted, refused, or none."),
    "host_reads": Option(type=bool, default=False, help="A step may read values on the host, between its first upload "
                         "and its read-back."),
    "memory": Option(type=int, default=1 << 30, help="Memory of the device, in bytes."),
    "python": Option(type=bool, default=False, help="Use no compiled device: no memory limit, no captures."),
}  # fmt: skip

descriptor = Descriptor(
    name=NAME,
    summary="a simulated accelerator over host memory; for tests",
    contracts={"descriptor": 1, "probe": 2, "device": 2, "ops": 2, "state": 2, "graph": 1, "communicator": 2},
    probe="evener_conformance.simulated.probe",
    probe_timeout=10.0,
    module="evener_conformance.simulated.plugin",
    serves=frozenset({f"namespace:{NAME}"}),
    # Other ops run on the reference, with torch ops that the chip has. These need ops that it lacks, or are common.
    ops=(
        "embedding",
        "rms_norm",
        "add_rms_norm",
        "linear",
        "grouped_linear",
        "rotary",
        "act_and_mul",
        "route",
        "partial_attention",
        "delta_gates",
        "encode_attention",
        "greedy",
        "sample",
        "add_bias",
        "penalize",
        "logprobs",
    ),
    states=("simulated.paged", "simulated.rows"),
    options=_OPTIONS,
)


def install_simulated_backend(folder: Path) -> Path:
    """Write this backend's entry point to ``folder``. With ``folder`` on ``sys.path`` and in PYTHONPATH,
    ``backend="simulated"`` finds it. Returns the ``.dist-info``."""
    return write_distribution(
        folder, f"evener-backend-{NAME}", {"evener.backends": {NAME: "evener_conformance.simulated:descriptor"}}
    )
