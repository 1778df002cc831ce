"""``AsyncLLM``: one engine for many asyncio tasks.

A reader thread waits for the engine's events and passes them to the event loop in batches: the loop is woken once for
all events of a step, however many requests run. Everything else happens on the loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evener.api.weights import AsyncWeightCommands
from evener.contracts.adapters import Adapters
from evener.contracts.generation.chat import Chat
from evener.contracts.media import MediaPrompt
from evener.contracts.outputs import Delta, RequestOutput
from evener.contracts.pooling import Embedding
from evener.engine.facts.engine_info import EngineInfo
from evener.engine.processes.launch import join_script
from evener.engine.wire import messages as wire
from evener.engine.wire.client import EngineClient
from evener.engine.wire.pooling import text_vectors
from evener.errors import EngineDeadError, EngineError, EvenerError, RenderTimeoutError
from evener.frontend.capacity import Capacity, Reservation
from evener.frontend.frontend import Frontend, Kind, PreparedRequest
from evener.frontend.outputs import OutputBuilder
from evener.frontend.settings import FrontendSettings
from evener.frontend.stream import RequestStream
from evener.frontend.tokenizer import Tokenizer
from evener.sampling_params import SamplingParams

if TYPE_CHECKING:
    from evener.config import Config


class AsyncLLM(AsyncWeightCommands):
    """An engine behind asyncio. Create it inside the event loop that will use it.

    Args:
        client: the engine.
        model_dir: folder with tokenizer and template; None: the engine's ``EngineInfo.model``.
        settings: the front end's settings, instead of ``model_dir``.
        max_queue: samples that may wait: with ``EngineInfo.max_reqs`` + ``max_queue`` of them open, new requests are
            refused; None: no limit.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        model_dir: Path | None = None,
        settings: FrontendSettings | None = None,
        max_queue: int | None = None,
    ) -> None:
        self.max_queue = max_queue
        self._client, self._settings = client, settings or FrontendSettings(model_dir=model_dir)
        self._loop = asyncio.get_running_loop()
        # Not asyncio's own threads: a burst of long texts must not delay other work. Renderings take turns anyway.
        self._texts, self._renderings = ThreadPoolExecutor(2, "evener-text"), ThreadPoolExecutor(1, "evener-render")
        self._frontend: Frontend | None = None
        #: The chat templates; None before the engine is ready.
        self.chat: Chat | None = None
        self._prepared: tuple[Frontend, Chat] | None = None
        self._capacity: Capacity | None = None
        #: What the engine reported when it became ready; None before.
        self.info: EngineInfo | None = None
        #: Why the engine has stopped; None while it runs.
        self.dead_reason: str | None = None
        self._start_error: EvenerError | None = None
        self._draining = False
        #: Why requests are refused for now; None: they are accepted.
        self.paused: str | None = None
        #: Whether the weights were released.
        self.asleep = False
        #: Of the weights that answers are computed with: "1" at the start.
        self.weights_version, self.updates = "1", 1
        #: Held by whoever sends a command.
        self.commanding = asyncio.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._asked: dict[type, asyncio.Future[Any]] = {}
        self._ready_or_dead = asyncio.Event()
        #: Set while no request is open.
        self.idle = asyncio.Event()
        self.idle.set()
        self._inbox: deque[wire.FromController] = deque()
        #: Set when the engine has stopped or was closed; see ``dead_reason``.
        self.died = asyncio.Event()
        self._inbox_lock = threading.Lock()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, name="evener-reader", daemon=True)
        self._reader.start()

    @classmethod
    async def start(
        cls, config: Config, mode: Literal["thread", "process"] = "process", settings: FrontendSettings | None = None
    ) -> AsyncLLM:
        """Start an engine and wait until it is ready. Under ``torchrun`` this returns in rank 0 only, as for ``LLM``.

        Args:
            config: of the engine, and of the front end unless there are ``settings``.
            mode: whether the engine gets a thread or processes.

        Raises:
            EvenerError: the engine or the front end could not start.
        """
        from evener.config.local_model import with_local_model
        from evener.engine.processes.start import start_engine

        config = await asyncio.to_thread(with_local_model, config)
        join_script(config)
        starting = asyncio.ensure_future(asyncio.to_thread(start_engine, config, mode))
        try:
            client = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread continues; close the engine that it starts.
            starting.add_done_callback(_close_result)
            raise
        llm = cls(client, settings=settings or FrontendSettings.from_config(config), max_queue=config.serve.max_queue)
        try:
            await llm.wait_ready()
        except BaseException:
            await llm.close()
            raise
        return llm

    async def wait_ready(self) -> None:
        """Wait until the engine is ready.

        Raises:
            EvenerError: the engine or the front end could not start.
        """
        await self._ready_or_dead.wait()
        if self._start_error is not None:
            raise self._start_error
        self._alive_frontend()

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self._frontend is not None and self.dead_reason is None and not (self._draining or self.paused)

    @property
    def alive(self) -> bool:
        """False when the engine has stopped or was closed; ``dead_reason`` says why."""
        return self.dead_reason is None

    @property
    def num_open(self) -> int:
        """Number of samples that have not ended."""
        return 0 if self._frontend is None else self._frontend.num_open

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if its folder has none."""
        return self._ready_frontend().tokenizer

    @property
    def adapters(self) -> Adapters:
        """The adapters (LoRA) that requests may name. Call ``load`` in a thread: it reads files."""
        return self._alive_frontend().adapters

    def reserve(self, samples: int, param: str = "n") -> Reservation:
        """Reserve room for samples before ``submit`` or ``submit_chat``: for a caller that has work to do first, or
        several prompts. Use it as a context manager; leaving it frees what was not submitted.

        Raises:
            RequestError: more samples than ever fit; ``param`` is the field that asks for them.
            OverloadedError: too many samples are open.
            EngineDeadError: the engine has stopped, is not ready or is draining.
        """
        self._ready_frontend()
        assert self._capacity is not None, "made together with the front end"
        return self._capacity.reserve(samples, param)

    async def submit(
        self, prompt: str | list[int] | MediaPrompt, params: SamplingParams | None = None, *,
        request_id: str | None = None, kind: Kind = "completion", reservation: Reservation | None = None,
    ) -> RequestStream:  # fmt: skip
        """Check and send a request. Errors in the request are raised here, before the first delta.

        Args:
            reservation: the result of ``reserve``; None: room is reserved here.

        Raises:
            RequestError, ContextLengthError: the request is invalid.
            OverloadedError: too many samples are open.
            EngineDeadError: the engine has stopped, is not ready or is draining.
        """
        frontend = self._ready_frontend()
        wanted = params or SamplingParams(detokenize=frontend.tokenizer is not None)
        if reservation is None:
            with self.reserve(wanted.n) as room:
                return await self.submit(prompt, wanted, request_id=request_id, kind=kind, reservation=room)
        request_id = request_id or uuid.uuid4().hex
        if frontend.plugins:
            # In a thread: a plugin may take a while and must not block the loop.
            samples = wanted.n
            prompt, wanted = await self._loop.run_in_executor(
                self._texts, frontend.plugins.preprocess, prompt, wanted, kind, request_id
            )
            if wanted.n != samples:
                reservation.add(wanted.n - samples)
        text = prompt if isinstance(prompt, str) else None
        # In a thread: the loop answers others while a text is tokenized.
        prepared = await self.prepare(prompt, wanted, kind)
        self._ready_frontend()  # the engine may have stopped meanwhile
        messages = frontend.submit(prepared, request_id)
        reservation.use(wanted.n)
        stream = RequestStream(request_id, text, prepared.ids, wanted.n, self.abort)
        self._streams[request_id] = stream
        self.idle.clear()
        for message in messages:
            self._client.send(message)
        return stream

    async def prepare(
        self, prompt: str | list[int] | MediaPrompt, params: SamplingParams, kind: Kind = "completion"
    ) -> PreparedRequest:
        """What ``submit`` would send: the prompt's ids, and the limit and the stop tokens that hold.

        Raises:
            RequestError, ContextLengthError, EngineDeadError: as ``submit``.
        """
        return await self._loop.run_in_executor(self._texts, self._ready_frontend().prepare, prompt, params, kind)

    async def submit_chat(
        self, messages: list[dict[str, Any]], params: SamplingParams | None = None, *, request_id: str | None = None,
        tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True,
        continue_final_message: bool = False, template_kwargs: dict[str, Any] | None = None,
        reservation: Reservation | None = None,
    ) -> RequestStream:  # fmt: skip
        """``submit`` of a conversation, rendered with the model's chat template.

        Raises:
            TemplateError: the model has no template, or the template refused the messages or took too long.
            RequestError, OverloadedError, EngineDeadError: as ``submit``.
        """
        self._ready_frontend()
        assert self.chat is not None, "made together with the front end"
        with reservation or self.reserve(1 if params is None else params.n) as room:
            rendering = self._renderings.submit(
                self.chat.prompt, messages, tools=tools, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, template_kwargs=template_kwargs,
            )  # fmt: skip
            began, limit = self._loop.time(), None if params is None else params.max_time
            late = "max_time passed before the messages were rendered; send a larger max_time"
            try:
                text = await asyncio.wait_for(asyncio.wrap_future(rendering), limit)
            except asyncio.TimeoutError as error:
                if not rendering.cancel():
                    self.chat.interrupt()
                raise RenderTimeoutError(late, "max_time", "deadline_exceeded") from error
            if params is not None and limit is not None:
                if (left := limit - (self._loop.time() - began)) <= 0:
                    raise RenderTimeoutError(late, "max_time", "deadline_exceeded")
                params = dataclasses.replace(params, max_time=left)
            return await self.submit(text, params, request_id=request_id, kind="chat", reservation=room)

    async def stream(
        self, prompt: str | list[int] | MediaPrompt, params: SamplingParams | None = None, *,
        request_id: str | None = None, kind: Kind = "completion",
    ) -> AsyncIterator[Delta]:  # fmt: skip
        """``submit``, then its deltas, as one asynchronous generator; closing it aborts the request."""
        async with await self.submit(prompt, params, request_id=request_id, kind=kind) as stream:
            async for delta in stream:
                yield delta

    async def generate(
        self, prompt: str | list[int] | MediaPrompt, params: SamplingParams | None = None, *,
        request_id: str | None = None, kind: Kind = "completion",
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """The whole output so far, each time it grows; the last one is ``finished``. Closing the generator aborts the
        request.

        Raises:
            EngineError: a sample ended with reason ``error``.
            RequestError, OverloadedError, EngineDeadError: as ``submit``.
        """
        async with await self.submit(prompt, params, request_id=request_id, kind=kind) as stream:
            plugins = self._ready_frontend().plugins
            builder = OutputBuilder(stream.request_id, stream.prompt, stream.prompt_token_ids, stream.n)
            async for delta in stream:
                if delta.error is not None:
                    kinds = EngineDeadError if delta.status == EngineDeadError.status else EngineError
                    raise kinds(f"request {stream.request_id}: {delta.error}")
                builder.add(delta)
                output = builder.snapshot()
                yield plugins.postprocess(output) if output.finished else output

    async def embed(
        self, prompt: str | list[int], *, dimensions: int | None = None, request_id: str | None = None
    ) -> Embedding:
        """The vector of a text or of token ids; see ``LLM.embed``. Cancelling it aborts the request.

        Raises:
            EngineError, RequestError, OverloadedError, EngineDeadError: as ``generate``.
        """
        self._ready_frontend()
        assert self.info is not None, "it came together with the front end"
        vectors = text_vectors(self.info, dimensions)
        outputs = [each async for each in self.generate(prompt, vectors.params, request_id=request_id, kind="embed")]
        return vectors.of_output(outputs[-1])  # type: ignore[no-any-return]

    def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends with deltas of finish reason ``abort``. Unknown ids are ignored."""
        if self._frontend is not None:
            for message in self._frontend.abort(request_id):
                self._client.send(message)

    async def stats(self) -> wire.StatsReport:
        """The engine's statistics. Callers that wait at the same time share one report.

        Raises:
            EngineDeadError: the engine has stopped or is not ready.
        """
        return await self._ask(wire.GetStats(), wire.StatsReport)  # type: ignore[no-any-return]

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the open ones; False if they do not end within ``timeout`` seconds."""
        self._draining = True
        try:
            await asyncio.wait_for(self.idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def command(self, order: wire.Command) -> wire.CommandDone:
        """As ``AsyncWeightCommands.command``."""
        return await self._ask(order, wire.CommandDone)  # type: ignore[no-any-return]

    async def _ask(self, message: wire.ToController, answer: type) -> Any:
        self._alive_frontend()
        if answer not in self._asked:
            self._asked[answer] = self._loop.create_future()
            self._client.send(message)
        # Shielded: if one caller is cancelled, the others still get the answer.
        return await asyncio.shield(self._asked[answer])

    async def close(self) -> None:
        """Stop the engine; open requests end with an error. Calling it again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(self._reader.join)
        self._dispatch()
        self._mark_dead("it was closed")
        for pool in (self._texts, self._renderings):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.chat is not None:
            await asyncio.to_thread(self.chat.close)

    def _ready_frontend(self) -> Frontend:
        frontend = self._alive_frontend()
        if self._draining:
            raise EngineDeadError("the engine is shutting down and takes no new requests")
        if self.paused is not None:
            raise EngineDeadError(self.paused)
        return frontend

    def _alive_frontend(self) -> Frontend:
        if self.dead_reason is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead_reason}")
        if self._frontend is None:
            raise EngineDeadError("the engine is not ready yet: wait for wait_ready()")
        return self._frontend

    def _read(self) -> None:
        """The reader thread."""
        while not self._closing.is_set():
            try:
                events = self._client.receive(0.5)
            except EvenerError as error:
                self._start_error = error if self._prepared is None else None
                events = [wire.Dead(str(error))]
            except Exception as error:  # a broken channel ends every request with that reason
                events = [wire.Dead(f"reading its events failed with {type(error).__name__}: {error}")]
            events = [event if not isinstance(event, wire.Ready) else self._prepare(event) for event in events]
            if events:
                with self._inbox_lock:
                    wake = not self._inbox
                    self._inbox.extend(events)
                if wake and not self._closing.is_set():
                    self._loop.call_soon_threadsafe(self._dispatch)
            if any(isinstance(event, wire.Dead) for event in events):
                return

    def _prepare(self, event: wire.Ready) -> wire.Ready | wire.Dead:
        """Build the front end here, not on the loop: a large vocabulary takes a second."""
        try:
            self._prepared = self._settings.build(event.info, self._client.send)
        except EvenerError as error:
            self._start_error = error
            return wire.Dead(str(error))
        except Exception as error:  # a bug of ours: otherwise ``wait_ready`` would wait for ever
            return wire.Dead(f"building its front end failed with {type(error).__name__}: {error}")
        return event

    def _dispatch(self) -> None:
        with self._inbox_lock:
            events, self._inbox = self._inbox, deque()
        try:
            for event in events:
                self._handle_event(event)
        except Exception as error:
            # Otherwise every open stream would wait for ever.
            self._mark_dead(f"its front end failed with {type(error).__name__}: {error}")
            raise

    def _handle_event(self, event: wire.FromController) -> None:
        if isinstance(event, wire.Ready):
            self._become_ready(event)
        elif isinstance(event, wire.Dead):
            self._mark_dead(event.reason)
        elif isinstance(event, wire.StatsReport | wire.CommandDone):
            if (waiting := self._asked.pop(type(event), None)) is not None and not waiting.done():
                waiting.set_result(event)
        elif self._frontend is not None:
            deltas, replies = self._frontend.handle(event)
            for reply in replies:
                self._client.send(reply)
            self._deliver(deltas)

    def _become_ready(self, event: wire.Ready) -> None:
        assert self._prepared is not None, "the reader thread built it before it handed Ready over"
        self.info, (self._frontend, self.chat) = event.info, self._prepared
        limit = None if self.max_queue is None else event.info.max_reqs + self.max_queue
        self._capacity = Capacity(limit, lambda: self.num_open)
        self._ready_or_dead.set()

    def _mark_dead(self, reason: str) -> None:
        if self.dead_reason is None:
            self.dead_reason = reason
        if self._frontend is not None:
            self._deliver(self._frontend.handle(wire.Dead(self.dead_reason))[0])
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(f"the engine has stopped: {self.dead_reason}"))
                waiting.exception()  # read once, or asyncio warns if no caller waits any more
        self._ready_or_dead.set()
        self.died.set()

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.put(delta)
        ended = {delta.request_id for delta in deltas if delta.finish_reason is not None}
        assert self._frontend is not None, "deltas come from it"
        for request_id in ended:
            if not self._frontend.is_open(request_id):
                self._streams.pop(request_id, None)
        if self._frontend.num_open == 0:
            self.idle.set()


def _close_result(starting: asyncio.Future[EngineClient]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
