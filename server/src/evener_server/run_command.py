"""``evener run``: answer one prompt, streamed to standard output, and exit."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from evener.cli.command import Command, read_config
from evener.config.resolve import ResolvedValue
from evener.config.schema import Config
from evener.engine.facts.manifest_report import ManifestReport
from evener.errors import ConfigError, EngineError, EvenerError
from evener.logs import set_up_logging
from evener_server import local_engine
from evener_server.collector import collector_paused, end_without_collection, objects_frozen
from evener_server.run_outputs import open_outputs

if TYPE_CHECKING:
    from evener.async_llm import AsyncLLM
    from evener.frontend.stream import RequestStream
    from evener.sampling_params import SamplingParams

log = logging.getLogger("evener.run")


def main(argv: list[str]) -> int:
    """Run it; the answer goes to standard output, one line with the timings to standard error."""
    end_without_collection()
    with collector_paused():
        arguments, config = read_config(_command(), argv)
    if arguments.prompt is None and config.request.prompt_tokens_len is None:
        raise ConfigError("evener run needs a prompt: --prompt TEXT, or request.prompt_tokens_len=N for random tokens")
    if arguments.prompt == "-":
        arguments.prompt = sys.stdin.read()
    local_engine.prepare()
    # A wrong request is reported before the output folder is created and before weights are read.
    with collector_paused():
        params, chats = sampling_params_from(arguments, config), _uses_chat_template(config, arguments)
    outputs = open_outputs(config)
    config = config if outputs is None else outputs.save_config(config)
    set_up_logging(config.log)
    try:
        answer = asyncio.run(_answer(config, arguments, params, chats))
    except EvenerError as error:
        log.info("failed: %s", error)
        raise
    # The answer first: the disk may be full.
    if arguments.json:
        print(json.dumps(answer.to_json(), indent=2))
    else:
        sys.stdout.write("" if answer.text.endswith("\n") else "\n")
        print(answer.line(), file=sys.stderr)
    if outputs is not None:
        log.info("%s", answer.line())
        outputs.write("resolved.json", msgspec.to_builtins(answer.resolved))
        outputs.write("manifest.json", msgspec.to_builtins(answer.manifest))
        outputs.write("result.json", answer.to_json() | {"model": config.model, "sampling": dataclasses.asdict(params)})
        print(f"output folder: {outputs.folder}", file=sys.stderr)
    return 0


@dataclass
class _Answer:
    """The answer and its timings; times as ``time.perf_counter`` gives them, in seconds."""

    backend: str
    reason: str
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    finish_reason: str | None = None
    resolved: Mapping[str, ResolvedValue] = field(default_factory=dict)
    manifest: ManifestReport = field(default_factory=ManifestReport)

    def rate(self) -> float | None:
        """Tokens per second after the first token; None for fewer than two tokens."""
        seconds = 0.0 if self.first is None else self.ended - self.first
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None

    def line(self) -> str:
        """The timings in one line."""
        rate, first = self.rate(), None if self.first is None else self.first - self.started
        parts = [f"{self.backend} ({self.reason})", f"{self.prompt_tokens} + {self.tokens} tokens"]
        parts += [] if first is None else [f"first token after {first:.2f} s"]
        parts += [] if rate is None else [f"{rate:.1f} tokens/s"]
        return "; ".join([*parts, f"finish reason: {self.finish_reason}"])

    def to_json(self) -> dict[str, Any]:
        """The same as plain data; times in seconds."""
        return {
            "text": self.text, "finish_reason": self.finish_reason, "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens, "backend": self.backend, "backend_reason": self.reason,
            "seconds_to_first_token": None if self.first is None else self.first - self.started,
            "tokens_per_second": self.rate(),
        }  # fmt: skip


def _command() -> Command:
    command = Command("run", "Answer one prompt and exit.")
    command.option("--prompt", metavar="TEXT", help="the prompt; - reads standard input")
    command.option("--system", metavar="TEXT", help="a system message before the prompt")
    command.option("--chat", dest="chat", action="store_true", default=None, help="apply the model's chat template "
                   "(the default if it has one)")  # fmt: skip
    command.option("--raw", dest="chat", action="store_false", help="complete the prompt without a chat template")
    add_sampling_options(command)
    command.option("--json", action="store_true", help="print the answer and its timings as JSON, at the end")
    return command


def add_sampling_options(command: Command) -> None:
    """The options that ``sampling_params_from`` reads."""
    command.option("--max-tokens", type=int, metavar="N", help="maximum number of new tokens")
    command.option("--temperature", type=float, metavar="X", help="sampling temperature; 0 is greedy")
    command.option("--top-p", type=float, metavar="X", help="sample from the likeliest tokens that add up to X")
    command.option("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    command.option("--min-p", type=float, metavar="X", help="drop tokens less likely than X times the likeliest")
    command.option("--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated")
    command.option("--ignore-eos", action="store_true", help="do not stop at the model's end-of-sequence token")


def sampling_params_from(arguments: argparse.Namespace, config: Config) -> SamplingParams:
    """The parameters from the command line; ``request.*`` and ``infer.stop_with_eos`` fill in what is not given.

    Raises:
        RequestError: a value is out of range.
    """
    from evener.sampling_params import SamplingParams

    # Both lengths are given: the legacy benchmark mode. Its answers always have exactly that length.
    fixed = config.request.prompt_tokens_len is not None and config.request.max_new_tokens is not None
    return SamplingParams(
        max_tokens=config.request.max_new_tokens if arguments.max_tokens is None else arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos or fixed or not config.infer.stop_with_eos,
    )


def _uses_chat_template(config: Config, arguments: argparse.Namespace) -> bool:
    """Whether the prompt goes through the model's chat template.

    Raises:
        ConfigError: there is a system message, which needs a template, and no template is used.
    """
    from evener.frontend.chat import open_chat
    from evener.loading.checkpoint import open_files

    chats = arguments.chat
    if chats is None:
        chats = open_chat(open_files(config.tokenizer or config.model)).available
    if arguments.system is not None and (not chats or arguments.prompt is None):
        raise ConfigError(
            "--system needs a chat template, but this model has none or --raw is given; put the text into --prompt"
        )
    return bool(chats)


async def _answer(config: Config, arguments: argparse.Namespace, params: SamplingParams, chats: bool) -> _Answer:
    with collector_paused():
        llm = await local_engine.start(config)
        kept = contextlib.ExitStack()
        kept.enter_context(objects_frozen())
    try:
        if llm.tokenizer is None:
            params = dataclasses.replace(params, detokenize=False)
        info = llm.info
        assert info is not None, "it was started"
        answer = _Answer(info.backend, info.backend_reason)
        answer.resolved, answer.manifest = info.config, info.manifest
        async with await _submit(llm, config, arguments, params, chats) as stream:
            answer.prompt_tokens = len(stream.prompt_token_ids)
            await _read(stream, answer, show=not arguments.json)
    finally:
        kept.close()
        await llm.close()
    return answer


async def _submit(
    llm: AsyncLLM, config: Config, arguments: argparse.Namespace, params: SamplingParams, chats: bool
) -> RequestStream:
    if config.request.prompt_tokens_len is not None:
        return await llm.submit(_fixed_prompt(llm, config, arguments.prompt, config.request.prompt_tokens_len), params)
    if not chats:
        return await llm.submit(arguments.prompt, params)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return await llm.submit_chat([*system, {"role": "user", "content": arguments.prompt}], params)


def _fixed_prompt(llm: AsyncLLM, config: Config, text: str | None, length: int) -> list[int]:
    """``length`` tokens: those of ``text``, repeated and cut, or random ones without a text.

    Raises:
        ConfigError: ``text`` has no tokens.
    """
    if text is None:
        assert llm.info is not None, "it was started"
        drawn = random.Random(config.seed)
        return [drawn.randrange(llm.info.vocab_size) for _ in range(length)]
    ids = [] if llm.tokenizer is None else llm.tokenizer.encode(text)
    if not ids:
        raise ConfigError(f"request.prompt_tokens_len={length} repeats the tokens of --prompt, but {text!r} has none; "
                          "leave --prompt out for random tokens")  # fmt: skip
    return (ids * -(-length // len(ids)))[:length]


async def _read(stream: RequestStream, answer: _Answer, show: bool) -> None:
    async for delta in stream:
        if delta.error is not None:
            raise EngineError(f"the request failed: {delta.error}")
        if delta.token_ids and answer.first is None:
            answer.first = time.perf_counter()
        answer.tokens += len(delta.token_ids)
        answer.text += delta.text
        answer.finish_reason = delta.finish_reason
        if show:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    answer.ended = time.perf_counter()
