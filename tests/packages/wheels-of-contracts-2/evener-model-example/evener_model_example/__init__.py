"""The descriptor of this package. evener reads it before it imports anything else here, so do not import torch."""

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="example",
    summary="Example: say in one sentence what it is.",
    contracts={"architecture": 2, "layers": 2},
    # The key is the name in "architectures" of the checkpoint's config.json.
    architectures={"ExampleForCausalLM": "evener_model_example.model:ExampleForCausalLM"},
)
