"""``evener models``: the model architectures of installed packages."""

from __future__ import annotations

from typing import Any

from evener.cli.command import Command, print_result
from evener.contracts.architecture import Architecture
from evener.errors import EvenerError
from evener.layers.builder import Builder
from evener.plugins.catalog import LazyImport

_COLUMNS = ("name", "family", "state", "oracle", "distribution")


def main(argv: list[str]) -> int:
    """Print the list."""
    command = Command("models", "List the supported model architectures, by their names in config.json.", False)
    command.option("--json", action="store_true", help="print JSON")
    arguments = command.parse_options(argv)
    from evener.plugins.discover import installed_catalog

    rows = [_row(target) for _, target in sorted(installed_catalog().lazy_imports("architecture").items())]
    print_result(arguments, rows, lambda: _table(rows))
    return 0


def _table(rows: list[dict[str, str]]) -> str:
    if not rows:
        return "no architecture is installed; type: pip install evener-models"
    widths = {column: max(len(row.get(column, "")) for row in rows) for column in _COLUMNS}
    cells = [[f"{row.get(column) or '-':<{widths[column]}}" for column in _COLUMNS] for row in rows]
    return "\n".join(row.get("error") or "  ".join(line).rstrip() for row, line in zip(rows, cells, strict=True))


def _row(target: LazyImport) -> dict[str, str]:
    row = {"name": target.name, "package": target.package, "distribution": target.distribution, "path": target.path}
    try:
        return {**row, **facts(target.load())}
    except EvenerError as error:
        return {**row, "error": str(error)}


def facts(architecture: type[Architecture]) -> dict[str, str]:
    """Family, kinds of state and oracle of a class, read from it and from its tiny model; "" means unknown."""
    config: dict[str, Any] = architecture.tiny_config()
    build = Builder("bfloat16", 64)
    if config:
        architecture(config, build)
    kinds = sorted({slot.spec.kind for slot in build.slots})
    return {"family": config.get("model_type", ""), "state": ", ".join(kinds), "oracle": architecture.oracle}
