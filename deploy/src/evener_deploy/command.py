"""``evener deploy MODEL [key=value …]``: several servers behind one address."""

from __future__ import annotations

import logging
import os
import signal
import threading
from importlib.util import find_spec

from evener.cli.command import Command, read_config
from evener.errors import ConfigError
from evener.logs import set_up_logging
from evener_deploy.options import DeployOptions, check_keys, read_resources

logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: list[str]) -> int:
    """Deploy until a signal comes. Returns the exit code.

    Raises:
        ConfigError: a wrong option or key, or Ray is not installed.
        EngineError: a replica does not start.
    """
    command = Command("deploy", "Serve a model with several servers behind one address, on Ray Serve.")
    command.option("--replicas", metavar="N", type=int, default=1,
                   help="servers at the start, and at least (default 1)")  # fmt: skip
    command.option("--max-replicas", metavar="N", type=int, default=0,
                   help="servers at most; more are started while they are busy (default: as --replicas)")  # fmt: skip
    command.option("--target", metavar="N", type=int, default=32,
                   help="running requests of a server above which more are started (default 32)")  # fmt: skip
    command.option("--grow-after", metavar="SECONDS", type=float, default=30.0,
                   help="seconds of more than --target before another server is started (default 30)")  # fmt: skip
    command.option("--shrink-after", metavar="SECONDS", type=float, default=600.0,
                   help="seconds of one server less being enough before one is ended (default 600)")  # fmt: skip
    command.option("--drain-timeout", metavar="SECONDS", type=float, default=300.0,
                   help="seconds that requests of a server that is ended may continue (default 300)")  # fmt: skip
    command.option("--spread", metavar="N", type=int, default=16,
                   help="running requests by which two servers may differ before a prompt goes to the less busy one, "
                   "although the other has its beginning in the cache (default 16)")  # fmt: skip
    command.option("--resources", metavar="NAME=AMOUNT,...", default="",
                   help="what Ray reserves for each server, as in GPU=2,CPU=4 (default CPU=1)")  # fmt: skip
    command.option("--start-timeout", metavar="SECONDS", type=float, default=3600.0,
                   help="until a server must be ready; 0: no limit (default 3600)")  # fmt: skip
    # Keys that are wrong are an error here, and not in every replica.
    arguments, config = read_config(command, argv, ranks=False)
    if config.infer.layers:
        raise ConfigError("infer.layers runs only some of the model's layers, whose text is not the model's, so it is "
                          "not served: leave it out; to time layers, type evener bench-engine")  # fmt: skip
    check_keys(config)
    words = command.parse(argv)[1]
    for name in ("replicas", "target", "spread"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)} is not valid; it takes 1 or more")
    for name in ("start_timeout", "grow_after", "shrink_after", "drain_timeout"):
        if not 0 <= (seconds := getattr(arguments, name)) < 1e9:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {seconds} is not valid; it takes seconds, 0 or more")
    most = arguments.max_replicas or arguments.replicas
    if most < arguments.replicas:
        raise ConfigError(f"--max-replicas {most} is less than --replicas {arguments.replicas}; give at least as many")
    options = DeployOptions(
        words=(*words, *(("--config", os.path.abspath(arguments.config)) if arguments.config else ())),
        host=config.serve.host, port=config.serve.port, replicas=arguments.replicas, max_replicas=most,
        target=arguments.target, spread=arguments.spread, resources=read_resources(arguments.resources),
        start_timeout=arguments.start_timeout, grow_after=arguments.grow_after, shrink_after=arguments.shrink_after,
        drain_timeout=arguments.drain_timeout,
        environ={name: value for name, value in os.environ.items() if name.startswith(("EVENER_", "CONFIG_NAME"))},
    )  # fmt: skip
    if find_spec("ray") is None:
        raise ConfigError("evener deploy needs Ray, which is not installed; type: pip install 'evener-deploy[ray]'")
    set_up_logging(config.log, logging.INFO)
    from evener_deploy import ray_app

    for number in _SIGNALS:
        signal.signal(number, _end)
    try:
        # Ray waits for ever for resources that the cluster does not have: a signal ends that too.
        logger.info("serving %d replicas at %s", options.replicas, ray_app.start(options))
        threading.Event().wait()
        return 0
    finally:
        ray_app.stop(options.drain_timeout)


def _end(*_: object) -> None:
    """End the deployment; a second signal ends this process at once."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    raise SystemExit(0)
