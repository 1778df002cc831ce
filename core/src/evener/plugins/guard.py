"""Limits on what packages do in this process before anything is chosen: their descriptors, their marks, their texts."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from evener.exits.watched import no_exit

#: Seconds that one descriptor, or one backend's marks, may take. They are plain data and small files.
SECONDS = 20.0
_ADVICE = "uninstall the package, or list it in EVENER_DISABLE_PLUGINS"


class TorchImportRefused(ImportError):
    """A descriptor or a mark imported torch."""

    def __init__(self) -> None:
        super().__init__(
            "it imports torch, which a descriptor or a mark must not: read versions with evener.backend.torch_marks, "
            "and import torch in the module that the descriptor's `module` names"
        )


class _Guard(MetaPathFinder, Loader):
    """Lets ``importlib.util.find_spec`` see torch but not import it. Only the thread that made it is guarded.

    Attributes:
        tripped: whether torch's import was tried.
    """

    def __init__(self) -> None:
        self._thread, self.tripped = threading.get_ident(), False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or threading.get_ident() != self._thread:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = self
                return spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.tripped = True
        raise TorchImportRefused()


@contextmanager
def guarded(who: str) -> Iterator[None]:
    """Within the block this thread cannot import torch, unless it is imported already, and cannot end the process
    silently (``no_exit``). A block that takes longer than ``SECONDS`` ends the process with exit code 1: nothing else
    can stop it.

    Args:
        who: the package and what runs, for the message.

    Raises:
        TorchImportRefused: the block tried to import torch, even if it caught the refusal.
        RuntimeError: the block called ``os._exit``.
    """
    guard = _Guard()
    limit = threading.Timer(SECONDS, _give_up, (who, os._exit))
    limit.daemon = True
    limit.start()
    sys.meta_path.insert(0, guard)
    try:
        with no_exit(who, _ADVICE):
            yield
    finally:
        sys.meta_path.remove(guard)
        limit.cancel()
    if guard.tripped:
        raise TorchImportRefused()


def _give_up(who: str, end_process: Callable[[int], NoReturn]) -> None:
    print(f"error: {who} did not end within {SECONDS:g} seconds; {_ADVICE}", file=sys.stderr, flush=True)
    end_process(1)


def printable(text: str) -> str:
    """``text`` with control characters escaped: a package's text must not move a terminal's cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
