"""``evener plugins``: every installed package, and what is wrong with those that cannot be used."""

from __future__ import annotations

import json

from evener.cli.command import Command


def main(argv: list[str]) -> int:
    """Print the list. 0 also when a package is broken: ``evener doctor`` judges."""
    command = Command("plugins", "List installed packages; nothing of them but their descriptors is imported.", False)
    command.option("--json", action="store_true", help="for programs")
    arguments = command.parse_options(argv)
    from evener.plugins import report, trace
    from evener.plugins.discover import discover

    listed = trace.catalog_report(discover())
    if arguments.json:
        table = report.to_json(listed)
        print(json.dumps({key: table[key] for key in ("candidates", "warnings")}, indent=2))
    else:
        print(report.render(listed, steps=False), end="")
    return 0
