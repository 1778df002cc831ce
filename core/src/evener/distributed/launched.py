"""Ranks that ``torchrun`` has started, on one machine or on many: who this process is, and how it finds the controller.

The controller's address and the keys of its channel go through the store at which the ranks meet. Whoever can read that
store can join the run: it belongs into a network that only the run's machines reach, as the data channel does.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from evener.distributed.keys import Keys
from evener.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_NAME = "evener/control"


class Contact(msgspec.Struct, frozen=True):
    """How a worker reaches its controller; see ``Hub``."""

    addresses: list[str]
    keys: Keys | None = None


@dataclass(frozen=True)
class Launched:
    """One of ``size`` processes that were started together, ``local_size`` of them on this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launched | None:
        """What the environment says; None in a process that was started alone.

        Raises:
            ConfigError: it says half of it.
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

    def joins(self, used: int) -> bool:
        """Whether this is a worker of rank 0's engine, which uses so many ranks.

        Raises:
            ConfigError: it uses more or fewer than there are.
        """
        if self.size != used:
            raise ConfigError(
                f"WORLD_SIZE={self.size}: {self.size} ranks were started, but infer.tp_size × infer.pp_size uses "
                f"{used}; set infer.tp_size={self.size}, or start one process without torchrun (`python -m evener …`)"
            )
        return self.rank > 0

    @property
    def interface(self) -> str:
        """The address at which the others reach rank 0's machine.

        Raises:
            ConfigError: the name is unknown.
        """
        try:
            family, *_, address = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ConfigError(f"MASTER_ADDR={self.host} cannot be used: {error}") from error
        return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])

    def publish(self, contact: Contact) -> None:
        """On rank 0: tell the others.

        Raises:
            ConfigError: they were told before, and are workers of another engine or have ended with it.
        """
        store = self._store()
        if store.check([_NAME]):
            raise ConfigError(
                "the ranks that torchrun has started work for one engine, and this process has had one: keep that, or "
                "run a script for each"
            )
        store.set(_NAME, msgspec.json.encode(contact).decode())

    def find(self) -> Contact:
        """On the others: wait for rank 0, and learn how to reach the controller."""
        return msgspec.json.decode(self._store().get(_NAME), type=Contact)

    def _store(self) -> Store:
        from torch.distributed.rendezvous import rendezvous

        store: Store = next(iter(rendezvous("env://", rank=self.rank, world_size=self.size)))[0]
        return store
