"""How a worker on another machine reaches the controller: addresses and keys.

zmq's CURVE encrypts the control channel and authenticates both ends. The connections that carry tensors are not
encrypted, so they must be in a network that only the run's machines can reach.
"""

from __future__ import annotations

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator


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
