"""Programs of others that drive the server: their pinned versions, and how they are run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from peer_sources import AGENTS, NODE, REQUIREMENTS

#: Seconds that a program may take. The coding agents send thousands of tokens: minutes on a busy machine.
LIMIT = 600.0


def version(package: str, *, of_agents: bool = False) -> str:
    """The pinned version of a client; ``of_agents``: in the environment of these."""
    node = [" for Node.js==".join(package.rsplit("@", 1)) for package in NODE]
    lines = [*node, *(AGENTS if of_agents else REQUIREMENTS).read_text("utf-8").splitlines()]
    return next(line.partition("==")[2] for line in lines if line.partition("==")[0].replace("_", "-") == package)


def run(*command: object, environ: dict[str, str], folder: Path) -> str:
    """What a program wrote to standard output; it must end with exit status 0."""
    words = [str(word) for word in command]
    out = subprocess.PIPE
    # A group of its own: what npm installs is often a script that starts the program, which would outlive it.
    with subprocess.Popen(
        words, env=environ, cwd=folder, stdout=out, stderr=out, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):  # there are none left
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{words} ended with {process.returncode}:\n{output[-20000:]}\n{errors[-4000:]}"
    return output
