"""The descriptor of evener's backend for Enflame GCU. Torch-free, like every descriptor's module."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="gcu",
    summary="Enflame GCU: the vendor's ops from vllm-gcu, torch_gcu for the rest, ECCL.",
    contracts={"probe": 2, "device": 2, "graph": 1, "communicator": 2, "state": 2, "ops": 2},
    module="evener_backend_gcu.plugin",
    probe="evener_backend_gcu.probe",
    probe_timeout=120.0,
    serves=frozenset({"namespace:gcu"}),
    evidence="L3: engine on a simulated device with stand-ins for the vendor's ops; L1: calls match the published "
    "schemas, 2026-11; never run on a GCU",
    ops=("rms_norm", "act_and_mul", "rotary", "sample", "linear", "grouped_linear"),
    states=("gcu.paged",),
    options={
        "graphs": Option(
            type=bool,
            default=False,
            help="Capture decode steps with GCUGraph; the vendor calls it experimental.",
        ),
    },
)
