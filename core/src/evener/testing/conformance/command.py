"""The command ``evener conformance``: whether a backend keeps the contracts.

It parses its line itself, as no module here knows those of ``evener.cli``.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from pathlib import Path
from typing import NoReturn

from evener.config.keys import split_command_line
from evener.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; type `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = _Parser(
        prog="evener conformance", usage="evener conformance --backend NAME [options] [package.key=value ...]",
        description="Check whether a backend keeps the contracts (docs/conformance.md).", allow_abbrev=False,
    )  # fmt: skip
    add = found.add_argument
    add("--backend", metavar="NAME", help="the backend to check", required=True)
    add(
        "--pretend",
        action="store_true",
        help="without its hardware: probe nothing, and take host memory for a device that does not open (level L3)",
    )
    add("--mode", choices=("test", "perf", "support"), default="test",
        help="test: check everything; perf: time kernels beside the reference; support: what is served, and why not "
             "(default: test)")  # fmt: skip
    add("--op", action="append", default=[], help="only this op, area, kernel or provider; may be repeated")
    add("--dtype", action="append", default=[], help="only this compute type; may be repeated")
    add("--seed", type=int, help="of random inputs; default: another one each time")
    add("--thorough", action="store_true", help="many more sizes")
    add("--json", metavar="FILE", help="write the result there")
    return found


def package_options(words: list[str]) -> dict[str, dict[str, str]]:
    """``package.key=value`` by package.

    Raises:
        ConfigError: a word that is none.
    """
    typed, options = split_command_line(words), dict[str, dict[str, str]]()
    if typed.positionals:
        raise ConfigError(f"evener conformance: unexpected argument {typed.positionals[0]!r}")
    for override in typed.overrides:
        package, _, key = override.key.rpartition(".")
        if not package:
            raise ConfigError(f"{override.shown!r} is no package's option; write PACKAGE.{override.key}=VALUE")
        options.setdefault(package, {})[key] = override.value
    return options


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Run the kit. 0 if nothing failed and nothing required is unknown, 1 otherwise."""
    arguments, words = parser().parse_known_args(argv)
    options = package_options(words)
    # torch's profiler would tell between the lines of progress that it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from evener.testing.conformance import report
    from evener.testing.conformance.plan import Request
    from evener.testing.conformance.run import run

    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    request = Request(seed, tuple(arguments.op), tuple(arguments.dtype), arguments.thorough)
    print(f"seed {seed}", file=sys.stderr)
    result = run(arguments.backend, request, arguments.pretend, options, arguments.mode, _say)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result.to_json(), indent=1) + "\n", "utf-8")
    report.show(result)
    return 0 if result.passed else 1
