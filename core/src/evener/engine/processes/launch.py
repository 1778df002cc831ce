"""Processes started together by ``torchrun``: rank 0 continues with its program, the others become workers of its
engine. Torch-free, unless this process is a worker."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from evener.config.schema import Config
from evener.distributed.torchrun import TorchrunEnv
from evener.errors import ConfigError
from evener.logs import stderr_level


def join_ranks(config: Config, environ: Mapping[str, str], level: int = logging.INFO) -> None:
    """Under ``torchrun``, rank 0 returns; the other ranks become its workers, and this does not return in them: their
    process ends with rank 0's engine. Without ``torchrun`` this does nothing.

    Args:
        level: a worker's minimum log level on standard error, if ``config`` does not set one.

    Raises:
        ConfigError: the number of ranks differs from the configuration, torch.distributed is already initialized, or
            the ranks should be threads of one process (``executor=inline``).
    """
    torchrun = TorchrunEnv.from_environ(environ)
    if torchrun is None:
        return
    if config.executor == "inline":
        raise ConfigError("executor=inline runs all ranks in one process, but torchrun starts one process for each "
                          "rank: leave out one of them")  # fmt: skip
    worker = torchrun.is_worker(config.infer.tp_size * config.infer.pp_size)
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        raise ConfigError("torch.distributed is already initialized in this process, but the engine must do it for its "
                          "ranks: leave out init_process_group, or call destroy_process_group before the engine "
                          "starts")  # fmt: skip
    if worker:
        from evener.engine.processes.child import run_rank

        run_rank(config, torchrun, level)


def join_script(config: Config) -> None:
    """``join_ranks`` for a user's own program: with one rank, each process has its own engine."""
    if config.infer.tp_size * config.infer.pp_size > 1:
        join_ranks(config, os.environ, stderr_level())
