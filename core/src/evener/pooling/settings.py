"""What a model makes of a whole text, in place of new tokens: a vector, or a score. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from evener.config.schema import InferConfig
from evener.contracts.checkpoint import Checkpoint
from evener.contracts.pooling import PoolingAnswer, PoolingRequest, PoolingSettings
from evener.errors import ArchitectureError, ConfigError, RequestError
from evener.plugins.discover import installed_catalog

if TYPE_CHECKING:
    from evener.contracts.architecture import Architecture

#: What a model does, for messages.
_DOES = {"generate": "generates text", "embed": "embeds texts (/v1/embeddings)", "score": "scores texts (/v1/rerank)"}


def check_task(wanted: str, settings: PoolingSettings | None) -> None:
    """Raises:
    RequestError: the model does not do what is ``wanted``: "generate", "embed" or "score".
    """
    if wanted != (task := "generate" if settings is None else settings.task):
        message = f"this model {_DOES[task]}; to have one that {_DOES[wanted]}, start it with infer.task={wanted}"
        raise RequestError(message, "model", "unsupported_task")


def choose_pooling(
    infer: InferConfig, files: Checkpoint, family: type[Architecture], known: Collection[str]
) -> PoolingAnswer | None:
    """What an installed package reads from the files of a model; None for one that generates text.

    Args:
        infer: with ``task`` and ``pooling``.
        files: of the model.
        family: its class.
        known: names of all registered classes.

    Raises:
        ArchitectureError: the class can only generate text.
        ConfigError: the model needs a package that is not installed, or ``infer.pooling`` is set for one that does not
            embed.
        EvenerError: what the package raises.
    """
    generates, found = files.architecture in known, None
    if infer.task != "generate":
        catalog = installed_catalog()
        readers = catalog.lazy_imports("pooling reader")
        # Without a reader these files would be ignored.
        if not readers and (infer.task != "auto" or not generates or files.text("modules.json") is not None):
            raise ConfigError(
                f"embedding or scoring with {files.path} needs a package that is not installed; type: pip install "
                "evener-models, or set infer.task=generate"
            )
        request = PoolingRequest(files, infer.task, infer.pooling, generates)
        found = next(catalog.answers("pooling reader", request), None)
        if found is None and infer.task != "auto":
            raise ConfigError(
                f"no installed package knows how {files.path} does what infer.task={infer.task} asks for ("
                f"{', '.join(readers)}); set infer.task=generate"
            )
    if infer.pooling != "auto" and (found is None or found.settings.task != "embed"):
        raise ConfigError(f"infer.pooling={infer.pooling} is for a model that embeds: set infer.task=embed")
    if found is not None and not family.takes_head:
        raise ArchitectureError(f"{family.__name__} can only generate text; set infer.task=generate")
    return found
