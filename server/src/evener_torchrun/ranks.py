"""Which rank this process is, and how it finds the controller.

Rank 0 publishes the controller's addresses and keys in torch's rendezvous store. Anyone who can read that store can
join the run, so the store must be in a network that only the run's machines can reach.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from evener.config.schema import Config
from evener.distributed.contact import Contact
from evener.distributed.world import RankPlacement, World
from evener.errors import ConfigError
from evener.logs import set_up_logging

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_NAME = "evener/control"


@dataclass(frozen=True)
class TorchrunEnv:
    """One of ``size`` processes that torchrun has started, ``local_size`` of them on this machine. ``host`` is the name
    or address of rank 0's machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> TorchrunEnv | None:
        """Read torchrun's environment variables. None if this process was started alone.

        Raises:
            ConfigError: some of the variables are missing or are no numbers.
        """
        if environ.get("WORLD_SIZE", "1") == "1":
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        wrong = [f"{name}={environ[name]}" for name in names if name not in missing and not environ[name].isdigit()]
        if missing or wrong:
            raise ConfigError(
                f"WORLD_SIZE={environ['WORLD_SIZE']} says that ranks were started together, but "
                + ", ".join([f"{name} is not set" for name in missing] + [f"{each} is no number" for each in wrong])
                + "; start them with torchrun, or unset WORLD_SIZE"
            )
        rank, size, local_rank, local_size = (int(environ[name]) for name in names)
        return cls(rank, size, local_rank, local_size, environ["MASTER_ADDR"])

    def join(self, config: Config, level: int) -> None:
        """In rank 0 this returns; the other ranks become its workers, and their processes end here. ``level``: as in
        ``evener.engine.processes.launch.join_ranks``.

        Raises:
            ConfigError: torchrun has started another number of ranks than the configuration uses, torch.distributed is
                already initialized, or the ranks should be threads of one process (``executor=inline``).
        """
        if config.executor == "inline":
            raise ConfigError("executor=inline runs all ranks in one process, but torchrun starts one process for each "
                              "rank: leave out one of them")  # fmt: skip
        if self.size != (used := config.infer.tp_size * config.infer.pp_size):
            raise ConfigError(
                f"WORLD_SIZE={self.size}: {self.size} ranks were started, but infer.tp_size × infer.pp_size uses "
                f"{used}; set infer.tp_size={self.size}, or start one process without torchrun (`python -m evener …`)"
            )
        if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
            raise ConfigError("torch.distributed is already initialized in this process, but the engine must do it for "
                              "its ranks: leave out init_process_group, or call destroy_process_group before the "
                              "engine starts")  # fmt: skip
        if self.rank > 0:
            self._work(config, level)

    def place(self, tp_size: int, pp_size: int) -> RankPlacement:
        """Where this process joins the others."""
        return RankPlacement(World.of(self.rank, tp_size, pp_size), self.local_rank, self.local_size, "env://")

    @property
    def interface(self) -> str:
        """The address under which the others reach rank 0's machine, in brackets if it is an IPv6 address.

        Raises:
            ConfigError: ``host`` cannot be resolved.
        """
        try:
            family, *_, address = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR={self.host} cannot be resolved ({error}); set it to an address of rank 0's machine"
            ) from error
        return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])

    def publish(self, contact: Contact) -> None:
        """On rank 0: publish the contact for the other ranks.

        Raises:
            ConfigError: it was published before: the other ranks work, or have worked, for another engine.
        """
        store = self._store()
        if store.check([_NAME]):
            raise ConfigError(
                "this process has already started an engine, and ranks of torchrun can only work for one; use the same "
                "engine again, or run one script for each engine"
            )
        store.set(_NAME, msgspec.json.encode(contact).decode())

    def find(self) -> Contact:
        """On the other ranks: wait until rank 0 has published the contact."""
        return msgspec.json.decode(self._store().get(_NAME), type=Contact)

    def _work(self, config: Config, level: int) -> NoReturn:
        """In a process of rank above 0: run a worker until the controller ends it."""
        from evener.engine.processes.child import run_role, run_worker
        from evener.engine.processes.control_channel import ControlClient

        sys.stdout.flush()  # what the program has written before it became a worker
        set_up_logging(config.log, level)
        place, contact = self.place(config.infer.tp_size, config.infer.pp_size), self.find()
        control = ControlClient(contact.addresses, self.rank, contact.keys, config.infer.heartbeat_timeout)
        code = run_role(control, lambda: run_worker(config, control, place))
        # Skips Python's shutdown: communication libraries may hang in it when other ranks have ended.
        logging.shutdown()
        os._exit(code)

    def _store(self) -> Store:
        from torch.distributed.rendezvous import rendezvous

        store: Store = next(iter(rendezvous("env://", rank=self.rank, world_size=self.size)))[0]
        return store
