"""The parts of an installed package for models that embed or score texts: one in the workers, one in the front end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.contracts.pooling import PoolingAnswer, PoolingRequest, check_task
from evener.engine.facts.engine_info import EngineInfo
from evener.plugins.discover import installed_catalog

if TYPE_CHECKING:
    from evener.contracts.architecture import Architecture


def pooling_part(name: str) -> Any:
    """The package's part with this name, see ``evener.contracts.pooling``.

    Raises:
        ConfigError: no installed package has it.
    """
    install = "evener-generation, or set infer.task=generate"
    return installed_catalog().need("part of pooling", name, "embedding or scoring texts", install)


def choose_pooling(request: PoolingRequest, family: type[Architecture]) -> PoolingAnswer | None:
    """How a model of class ``family`` embeds or scores a text; None: it generates text.

    Raises:
        ConfigError: a package is not installed, or ``infer.pooling`` is set for a model that does not embed.
        EvenerError: what the package raises.
    """
    # A model that generates needs no package.
    if not request.wanted and request.pooling == "auto" and not installed_catalog().lazy_imports("part of pooling"):
        return None
    answer: PoolingAnswer | None = pooling_part("choose")(request, family)
    return answer


def text_vectors(info: EngineInfo, dimensions: int | None) -> Any:
    """The kind of vectors that a request wants, as ``evener_pooling.vectors.TextVectors``. ``dimensions``: numbers of a
    vector; None: all.

    Raises:
        RequestError: the model does not embed, or its vectors cannot be cut to this length.
    """
    check_task("embed", info.pooling)
    return pooling_part("vectors")(info.pooling, info.hidden_size, dimensions)
