"""The descriptor. evener reads it before it imports anything else of the package, so this module imports no torch."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="worked",
    summary="A simulated device in host memory, with one of everything that a backend may bring.",
    contracts={"probe": 2, "device": 2, "ops": 2, "state": 2, "graph": 1, "communicator": 2},
    probe="evener_backend_worked.probe",
    module="evener_backend_worked.hooks",
    evidence="L3: the conformance kit, over host memory",
    ops=("add_rms_norm", "linear", "mlp_block"),
    states=("worked.paged",),
)
