"""``evener version``: the versions of installed packages, for bug reports."""

from __future__ import annotations

import platform

from evener.cli.command import Command, print_result


def main(argv: list[str]) -> int:
    """Print the versions."""
    command = Command("version", "Show versions of evener, its packages, Python and torch.", False)
    command.option("--json", action="store_true", help="print JSON")
    arguments = command.parse_options(argv)
    found = versions()
    print_result(arguments, found, lambda: "\n".join(f"{name} {version}" for name, version in found.items()))
    return 0


def versions() -> dict[str, str]:
    """``{distribution: version}`` of evener, installed packages, torch and Python. Imports none of them."""
    from importlib_metadata import PackageNotFoundError, version

    from evener.plugins.discover import core_version, installed_catalog

    catalog = installed_catalog()
    found = {"evener": core_version()}
    for origin in (*catalog.packages, *catalog.problems, *catalog.disabled):
        found[origin.distribution] = origin.version
    try:
        found["torch"] = version("torch")
    except PackageNotFoundError:
        found["torch"] = "not installed"
    return {**found, "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
