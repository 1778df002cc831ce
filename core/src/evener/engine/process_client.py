"""Worker and controller in processes of their own, as the controller and the front end see them."""

from __future__ import annotations

import threading

import msgspec

from evener.config.schema import Config
from evener.engine.client import EngineClient
from evener.engine.executor import Executor
from evener.engine.messages import Dead, FromController, Shutdown, ToController
from evener.engine.plan import Plan, StepResult
from evener.engine.process import Child, Failed
from evener.engine.worker_facts import WorkerFacts
from evener.errors import EngineDeadError

_ENCODER = msgspec.msgpack.Encoder()
_RESULTS = msgspec.msgpack.Decoder(StepResult | Failed)
_EVENTS = msgspec.msgpack.Decoder(list[FromController])
_FAILED = msgspec.msgpack.Decoder(Failed)


def _failure(data: bytes) -> Failed | None:
    """The message as a ``Failed``, if it is one."""
    try:
        return _FAILED.decode(data)
    except msgspec.ValidationError:
        return None


class ProcessExecutor(Executor):
    """A worker in a child process. Construct waits until it is ready.

    Raises:
        EvenerError: what stopped the worker from starting.
    """

    def __init__(self, config: Config) -> None:
        self._child = Child("worker", config)
        try:
            data = self._child.receive()
        except EngineDeadError:
            self._child.close(0)
            raise
        assert data is not None, "without a time limit there is a message or an error"
        failed = _failure(data)
        if failed is not None:
            self._child.close()
            raise failed.error()
        self.facts = msgspec.msgpack.decode(data, type=WorkerFacts)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._child.process.pid

    def submit(self, plan: Plan) -> None:
        self._child.send(_ENCODER.encode(plan))

    def read(self) -> StepResult:
        data = self._child.receive()
        assert data is not None
        result: StepResult | Failed = _RESULTS.decode(data)
        if isinstance(result, Failed):
            raise EngineDeadError(f"the worker process failed: {result.message}")
        return result

    def check(self) -> None:
        self._child.check()

    def close(self) -> None:
        self._child.close()


class ProcessClient(EngineClient):
    """A controller in a child process. The first ``receive`` gives ``Ready`` or raises what stopped it."""

    def __init__(self, config: Config) -> None:
        self._child = Child("controller", config)
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
            return  # ``receive`` says so, and ends what is open

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
        failed = _failure(data)
        if failed is not None:
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
            # It reads no message before it has loaded the model, which may take minutes.
            self._child.end()
        with self._receiving:  # a blocked ``receive`` has seen by now that the child is gone
            self._dead = True
            self._child.close()
