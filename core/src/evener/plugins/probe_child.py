"""The child process of a probe: ``python -m evener.plugins.probe_child MODULE RESULT_FILE SECONDS``.

It runs ``MODULE.probe()`` and writes the outcome to ``RESULT_FILE`` as JSON: standard output may hold what the vendor's
software prints. It ends with its parent (end of file on standard input), and in any case shortly after SECONDS.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec

from evener.contracts.probe import ProbeResult

#: Seconds after the parent's limit at which the child ends itself, if the parent has not.
GRACE = 2.0


class ProbeAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the child writes into its file: the result, as ``encode`` gives it, or the error that ended the probe."""

    result: Any = None
    error: str = ""
    traceback: str = ""


def encode(result: object) -> dict[str, Any]:
    """``result`` as JSON-able data.

    Raises:
        TypeError: it is no ``ProbeResult``, or a field of it has the wrong type.
    """
    if not isinstance(result, ProbeResult):
        raise TypeError(f"probe() returned {result!r}, not a ProbeResult")
    data: dict[str, Any] = msgspec.to_builtins(result)
    decode(data)
    return data


def decode(data: Any) -> ProbeResult:
    """The result that ``encode`` wrote.

    Raises:
        TypeError: ``data`` was not written by ``encode``.
    """
    try:
        result = msgspec.convert(data, ProbeResult)
    except msgspec.ValidationError as cause:
        raise TypeError(f"no ProbeResult with fields of the right types: {cause}") from cause
    if result.score < 0:
        raise TypeError(f"a probe's score is a whole number, 0 or more, not {result.score}")
    return result


def main(module: str, result_file: str, seconds: str) -> None:
    """Run the probe of ``module`` and end the process without exit handlers, which may hang."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(seconds) + GRACE)
    _die_with_parent()
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    outcome = _outcome(module)
    target = Path(result_file)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(msgspec.to_builtins(outcome)))
    part.replace(target)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _outcome(module: str) -> ProbeAnswer:
    try:
        return ProbeAnswer(result=encode(importlib.import_module(module).probe()))
    except BaseException as error:  # also SystemExit: the parent reports whatever ended the probe
        return ProbeAnswer(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


def _die_with_parent() -> None:
    """End this process group when the parent closes standard input; the probe itself reads from an empty file."""
    lifeline = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="probe-lifeline", daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
