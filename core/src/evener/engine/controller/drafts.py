"""Speculative decoding: asks an installed package, as the configuration says."""

from __future__ import annotations

from typing import Any

from evener.config.schema import InferConfig
from evener.plugins.discover import installed_catalog


def find_drafts(infer: InferConfig) -> Any | None:
    """The draft policy of an engine, see ``evener.contracts.generation.drafts``; None without speculative decoding.

    Raises:
        ConfigError: no installed package has one, or it cannot do what the configuration asks.
    """
    if infer.proposes == "none":
        return None
    return installed_catalog().need("draft policy", "", f"infer.drafter={infer.proposes}", "evener-generation")(infer)
