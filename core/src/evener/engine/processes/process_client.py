"""The engine client whose controller runs in a child process."""

from __future__ import annotations

import threading

import msgspec

from evener.config.schema import Config
from evener.engine.processes.child_process import ChildChannel, read_failure
from evener.engine.wire.client import EngineClient
from evener.engine.wire.messages import Dead, FromController, Shutdown, ToController
from evener.errors import EngineDeadError

_ENCODER = msgspec.msgpack.Encoder()
_EVENTS = msgspec.msgpack.Decoder(list[FromController])


class ProcessClient(EngineClient):
    """Runs the controller in a child process. The first event is ``Ready``; if the engine cannot start, the first
    ``receive`` raises the error that stopped it."""

    def __init__(self, config: Config) -> None:
        self._child = ChildChannel("controller", config, config.infer.heartbeat_timeout)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._closing = self._dead = self._started = False

    def send(self, message: ToController) -> None:
        with self._sending:
            if not (self._dead or self._closing):
                self._send(message)

    def _send(self, message: ToController) -> None:
        try:
            self._child.send(_ENCODER.encode(message))
        except EngineDeadError:
            if not self._started:
                raise
            # Later ``receive`` reports that the engine is dead, which ends all open requests.

    def receive(self, timeout: float | None) -> list[FromController]:
        with self._receiving:
            if self._dead:
                return []
            return self._receive(timeout)

    def _receive(self, timeout: float | None) -> list[FromController]:
        try:
            data = self._child.receive(timeout)
        except EngineDeadError as error:
            self._dead = True
            return [] if self._closing else [Dead(str(error))]
        if data is None:
            return []
        if (failed := read_failure(data)) is not None:
            self._dead = True
            raise failed.error()
        self._started = True
        return _EVENTS.decode(data)

    def close(self, drain: bool = False) -> None:
        with self._sending:
            if self._closing:
                return
            if self._started and not self._dead:
                self._send(Shutdown(drain=drain))
            self._closing = True
        if self._started:
            self._child.wait()
        else:
            # It would read a ``Shutdown`` only after it has loaded the model, which may take minutes.
            self._child.end()
        with self._receiving:  # a blocked ``receive`` has returned by now, because the child has ended
            self._dead = True
            self._child.close()
