"""What this package is. evener reads it before it imports anything else of it: no torch here."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="example",
    summary="Example: say in one sentence what it is.",
    contracts={"architecture": 1, "layers": 1},
    # The name is the one in "architectures" of the checkpoint's config.json.
    architectures={"ExampleForCausalLM": "evener_model_example.model:ExampleForCausalLM"},
)
