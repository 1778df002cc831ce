"""Programs of others that drive the server: their pinned versions, and how they are run."""

from __future__ import annotations

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
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout[-20000:]}\n{done.stderr[-4000:]}"
    return done.stdout
