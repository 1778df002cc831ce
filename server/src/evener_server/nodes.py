"""Servers started with one process per machine instead of one per device, with KsanaLLM's environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from evener.cli.command import Command, read_config
from evener.errors import ConfigError

_NUMBERS = ("WORLD_SIZE", "NODE_RANK", "MASTER_PORT")


def exec_torchrun_if_multi_node(command: Command, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """If ``WORLD_SIZE`` is a number of machines, replace this process by torchrun, which starts the command once for
    each device of this machine; this does not return then. Otherwise do nothing.

    Raises:
        ConfigError: a variable is missing or wrong, or the ranks cannot be divided equally among the machines.
    """
    multi_node = not environ.get("RANK") and bool(environ.get("NODE_RANK") or environ.get("MASTER_HOST"))
    if environ.get("WORLD_SIZE", "1") == "1" or not multi_node:
        return
    _, config = read_config(command, argv, environ, ranks=False)
    typed = [*torchrun_args(environ, config.infer.tp_size, config.infer.pp_size), "-m", "evener", command.name, *argv]
    # Not what was typed after it: that may have an API key.
    started = " ".join(typed[: len(typed) - len(argv)])
    print(f"WORLD_SIZE counts machines; starting torchrun here: {started} …", file=sys.stderr)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *typed])


def torchrun_args(environ: Mapping[str, str], tp_size: int, pp_size: int) -> list[str]:
    """torchrun's arguments to start this machine's share of ``tp_size * pp_size`` ranks.

    Raises:
        ConfigError: a variable is missing or wrong, or the ranks cannot be divided equally among the machines.
    """
    wrong = [f"{name} is not set" for name in (*_NUMBERS, "MASTER_HOST") if not environ.get(name)]
    wrong += [f"{name}={environ[name]} is not a number" for name in _NUMBERS if not environ.get(name, "0").isdigit()]
    if wrong:
        raise ConfigError(
            f"NODE_RANK and MASTER_HOST ask for one process per machine, but {', '.join(wrong)}; set WORLD_SIZE "
            "(number of machines), NODE_RANK (this one, from 0), MASTER_HOST and MASTER_PORT on each, or use torchrun"
        )
    nodes, node, port = (int(environ[name]) for name in _NUMBERS)
    if node >= nodes:
        raise ConfigError(f"NODE_RANK={node} is not a machine of WORLD_SIZE={nodes}; set it from 0 to {nodes - 1}")
    if tp_size * pp_size % nodes:
        raise ConfigError(
            f"{tp_size * pp_size} ranks (infer.tp_size × infer.pp_size) cannot be divided equally among WORLD_SIZE="
            f"{nodes} machines; set infer.pp_size={nodes}, and infer.tp_size to the number of devices of a machine"
        )
    each = tp_size * pp_size // nodes
    told = {"nnodes": nodes, "node_rank": node, "master_addr": environ["MASTER_HOST"], "master_port": port}
    return [f"--{key}={value}" for key, value in {**told, "nproc_per_node": each}.items()]
