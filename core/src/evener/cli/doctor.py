"""``evener doctor``: how the backend is chosen on this machine, with every step and reason for each candidate."""

from __future__ import annotations

from dataclasses import replace

from evener.cli.command import Command, print_result
from evener.errors import PluginError


def main(argv: list[str]) -> int:
    """Print the steps. Returns 0 if a backend can be used and every chosen package be imported, 1 if not."""
    command = Command("doctor", "Show how the backend is chosen: every candidate, every step, with reasons.", False)
    command.option("--backend", help="check this backend, as if a run asked for it")
    command.option("--fresh", action="store_true", help="probe the devices again; ignore cached results")
    command.option("--json", action="store_true", help="print JSON")
    arguments = command.parse_options(argv)
    from evener.plugins import report
    from evener.plugins.choose import assess, requested_backend
    from evener.plugins.discover import installed_catalog
    from evener.plugins.load import load
    from evener.plugins.probe import ProbeRun
    from evener.tuning_files.measurements import tuning_lines

    catalog = installed_catalog()
    only = requested_backend(arguments.backend)[0]
    assessed = assess(
        catalog, arguments.backend, probes=ProbeRun.start(catalog.backends, only=only, fresh=arguments.fresh)
    )
    chosen, checked = assessed.selection.all_packages if assessed.selection else (), assessed.report
    try:
        if assessed.selection:
            load(assessed.selection)
    except PluginError as error:
        checked = replace(checked, error=report.error_text(error))
    tuning = list(tuning_lines([p.descriptor.tuning for p in chosen if p.descriptor.tuning]))
    found = {**report.to_json(checked), "tuning": tuning}
    print_result(arguments, found, lambda: report.render(checked) + "\n".join(tuning))
    return 0 if checked.ok else 1
