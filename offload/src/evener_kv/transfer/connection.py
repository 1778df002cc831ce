"""Connections between servers: frames of bounded size over TCP, after both ends have proved that they have the key.

Each end proves it by an HMAC over two numbers that were never used before, one of either end. What follows is neither
encrypted nor signed, so the network between the servers must be one's own.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from evener.errors import ConfigError
from evener_kv.transfer.messages import VERSION, Answer, Challenge, Proof, Refused, Request

log = logging.getLogger("evener.kv")
T = TypeVar("T")
#: The longest frame: a lookup of a million tokens has 2 MiB. And before the other end is known.
_MAX_FRAME, _MAX_FIRST_FRAME = 8 << 20, 1024
#: Seconds for the proofs; and that a connection may stay open without a request, which may take as long.
_PROOF_SECONDS, _IDLE_SECONDS = 5.0, 600.0
#: Connections at a time; more are closed at once.
MAX_CONNECTIONS = 512
_NONCE = 32


class TransferError(Exception):
    """The other end is lost, slow, or says what it must not."""


class Channel:
    """One connection. All that is done over it must be over at ``deadline``, a time of ``time.monotonic``.

    Every method raises ``TransferError`` if the connection breaks, the time is over, or a message is wrong.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket, self.deadline = sock, deadline
        self._encode = msgspec.msgpack.Encoder().encode
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; another thread that uses it gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        data = self._encode(message)
        self.send_bytes(len(data).to_bytes(4, "big") + data)

    def receive(self, kind: Any, longest: int = _MAX_FRAME) -> Any:
        """The next message, which must be of ``kind``."""
        length = int.from_bytes(self._read(4), "big")
        if not 0 < length <= longest:
            raise TransferError(f"a message of {length} bytes is longer than {longest}")
        try:
            return msgspec.msgpack.decode(self._read(length), type=kind)
        except msgspec.DecodeError as error:
            raise TransferError(f"a message is wrong: {error}") from error

    def ask(self, request: Request, kind: type[T]) -> T:
        """Send a request. Returns its answer."""
        self.send(request)
        return self.answer(kind)

    def answer(self, kind: type[T]) -> T:
        """The answer to a request that was sent."""
        found = self.receive(Answer)
        if isinstance(found, Refused):
            raise TransferError(found.reason[:500])
        if not isinstance(found, kind):
            raise TransferError(f"the answer is {type(found).__name__}, not {kind.__name__}")
        return found

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes as they are."""
        rest = memoryview(data)
        with _mapped():
            while rest:
                self._limit()
                rest = rest[self._socket.send(rest) :]

    def receive_into(self, target: memoryview) -> None:
        """Fill ``target`` with bytes."""
        with _mapped():
            while target:
                self._limit()
                count = self._socket.recv_into(target)
                if not count:
                    raise TransferError("the connection was closed")
                target = target[count:]

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return data

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TransferError("it took too long")
        self._socket.settimeout(left)


@contextlib.contextmanager
def _mapped() -> Any:
    try:
        yield
    except TimeoutError as error:
        raise TransferError("it took too long") from error
    except OSError as error:
        raise TransferError(f"the connection is lost ({error.strerror or error})") from error


def connect(address: tuple[str, int], key: bytes, deadline: float) -> Channel:
    """Call a server and prove the key, both ways.

    Raises:
        TransferError: nobody answers, or it has another key or version.
    """
    with _mapped():
        channel = Channel(socket.create_connection(address, max(0.001, deadline - time.monotonic())), deadline)
    try:
        challenge = channel.receive(Challenge, _MAX_FIRST_FRAME)
        if challenge.version != VERSION:
            raise TransferError(f"it speaks version {challenge.version}, not {VERSION}: run the same evener on both")
        own = secrets.token_bytes(_NONCE)
        channel.send(Proof(own, _mac(key, b"caller", challenge.nonce, own)))
        proof = channel.receive(Proof, _MAX_FIRST_FRAME)
        if not hmac.compare_digest(proof.mac, _mac(key, b"called", own, challenge.nonce)):
            raise TransferError("it has another key: give both the same offload.kv_key_file")
    except BaseException:
        channel.close()
        raise
    return channel


def _mac(key: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, b"evener kv " + who + len(first).to_bytes(4, "big") + first + second, "sha256")


class TransferServer:
    """Answers requests of who has the key, each connection in a thread of its own.

    Args:
        answer: gets a channel and a request, and sends the answer. What it raises closes the connection.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, address: tuple[str, int], key: bytes, answer: Callable[[Channel, Request], None]) -> None:
        self._key, self._answer, self._lock = key, answer, threading.Lock()
        self._open: set[Channel] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._socket = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise ConfigError(f"offload.kv_transfer: {where} cannot be listened on ({error.strerror}); this port and "
                              "one more for each rank must be free, on this machine's address") from error  # fmt: skip
        threading.Thread(target=self._accept, name="evener-kv-accept", daemon=True).start()

    def close(self) -> None:
        """End it, with all connections. Calling it again does nothing."""
        with self._lock:
            self._closed, still_open = True, list(self._open)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in still_open:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # such as too many open files
                continue
            try:
                self._begin(sock)
            except (OSError, RuntimeError) as error:  # it is gone already, or no thread can be started
                log.warning("a connection for KV blocks was not served: %s", error)
                sock.close()

    def _begin(self, sock: socket.socket) -> None:
        channel = Channel(sock, time.monotonic() + _PROOF_SECONDS)
        with self._lock:
            if self._closed or len(self._open) >= MAX_CONNECTIONS:
                channel.close()
                return
            self._open.add(channel)
        try:
            threading.Thread(target=self._serve, args=(channel,), name="evener-kv", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._open.discard(channel)
            raise

    def _serve(self, channel: Channel) -> None:
        try:
            if not self._prove(channel):
                return
            while True:
                channel.deadline = time.monotonic() + _IDLE_SECONDS
                self._answer(channel, channel.receive(Request))
        except TransferError as error:
            log.debug("a connection for KV blocks ended: %s", error)
        except Exception:
            log.exception("a request for KV blocks failed")
        finally:
            with self._lock:
                self._open.discard(channel)
            channel.close()

    def _prove(self, channel: Channel) -> bool:
        own = secrets.token_bytes(_NONCE)
        channel.send(Challenge(VERSION, own))
        proof = channel.receive(Proof, _MAX_FIRST_FRAME)
        if not hmac.compare_digest(proof.mac, _mac(self._key, b"caller", own, proof.nonce)):
            # The answer shows the caller that the keys differ. It says nothing about this one.
            channel.send(Proof(b"", b""))
            return False
        channel.send(Proof(own, _mac(self._key, b"called", proof.nonce, own)))
        return True
