"""A backend in host memory that fails as ``FAILS`` says; without it, it is right."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="failing",
    summary="Host memory, with a failure of your choice.",
    contracts={"probe": 2, "device": 2, "ops": 2},
    module="evener_backend_failing.plugin",
    probe="evener_backend_failing.probe",
    probe_timeout=5.0,
    serves=frozenset({"namespace:cpu"}),
    ops=("act_and_mul", "rms_norm"),
)
