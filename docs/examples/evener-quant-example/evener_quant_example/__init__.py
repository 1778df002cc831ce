"""The descriptor. evener reads it before it imports anything else of the package, so this module imports no torch."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="int8-groups",
    summary="Checkpoints with int8 weights and one scale per group of columns.",
    contracts={"ops": 2, "quant": 3},
    module="evener_quant_example.plugin",
    # The kernel is plain torch, so any namespace would do; each backend named here is one that the kit was run on.
    needs=frozenset({"namespace:cpu"}),
    ops=("linear",),
    formats=("int8-groups",),
)
