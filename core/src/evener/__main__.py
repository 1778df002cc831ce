"""``python -m evener``: with the legacy arguments ``models=… models.ckpt_dir=… serve.port=…`` it serves; with a command
first it is the same as ``evener``."""

from __future__ import annotations

import os
import sys

from evener.cli.main import main


def run(argv: list[str]) -> int:
    """Run one command line; returns the exit code. Without a command the keys are for ``serve``."""
    from evener.config.old_spellings import installed_spellings

    first = argv[0] if argv else ""
    if not argv and not os.environ.get("CONFIG_NAME"):
        return main(["--help"])
    legacy_style = "=" in first or not argv or (first.startswith("--") and first not in ("--help", "--version"))
    if not legacy_style:
        return main(argv)
    for note in installed_spellings().unread(os.environ):
        print(f"warning: {note}", file=sys.stderr)
    return main(["serve", *argv])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
