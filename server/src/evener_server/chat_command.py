"""``evener chat MODEL`` and ``evener chat --url http://…``: a conversation in the terminal.

Ctrl-C stops an answer; at the prompt it, Ctrl-D and /exit end the program. What was said of a stopped answer stays in
the conversation. Where standard input is no terminal, each of its lines is a message.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing

from evener.async_llm import AsyncLLM
from evener.cli.command import Command, read_config
from evener.cli.run import add_sampling_options, sampling_of
from evener.errors import ConfigError, EngineDeadError, EvenerError
from evener.logs import set_up_logging
from evener_server.chat_models import ChatModel, LocalModel, RemoteModel
from evener_server.chat_screen import MarkdownScreen, PlainScreen, Screen

HELP = (
    "/reset begins anew, /system TEXT sets the system message (without TEXT: none), /exit ends, Ctrl-C stops an answer"
)
#: Parameters that go to a server as they are called here.
_REMOTE = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")


def main(argv: list[str]) -> int:
    """Chat until the end of input. Returns the exit code.

    Raises:
        ConfigError: a wrong option.
        EvenerError: the model does not start, or the server does not answer.
    """
    command = _command()
    arguments, words = command.parse(argv)
    loop = asyncio.new_event_loop()
    try:
        model = loop.run_until_complete(_remote(arguments, words) if arguments.url else _local(command, argv))
        try:
            markdown = sys.stdout.isatty() if arguments.markdown is None else arguments.markdown
            screen = MarkdownScreen() if markdown else PlainScreen()
            read = _reader(model) if sys.stdin.isatty() else sys.stdin.readline
            return Conversation(model, screen, loop, arguments.system).run(read)
        finally:
            loop.run_until_complete(model.close())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def _command() -> Command:
    command = Command("chat", "Talk with a model in the terminal.")
    command.option("--url", metavar="URL", help="with the model of an OpenAI server, instead of one in this process; "
                   "MODEL is then its name there")  # fmt: skip
    command.option("--api-key", metavar="KEY", help="for that server; default: $OPENAI_API_KEY")
    command.option("--system", metavar="TEXT", help="a system message")
    command.option("--plain", dest="markdown", action="store_false", default=None, help="show text as it comes")
    command.option("--markdown", dest="markdown", action="store_true", help="draw Markdown (the default on a terminal)")
    add_sampling_options(command)
    return command


async def _local(command: Command, argv: list[str]) -> ChatModel:
    arguments, config = read_config(command, argv)
    params = sampling_of(arguments, config)
    set_up_logging(config.log)
    llm = await AsyncLLM.start(config, "thread")
    try:
        if llm.tokenizer is None:
            raise ConfigError(f"{config.model} has no tokenizer, so nobody can talk with it; set tokenizer=FOLDER")
        await llm.warm_up_chat()
    except BaseException:
        await llm.close()
        raise
    return LocalModel(llm, params)


async def _remote(arguments: argparse.Namespace, words: list[str]) -> ChatModel:
    strange = [word for word in words if "=" in word or word.startswith("-")] or words[1:]
    if strange:
        raise ConfigError(
            f"evener chat --url takes a model's name and options, not {strange[0]!r}; keys are the server's"
        )
    given = {name: getattr(arguments, name) for name in _REMOTE if getattr(arguments, name) is not None}
    if arguments.ignore_eos:
        given["ignore_eos"] = True
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    model = RemoteModel(arguments.url, words[0] if words else None, given, key)
    try:
        await model.open()
    except BaseException:
        await model.close()
        raise
    return model


def _reader(model: ChatModel) -> Callable[[], str]:
    """Asks a person; the arrow keys go through what was typed before."""
    import readline

    assert readline, "importing it is all that input() needs"
    print(f"talking with {model.name}; /help lists commands", file=sys.stderr)

    def read() -> str:
        try:
            return input("> ") + "\n"
        except EOFError:
            print(file=sys.stderr)
            return ""

    return read


class Conversation:
    """What was said, and the way on.

    Args:
        model: who answers; screen: where.
        loop: runs while an answer comes.
        system: the system message; None for none.
    """

    def __init__(
        self, model: ChatModel, screen: Screen, loop: asyncio.AbstractEventLoop, system: str | None = None
    ) -> None:
        self._model, self._screen, self._loop, self._system = model, screen, loop, system
        self.messages: list[dict[str, str]] = []

    def run(self, read: Callable[[], str]) -> int:
        """Take lines until there are no more. 1 if the last message got no answer, else 0."""
        code = 0
        while line := read():
            text = line.strip()
            if text == "/exit":
                break
            if text.startswith("/") and self._command(text):
                continue
            if text:
                code = self._ask(text)
        return code

    def _command(self, text: str) -> bool:
        """Whether it was one."""
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self.messages.clear()
        elif name == "/system":
            self._system = rest.strip() or None
        elif name == "/help":
            print(HELP, file=sys.stderr)
        elif name[1:].isalpha():
            print(f"there is no {name}; {HELP}", file=sys.stderr)
        else:
            return False  # a path, a comment, …
        return True

    def _ask(self, text: str) -> int:
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        task = self._loop.create_task(self._answer(pieces))
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        self._screen.begin()
        problem: EvenerError | None = None
        try:
            self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            pieces.append("")  # stopped, even before the first word
        except EvenerError as error:
            problem = error
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
            self._screen.end()
        if problem is None:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
            return 0
        # The question goes with its answer: otherwise the next one would repeat what failed.
        self.messages.pop()
        if isinstance(problem, EngineDeadError):
            raise problem
        print(f"error: {problem}", file=sys.stderr)
        return 1

    async def _answer(self, pieces: list[str]) -> None:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        async with aclosing(self._model.answer([*system, *self.messages])) as answer:  # type: ignore[type-var]
            async for piece in answer:
                pieces.append(piece)
                self._screen.add(piece)
