"""Configuration: what was asked for (``Config``), what came of it (``ResolvedConfig``), and how keys are typed.

====================  ========================================================================
module                noun
====================  ========================================================================
``schema``            ``Config`` and its sections: every key with its default and help
``keys``              keys as they are typed; unknown keys
``seeds``             old spellings
``packages``          keys that installed packages add
``build``             from overrides to a ``Config``
``resolve``           from a ``Config`` to a ``ResolvedConfig``, with reasons
``checkpoint``        facts of a checkpoint's ``config.json``
``host``              cores of this host
``source``            models that are named and do not lie here
``hydra_boundary``    whole files and the command line's value grammar; the only user of Hydra
====================  ========================================================================
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from evener.config import build
from evener.config.schema import Config, InferConfig, LogConfig, RequestConfig, ServeConfig, to_flat

__all__ = [
    "Config",
    "InferConfig",
    "LogConfig",
    "OldSpellingWarning",
    "RequestConfig",
    "ServeConfig",
    "from_overrides",
    "to_flat",
]


class OldSpellingWarning(UserWarning):
    """A key or value in a spelling that has a newer one."""


def from_overrides(model: str | os.PathLike[str], overrides: Mapping[str, Any]) -> Config:
    """A ``Config`` from Python values, without Hydra: ``from_overrides(path, {"infer.max_reqs": 8, "backend":
    "cpu"})``.

    Args:
        model: folder of the checkpoint.
        overrides: dotted keys, nested mappings, or both; values may be typed or text.

    Raises:
        ConfigError: an unknown key, or a value that cannot be used.

    Warns:
        OldSpellingWarning: once for each old spelling.
    """
    built = build.from_overrides(model, overrides)
    for note in built.notes:
        warnings.warn(note, OldSpellingWarning, stacklevel=3)
    return built.config
