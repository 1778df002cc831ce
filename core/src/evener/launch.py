"""Processes that were started together: which go on with their program, and which become workers of the first one's
engine. Torch-free, unless this process is a worker."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from evener.config.schema import Config
from evener.distributed.launched import Launched
from evener.errors import ConfigError
from evener.logs import stderr_level


def join_ranks(config: Config, environ: Mapping[str, str], level: int = logging.INFO) -> None:
    """Of the ranks that ``torchrun`` has started, rank 0 goes on; the others become its workers, and this does not
    return in them: their process ends with rank 0's engine.

    Args:
        level: the least that a worker logs on standard error where ``config`` does not say.

    Raises:
        ConfigError: there are other numbers of ranks than the configuration uses, they have met already, or are to be
            threads of one process.
    """
    launched = Launched.of(environ)
    if launched is None:
        return
    if config.executor == "inline":
        raise ConfigError("executor=inline has all ranks in one process, torchrun one for each; leave one out")
    worker = launched.joins(config.infer.tp_size * config.infer.pp_size)
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        raise ConfigError(
            "torch.distributed is initialized in this process, which an engine does for its ranks by itself; leave out "
            "init_process_group, or call destroy_process_group before the engine starts"
        )
    if worker:
        from evener.engine.child import run_rank

        run_rank(config, launched, level)


def join_script(config: Config) -> None:
    """``join_ranks`` for a program that is no command of ours: with one rank, each process has an engine of its own."""
    if config.infer.tp_size * config.infer.pp_size > 1:
        join_ranks(config, os.environ, stderr_level())
