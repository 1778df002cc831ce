"""A simulated accelerator: an own namespace of torch's over host memory, with the constraints of hard vendors as
switches. Torch-free: the descriptor, and how a test installs it.

Each option is one constraint of a chip. All are on by default; ``simulated.block_128=false`` lifts one. When the engine
or a kernel breaks a constraint that is on, the device raises ``ConstraintError`` naming the switch.
``docs/simulated-devices.md`` tells how a vendor models a chip with it.
"""

from __future__ import annotations

from pathlib import Path

from evener.contracts.descriptor import Descriptor, Option
from evener.testing.installed import write_distribution

#: What torch calls the namespace, and the backend's name.
NAME = "simulated"
#: How many of it there are; one where it computes in Python.
DEVICES = 4

_OPTIONS = {
    "chip": Option(type=str, default="newer", choices=("newer", "older"), help="Which of the backend's two chips: the "
                   "older one has no bfloat16 and holds 8 captures, the newer one 64."),
    "block_128": Option(type=bool, default=True, help="State comes in blocks of 128 tokens only."),
    "transposed_values": Option(type=bool, default=True, help="A block holds values as [heads, dim, tokens]."),
    "host_lengths": Option(type=bool, default=True, help="Attention takes lengths from the host, and they must be the "
                           "device's."),
    "alignment": Option(type=int, default=32, help="Bytes to which what a kernel takes must be aligned."),
    "int64": Option(type=bool, default=False, help="Kernels take int64 tensors."),
    "graphs": Option(type=bool, default=True, help="Decode steps can be captured."),
    "graph_update": Option(type=bool, default=True, help="A capture bakes lengths in; replays need an update."),
    "max_captures": Option(type=int, default=None, help="Captures that may live at once; default: the chip's."),
    "missing": Option(type=str, default="count", choices=("count", "refuse", "none"), help="Torch's ops that the chip "
                      "has no kernel for: run on the host and counted, refused, or none."),
    "host_reads": Option(type=bool, default=False, help="A step may read values on the host, between its first upload "
                         "and its read-back."),
    "memory": Option(type=int, default=1 << 30, help="Bytes of the device; more is out of memory."),
    "python": Option(type=bool, default=False, help="Do without the compiled device: no limit of memory, no captures."),
}  # fmt: skip

descriptor = Descriptor(
    name=NAME,
    summary="a simulated accelerator over host memory; for tests",
    contracts={"descriptor": 1, "probe": 1, "device": 1, "ops": 1, "state": 1, "graph": 1, "communicator": 1},
    probe="evener.testing.simulated.probe",
    probe_timeout=10.0,
    module="evener.testing.simulated.plugin",
    serves=frozenset({f"namespace:{NAME}"}),
    # The rest is the reference's, over ops of torch that the chip has; these need some that it lacks, or are common.
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
    """The entry point of this backend in ``folder``; on ``sys.path`` and in PYTHONPATH, ``backend="simulated"`` finds
    it. Returns the ``.dist-info``."""
    return write_distribution(
        folder, f"evener-backend-{NAME}", {"evener.backends": {NAME: "evener.testing.simulated:descriptor"}}
    )
