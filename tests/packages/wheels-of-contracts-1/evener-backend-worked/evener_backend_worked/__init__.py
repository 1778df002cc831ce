"""What the package is. evener reads it before it imports anything else of it, so there is no torch here."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="worked",
    summary="Host memory that plays an accelerator, with one of everything that a backend may bring.",
    contracts={"probe": 1, "device": 1, "ops": 1, "state": 1, "graph": 1, "communicator": 1},
    probe="evener_backend_worked.probe",
    module="evener_backend_worked.hooks",
    evidence="L3: the conformance kit, over host memory",
    ops=("add_rms_norm", "linear", "mlp_block"),
    states=("worked.paged",),
)
