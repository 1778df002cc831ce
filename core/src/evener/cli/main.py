"""``evener``: find the command, run it, and turn errors into one line.

Commands of installed packages stand beside the built-in ones; a built-in name cannot be taken. Exit codes: 0 done, 1
it could not be done, 2 it was asked for wrongly, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from evener.errors import ConfigError, DescriptorError, EvenerError, UnknownNameError

if TYPE_CHECKING:
    from evener.plugins.target import Target

Main = Callable[[list[str]], int]


#: Commands of the core's own: module and summary.
_BUILTIN: Mapping[str, tuple[str, str]] = {
    "run": ("evener.cli.run", "answer one prompt and stop"),
    "explain": ("evener.cli.explain", "show what a run would use, op by op, and its memory"),
    "tune": ("evener.cli.tune", "time what could serve a model's call sites, into a file that runs read"),
    "config": ("evener.cli.config", "show what every option resolves to, and why"),
    "why-not": ("evener.cli.why_not", "say what became of a backend, package, op, kernel or scheme, and why"),
    "plugins": ("evener.cli.plugins", "list installed packages"),
    "doctor": ("evener.cli.doctor", "show how the backend is chosen, step by step"),
    "models": ("evener.cli.models", "list the architectures that can be run"),
    "new": ("evener.cli.new", "write a package to start from: new backend NAME, new model NAME"),
    "conformance": ("evener.testing.conformance.command", "check whether a backend keeps the contracts"),
    "version": ("evener.cli.version", "show versions"),
}
BUILTIN_NAMES = tuple(_BUILTIN)
#: Commands that a package of ours brings, and what to type when it is not installed.
_OPTIONAL: Mapping[str, tuple[str, str]] = {
    "serve": ("serve a model over HTTP", 'pip install "evener[serve]"'),
    "chat": ("talk with a model in the terminal", 'pip install "evener[serve]"'),
    "completion": ("print a completion script for a shell", 'pip install "evener[serve]"'),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; ``argv`` defaults to the process's. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`); without this the interpreter complains when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EvenerError as error:
        return _report(error, str(error), 2 if isinstance(error, ConfigError) else 1)
    except Exception as error:
        hint = "this is a fault of evener or of a package; EVENER_DEBUG=1 shows where, for the report to its author"
        return _report(error, f"{type(error).__name__}: {error}; {hint}", 1)


def _report(error: Exception, message: str, code: int) -> int:
    if os.environ.get("EVENER_DEBUG", "0") not in ("", "0"):
        raise error
    print(f"error: {message}", file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    name, rest = words[0], words[1:]
    if name == "--version":
        name = "version"
    return find(name)(rest)


def find(name: str) -> Main:
    """The function of one command; imports its module.

    Raises:
        UnknownNameError: nobody has such a command.
        ConfigError: it belongs to a package that is not installed.
        DescriptorError: the package that announces it does not deliver it.
    """
    if name in _BUILTIN:
        return cast(Main, import_module(_BUILTIN[name][0]).main)
    found = installed_commands()
    if name in found:
        loaded = found[name].load()
        if not callable(loaded):
            raise DescriptorError(f"command {name!r} of {found[name].distribution} is no function: {found[name].path}")
        return cast(Main, loaded)
    if name in _OPTIONAL:
        raise ConfigError(
            f"`evener {name}` comes with a package that is not installed; type: {_OPTIONAL[name][1]}{_unusable()}"
        )
    raise UnknownNameError(
        "command", name, {*_BUILTIN, *_OPTIONAL, *found}, "`evener --help` lists them." + _unusable()
    )


def _unusable() -> str:
    """Packages that are installed and cannot be used, any of which may bring the command; empty if there is none."""
    from evener.plugins.discover import discover

    catalog = discover()
    reasons = [str(problem.error) for problem in catalog.problems]
    reasons += [f"{each} is switched off: {each.reason}" for each in catalog.disabled]
    return "".join(f"\n  {reason}" for reason in reasons)


def installed_commands() -> Mapping[str, Target]:
    """Commands that installed packages bring.

    Raises:
        DescriptorError: a package announces a built-in command's name.
    """
    from evener.plugins.discover import discover

    found = discover().commands()
    for name in found.keys() & _BUILTIN.keys():
        raise DescriptorError(
            f"{found[name].distribution} brings a command {name!r}, which is evener's own; uninstall it, or switch it "
            f"off with EVENER_DISABLE_PLUGINS={found[name].package}"
        )
    return found


def help_text() -> str:
    """What ``evener --help`` prints."""
    rows = [(name, summary) for name, (_, summary) in _BUILTIN.items()]
    found = installed_commands()
    rows += [(name, summary if name in found else f"{summary} ({how})") for name, (summary, how) in _OPTIONAL.items()]
    rows += [(name, f"from {found[name].distribution}") for name in sorted(found) if name not in _OPTIONAL]
    lines = [f"  {name:<11} {summary}" for name, summary in rows]
    head = (
        "usage: evener COMMAND [options]\n\nServe and run language models on whatever hardware is here.\n\ncommands:\n"
    )
    return (
        head
        + "\n".join(lines)
        + "\n\n`evener COMMAND --help` says more; EVENER_DEBUG=1 shows where an error comes from."
    )
