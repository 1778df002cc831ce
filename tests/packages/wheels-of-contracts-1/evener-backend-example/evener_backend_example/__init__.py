"""What this package is. evener reads it before it imports anything else of it: no torch here."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="example",
    summary="Example: say in one sentence what it is.",
    contracts={"probe": 1, "device": 1, "ops": 1},
    probe="evener_backend_example.probe",
    module="evener_backend_example.plugin",
    serves=frozenset({"namespace:cpu"}),  # of your own torch namespace, once the device has one
    evidence="L0: it imports and installs",
    ops=("rms_norm",),
)
