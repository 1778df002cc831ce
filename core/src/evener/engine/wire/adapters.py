"""What computes with adapters (LoRA), if the engine has any; front end, controller and workers each take their part."""

from __future__ import annotations

from typing import Any

from evener.errors import ConfigError
from evener.plugins.discover import installed_catalog


def find_adapters(wanted: object) -> Any | None:
    """The class of an installed package, see ``evener.contracts.adapters``; None if it is not ``wanted``.

    Raises:
        ConfigError: no installed package has one.
    """
    if not wanted:
        return None
    found = installed_catalog().lazy_imports("maker of adapters")
    if not found:
        raise ConfigError("infer.max_loras and infer.lora_modules need a package that is not installed: pip install "
                          "evener-generation")  # fmt: skip
    return found[min(found)].load()
