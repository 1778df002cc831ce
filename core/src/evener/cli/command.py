"""What the commands share: options of their own beside the keys, whole files, and errors as one line.

``read_config`` is what a command that a package brings should use too::

    def main(argv: list[str]) -> int:
        command = Command("serve", "Serve a model over HTTP.")
        arguments, config = read_config(command, argv)
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from evener.config.keys import Typed, split_command_line
from evener.config.schema import Config
from evener.config.seeds import environment_overrides
from evener.errors import ConfigError
from evener.launch import join_ranks

_EPILOG = (
    "Every key=value may be written --key value too; a file of keys is given with --config FILE or CONFIG_NAME=FILE. "
    "`evener config --keys` lists the keys."
)


class Command:
    """One command's own options. Anything else on its command line is a model or a key, or what ``words`` calls it."""

    def __init__(self, name: str, summary: str, takes_model: bool = True, words: str = "") -> None:
        self.name = name
        usage = f"evener {name} [options] {'MODEL [key=value ...]' if takes_model else words}".rstrip()
        self._parser = _Parser(
            prog=f"evener {name}", usage=usage, description=summary, epilog=_EPILOG if takes_model else None,
            allow_abbrev=False, add_help=False,
        )  # fmt: skip
        self._takes_value: dict[str, bool] = {}
        self.option("-h", "--help", action="help", help="show this and stop")
        if takes_model:
            # The second spelling is a seed's.
            self.option(
                "--config",
                "--config_file",
                metavar="FILE",
                help="a YAML file of keys; a path, or a name here or in config/",
            )

    def option(self, *names: str, **settings: Any) -> None:
        """Add an option; the arguments are those of ``argparse.ArgumentParser.add_argument``."""
        action = self._parser.add_argument(*names, **settings)
        self._takes_value.update(dict.fromkeys(action.option_strings, action.nargs != 0))

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """This command's options, and the words that are not its own in their order.

        Raises:
            ConfigError: an option lacks its value, or has a wrong one.
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
        """``parse`` for a command that takes nothing but its own options.

        Raises:
            ConfigError: as ``parse``, or there is something else.
        """
        arguments, words = self.parse(argv)
        if words:
            raise ConfigError(f"evener {self.name}: unexpected argument {words[0]!r}")
        return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; type `{self.prog} --help`")


def read_config(
    command: Command, argv: Sequence[str], environ: Mapping[str, str] | None = None, *, ranks: bool = True
) -> tuple[argparse.Namespace, Config]:
    """A command line as the command's own options and a ``Config``; notes about old spellings go to standard error.

    Args:
        environ: where ``CONFIG_NAME`` and ``WORLD_SIZE`` are read; default ``os.environ``.
        ranks: the command starts an engine: see ``evener.launch.join_ranks``.

    Raises:
        ConfigError: an unknown key, a value that cannot be used, no model, or another number of ranks than is used.
    """
    environ = os.environ if environ is None else environ
    arguments, words = command.parse(argv)
    typed = split_command_line(words)
    inherited, notes = environment_overrides(environ)
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    # Whatever is typed comes later and wins.
    typed = Typed(typed.positionals, (*inherited, *typed.overrides))
    config = build_config(typed, arguments.config or environ.get("CONFIG_NAME"))
    if ranks and config.request.prompt_tokens_len is not None and command.name != "run":
        raise ConfigError("request.prompt_tokens_len makes up a prompt for `evener run`; `evener "
                          f"{command.name}` gets its prompts from elsewhere: leave it out")  # fmt: skip
    from evener.config.source import with_local_model

    config = with_local_model(config)
    if ranks:
        join_ranks(config, environ)
    return arguments, config


def build_config(typed: Typed, file: str | None = None) -> Config:
    """A ``Config`` of a split command line and a whole file; notes go to standard error.

    Raises:
        ConfigError: as ``read_config``.
    """
    from evener.config.hydra_boundary import from_command_line

    if len(typed.positionals) > 1:
        raise ConfigError(f"unexpected argument {typed.positionals[1]!r}; options are written key=value or --key value")
    built = from_command_line(typed.positionals[0] if typed.positionals else None, typed.overrides, file or None)
    for note in built.notes:
        print(f"warning: {note}", file=sys.stderr)
    return built.config
