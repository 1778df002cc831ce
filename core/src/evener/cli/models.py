"""``evener models``: the architectures that installed packages can run."""

from __future__ import annotations

import json
from typing import Any

from evener.cli.command import Command
from evener.contracts.architecture import Architecture
from evener.errors import EvenerError
from evener.layers.builder import Builder
from evener.plugins.target import Target

_COLUMNS = ("name", "family", "state", "oracle", "distribution")


def main(argv: list[str]) -> int:
    """Print the list."""
    command = Command(
        "models", "List the architectures that can be run, by the name that a checkpoint asks for.", False
    )
    command.option("--json", action="store_true", help="for programs")
    arguments = command.parse_options(argv)
    from evener.plugins.catalog import targets
    from evener.plugins.discover import discover

    rows = [_row(target) for _, target in sorted(targets(discover().packages, "architecture").items())]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("no architecture is installed; type: pip install evener-models")
    else:
        widths = {column: max(len(row.get(column, "")) for row in rows) for column in _COLUMNS}
        for row in rows:
            cells = (f"{row.get(column) or '-':<{widths[column]}}" for column in _COLUMNS)
            print(row.get("error") or "  ".join(cells).rstrip())
    return 0


def _row(target: Target) -> dict[str, str]:
    row = {"name": target.name, "package": target.package, "distribution": target.distribution, "path": target.path}
    try:
        return {**row, **facts(target.load())}
    except EvenerError as error:
        return {**row, "error": str(error)}


def facts(architecture: type[Architecture]) -> dict[str, str]:
    """What a class says of itself, and its tiny model declares: family, kinds of state, oracle; "" is unknown."""
    config: dict[str, Any] = architecture.tiny_config()
    build = Builder("bfloat16", 64)
    if config:
        architecture(config, build)
    kinds = sorted({slot.spec.kind for slot in build.slots})
    return {"family": config.get("model_type", ""), "state": ", ".join(kinds), "oracle": architecture.oracle}
