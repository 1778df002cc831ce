"""The descriptor. evener reads it before it imports anything else of the package."""

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="request-example",
    summary="The perplexity of each prompt, and pictures as rows of embeddings.",
    contracts={"request_plugin": 1},
    request_plugins={
        "perplexity": "evener_request_example.perplexity:Perplexity",
        "pictures": "evener_request_example.pictures:Pictures",
    },
    options={"pictures": Option(type=str, default=None, help="Folder with the rows of pictures, NAME.npy.")},
)
