"""``python -m evener``: the same as ``evener``; an installed package may also translate arguments of other programs."""

from __future__ import annotations

import sys

from evener.cli.main import main


def run(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    from evener.config.old_spellings import installed_spellings

    return main(installed_spellings().arguments(argv))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
