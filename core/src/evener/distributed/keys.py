"""Keys of a control channel that leaves the machine: CURVE, so that it is encrypted and both sides know each other."""

from __future__ import annotations

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator


class Keys(msgspec.Struct, frozen=True):
    """What a worker needs: the controller's public key, and the pair by which the controller knows its workers."""

    controller: bytes
    public: bytes
    secret: bytes


class Guard:
    """The controller's keys, made for one run, and the thread that turns strangers away from its sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        public, self._secret = zmq.curve_keypair()
        self.keys = Keys(public, *zmq.curve_keypair())
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may speak; zmq calls it."""
        del domain
        return key == self.keys.public

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Call before ``socket`` is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def close(self) -> None:
        """End the thread."""
        self._thread.stop()


def show_keys(socket: zmq.Socket[bytes], keys: Keys | None) -> None:
    """Call on a worker's socket before it connects; without keys it stays as it is."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.controller)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
