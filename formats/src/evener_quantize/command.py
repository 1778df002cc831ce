"""The command ``evener quantize SRC DST``."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from evener_calibrate.text import read_text

from evener.cli.command import Command, build_config, print_result
from evener.config.keys import ParsedCommandLine, split_command_line
from evener.config.local_model import with_local_model
from evener.config.schema import Config
from evener.errors import ConfigError
from evener_quantize.settings import GROUPS, METHODS, ORDERS, Settings

#: Keys that have an effect here, beside options of packages.
KEYS = ("dtype", "backend", "tokenizer", "weight_map")
#: Characters of text that are read for each token that is wanted.
_CHARACTERS = 16


def main(argv: list[str]) -> int:
    """Quantize, and say what was written."""
    arguments, config, result = read_arguments(argv)
    settings = settings_of(arguments)
    if settings.nearest == (arguments.data is not None):
        raise ConfigError("evener quantize needs a text: add --data FILE; or --nearest, which uses none")
    text = ""
    if not settings.nearest:
        text = read_text(Path(arguments.data).expanduser(), settings.tokens * _CHARACTERS, "--data")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from evener_quantize.driver import quantize

    shown = not arguments.quiet and sys.stderr.isatty()
    columns = ("layer", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task("", total=None)
        made = quantize(config, result, settings, text, lambda n, count: bar.update(task, completed=n, total=count))
    how = "to nearest" if settings.nearest else f"with {made['tokens']:,} tokens"
    groups = f"in groups of {made['group']}" if made["group"] else "in whole rows"
    without = (
        f"; {made['without_input']} matrices of experts that no token reached are rounded to nearest: give a longer "
        "text, with --tokens"
        if made["without_input"]
        else ""
    )
    print_result(arguments, made, lambda: f"{result}: {made['matrices']} matrices, {how}, {groups}; {made['bytes']:,} "
                 f"bytes in {made['files']} weight files{without}")  # fmt: skip
    return 0


def read_arguments(argv: Sequence[str]) -> tuple[Namespace, Config, Path]:
    """The options, the configuration and the result's path.

    Raises:
        ConfigError: there are not two paths, or a key has no effect here.
    """
    command = Command(
        "quantize", "Quantize a model to the folder DST, as GPTQ or AWQ, with the help of a text. It is run and "
        "quantized layer by layer. Interrupted, it goes on where it was when it is started again.",
        takes_model=False, words="SRC DST --method gptq --data FILE [key=value ...]",
    )  # fmt: skip
    command.option("--method", choices=METHODS, default="gptq", help="the algorithm and the format (gptq)")
    command.option("--data", metavar="FILE", help="the text, in UTF-8; like what the model will be used for")
    command.option("--nearest", action="store_true", help="only round, without a text; to compare")
    command.option("--bits", metavar="N", type=int, default=4, help="bits of a number: 4; with gptq also 2, 3 or 8")
    command.option("--group", metavar="N", type=int, help="columns with a scale of their own, -1: whole rows; default: "
                   f"the first of {', '.join(map(str, GROUPS))} that divides all matrices")  # fmt: skip
    command.option("--asymmetric", action="store_true", help="gptq: with zero points; awq always has them")
    command.option("--order", choices=ORDERS, help="gptq: of the columns: static: large inputs first (default); "
                   "groups: groups in this order too (desc_act), slower later; none: as they are")  # fmt: skip
    command.option("--tokens", metavar="N", type=int, default=32768, help="read at most N tokens of the text (32768)")
    command.option("--window", metavar="N", type=int, default=2048, help="tokens that see each other (2048)")
    command.option("--json", action="store_true", help="print JSON")
    command.option("--quiet", action="store_true", help="show no progress")
    arguments, words = command.parse(argv)
    typed = split_command_line(words)
    if len(typed.positionals) != 2:
        raise ConfigError("evener quantize needs two paths: evener quantize SRC DST --method gptq --data FILE")
    config = build_config(ParsedCommandLine(typed.positionals[:1], typed.overrides))
    for override in typed.overrides:
        if override.key not in KEYS and override.key.partition(".")[0] not in config.options:
            raise ConfigError(f"{override.original} changes nothing in a quantization, which takes {', '.join(KEYS)} "
                              "and options of packages; leave it out")  # fmt: skip
    return arguments, with_local_model(config), Path(typed.positionals[1]).expanduser().absolute()


def settings_of(arguments: Namespace) -> Settings:
    """What the options ask for.

    Raises:
        ConfigError: they contradict each other.
    """
    awq, group = arguments.method == "awq", arguments.group
    if awq and arguments.asymmetric:
        raise ConfigError("--asymmetric is for --method gptq; awq always has zero points: leave it out")
    return Settings(
        arguments.method, arguments.bits, 0 if group == -1 else group, not (awq or arguments.asymmetric),
        arguments.order or ("none" if awq else "static"), arguments.nearest, arguments.tokens, arguments.window,
    )  # fmt: skip
