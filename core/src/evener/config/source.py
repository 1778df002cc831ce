"""Models that are named and do not lie here: fetched by the package that knows where from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evener.config.schema import Config
from evener.errors import CheckpointError


def with_local_model(config: Config) -> Config:
    """``config`` with a model that lies here: a name such as ``org/name`` that is no path is fetched by the installed
    source, and stays the served name.

    Raises:
        CheckpointError: nobody can fetch it.
    """
    name = config.model
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or "/" not in name:
        return config
    from evener.plugins.catalog import targets
    from evener.plugins.discover import discover

    sources = targets(discover().packages, "model source")
    for source in sources.values():
        path = source.load()(name, config.load != "dummy", config.options.get(source.package, {}))
        if path is not None:
            served = config.serve.served_model_name or name
            return replace(config, model=str(path), serve=replace(config.serve, served_model_name=served))
    detail = "fetches it" if sources else "fetches models: pip install evener-models"
    raise CheckpointError(
        f"cannot open the model {name}: it does not exist here, and no installed package {detail}; check the path"
    )
