"""Configuration: what was asked for (``Config``), what is used (``ResolvedConfig``), and how keys are written.

====================  ========================================================================
module                content
====================  ========================================================================
``schema``            ``Config`` and its sections: every key with its default and help
``keys``              keys on the command line; unknown keys
``old_spellings``     asks a package about old spellings of keys
``packages``          keys of installed packages
``build``             from overrides to a ``Config``
``resolve``           from a ``Config`` to a ``ResolvedConfig``, with reasons
``stages``            stages on unlike devices, which a package places
``checkpoint``        facts from a checkpoint's ``config.json``
``cpu_cores``         CPU cores of this host
``local_model``       fetches a model that is given as a hub id
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
    "LegacyKeyWarning",
    "LogConfig",
    "RequestConfig",
    "ServeConfig",
    "from_overrides",
    "to_flat",
]


class LegacyKeyWarning(UserWarning):
    """A key or value in an old spelling."""


def from_overrides(model: str | os.PathLike[str], overrides: Mapping[str, Any]) -> Config:
    """A ``Config`` from Python values, without Hydra: ``from_overrides(path, {"infer.max_reqs": 8, "backend":
    "cpu"})``.

    Args:
        model: folder of the checkpoint.
        overrides: dotted keys, nested mappings, or both; values may be typed or text.

    Raises:
        ConfigError: an unknown key, or an invalid value.

    Warns:
        LegacyKeyWarning: once for each old spelling.
    """
    built = build.from_overrides(model, overrides)
    for note in built.notes:
        warnings.warn(note, LegacyKeyWarning, stacklevel=3)
    return built.config
