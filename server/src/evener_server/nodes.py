"""Servers that were started once on each machine instead of once for each device, by KsanaLLM's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from evener.cli.command import Command, read_config
from evener.errors import ConfigError

_NUMBERS = ("WORLD_SIZE", "NODE_RANK", "MASTER_PORT")


def start_ranks(command: Command, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Where ``WORLD_SIZE`` counts machines, this process becomes torchrun, which starts the command once for each of
    this machine's devices, and this does not return; elsewhere nothing happens.

    Raises:
        ConfigError: a variable is missing or wrong, or the machines cannot have equally many ranks.
    """
    theirs = not environ.get("RANK") and bool(environ.get("NODE_RANK") or environ.get("MASTER_HOST"))
    if environ.get("WORLD_SIZE", "1") == "1" or not theirs:
        return
    _, config = read_config(command, argv, environ, ranks=False)
    typed = [*torchrun(environ, config.infer.tp_size, config.infer.pp_size), "-m", "evener", command.name, *argv]
    print(f"WORLD_SIZE counts machines here; this one starts: torchrun {' '.join(typed)}", file=sys.stderr)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *typed])


def torchrun(environ: Mapping[str, str], tp_size: int, pp_size: int) -> list[str]:
    """What torchrun is told to start this machine's part of so many ranks.

    Raises:
        ConfigError: a variable is missing or wrong, or the machines cannot have equally many ranks.
    """
    wrong = [f"{name} is not set" for name in (*_NUMBERS, "MASTER_HOST") if not environ.get(name)]
    wrong += [f"{name}={environ[name]} is no number" for name in _NUMBERS if not environ.get(name, "0").isdigit()]
    if wrong:
        raise ConfigError(
            f"NODE_RANK and MASTER_HOST say that one process was started on each machine, but {', '.join(wrong)}; set "
            "WORLD_SIZE (machines), NODE_RANK (this one, from 0), MASTER_HOST and MASTER_PORT on each, or use torchrun"
        )
    nodes, node, port = (int(environ[name]) for name in _NUMBERS)
    if node >= nodes:
        raise ConfigError(f"NODE_RANK={node} is none of WORLD_SIZE={nodes} machines, which are 0 to {nodes - 1}")
    if tp_size * pp_size % nodes:
        raise ConfigError(
            f"WORLD_SIZE={nodes} machines cannot have equally many of {tp_size * pp_size} ranks (infer.tp_size × "
            f"infer.pp_size); type infer.pp_size={nodes} and as many for infer.tp_size as each machine has devices"
        )
    each = tp_size * pp_size // nodes
    told = {"nnodes": nodes, "node_rank": node, "master_addr": environ["MASTER_HOST"], "master_port": port}
    return [f"--{key}={value}" for key, value in {**told, "nproc_per_node": each}.items()]
