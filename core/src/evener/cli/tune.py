"""``evener tune``: time what could serve a model's call sites here, and write the file that resolution reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from evener.cli.command import Command, read_config
from evener.errors import ConfigError

if TYPE_CHECKING:
    from evener.testing.tuning.record import Recorded


def main(argv: list[str]) -> int:
    """Tune, and write the file. 0 if it holds something, 1 if nothing had a choice."""
    command = Command("tune", "Time what could serve each call site of a model here, into a file that later runs read.")
    command.option("--out", metavar="FILE", help="default: in the user's cache folder, where runs look for it")
    command.option("--op", metavar="OP,OP", default="", help="only these ops; default: all that the model calls")
    command.option("--buckets", metavar="N,N", default="", help="only steps of so many tokens; default: all buckets")
    command.option("--context", metavar="N", type=int, default=512, help="earlier tokens of requests (512)")
    arguments, config = read_config(command, argv)
    if config.infer.tp_size * config.infer.pp_size > 1:
        raise ConfigError("evener tune runs on one device; leave infer.tp_size and infer.pp_size out")
    ops, buckets = ([word for word in text.split(",") if word] for text in (arguments.op, arguments.buckets))
    if not all(word.isdigit() for word in buckets):
        raise ConfigError(f"--buckets {arguments.buckets}: it takes numbers of tokens, as in 1,16")
    from evener.testing.tuning.run import tune

    path, outcomes = tune(config, ops, [int(n) for n in buckets], arguments.context, arguments.out, _shown)
    print("\n".join(line for found in outcomes for line in found.lines()))
    count = sum(found.anyway is not None for found in outcomes)
    print(f"{count} measurements in {path}", file=sys.stderr)
    return 0 if count else 1


def _shown(recorded: Sequence[Recorded]) -> Iterable[Recorded]:
    """The same, with progress on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(recorded, "timing", console=console, disable=not console.is_terminal)
