"""``python -m evener_deploy.child FD serve MODEL …``: the command ``evener``, which ends if its parent does.

The parent holds the other end of a pipe and never writes to it. When it is gone, however it ended, the pipe is closed,
and this process gets the signal that lets running requests end. Nothing else of the command differs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def end_with_parent(pipe: int) -> None:
    """Send SIGTERM to this process as soon as nobody holds the other end of ``pipe``."""

    def wait() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def main() -> int:
    """Run the command behind the number of the pipe."""
    from evener.cli.main import main as evener

    end_with_parent(int(sys.argv[1]))
    return evener(sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
