"""Code that may not end this process: ``os._exit`` is refused, C's ``exit`` and fatal signals are named."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

_VERSION = "CS_GNU_LIBC_VERSION"
_GLIBC = _VERSION in getattr(os, "confstr_names", ()) and (os.confstr(_VERSION) or "").startswith("glibc")


@contextmanager
def no_exit(who: str, advice: str) -> Iterator[None]:
    """Within the block this thread cannot end the process with exit code 0, unless C code calls ``_exit``: C's ``exit``
    (seen where the C library is glibc) becomes one line on standard error and exit code 1. A fatal signal, as of
    ``abort``, shows the stack of Python, which names the file.

    Args:
        who: what runs, for the message; ``advice``: what to do.

    Raises:
        RuntimeError: the block called ``os._exit``.
    """
    end_process, shows_faults = os._exit, faulthandler.is_enabled()
    os._exit = _refuse(end_process)  # type: ignore[assignment]
    if not shows_faults and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)

    def report_exit() -> None:
        print(f"error: {who} called exit(), which ends the process; {advice}", file=sys.stderr, flush=True)
        end_process(1)

    try:
        with _at_c_exit(report_exit):
            yield
    finally:
        os._exit = end_process
        if not shows_faults:
            faulthandler.disable()


def _refuse(end_process: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """``os._exit`` for this thread; other threads, and processes that they fork meanwhile, end as they should."""
    here = os.getpid(), threading.get_ident()

    def refuse(status: int) -> NoReturn:
        if here != (os.getpid(), threading.get_ident()):
            end_process(status)
        raise RuntimeError(f"it called os._exit({status}), which would end the process")

    return refuse


@contextmanager
def _at_c_exit(call: Callable[[], None]) -> Iterator[None]:
    """Within the block C's ``exit`` calls ``call``; not in processes that were forked meanwhile."""
    if not _GLIBC:
        yield
        return
    pid, active = os.getpid(), [True]

    def at_exit(_: object) -> None:
        if active and os.getpid() == pid:
            call()

    library, key = ctypes.CDLL(None), ctypes.c_int()  # the key's address stands for a library that can be unloaded
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(at_exit)
    library.__cxa_atexit(function, None, ctypes.byref(key))
    try:
        yield
    finally:
        active.clear()
        library.__cxa_finalize(ctypes.byref(key))  # calls the function for the last time, and forgets it
