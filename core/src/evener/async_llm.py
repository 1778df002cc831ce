"""``AsyncLLM``: one engine for many asyncio tasks.

A reader thread waits for the engine's events and hands them over to the event loop in batches: however many requests
run, the loop is woken once for all the events of a step. Everything else happens on the loop.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.media import MediaPrompt
from evener.engine.client import EngineClient
from evener.engine.messages import Dead, FromController, GetStats, Ready, StatsReport
from evener.errors import EngineDeadError, EngineError, EvenerError, OverloadedError, RequestError
from evener.frontend.chat import Chat
from evener.frontend.frontend import Frontend, Kind
from evener.frontend.outputs import Delta, OutputBuilder, RequestOutput
from evener.frontend.settings import FrontendSettings
from evener.frontend.stream import RequestStream
from evener.frontend.tokenizer import Tokenizer
from evener.launch import join_script
from evener.sampling_params import SamplingParams

if TYPE_CHECKING:
    from evener.config import Config

#: Prompts with more characters are tokenized in a thread, so that the loop goes on.
_INLINE_CHARS = 4000
_NOT_READY = "the engine is not ready yet: wait for wait_ready()"


class AsyncLLM:
    """An engine behind asyncio. Create it inside the event loop that will use it.

    Args:
        client: the engine.
        model_dir: folder with tokenizer and template; None: what ``Ready.info["model"]`` says.
        settings: the front end's settings, instead of ``model_dir``.
        max_queue: samples that may wait: with ``Ready.info["max_reqs"]`` (0 if absent) + ``max_queue`` of them open,
            new requests are refused; None: no limit.
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
        self._frontend: Frontend | None = None
        self._chat: Chat | None = None
        self._built: tuple[Frontend, Chat] | None = None
        self._info: dict[str, object] = {}
        self._dead_reason: str | None = None
        self._start_error: EvenerError | None = None
        self._draining = False
        self._streams: dict[str, RequestStream] = {}
        self._report: asyncio.Future[StatsReport] | None = None
        self._ready_or_dead = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inbox: deque[FromController] = deque()
        #: Set once the engine is gone or closed; see ``dead_reason``.
        self.died = asyncio.Event()
        self._inbox_lock = threading.Lock()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, name="evener-reader", daemon=True)
        self._reader.start()

    @classmethod
    async def start(cls, config: Config, mode: Literal["thread", "process"] = "process") -> AsyncLLM:
        """Start an engine and wait until it is ready. Under ``torchrun`` as ``LLM``: this returns in rank 0 only.

        Raises:
            EvenerError: what stopped the engine or the front end from starting.
        """
        from evener.config.source import with_local_model
        from evener.engine.start import start_engine

        config = await asyncio.to_thread(with_local_model, config)
        join_script(config)
        starting = asyncio.ensure_future(asyncio.to_thread(start_engine, config, mode))
        try:
            client = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread goes on; what it makes must not stay.
            starting.add_done_callback(_close_result)
            raise
        llm = cls(client, settings=FrontendSettings.from_config(config), max_queue=config.serve.max_queue)
        try:
            await llm.wait_ready()
        except BaseException:
            await llm.close()
            raise
        return llm

    async def wait_ready(self) -> None:
        """Wait for the engine's first event.

        Raises:
            EvenerError: what stopped the engine or the front end from starting.
        """
        await self._ready_or_dead.wait()
        if self._start_error is not None:
            raise self._start_error
        self._check_alive()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._frontend is not None and self._dead_reason is None and not self._draining

    @property
    def alive(self) -> bool:
        """False once the engine is gone or closed; ``dead_reason`` says why."""
        return self._dead_reason is None

    @property
    def dead_reason(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        return self._dead_reason

    @property
    def info(self) -> dict[str, object]:
        """``Ready.info``; empty before."""
        return self._info

    @property
    def num_open(self) -> int:
        """Samples that have not ended."""
        return 0 if self._frontend is None else self._frontend.num_open

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when its folder has none."""
        return self._ready_frontend().tokenizer

    async def submit(
        self,
        prompt: str | list[int] | MediaPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        kind: Kind = "completion",
    ) -> RequestStream:
        """Check and send a request. Whatever is wrong with it is raised here, before the first delta.

        Raises:
            RequestError, ContextLengthError: the request is invalid.
            OverloadedError: too many samples are open.
            EngineDeadError: the engine is gone, not ready or draining.
        """
        frontend = self._ready_frontend()
        wanted = params or SamplingParams(detokenize=frontend.tokenizer is not None)
        self._check_room(wanted.n)
        if frontend.plugins:
            # In a thread: what a plugin does may take a while, and others are served meanwhile.
            prompt, wanted = await asyncio.to_thread(frontend.plugins.before, prompt, wanted, kind)
            self._ready_frontend()
            self._check_room(wanted.n)
        text = prompt if isinstance(prompt, str) else None
        if text is not None and len(text) > _INLINE_CHARS:
            prompt = await asyncio.to_thread(frontend.encode, text, wanted, kind)
            self._ready_frontend()
            self._check_room(wanted.n)
        request_id = request_id or uuid.uuid4().hex
        messages = frontend.submit(prompt, wanted, request_id, kind)
        stream = RequestStream(request_id, text, messages[0].prompt, wanted.n, self.abort)
        self._streams[request_id] = stream
        self._idle.clear()
        for message in messages:
            self._client.send(message)
        return stream

    async def submit_chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> RequestStream:
        """``submit`` of a conversation, rendered with the model's chat template.

        Raises:
            TemplateError: there is no template, or it refused the messages or took too long.
            RequestError, OverloadedError, EngineDeadError: as ``submit``.
        """
        self._ready_frontend()
        self._check_room(1 if params is None else params.n)
        assert self._chat is not None, "made together with the front end"
        text = await asyncio.to_thread(
            self._chat.prompt, messages, tools=tools, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, template_kwargs=template_kwargs,
        )  # fmt: skip
        return await self.submit(text, params, request_id=request_id, kind="chat")

    async def stream(
        self,
        prompt: str | list[int] | MediaPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        kind: Kind = "completion",
    ) -> AsyncIterator[Delta]:
        """``submit`` and its deltas as one asynchronous generator; closing it aborts the request."""
        async with await self.submit(prompt, params, request_id=request_id, kind=kind) as stream:
            async for delta in stream:
                yield delta

    async def generate(
        self,
        prompt: str | list[int] | MediaPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        kind: Kind = "completion",
    ) -> AsyncIterator[RequestOutput]:
        """Everything so far, each time there is more; the last one is ``finished``. Closing the generator aborts the
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
                yield plugins.whole(output) if output.finished else output

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets last deltas with reason ``abort``. An unknown id is ignored: it has ended."""
        if self._frontend is not None:
            for message in self._frontend.abort(request_id):
                self._client.send(message)

    async def stats(self) -> StatsReport:
        """How busy the engine is. Callers that wait at the same time get one report.

        Raises:
            EngineDeadError: the engine is gone or not ready.
        """
        self._check_alive()
        if self._frontend is None:
            raise EngineDeadError(_NOT_READY)
        if self._report is None:
            self._report = self._loop.create_future()
            self._client.send(GetStats())
        # Shielded: one caller that is cancelled must not take the report from the others.
        return await asyncio.shield(self._report)

    async def warm_up_chat(self) -> None:
        """Start what renders chat templates, so that the first chat does not wait for it.

        Raises:
            TemplateError: it does not start.
            EngineDeadError: the engine is gone or not ready.
        """
        self._ready_frontend()
        assert self._chat is not None, "made together with the front end"
        await asyncio.to_thread(self._chat.warm_up)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the open ones; False if ``timeout`` seconds were not enough."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop the engine; open requests end with an error. Calling it again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(self._reader.join)
        self._dispatch()
        self._die("it was closed")
        if self._chat is not None:
            await asyncio.to_thread(self._chat.close)

    def _ready_frontend(self) -> Frontend:
        self._check_alive()
        if self._frontend is None:
            raise EngineDeadError(_NOT_READY)
        if self._draining:
            raise EngineDeadError("the engine is shutting down and takes no new requests")
        return self._frontend

    def _check_alive(self) -> None:
        if self._dead_reason is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead_reason}")

    def _check_room(self, n: int) -> None:
        if self.max_queue is None:
            return
        limit = int(self._info.get("max_reqs", 0)) + self.max_queue  # type: ignore[call-overload]
        if n > limit:
            raise RequestError(f"n is {n}, but at most {limit} samples are taken at a time: ask for fewer", "n")
        if self.num_open + n > limit:
            raise OverloadedError(f"{self.num_open} requests are open and {limit} are allowed: try again in a moment")

    def _read(self) -> None:
        """The reader thread."""
        while not self._closing.is_set():
            try:
                events = self._client.receive(0.5)
            except EvenerError as error:
                self._start_error = error if self._built is None else None
                events = [Dead(str(error))]
            except Exception as error:  # whatever breaks the channel ends every request with that reason
                events = [Dead(f"reading its events failed with {type(error).__name__}: {error}")]
            events = [event if not isinstance(event, Ready) else self._prepare(event) for event in events]
            if events:
                with self._inbox_lock:
                    wake = not self._inbox
                    self._inbox.extend(events)
                if wake and not self._closing.is_set():
                    self._loop.call_soon_threadsafe(self._dispatch)
            if any(isinstance(event, Dead) for event in events):
                return

    def _prepare(self, event: Ready) -> Ready | Dead:
        """Build the front end here, not on the loop: a large vocabulary takes a second."""
        try:
            self._built = self._settings.build(event.info)
        except EvenerError as error:
            self._start_error = error
            return Dead(str(error))
        except Exception as error:  # a defect of ours: without an answer ``wait_ready`` would wait for ever
            return Dead(f"building its front end failed with {type(error).__name__}: {error}")
        return event

    def _dispatch(self) -> None:
        with self._inbox_lock:
            events, self._inbox = self._inbox, deque()
        try:
            for event in events:
                self._take(event)
        except Exception as error:
            # Without this every open stream would wait for ever.
            self._die(f"its front end failed with {type(error).__name__}: {error}")
            raise

    def _take(self, event: FromController) -> None:
        if isinstance(event, Ready):
            self._become_ready(event)
        elif isinstance(event, Dead):
            self._die(event.reason)
        elif isinstance(event, StatsReport):
            self._take_report(event)
        elif self._frontend is not None:
            deltas, replies = self._frontend.handle(event)
            for reply in replies:
                self._client.send(reply)
            self._give_out(deltas)

    def _take_report(self, report: StatsReport) -> None:
        waiting, self._report = self._report, None
        if waiting is not None and not waiting.done():
            waiting.set_result(report)

    def _become_ready(self, event: Ready) -> None:
        assert self._built is not None, "the reader thread built it before it handed Ready over"
        self._info, (self._frontend, self._chat) = event.info, self._built
        self._ready_or_dead.set()

    def _die(self, reason: str) -> None:
        if self._dead_reason is None:
            self._dead_reason = reason
        if self._frontend is not None:
            self._give_out(self._frontend.handle(Dead(self._dead_reason))[0])
        if self._report is not None and not self._report.done():
            self._report.set_exception(EngineDeadError(f"the engine has stopped: {self._dead_reason}"))
            self._report.exception()  # seen: a caller that has gone leaves no complaint behind
        self._ready_or_dead.set()
        self.died.set()

    def _give_out(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)
        ended = {delta.request_id for delta in deltas if delta.finish_reason is not None}
        assert self._frontend is not None, "deltas come from it"
        for request_id in ended:
            if not self._frontend.is_open(request_id):
                self._streams.pop(request_id, None)
        if self._frontend.num_open == 0:
            self._idle.set()


def _close_result(starting: asyncio.Future[EngineClient]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
