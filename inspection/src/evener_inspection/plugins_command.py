"""``evener plugins``: every installed package, and why a package cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.cli.command import Command, print_result

if TYPE_CHECKING:
    from evener.plugins.catalog import Catalog
    from evener.plugins.report import Report


def main(argv: list[str]) -> int:
    """Print the list. Returns 0 also if a package is broken; ``evener doctor`` returns 1 then."""
    command = Command("plugins", "List installed packages. Only their descriptors are imported.", False)
    command.option("--json", action="store_true", help="print JSON")
    arguments = command.parse_options(argv)
    from evener.plugins import report
    from evener.plugins.discover import installed_catalog

    listed = catalog_report(installed_catalog())
    table = report.to_json(listed)
    found = {key: table[key] for key in ("candidates", "warnings")}
    print_result(arguments, found, lambda: report.render(listed, steps=False))
    return 0


def catalog_report(catalog: Catalog) -> Report:
    """What is installed, before anything is probed or chosen."""
    from evener.plugins.report import Report, package_record, read_steps, unusable

    usable = tuple(package_record(package, "installed", "", read_steps(package)) for package in catalog.packages)
    return Report((*usable, *unusable(catalog)), warnings=catalog.warnings)
