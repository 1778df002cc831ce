"""Worker and controller in processes of their own, as the controller and the front end see them."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec

from evener.config.schema import Config
from evener.distributed.hub import END, Hub
from evener.distributed.launched import Contact, Launched
from evener.distributed.process import Child, Failed, Process
from evener.distributed.world import Place, World
from evener.engine.client import EngineClient
from evener.engine.executor import Executor
from evener.engine.messages import Dead, FromController, Shutdown, ToController
from evener.engine.plan import Plan, StepResult
from evener.engine.worker_facts import WorkerFacts, agree
from evener.errors import EngineDeadError

#: Seconds between looks at whether the workers still live, and those given to find the first cause of a failure. While
#: a worker starts it may be silent for so many times longer: libraries that are loaded let nobody else run.
_BEAT, _GRACE, _STARTING = 0.2, 0.5, 6
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
    """One worker process a rank: on this machine, or those that ``launched`` is one of. Construct waits until all are
    ready.

    Raises:
        EvenerError: what stopped a worker from starting.
    """

    def __init__(self, config: Config, launched: Launched | None = None) -> None:
        infer = config.infer
        sizes = infer.tp_size, infer.pp_size
        self._silence, self._patience, self._failed = _STARTING * infer.silence_limit, infer.step_limit, False
        self._worlds = [World.of(rank, *sizes) for rank in range(sizes[0] * sizes[1])]
        self._hub = Hub(None if launched is None else launched.interface)
        self._children: dict[int, Process] = {}
        meet = f"file://{self._hub.folder.path}/meet"
        try:
            for world in self._worlds if launched is None else self._worlds[:1]:
                place = Place(world, world.rank, world.size, meet) if launched is None else Place.of(launched, *sizes)
                self._start(config, place)
            self.facts = agree(self._gather())
            self._silence = infer.silence_limit
        except BaseException:
            self.close(0)
            raise

    def _start(self, config: Config, place: Place) -> None:
        world, contact = place.world, Contact(self._hub.addresses, self._hub.keys)
        orders = {"contact": msgspec.to_builtins(contact), "place": msgspec.to_builtins(place)}
        self._hub.pulse.expect(str(world.rank))
        # The ranks of one machine meet without leaving it.
        alone = {"GLOO_SOCKET_IFNAME": "lo"} if world.size > 1 and contact.keys is None else {}
        self._children[world.rank] = Process("worker", world.name, config, orders, alone)

    def _gather(self) -> list[WorkerFacts]:
        found: dict[int, WorkerFacts] = {}
        while len(found) < len(self._worlds):
            if (came := self._hub.receive(_BEAT)) is None:
                self.check()
                continue
            rank, data = came
            if (failed := _failure(data)) is not None:
                self._say_who_is_gone(_GRACE)
                raise failed.error(f"{self._worlds[rank].name}: " if len(self._worlds) > 1 else "")
            found[rank] = msgspec.msgpack.decode(data, type=WorkerFacts)
        return [facts for _, facts in sorted(found.items())]

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank."""
        return [child.process.pid for _, child in sorted(self._children.items())]

    def submit(self, plan: Plan) -> None:
        data = _ENCODER.encode(plan)
        for world in self._worlds:
            try:
                self._hub.send(world.rank, data)
            except EngineDeadError as error:
                self._say_who_is_gone(_GRACE)
                raise self._gone(f"the {world.name} process cannot be reached: {error}") from None

    def read(self) -> StepResult:
        began = time.monotonic()
        while True:
            if (came := self._hub.receive(_BEAT)) is not None:
                rank, data = came
                result: StepResult | Failed = _RESULTS.decode(data)
                if not isinstance(result, Failed):
                    return result
                # A rank whose neighbour was killed fails, too: the other is worth more words.
                self._say_who_is_gone(_GRACE)
                raise self._gone(f"the {self._worlds[rank].name} process failed: {result.message}")
            self.check()
            if self._patience and time.monotonic() - began > self._patience:
                raise self._gone(f"a step has taken more than infer.step_limit={self._patience:g} s")

    def check(self) -> None:
        self._say_who_is_gone(0)

    def _say_who_is_gone(self, grace: float) -> None:
        """Raise ``EngineDeadError`` if a worker is gone or silent. Those that were killed are named before those that
        ended for the lack of others, for which ``grace`` seconds are given; messages are read first."""
        until = time.monotonic() + grace
        while True:
            ended = [child for child in self._children.values() if child.how_it_ended() is not None]
            killed = [child for child in ended if child.process.returncode < 0]
            if killed or time.monotonic() >= until:
                break
            time.sleep(0.02)
        if killed or (ended and not grace and not self._hub.waiting(_GRACE)):
            raise self._gone(str((killed or ended)[0].how_it_ended()))
        for world in self._worlds:
            silent = self._hub.pulse.silence(str(world.rank))
            if self._silence and silent > self._silence:
                raise self._gone(f"the {world.name} process gave no sign of life for {silent:.0f} s")

    def _gone(self, what: str) -> EngineDeadError:
        """The error to raise; the other workers end, so that their devices are free."""
        self._failed = True
        for child in self._children.values():
            child.process.kill()
        return EngineDeadError(f"{what}; restart the server, and see its log for the reason")

    def close(self, patience: float = 10.0) -> None:
        for world in self._worlds if len(self._children) < len(self._worlds) else ():
            with contextlib.suppress(EngineDeadError):  # it has gone before
                self._hub.send(world.rank, END)
        for child in self._children.values():
            child.let_go()
        until = time.monotonic() + (0 if self._failed else patience)
        for child in self._children.values():
            child.end(max(0.0, until - time.monotonic()))
        self._hub.close()


class ProcessClient(EngineClient):
    """A controller in a child process. The first ``receive`` gives ``Ready`` or raises what stopped it."""

    def __init__(self, config: Config) -> None:
        self._child = Child("controller", config, config.infer.silence_limit)
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
            # ``receive`` says so, and ends what is open

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
