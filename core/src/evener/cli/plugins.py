"""``evener plugins``: every installed package, and why a package cannot be used."""

from __future__ import annotations

import json

from evener.cli.command import Command


def main(argv: list[str]) -> int:
    """Print the list. Returns 0 also if a package is broken; ``evener doctor`` returns 1 then."""
    command = Command("plugins", "List installed packages. Only their descriptors are imported.", False)
    command.option("--json", action="store_true", help="print JSON")
    arguments = command.parse_options(argv)
    from evener.plugins import report
    from evener.plugins.discover import installed_catalog

    listed = report.catalog_report(installed_catalog())
    if arguments.json:
        table = report.to_json(listed)
        print(json.dumps({key: table[key] for key in ("candidates", "warnings")}, indent=2))
    else:
        print(report.render(listed, steps=False), end="")
    return 0
