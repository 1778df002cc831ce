"""A backend that is right, until ``PLANTED_DEFECT`` names one of the faults that vendors ship: what the conformance kit
is measured with. The first 28 were written without sight of the kit, the others after it had missed them."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="planted",
    summary="Host memory, with a fault of your choice.",
    contracts={"probe": 2, "device": 2, "ops": 2, "state": 2, "graph": 1, "communicator": 2},
    module="evener_backend_planted.plugin",
    probe="evener_backend_planted.probe",
    serves=frozenset({"namespace:cpu"}),
    ops=("rms_norm", "add_rms_norm", "act_and_mul", "rotary", "linear", "greedy", "mlp_block"),
    states=("planted.pages",),
)
