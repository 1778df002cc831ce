"""Processes started together by ``torchrun``: rank 0 continues with its program, the others become workers of its
engine. An installed package knows the launcher. Torch-free, unless this process is a worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from evener.config.schema import Config
from evener.logs import stderr_level
from evener.plugins.discover import installed_catalog


def launched_rank(environ: Mapping[str, str]) -> Any | None:
    """This process as a rank of a run, see ``evener_torchrun.ranks.TorchrunEnv``; None: it was started alone.

    Raises:
        ConfigError: the variables of ``environ`` are incomplete or wrong, or no installed package reads them.
    """
    if (size := environ.get("WORLD_SIZE", "1")) == "1":
        return None
    what = f"WORLD_SIZE={size} says that ranks were started together, which"
    launcher = installed_catalog().need("launcher", "torchrun", what, "evener-server, or unset WORLD_SIZE")
    return launcher.from_environ(environ)


def join_ranks(config: Config, environ: Mapping[str, str], level: int = logging.INFO) -> None:
    """Under ``torchrun``, rank 0 returns; the other ranks become its workers, and this does not return in them: their
    process ends with rank 0's engine. Without ``torchrun`` this does nothing.

    Args:
        level: a worker's minimum log level on standard error, if ``config`` does not set one.

    Raises:
        ConfigError: the number of ranks differs from the configuration, torch.distributed is already initialized, or
            the ranks should be threads of one process (``executor=inline``).
    """
    if (rank := launched_rank(environ)) is not None:
        rank.join(config, level)


def join_script(config: Config) -> None:
    """``join_ranks`` for a user's own program: with one rank, each process has its own engine."""
    if config.infer.tp_size * config.infer.pp_size > 1:
        join_ranks(config, os.environ, stderr_level())
