"""What the commands share: their own options beside the config keys, config files, and errors in one line.

Commands of other packages should use ``read_config`` too::

    def main(argv: list[str]) -> int:
        command = Command("serve", "Serve a model over HTTP.")
        arguments, config = read_config(command, argv)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from evener.config.build import Built
from evener.config.keys import ParsedCommandLine, split_command_line
from evener.config.old_spellings import installed_spellings
from evener.config.schema import Config
from evener.engine.processes.launch import join_ranks
from evener.errors import ConfigError
from evener.plugins.discover import installed_catalog

_EPILOG = (
    "Every key=value may also be written --key value. Keys can be read from a YAML file: --config FILE, or the "
    "environment variable CONFIG_NAME=FILE. `evener config --keys` lists all keys."
)


class Command:
    """One command's own options. Anything else on its command line is the model, a key, or what ``words`` describes."""

    def __init__(self, name: str, summary: str, takes_model: bool = True, words: str = "") -> None:
        self.name = name
        usage = f"evener {name} [options] {'MODEL [key=value ...]' if takes_model else words}".rstrip()
        self._parser = _Parser(
            prog=f"evener {name}", usage=usage, description=summary, epilog=_EPILOG if takes_model else None,
            allow_abbrev=False, add_help=False,
        )  # fmt: skip
        self._takes_value: dict[str, bool] = {}
        self.option("-h", "--help", action="help", help="show this help and exit")
        if takes_model:
            # The second spelling is a legacy one.
            self.option(
                "--config", "--config_file", metavar="FILE",
                help="YAML file of keys: a path, or a file name in this folder or in config/",
            )  # fmt: skip

    def option(self, *names: str, **settings: Any) -> None:
        """Add an option; the arguments are those of ``argparse.ArgumentParser.add_argument``."""
        action = self._parser.add_argument(*names, **settings)
        self._takes_value.update(dict.fromkeys(action.option_strings, action.nargs != 0))

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """This command's options, and all other words in their order.

        Raises:
            ConfigError: an option has no value, or a wrong one.
        """
        own: list[str] = []
        rest: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            name = word.partition("=")[0] if word.startswith("--") else word
            if word == "--":
                rest += [word, *words]
                break
            if name not in self._takes_value:
                rest.append(word)
                continue
            takes = self._takes_value[name] and name == word
            # Joined, so that a value may begin with a dash ("--prompt '- a list'").
            own.append(f"{word}={words.pop(0)}" if takes and words and word.startswith("--") else word)
        return self._parser.parse_args(own), rest

    def parse_options(self, argv: Sequence[str]) -> argparse.Namespace:
        """``parse`` for a command that takes only its own options.

        Raises:
            ConfigError: as ``parse``, or there is another word.
        """
        arguments, words = self.parse(argv)
        if words:
            raise ConfigError(f"evener {self.name}: unexpected argument {words[0]!r}; type `evener {self.name} --help`")
        return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; type `{self.prog} --help`")


def print_result(arguments: argparse.Namespace, value: object, text: Callable[[], str]) -> None:
    """Print a command's result: ``value`` as JSON if ``--json`` was given, else what ``text`` returns."""
    print(json.dumps(value, indent=2) if arguments.json else text().removesuffix("\n"))


def read_config(
    command: Command, argv: Sequence[str], environ: Mapping[str, str] | None = None, *, ranks: bool = True
) -> tuple[argparse.Namespace, Config]:
    """Split a command line into the command's own options and a ``Config``; warnings about old spellings go to
    standard error.

    Args:
        environ: where ``CONFIG_NAME`` and ``WORLD_SIZE`` are read; default ``os.environ``.
        ranks: whether the command starts an engine: see ``evener.engine.processes.launch.join_ranks``.

    Raises:
        ConfigError: an unknown key, an invalid value, no model, or the wrong number of ranks.
    """
    environ = os.environ if environ is None else environ
    arguments, words = command.parse(argv)
    typed = split_command_line(words)
    inherited = installed_spellings().from_environ(environ)
    for note in inherited.notes:
        print(f"warning: {note}", file=sys.stderr)
    # Typed overrides come later and win.
    typed = ParsedCommandLine(typed.positionals, (*inherited.overrides, *typed.overrides))
    config = build_config(typed, arguments.config or environ.get("CONFIG_NAME"))
    if ranks and config.request.prompt_tokens_len is not None and command.name != "run":
        raise ConfigError("request.prompt_tokens_len sets the prompt length of `evener run` only; `evener "
                          f"{command.name}` does not use it: leave it out")  # fmt: skip
    from evener.config.local_model import with_local_model

    config = with_local_model(config)
    if ranks:
        join_ranks(config, environ)
    return arguments, config


def build_config(typed: ParsedCommandLine, file: str | None = None) -> Config:
    """A ``Config`` of a split command line and a config file; warnings go to standard error.

    Raises:
        ConfigError: as ``read_config``, or no installed package reads command lines.
    """
    from_command_line = installed_catalog().need("config reader", "", "reading keys", "evener-formats")
    if len(typed.positionals) > 1:
        raise ConfigError(f"unexpected argument {typed.positionals[1]!r}: the model comes first, then options as "
                          "key=value or --key value")  # fmt: skip
    built: Built = from_command_line(typed.positionals[0] if typed.positionals else None, typed.overrides, file or None)
    for note in built.notes:
        print(f"warning: {note}", file=sys.stderr)
    return built.config
