"""Models given by a hub id instead of a path: an installed package fetches them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evener.config.schema import Config
from evener.errors import CheckpointError


def with_local_model(config: Config) -> Config:
    """``config`` with a local model: an id such as ``org/name`` that is not a path is fetched by the installed model
    source, and becomes the served name.

    Raises:
        CheckpointError: no installed package can fetch it.
    """
    name = config.model
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or "/" not in name:
        return config
    from evener.plugins.discover import installed_catalog

    sources = installed_catalog().lazy_imports("model source")
    for source in sources.values():
        path = source.load()(name, config.load != "dummy", config.options.get(source.package, {}))
        if path is not None:
            served = config.serve.served_model_name or name
            return replace(config, model=str(path), serve=replace(config.serve, served_model_name=served))
    detail = "can fetch it" if sources else "fetches models: pip install evener-models"
    raise CheckpointError(
        f"cannot open the model {name}: there is no such path, and no installed package {detail}; check the path"
    )
