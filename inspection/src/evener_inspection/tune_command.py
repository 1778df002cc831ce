"""``evener tune``: benchmark the kernels that could run a model's ops on this device, and save the choices."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from evener.cli.command import Command, read_config
from evener.errors import ConfigError

if TYPE_CHECKING:
    from evener_inspection.recorded_ops import RecordedOp


def main(argv: list[str]) -> int:
    """Tune, and write the file. Returns 0 if it has measurements, 1 if no op had more than one kernel."""
    command = Command("tune", "Benchmark kernels for the ops of a model on this device, and save the choices for later "
                      "runs.")  # fmt: skip
    command.option("--out", metavar="FILE", help="where to save; default: the user's cache folder, which runs read")
    command.option("--op", metavar="OP,OP", default="", help="only these ops; default: all ops of the model")
    command.option("--buckets", metavar="N,N", default="", help="only steps of N tokens; default: all buckets")
    command.option("--context", metavar="N", type=int, default=512, help="tokens of context before a step (512)")
    arguments, config = read_config(command, argv)
    if config.infer.tp_size * config.infer.pp_size > 1:
        raise ConfigError("evener tune runs on one device: leave infer.tp_size and infer.pp_size out")
    ops, buckets = ([word for word in text.split(",") if word] for text in (arguments.op, arguments.buckets))
    if not all(word.isdigit() for word in buckets):
        raise ConfigError(f"--buckets {arguments.buckets} is not a list of token counts; write it as in --buckets 1,16")
    from evener_inspection.tuner import tune

    path, outcomes = tune(config, ops, [int(n) for n in buckets], arguments.context, arguments.out, _with_progress)
    print("\n".join(line for found in outcomes for line in found.lines()))
    count = sum(found.untuned is not None for found in outcomes)
    print(f"{count} measurements in {path}", file=sys.stderr)
    return 0 if count else 1


def _with_progress(recorded: Sequence[RecordedOp]) -> Iterable[RecordedOp]:
    """The same, with a progress bar on standard error if that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(recorded, "benchmarking", console=console, disable=not console.is_terminal)
