"""Which connector the configuration asks for; controller and workers each take their half of it."""

from __future__ import annotations

from typing import Any

from evener.config.schema import InferConfig
from evener.errors import ConfigError
from evener.plugins.discover import installed_catalog


def find_connector(infer: InferConfig) -> Any | None:
    """The connector's class, see ``evener.contracts.connector``; None: the engine has none.

    Raises:
        ConfigError: no installed package has it, or there is no prefix cache.
    """
    if infer.kv_host_memory is None:
        return None
    if not infer.prefix_cache:
        raise ConfigError("infer.kv_host_memory keeps what leaves the prefix cache; set infer.prefix_cache=true too")
    found = installed_catalog().lazy_imports("connector")
    if "host" not in found:
        raise ConfigError("infer.kv_host_memory needs a package that is not installed: pip install evener-offload")
    return found["host"].load()
