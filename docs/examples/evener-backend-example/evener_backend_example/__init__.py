"""The descriptor of this package. evener reads it before it imports anything else here, so do not import torch."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="example",
    summary="Example: say in one sentence what it is.",
    contracts={"probe": 2, "device": 2, "ops": 2},
    probe="evener_backend_example.probe",
    module="evener_backend_example.plugin",
    serves=frozenset({"namespace:cpu"}),  # your own torch namespace, once the device has one
    evidence="L0: it imports and installs",
    ops=("rms_norm",),
)
