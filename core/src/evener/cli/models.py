"""``evener models``: the architectures that installed packages can run."""

from __future__ import annotations

import json

from evener.cli.command import Command
from evener.errors import ConfigError


def main(argv: list[str]) -> int:
    """Print the list."""
    command = Command(
        "models", "List the architectures that can be run, by the name that a checkpoint asks for.", False
    )
    command.option("--json", action="store_true", help="for programs")
    arguments, words = command.parse(argv)
    if words:
        raise ConfigError(f"evener models: unexpected argument {words[0]!r}")
    from evener.plugins.catalog import targets
    from evener.plugins.discover import discover

    found = sorted(targets(discover().packages, "architecture"), key=lambda target: target.name)
    if arguments.json:
        rows = [{"name": t.name, "package": t.package, "distribution": t.distribution, "path": t.path} for t in found]
        print(json.dumps(rows, indent=2))
    elif not found:
        print("no architecture is installed; type: pip install evener-models")
    else:
        width = max(len(target.name) for target in found)
        print("\n".join(f"{target.name:<{width}}  {target.distribution}" for target in found))
    return 0
