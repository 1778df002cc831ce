"""``evener serve MODEL [key=value …]``."""

from __future__ import annotations

import asyncio
import logging
import math
import os

from evener.cli.command import Command, read_config
from evener.errors import ConfigError
from evener.logs import set_up_logging
from evener_server.early_reading import read_weights_ahead
from evener_server.nodes import exec_torchrun_if_multi_node
from evener_server.process import serve

_DRAIN_SECONDS = 30.0


def main(argv: list[str]) -> int:
    """Serve until a signal comes. Returns the exit code: 0 after SIGTERM or SIGINT, 128 + the number of a second
    signal, 1 if the engine died.

    Raises:
        ConfigError: a wrong option, or an address that cannot be used.
        EvenerError: the engine does not start.
    """
    command = Command("serve", "Serve a model over HTTP with the OpenAI API.")
    command.option(
        "--drain-timeout", metavar="SECONDS", type=float, default=_DRAIN_SECONDS,
        help=f"how long running requests may continue after SIGTERM (default {_DRAIN_SECONDS:g})",
    )  # fmt: skip
    command.option("--restart", action="store_true", help="start again if the engine dies, instead of exiting with 1")
    exec_torchrun_if_multi_node(command, argv, os.environ)
    arguments, config = read_config(command, argv)
    drain: float = arguments.drain_timeout
    if not (math.isfinite(drain) and drain >= 0):
        raise ConfigError(f"--drain-timeout {drain} is not valid; it takes seconds, 0 or more")
    set_up_logging(config.log, logging.INFO)
    read_weights_ahead(config)
    return asyncio.run(serve(config, drain_timeout=drain, restart=arguments.restart))
