"""Chooses what limits the steps of a server, as configured."""

from __future__ import annotations

from evener.config.schema import Config


def chosen(config: Config) -> str:
    """The value of ``generation.step_limit``."""
    found: str = config.options.get("generation", {}).get("step_limit", "measured")
    return found
