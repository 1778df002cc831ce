"""Ranks that torchrun has started, on one machine or on several: which rank this is, and how it finds the controller.

Rank 0 publishes the controller's addresses and keys in torch's rendezvous store. Anyone who can read that store can
join the run, so the store must be in a network that only the run's machines can reach. The same holds for the
connections that carry tensors. zmq's CURVE encrypts the control channel and authenticates both ends.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from evener.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_NAME = "evener/control"


class Keys(msgspec.Struct, frozen=True):
    """What a worker needs: the controller's public key, and the key pair that all workers of the run share."""

    controller: bytes
    public: bytes
    secret: bytes


class CurveServer:
    """The controller's keys, made for one run, and the thread that rejects clients without the workers' key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        public, self._secret = zmq.curve_keypair()
        self.keys = Keys(public, *zmq.curve_keypair())
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by zmq: whether to accept a client with this public key."""
        del domain
        return key == self.keys.public

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Require keys on ``socket``. Call it before the socket is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def close(self) -> None:
        """End the thread."""
        self._thread.stop()


def set_curve_keys(socket: zmq.Socket[bytes], keys: Keys | None) -> None:
    """Use the keys on a worker's ``socket``. Call it before the socket connects; None changes nothing."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.controller)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class Contact(msgspec.Struct, frozen=True):
    """How a worker reaches its controller; see ``ControlServer``."""

    addresses: list[str]
    keys: Keys | None = None


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

    def is_worker(self, used: int) -> bool:
        """Whether this process only runs a worker, for the engine of rank 0. ``used``: the number of ranks that the
        configuration uses.

        Raises:
            ConfigError: torchrun has started another number of ranks.
        """
        if self.size != used:
            raise ConfigError(
                f"WORLD_SIZE={self.size}: {self.size} ranks were started, but infer.tp_size × infer.pp_size uses "
                f"{used}; set infer.tp_size={self.size}, or start one process without torchrun (`python -m evener …`)"
            )
        return self.rank > 0

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

    def _store(self) -> Store:
        from torch.distributed.rendezvous import rendezvous

        store: Store = next(iter(rendezvous("env://", rank=self.rank, world_size=self.size)))[0]
        return store
