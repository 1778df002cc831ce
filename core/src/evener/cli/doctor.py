"""``evener doctor``: how the backend is chosen here, each step of each candidate with its reasons."""

from __future__ import annotations

import json
import shutil
import sys

from evener.cli.command import Command
from evener.errors import ConfigError


def main(argv: list[str]) -> int:
    """Print the steps. 0 if a backend can be used, 1 if not."""
    command = Command("doctor", "Show how the backend is chosen: every candidate, every step, with reasons.", False)
    command.option("--backend", help="ask for this one, as a run would")
    command.option("--fresh", action="store_true", help="probe again instead of reading cached answers")
    command.option("--json", action="store_true", help="for programs")
    arguments, words = command.parse(argv)
    if words:
        raise ConfigError(f"evener doctor: unexpected argument {words[0]!r}")
    from evener.plugins import report
    from evener.plugins.choose import assess, requested_backend
    from evener.plugins.discover import discover
    from evener.plugins.probe import ProbeRun

    catalog = discover()
    name, _ = requested_backend(arguments.backend)
    with ProbeRun.start(catalog.backends, only=name, fresh=arguments.fresh) as probes:
        assessed = assess(catalog, arguments.backend, probes=probes)
    if arguments.json:
        print(json.dumps(report.to_json(assessed.report), indent=2))
    else:
        width = shutil.get_terminal_size((120, 24)).columns
        print(report.render(assessed.report, width=width, color=sys.stdout.isatty()), end="")
    return report.exit_code(assessed.report)
