"""``evener conformance``: check whether a backend keeps the contracts."""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import sys
from pathlib import Path

from evener.cli.command import Command
from evener.config.keys import split_command_line
from evener.errors import ConfigError
from evener_conformance.core_version import check_core_version


def command() -> Command:
    """The command's options."""
    found = Command(
        "conformance", "Check whether a backend keeps the contracts (docs/conformance.md).", False,
        "--backend NAME [package.key=value ...]",
    )  # fmt: skip
    add = found.option
    add("--backend", metavar="NAME", help="the backend to check", required=True)
    add(
        "--pretend",
        action="store_true",
        help="check without the hardware: no probe, and host memory if the device does not open (level L3)",
    )
    add("--mode", choices=("test", "perf", "support"), default="test",
        help="test: check everything; perf: time kernels and the reference; support: show what is served, and why not "
             "(default: test)")  # fmt: skip
    add("--op", action="append", default=[], help="check only this op, area, kernel or provider; may be repeated")
    add("--dtype", action="append", default=[], help="check only this compute dtype; may be repeated")
    add("--seed", type=int, help="seed of the random inputs; default: a new one for each run")
    add("--thorough", action="store_true", help="check many more sizes")
    add("--json", metavar="FILE", help="write the result to this file")
    return found


def package_options(words: list[str]) -> dict[str, dict[str, str]]:
    """The words ``package.key=value``, as ``{package: {key: value}}``.

    Raises:
        ConfigError: a word has another form.
    """
    typed, options = split_command_line(words), dict[str, dict[str, str]]()
    if typed.positionals:
        raise ConfigError(f"evener conformance: unexpected argument {typed.positionals[0]!r}")
    for override in typed.overrides:
        package, _, key = override.key.rpartition(".")
        if not package:
            raise ConfigError(f"{override.original!r} belongs to no package; write PACKAGE.{override.key}=VALUE")
        options.setdefault(package, {})[key] = override.value
    return options


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Run the kit. 0 if nothing failed and nothing required is unknown, 1 otherwise."""
    arguments, words = command().parse(argv)
    check_core_version()
    options = package_options(words)
    # A kernel that reaches behind its tensors may end the process (see ``kit.guards``): show where.
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    # Otherwise torch's profiler prints its own start and stop messages between the lines of progress.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from evener_conformance.kit import report
    from evener_conformance.kit.checklist import CheckRequest
    from evener_conformance.kit.run import run

    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    request = CheckRequest(seed, tuple(arguments.op), tuple(arguments.dtype), arguments.thorough)
    print(f"seed {seed}", file=sys.stderr)
    result = run(arguments.backend, request, arguments.pretend, options, arguments.mode, _say)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result.to_json(), indent=1) + "\n", "utf-8")
    report.show(result)
    return 0 if result.passed else 1
