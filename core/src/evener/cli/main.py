"""``evener``: find the command, run it, and turn errors into one line.

Installed packages may add commands, but not under a built-in name. Exit codes: 0 success, 1 failure, 2 wrong usage or
configuration, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from evener.errors import ConfigError, DescriptorError, EvenerError, UnknownNameError

if TYPE_CHECKING:
    from evener.plugins.catalog import LazyImport

Main = Callable[[list[str]], int]


#: Commands of the core's own: module and summary.
_BUILTIN: Mapping[str, tuple[str, str]] = {
    "doctor": ("evener.cli.doctor", "show how the backend is chosen, step by step"),
    "version": ("evener.cli.version", "show versions"),
}
BUILTIN_NAMES = tuple(_BUILTIN)
_SERVE, _KIT = 'pip install "evener[serve]"', "pip install evener-conformance"
#: Commands that come with another distribution of this project, and what to type when it is not installed.
_OPTIONAL: Mapping[str, tuple[str, str]] = {
    "serve": ("serve a model over HTTP", _SERVE),
    "run": ("answer one prompt and exit", _SERVE),
    "chat": ("chat with a model in the terminal", _SERVE),
    "client": ("ask a running server from a terminal", _SERVE),
    "deploy": ("run several servers behind one address", "pip install evener-deploy"),
    "completion": ("print a shell completion script", _SERVE),
    "explain": ("show which kernel would run each op, and the memory plan", _SERVE),
    "why-not": ("explain why a backend, package, op, kernel or scheme was or wasn't used", _SERVE),
    "config": ("show the resolved value of every option, and why", _SERVE),
    "models": ("list the supported model architectures", _SERVE),
    "plugins": ("list installed packages", _SERVE),
    "convert": ("write a checkpoint in another format, or divided for ranks", _SERVE),
    "quantize": ("write a GPTQ or AWQ checkpoint with the help of a text", _SERVE),
    "calibrate": ("write scales for a KV cache of eight bits", _SERVE),
    "bench-engine": ("time the engine alone, or some of its layers", _SERVE),
    "tune": ("benchmark kernels and save the choices", _SERVE),
    "conformance": ("check whether a backend keeps the contracts", _KIT),
    "new": ("create a package to start from: new backend NAME, new model NAME", _KIT),
    "first-contact": ("try a backend on its hardware, and write an evidence file", _KIT),
    "evidence": ("check an evidence file and add it to results", _KIT),
}

#: What to do when something has run out, by the system's error number.
_EXHAUSTED: Mapping[int | None, str] = {
    errno.ENOSPC: "the disk is full: free space on it", errno.EDQUOT: "the disk quota is used up: free space",
    errno.EMFILE: "this process has too many open files: allow more, as with `ulimit -n 4096`",
    errno.ENOMEM: "memory ran out: close programs, lift `ulimit -v`, or set infer.kv_memory to less",
}  # fmt: skip
#: How libraries say that memory, or room for a thread, ran out, in errors of other types.
_OUT_OF_MEMORY = ("failed to map segment from shared object", "can't allocate memory", "can't start new thread")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; ``argv`` defaults to the process's. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        print("; ".join(("interrupted", *map(str, stop.args))), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader is gone (`| head`); without this the interpreter prints an error when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EvenerError as error:
        return _report(error, str(error), 2 if isinstance(error, ConfigError) else 1)
    except Exception as error:
        hint = "this is a bug in evener or in a package: set EVENER_DEBUG=1 to see the stack trace, and report it"
        return _report(error, f"{type(error).__name__}: {error}; {_exhausted(error) or hint}", 1)


def _exhausted(error: Exception) -> str | None:
    """What to do if the machine, or a limit of this process, has run out of something; None for other errors."""
    out_of_memory = isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
    return _EXHAUSTED.get(errno.ENOMEM if out_of_memory else getattr(error, "errno", None))


def _report(error: Exception, message: str, code: int) -> int:
    if os.environ.get("EVENER_DEBUG", "0") not in ("", "0"):
        raise error
    from evener.plugins.guard import printable

    print(f"error: {printable(message)}", file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    name = "version" if words[0] == "--version" else words[0]
    return find_command(name)(words[1:])


def find_command(name: str) -> Main:
    """The function of one command; imports its module.

    Raises:
        UnknownNameError: there is no such command.
        ConfigError: it belongs to a package that is not installed.
        DescriptorError: the package that declares it does not have it.
    """
    if name in _BUILTIN:
        return cast(Main, import_module(_BUILTIN[name][0]).main)
    found = installed_commands()
    if name in found:
        loaded = found[name].load()
        if not callable(loaded):
            raise DescriptorError(
                f"command {name!r} of {found[name].distribution} is not a function: {found[name].path}; report it to "
                "the package's author"
            )
        return cast(Main, loaded)
    if name in _OPTIONAL:
        how = _OPTIONAL[name][1] + _unusable()
        raise ConfigError(f"`evener {name}` needs a package that is not installed; type: {how}")
    hint = "`evener --help` lists them." + _unusable()
    raise UnknownNameError("command", name, {*_BUILTIN, *_OPTIONAL, *found}, hint)


def _unusable() -> str:
    """Installed packages that cannot be used: one of them may have the command. Empty if there is none."""
    from evener.plugins.discover import installed_catalog

    catalog = installed_catalog()
    reasons = [str(problem.error) for problem in catalog.problems]
    reasons += [f"{each} is disabled: {each.reason}" for each in catalog.disabled]
    return "".join(f"\n  {reason}" for reason in reasons)


def installed_commands() -> Mapping[str, LazyImport]:
    """Commands of installed packages.

    Raises:
        DescriptorError: a package declares a command with a built-in name.
    """
    from evener.plugins.discover import installed_catalog

    found = installed_catalog().commands()
    for name in found.keys() & _BUILTIN.keys():
        raise DescriptorError(
            f"{found[name].distribution} declares a command {name!r}, which is a built-in command; uninstall it, or "
            f"disable it with EVENER_DISABLE_PLUGINS={found[name].package}"
        )
    return found


def help_text() -> str:
    """What ``evener --help`` prints."""
    rows = [(name, summary) for name, (_, summary) in _BUILTIN.items()]
    found = installed_commands()
    rows += [(name, summary if name in found else f"{summary} ({how})") for name, (summary, how) in _OPTIONAL.items()]
    rows += [(name, f"from {found[name].distribution}") for name in sorted(found) if name not in _OPTIONAL]
    head = "usage: evener COMMAND [options]\n\nRun and serve large language models on this machine.\n\ncommands:\n"
    tail = "`evener COMMAND --help` shows a command's options. EVENER_DEBUG=1 shows the stack trace of an error."
    return head + "\n".join(f"  {name:<13} {summary}" for name, summary in rows) + f"\n\n{tail}"
