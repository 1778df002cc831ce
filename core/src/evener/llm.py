"""``LLM``: one engine for one synchronous caller."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evener.api.weights import WeightCommands
from evener.contracts.adapters import Adapters
from evener.contracts.media import MediaPrompt
from evener.contracts.outputs import RequestOutput
from evener.contracts.pooling import Embedding
from evener.engine.facts.engine_info import EngineInfo
from evener.engine.processes.launch import join_script
from evener.engine.wire.client import EngineClient
from evener.engine.wire.messages import Command, CommandDone, Dead, Ready
from evener.engine.wire.pooling import text_vectors
from evener.errors import EngineDeadError, EngineError, RequestError
from evener.frontend.frontend import Kind
from evener.frontend.outputs import OutputBuilder
from evener.frontend.settings import FrontendSettings
from evener.frontend.tokenizer import Tokenizer
from evener.sampling_params import SamplingParams

Messages = list[dict[str, Any]]


class LLM(WeightCommands):
    """A model that is ready to generate. A process can have several; each handles one call at a time.

    The scheduler runs in this process, in the caller's thread; so does the worker, unless ``executor=process``. Several
    workers run in their own processes, or with ``executor=inline`` as threads of this one, for a debugger.
    In a script under ``torchrun`` with several ranks, this returns in rank 0 only: the other ranks become its workers,
    and their processes end with it.

    Args:
        model: a folder, a file, or an id on a hub.
        overrides: config keys with dots: ``LLM(folder, dtype="bfloat16", **{"infer.tp_size": 2})``.

    Raises:
        EvenerError: the engine cannot start (config, backend, checkpoint, memory).
    """

    def __init__(self, model: str | Path, **overrides: object) -> None:
        from evener.config import from_overrides
        from evener.config.local_model import with_local_model
        from evener.engine.processes.start import start_engine

        config = with_local_model(from_overrides(str(model), overrides))
        join_script(config)
        self._start(start_engine(config, "inline"), FrontendSettings.from_config(config))

    @classmethod
    def from_client(
        cls, client: EngineClient, model_dir: Path | None = None, settings: FrontendSettings | None = None
    ) -> LLM:
        """For an engine that was started elsewhere, or a fake one. ``model_dir`` has tokenizer and template; None: the
        engine's ``EngineInfo.model``. ``settings`` replaces ``model_dir``."""
        llm = cls.__new__(cls)
        llm._start(client, settings or FrontendSettings(model_dir=model_dir))
        return llm

    def _start(self, client: EngineClient, settings: FrontendSettings) -> None:
        self._client = client
        # Closes the engine also if a script ends without ``close``.
        self._end = weakref.finalize(self, client.close)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._dead_reason: str | None = None
        #: Of the weights that answers are computed with: "1" at the start.
        self.weights_version, self.updates = "1", 1
        try:
            self.info: EngineInfo = self._wait_for(Ready, "the engine did not start").info
            self._frontend, self._chat = settings.build(self.info, client.send)
        except BaseException:
            self._end()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if its folder has none."""
        return self._frontend.tokenizer

    def generate(
        self, prompts: str | list[int] | MediaPrompt | Sequence[str | list[int] | MediaPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        lora: str | None = None, raise_on_error: bool = True,
    ) -> list[RequestOutput]:  # fmt: skip
        """Complete prompts; returns the outputs in the order of the prompts.

        Args:
            prompts: text, token ids (a flat list of int is one prompt), ids with embedding rows for some of them
                (``MediaPrompt``), or a list of those.
            sampling_params: for all prompts, or a list with one for each.
            lora: the adapter of all prompts, by its name; None: as ``SamplingParams.lora`` says.
            raise_on_error: False: a failed request is returned with ``error`` set and ``finish_reason`` ``error``.

        Raises:
            RequestError: a prompt or its parameters are invalid; nothing was submitted then.
            EngineError: a request failed in the engine; raised after all others have ended.
            EngineDeadError: the engine has stopped.
        """
        return self._run(_as_prompts(prompts), sampling_params, "completion", raise_on_error, lora)

    def chat(
        self, messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True,
        continue_final_message: bool = False, template_kwargs: dict[str, Any] | None = None,
        lora: str | None = None, raise_on_error: bool = True,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation, or a list of them, with the model's chat template. ``lora`` as in ``generate``.

        Raises:
            RequestError, TemplateError: a conversation cannot be used; nothing was submitted then.
            EngineError, EngineDeadError: as ``generate``.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError(
                "messages must be a conversation or a list of conversations, and must not be empty", "messages"
            )
        conversations: list[Any] = [messages] if isinstance(messages[0], dict) else list(messages)
        texts = [
            self._chat.prompt(
                conversation, tools=tools, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, template_kwargs=template_kwargs,
            )
            for conversation in conversations
        ]  # fmt: skip
        return self._run(texts, sampling_params, "chat", raise_on_error, lora)

    def embed(
        self, prompts: str | list[int] | Sequence[str | list[int]], *, dimensions: int | None = None
    ) -> list[Embedding]:
        """The embeddings of texts or token ids, of a model with ``infer.task=embed``.

        Args:
            dimensions: numbers of each vector; None: as many as the model has.

        Raises:
            RequestError: the model generates text, or a prompt or ``dimensions`` is wrong; nothing was submitted then.
            EngineError, EngineDeadError: as ``generate``.
        """
        vectors = text_vectors(self.info, dimensions)
        return list(map(vectors.of_output, self._run(_as_prompts(prompts), vectors.params, "embed", True)))

    @property
    def adapters(self) -> Adapters:
        """The adapters (LoRA) that requests may name: to load and to unload them."""
        return self._frontend.adapters

    def command(self, order: Command) -> CommandDone:
        """As ``WeightCommands.command``."""
        with self._lock:
            self._check_open()
            self._client.send(order)
            return self._wait_for(CommandDone, "the engine has stopped")  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop the engine and free what it holds. Calling it again does nothing."""
        self._end()
        self._chat.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[str | list[int] | MediaPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None, kind: Kind, raise_on_error: bool,
        lora: str | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        params = self._each(sampling_params, len(prompts))
        params = params if lora is None else [replace(each, lora=lora) for each in params]
        with self._lock:
            self._check_open()
            names = [str(next(self._numbers)) for _ in prompts]
            given = zip(prompts, params, names, strict=True)
            changed = [self._frontend.plugins.preprocess(p, s, kind, name) for p, s, name in given]
            prepared = [self._frontend.prepare(p, s, kind) for p, s in changed]
            builders: dict[str, OutputBuilder] = {}
            try:
                for (prompt, _), ready, request_id in zip(changed, prepared, names, strict=True):
                    requests = self._frontend.submit(ready, request_id)
                    text = prompt if isinstance(prompt, str) else None
                    builders[request_id] = OutputBuilder(request_id, text, ready.ids, ready.params.n)
                    for request in requests:
                        self._client.send(request)
                self._collect(builders)
            except BaseException:
                # Also after Ctrl-C: requests that still run would slow down the next call.
                for request_id in builders:
                    for message in self._frontend.abort(request_id):
                        self._client.send(message)
                raise
        outputs = [self._frontend.plugins.postprocess(builder.snapshot()) for builder in builders.values()]
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None and raise_on_error:
            error = EngineError if self._dead_reason is None else EngineDeadError
            raise error(f"prompt {outputs.index(failed)} failed: {failed.error}")
        return outputs

    def _check_open(self) -> None:
        if not self._end.alive:
            raise EngineDeadError("this LLM was closed: make another")
        if self._dead_reason is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead_reason}")

    def _collect(self, builders: dict[str, OutputBuilder]) -> None:
        unfinished = set(builders)
        while unfinished:
            if not self._end.alive:
                raise EngineDeadError("this LLM was closed while it generated")
            for event in self._client.receive(None):
                if isinstance(event, Dead):
                    self._dead_reason = event.reason
                deltas, replies = self._frontend.handle(event)
                for reply in replies:
                    self._client.send(reply)
                for delta in deltas:
                    builder = builders.get(delta.request_id)
                    if builder is None:
                        continue  # it belongs to a call that was interrupted
                    builder.add(delta)
                    if builder.finished:
                        unfinished.discard(delta.request_id)

    def _each(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if given is None:
            given = SamplingParams(detokenize=self._frontend.tokenizer is not None)
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise RequestError(
                f"there are {count} prompts and {len(given)} SamplingParams: give one for all, or one each",
                "sampling_params",
            )
        return given

    def _wait_for(self, kind: type, failed: str) -> Any:
        """The next event of this kind, after all that came together with it were read."""
        found = None
        while found is None:
            for event in self._client.receive(None):
                if isinstance(event, Dead):
                    self._dead_reason = event.reason
                    raise EngineDeadError(f"{failed}: {event.reason}")
                if kind is not Ready:  # samples of a call that was interrupted end
                    self._frontend.handle(event)
                found = event if isinstance(event, kind) else found
        return found


def _as_prompts(prompts: object) -> Sequence[str | list[int] | MediaPrompt]:
    """A list of prompts.

    Raises:
        RequestError: it is neither a prompt nor a list of them.
    """
    if isinstance(prompts, (str, MediaPrompt)):
        return [prompts]
    if isinstance(prompts, (list, tuple)):
        if prompts and all(isinstance(item, int) for item in prompts):
            return [list(prompts)]
        if all(isinstance(item, (str, list, tuple, MediaPrompt)) for item in prompts):
            return [item if isinstance(item, (str, MediaPrompt)) else list(item) for item in prompts]
    raise RequestError("prompts must be a string, a list of token ids, or a list of those", "prompts")
