"""``python -m evener``: the seeds' style, ``models=… models.ckpt_dir=… serve.port=…``, serves; a command's name first
is ``evener``."""

from __future__ import annotations

import os
import sys

from evener.cli.main import main


def run(argv: list[str]) -> int:
    """Run one command line; returns the exit code. Keys without a command mean ``serve``."""
    from evener.config.seeds import environment_notes

    first = argv[0] if argv else ""
    if not argv and not os.environ.get("CONFIG_NAME"):
        return main(["--help"])
    style_of_seeds = "=" in first or not argv or (first.startswith("--") and first not in ("--help", "--version"))
    if not style_of_seeds:
        return main(argv)
    for note in environment_notes(os.environ):
        print(f"warning: {note}", file=sys.stderr)
    return main(["serve", *argv])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
