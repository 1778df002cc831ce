"""Start-up's report as text and JSON."""

from __future__ import annotations

import json

from evener.plugins.choose import assess
from evener.plugins.probe import ProbeRun
from evener.plugins.report import exit_code, render, to_json
from evener.plugins.trace import Report, catalog_report

from .conftest import Site, score_of


def _report(site: Site, requested: str | None = None, **environ: str) -> Report:
    catalog = site.discover(**environ)
    run = ProbeRun.start(catalog.backends, environ={}, cache=site.cache)
    return assess(catalog, requested, probes=run, environ=environ, pci_root=site.folder / "no-pci").report


def _furnish(site: Site) -> None:
    site.add("backend", "cpu", probe=score_of(10))
    site.add("backend", "chip", probe=score_of(100))
    site.add("backend", "broken", init="raise OSError('torn')")
    site.add("backend", "off")
    site.add("kernels", "[fast]", init="", distribution="dist-fast")


def test_the_doctor_shows_every_step_of_every_candidate_and_what_was_chosen(site: Site) -> None:
    _furnish(site)
    report = _report(site, EVENER_DISABLE_PLUGINS="off")
    text = render(report, width=200)
    for part in ("dist-cpu 1.0", "contracts", "marks", "its device node is there", "score 100 (marks decide)", "torn"):
        assert part in text
    for part in ("chosen", "refused", "broken", "disabled", "0: a chip (1.0 GiB)", "[fast]", "backend: chip (highest"):
        assert part in text
    assert "\x1b[" not in text
    assert "\x1b[" in render(report, color=True)
    assert exit_code(report) == 0


def test_json_is_plain_data(site: Site) -> None:
    _furnish(site)
    data = json.loads(json.dumps(to_json(_report(site, EVENER_DISABLE_PLUGINS="off"))))
    assert data["ok"] is True and data["backend"] == "chip"
    chip = next(each for each in data["candidates"] if each["name"] == "chip")
    assert chip["verdict"] == "chosen"
    assert [step["name"] for step in chip["steps"]] == ["found", "contracts", "marks", "probe"]


def test_the_exit_code_is_1_when_what_was_asked_for_has_a_problem(site: Site) -> None:
    _furnish(site)
    for name in ("broken", "missing"):
        report = _report(site, name, EVENER_DISABLE_PLUGINS="off")
        assert exit_code(report) == 1 and report.error is not None
        assert f"error: {report.error.splitlines()[0]}" in render(report, width=500)


def test_the_list_of_plugins_needs_no_probe(site: Site) -> None:
    _furnish(site)
    report = catalog_report(site.discover(EVENER_DISABLE_PLUGINS="off"))
    verdicts = {each.name: each.verdict for each in report.candidates}
    assert verdicts == {
        "chip": "installed",
        "cpu": "installed",
        "broken": "broken",
        "[fast]": "broken",
        "off": "disabled",
    }
    assert "A test." in render(report, steps=False)
