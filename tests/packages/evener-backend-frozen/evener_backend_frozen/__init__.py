"""A vendor's package as it was published, for the contract versions below. Frozen: see
tests/test_contract_versions.py."""

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="frozen",
    summary="A chip whose vendor has moved on.",
    contracts={"descriptor": 1, "probe": 2, "device": 2, "ops": 2},
    module="evener_backend_frozen.plugin",
    probe="evener_backend_frozen.probe",
    probe_timeout=5.0,
    serves=frozenset({"namespace:cpu"}),
    options={"rods": Option(type=int, default=64, help="Tokens that a kernel takes.", choices=(16, 64))},
    aliases={"infer.op_impl=frozen": "ops.rms_norm=ice_norm"},
    ops=("rms_norm",),
)
