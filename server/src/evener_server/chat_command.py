"""``evener chat MODEL`` and ``evener chat --url http://…``: a conversation in the terminal.

Ctrl-C stops an answer; the text so far stays in the conversation. At the prompt, Ctrl-C, Ctrl-D and /exit end the
program. If standard input is not a terminal, each of its lines is a message.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing

from evener.cli.command import Command, read_config
from evener.errors import ConfigError, EngineDeadError, EvenerError
from evener.logs import set_up_logging
from evener_server import local_engine
from evener_server.chat_models import ChatModel, LocalModel, RemoteModel
from evener_server.chat_screen import MarkdownScreen, PlainScreen, Screen, without_echo
from evener_server.collector import end_without_collection
from evener_server.run_command import add_sampling_options, sampling_params_from

HELP = (
    "/reset: new conversation; /system TEXT: set the system message (no TEXT: none); /exit: end; Ctrl-C: stop an answer"
)
#: Parameters that have the same names in the server's API.
_REMOTE = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")


def main(argv: list[str]) -> int:
    """Chat until the end of input. Returns the exit code.

    Raises:
        ConfigError: a wrong option.
        EvenerError: the model does not start, or the server does not answer.
    """
    end_without_collection()
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
    command = Command("chat", "Chat with a model in the terminal.")
    command.option("--url", metavar="URL", help="use a server with the OpenAI API instead of a model in this process; "
                   "MODEL is then the model's name on that server")  # fmt: skip
    command.option("--api-key", metavar="KEY", help="API key for that server; default: $OPENAI_API_KEY")
    command.option("--system", metavar="TEXT", help="a system message")
    command.option("--plain", dest="markdown", action="store_false", default=None, help="show the text unformatted")
    command.option(
        "--markdown", dest="markdown", action="store_true", help="format Markdown (the default on a terminal)"
    )
    add_sampling_options(command)
    return command


async def _local(command: Command, argv: list[str]) -> ChatModel:
    arguments, config = read_config(command, argv)
    local_engine.prepare()
    params = sampling_params_from(arguments, config)
    set_up_logging(config.log)
    llm = await local_engine.start(config)
    try:
        if llm.tokenizer is None:
            raise ConfigError(f"{config.model} has no tokenizer, which a chat needs; set tokenizer=FOLDER")
        assert llm.chat is not None, "the engine is ready"
        await asyncio.to_thread(llm.chat.warm_up)
    except BaseException:
        await llm.close()
        raise
    return LocalModel(llm, params)


async def _remote(arguments: argparse.Namespace, words: list[str]) -> ChatModel:
    strange = [word for word in words if "=" in word or word.startswith("-")] or words[1:]
    if strange:
        raise ConfigError(
            f"evener chat --url takes a model name and options, not {strange[0]!r}: set keys when you start the server"
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
    """Reads lines from the terminal; the arrow keys show earlier lines."""
    import readline

    assert readline, "input() uses it once it is imported"
    print(f"chat with {model.name}; /help lists the commands", file=sys.stderr)

    def read() -> str:
        try:
            return input("> ") + "\n"
        except EOFError:
            print(file=sys.stderr)
            return ""

    return read


class Conversation:
    """A conversation with a model.

    Args:
        model: answers the messages; screen: shows the answers.
        loop: runs while an answer is generated.
        system: the system message; None: no system message.
    """

    def __init__(
        self, model: ChatModel, screen: Screen, loop: asyncio.AbstractEventLoop, system: str | None = None
    ) -> None:
        self._model, self._screen, self._loop, self._system = model, screen, loop, system
        self.messages: list[dict[str, str]] = []

    def run(self, read: Callable[[], str]) -> int:
        """Handle lines until ``read`` returns "". Returns 1 if the last message got no answer, else 0."""
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
        """Run a command; False if ``text`` is not a command."""
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self.messages.clear()
        elif name == "/system":
            self._system = rest.strip() or None
        elif name == "/help":
            print(HELP, file=sys.stderr)
        elif name[1:].isalpha():
            print(f"unknown command {name}; {HELP}", file=sys.stderr)
        else:
            return False  # a path, a comment, …
        return True

    def _ask(self, text: str) -> int:
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        task = self._loop.create_task(self._answer(pieces))
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        problem: EvenerError | None = None
        self._screen.begin()
        try:
            with without_echo(sys.stdin):
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
        # The question is removed too: otherwise the next request would repeat what failed.
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
