"""What a model makes of a whole text, in place of new tokens: a vector, or a score. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.contracts.pooling import PoolingAnswer, PoolingRequest
from evener.errors import ArchitectureError, ConfigError
from evener.plugins.discover import installed_catalog

if TYPE_CHECKING:
    from evener.contracts.architecture import Architecture


def choose_pooling(request: PoolingRequest, family: type[Architecture]) -> PoolingAnswer | None:
    """What an installed package reads from the files of a model; None for one that generates text.

    Args:
        family: the model's class.

    Raises:
        ArchitectureError: the class can only generate text, or only encode it.
        ConfigError: the model needs a package that is not installed, or ``infer.pooling`` is set for one that does not
            embed.
        EvenerError: what the package raises.
    """
    found, path = None, request.checkpoint.path
    if request.task == "generate" and request.longest is not None:
        raise ArchitectureError(
            f"{request.checkpoint.architecture} is an encoder of texts and generates none: leave out "
            "infer.task=generate, and ask for vectors (/v1/embeddings) or scores (/v1/rerank)"
        )
    if request.task != "generate":
        catalog = installed_catalog()
        readers = catalog.lazy_imports("pooling reader")
        # Without a reader these files would be ignored.
        if not readers and request.wanted:
            raise ConfigError(
                f"embedding or scoring with {path} needs a package that is not installed; type: pip install "
                "evener-models, or set infer.task=generate"
            )
        found = next(catalog.answers("pooling reader", request), None)
        if found is None and request.task != "auto":
            raise ConfigError(
                f"no installed package knows how {path} does what infer.task={request.task} asks for ("
                f"{', '.join(readers)}); set infer.task=generate"
            )
    if request.pooling != "auto" and (found is None or found.settings.task != "embed"):
        raise ConfigError(f"infer.pooling={request.pooling} is for a model that embeds: set infer.task=embed")
    if found is not None and not family.takes_head:
        raise ArchitectureError(f"{family.__name__} can only generate text; set infer.task=generate")
    return found
