"""Start-up's report as text and JSON."""

from __future__ import annotations

import json

from evener.plugins.choose import assess
from evener.plugins.probe import ProbeRun
from evener.plugins.report import Report, render, to_json
from evener_conformance.package_site import Site, probing, score_of
from evener_inspection.plugins_command import catalog_report


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
    for part in (
        "dist-cpu 1.0",
        "contracts",
        "marks",
        "its device node is there",
        "score 100 (from its marks)",
        "torn",
    ):
        assert part in text
    for part in ("chosen", "refused", "broken", "disabled", "0: a chip (1.0 GiB)", "[fast]", "backend: chip (highest"):
        assert part in text
    assert "\x1b[" not in text
    assert "\x1b[" in render(report, color=True)
    assert report.ok


def test_the_report_shows_a_package_s_evidence_or_that_it_has_none(site: Site) -> None:
    site.add("backend", "cpu", 'evidence="L3: a simulated chip"', probe=score_of(10))
    site.add("backend", "mute", probe=score_of(1))
    site.add("plugin", "words")
    site.add("kernels", "boast", 'evidence="works"', module="")
    report = _report(site)
    text = render(report, width=300)
    assert (
        text.count("verified to L3: a simulated chip") == 1 and text.count("verified: its descriptor does not say") == 1
    )
    assert "its evidence is 'works'; write the level first, L0 to L5" in text
    assert {each.name: each.evidence for each in report.candidates}["cpu"] == "L3: a simulated chip"


def test_json_is_plain_data(site: Site) -> None:
    _furnish(site)
    data = json.loads(json.dumps(to_json(_report(site, EVENER_DISABLE_PLUGINS="off"))))
    assert data["ok"] is True and data["backend"] == "chip"
    chip = next(each for each in data["candidates"] if each["name"] == "chip")
    assert chip["verdict"] == "chosen"
    assert [step["name"] for step in chip["steps"]] == ["found", "contracts", "marks", "probe"]


def test_the_exit_code_is_1_when_the_requested_backend_has_a_problem(site: Site) -> None:
    _furnish(site)
    for name in ("broken", "missing"):
        report = _report(site, name, EVENER_DISABLE_PLUGINS="off")
        assert not report.ok and report.error is not None
        assert f"error: {report.error.splitlines()[0]}" in render(report, width=500)


def test_an_error_is_shown_in_the_steps_and_once_as_warning_or_error(site: Site) -> None:
    _furnish(site)
    for name, last in ((None, "warning: "), ("broken", "error: ")):
        said = [line for line in render(_report(site, name), width=500).splitlines() if "torn" in line]
        assert len([line for line in said if "reading its descriptor" in line]) == 2, said
        assert any(line.startswith(last) for line in said)


def test_a_hanging_probe_is_reported_once_with_its_time_limit(site: Site) -> None:
    site.add("backend", "chip", probe=probing("import signal\nsignal.pause()"))
    probes = site.probe(timeout=0.2, only="chip").result()
    report = assess(site.discover(), "chip", probes=probes, environ={}, pci_root=site.folder / "no-pci").report
    assert report.error is not None and report.warnings == ()
    assert "within 0.2 seconds (probe_timeout of its descriptor, or EVENER_PROBE_TIMEOUT)" in report.error
    assert "evener doctor" not in report.error


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
