"""evener as an engine of Dynamo: ``python -m evener_deploy.dynamo_engine MODEL [key=value …] [Dynamo's options]``.

Dynamo's frontend writes conversations as token ids and reads stop strings; this process turns ids into ids. Its router
hears from ``server.kv_events``, which is set here, which prompts the engine has in its prefix cache. Written for
ai-dynamo 1.6 (``dynamo.common.backend``). Only this module imports Dynamo.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import InvalidArgument

from evener.async_llm import AsyncLLM
from evener.cli.command import Command, read_config
from evener.config.schema import Config
from evener.errors import ConfigError, EngineError, RequestError
from evener.sampling_params import SamplingParams
from evener_deploy.dynamo_request import sampling
from evener_deploy.engine_process import free_port

_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled", "timeout": "length"}


class EvenerEngine(LLMEngine):  # type: ignore[misc]  # Dynamo ships no types
    """One engine in processes of its own."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._llm: AsyncLLM | None = None
        self._events = config.options["server"]["kv_events"]
        #: Dynamo's object of each open request, by the engine's id of it.
        self._open: dict[str, Any] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[EvenerEngine, WorkerConfig]:
        """Read a command line: the model, keys, and where Dynamo finds its other processes."""
        command = Command("dynamo", "An engine of Dynamo.")
        command.option("--namespace", default="dynamo", help="Dynamo's namespace (default dynamo)")
        command.option("--component", default="backend", help="the worker's name in it (default backend)")
        command.option("--discovery-backend", default="etcd", help="where processes find each other: etcd, file, mem")
        command.option("--request-plane", default="tcp", help="how requests come (default tcp)")
        command.option("--event-plane", default=None, help="how events go: nats or zmq")
        arguments, config = read_config(command, sys.argv[1:] if argv is None else argv)
        if config.infer.layers:
            raise ConfigError("infer.layers runs only some of the model's layers, whose text is not the model's, so it "
                              "is not served: leave it out")  # fmt: skip
        own = dict(config.options.get("server", {}))
        own.setdefault("kv_events", f"tcp://127.0.0.1:{free_port()}")
        config = replace(config, options={**config.options, "server": own})
        name = config.serve.served_model_name or config.model.rstrip("/").rpartition("/")[2]
        worker = WorkerConfig(
            namespace=arguments.namespace, component=arguments.component, model_name=config.model,
            served_model_name=name, discovery_backend=arguments.discovery_backend,
            request_plane=arguments.request_plane, event_plane=arguments.event_plane,
        )  # fmt: skip
        return cls(config), worker

    async def start(self, worker_id: int) -> EngineConfig:
        """Start the engine; returns its limits."""
        llm = await AsyncLLM.start(self._config)
        await llm.wait_ready()
        self._llm, info = llm, llm.info
        assert info is not None, "it was waited for"
        if info.pooling is not None:
            raise ConfigError("Dynamo's engines generate, and this model embeds or scores; use evener serve for it")
        return EngineConfig(
            model=self._config.model, served_model_name=info.served_name,
            llm=LlmRegistration(
                context_length=info.max_model_len, kv_cache_block_size=info.config["infer.block_size"].value,
                total_kv_blocks=(await llm.stats()).blocks, max_num_seqs=info.max_reqs,
                max_num_batched_tokens=info.config["infer.step_tokens"].value,
            ),
        )  # fmt: skip

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Where Dynamo hears of the prefix cache."""
        return [ZmqSource(endpoint=self._events.replace("*", "127.0.0.1"))]

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The tokens of one request, as they are sampled.

        Raises:
            InvalidArgument: a value is out of range, or asks for what this engine does not do under Dynamo.
            EngineError: the engine failed.
        """
        try:
            async for chunk in self._generate(token_ids_to_list(request["token_ids"]), sampling(request), context):
                yield chunk
        except RequestError as error:
            raise InvalidArgument(str(error)) from error

    async def abort(self, context: Any) -> None:
        """End a request that nobody waits for, also while it waits for its turn. Dynamo says so once."""
        for name, each in list(self._open.items()):
            # Clients may choose ids, so two requests may have one: only what is stopped ends.
            if self._llm is not None and each.id() == context.id() and _is_over(each):
                self._llm.abort(name)

    async def _generate(
        self, prompt: list[int], params: SamplingParams, context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        assert self._llm is not None, "Dynamo starts an engine before it asks"
        name, done, cached = uuid.uuid4().hex, 0, 0
        self._open[name] = context
        try:
            # Leaving the context aborts what has not ended.
            async with await self._llm.submit(prompt, params, request_id=name) as stream:
                if _is_over(context):  # an abort came before the engine knew of the request
                    await stream.aclose()
                    yield _chunk([], "cancelled", len(prompt), 0, 0)
                async for delta in stream:
                    if _is_over(context):
                        yield _chunk([], "cancelled", len(prompt), done, cached)
                        return
                    if delta.error is not None:
                        raise EngineError(delta.error)
                    done, cached = done + len(delta.token_ids), max(cached, delta.num_cached_tokens)
                    if delta.finish_reason is None:
                        yield {"token_ids": delta.token_ids, "index": 0}
                    else:
                        yield _chunk(delta.token_ids, _REASONS[delta.finish_reason], len(prompt), done, cached)
        finally:
            del self._open[name]

    async def cleanup(self) -> None:
        """End the engine; a second call does nothing."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await llm.close()


def _is_over(context: Any) -> bool:
    """Whether nobody waits for the request any more."""
    return bool(context.is_stopped() or context.is_killed())


def _chunk(ids: list[int], reason: str, prompt: int, done: int, cached: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done,
             "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip
    return {"token_ids": ids, "index": 0, "finish_reason": reason, "completion_usage": usage}


if __name__ == "__main__":
    run(EvenerEngine)
