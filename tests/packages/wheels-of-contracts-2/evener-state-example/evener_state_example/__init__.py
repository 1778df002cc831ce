"""The descriptor. evener reads it before it imports anything else of the package, so this module imports no torch."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="recurrent-rows",
    summary="Recurrent state of gated delta nets, advanced for many requests at once.",
    contracts={"state": 2},
    module="evener_state_example.plugin",
    needs=frozenset({"namespace:cpu"}),  # where the kit was run; the provider is plain torch
    states=("example.rows",),
)
