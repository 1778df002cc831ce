"""``evener doctor``: how the backend is chosen on this machine, with every step and reason for each candidate."""

from __future__ import annotations

from evener.cli.command import Command, print_result


def main(argv: list[str]) -> int:
    """Print the steps. Returns 0 if a backend can be used, 1 if not."""
    command = Command("doctor", "Show how the backend is chosen: every candidate, every step, with reasons.", False)
    command.option("--backend", help="check this backend, as if a run asked for it")
    command.option("--fresh", action="store_true", help="probe the devices again; ignore cached results")
    command.option("--json", action="store_true", help="print JSON")
    arguments = command.parse_options(argv)
    from evener.plugins import report
    from evener.plugins.choose import assess, requested_backend
    from evener.plugins.discover import installed_catalog
    from evener.plugins.probe import ProbeRun
    from evener.resolution.tuning import tuning_lines

    catalog = installed_catalog()
    name, _ = requested_backend(arguments.backend)
    probes = ProbeRun.start(catalog.backends, only=name, fresh=arguments.fresh)
    assessed = assess(catalog, arguments.backend, probes=probes)
    chosen = assessed.selection.all_packages if assessed.selection else ()
    tuning = list(tuning_lines([p.descriptor.tuning for p in chosen if p.descriptor.tuning]))
    found = {**report.to_json(assessed.report), "tuning": tuning}
    print_result(arguments, found, lambda: report.render(assessed.report) + "\n".join(tuning))
    return 0 if assessed.report.ok else 1
