"""The child process of a probe: ``python -m evener.plugins.probe_child MODULE RESULT_FILE SECONDS``.

It runs ``MODULE.probe()`` and writes what came of it to ``RESULT_FILE`` as JSON, so that whatever the vendor's software
prints does no harm. It dies with its parent (end of file on standard input), and in any case shortly after SECONDS.
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

from evener.plugins import probe_wire

#: Seconds after the parent's limit at which the child ends itself, should the parent not have done it.
GRACE = 2.0


def main(module: str, result_file: str, seconds: str) -> None:
    """Run the probe of ``module`` and leave the process without running anybody's exit handlers."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(seconds) + GRACE)
    _die_with_parent()
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    outcome = _outcome(module)
    target = Path(result_file)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(outcome))
    part.replace(target)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _outcome(module: str) -> dict[str, Any]:
    try:
        return {"result": probe_wire.encode(importlib.import_module(module).probe())}
    except BaseException as error:  # including SystemExit: the parent must hear of whatever ended the probe
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _die_with_parent() -> None:
    """Standard input is a pipe that only the parent holds open; the probe itself reads from an empty one."""
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
