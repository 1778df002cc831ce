"""Choosing: one backend by name or score, always with a reason; then the packages whose needs it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.errors import BackendError, NoBackendError, ProbeError
from evener.plugins.choose import assess, choose
from evener.plugins.probe import ProbeRun
from evener_conformance.package_site import MARKS_FIT, Site, probing, score_of

NO_MARKS = score_of(1).replace('Marks(True, ("its device node is there",)', 'Marks(False, ("no /dev/chip",)')


def test_the_highest_score_wins_and_the_reason_names_the_others(site: Site) -> None:
    site.add("backend", "cpu", probe=score_of(10))
    site.add("backend", "chip", probe=score_of(100, "one chip"))
    selection = site.choose()
    assert selection.backend.name == "chip"
    assert selection.reason == "highest score 100 over cpu 10: one chip"
    verdicts = {each.name: (each.verdict, each.reason) for each in selection.report.candidates}
    assert verdicts["cpu"] == ("refused", "backend 'chip' was chosen")


def test_the_argument_wins_over_the_environment_and_the_environment_over_the_score(site: Site) -> None:
    for name, score in (("low", 1), ("middle", 5), ("high", 9)):
        site.add("backend", name, probe=score_of(score))
    assert site.choose().backend.name == "high"
    assert site.choose(EVENER_BACKEND="").backend.name == "high"
    chosen = site.choose(EVENER_BACKEND="middle")
    assert (chosen.backend.name, chosen.reason) == ("middle", "named by EVENER_BACKEND=middle")
    assert site.choose("low", EVENER_BACKEND="middle").reason == "named by backend=low"


def test_a_tie_is_an_error_that_names_both_and_the_option_to_set(site: Site) -> None:
    site.add("backend", "one")
    site.add("backend", "two")
    with pytest.raises(BackendError) as raised:
        site.choose()
    for part in ("dist-one", "dist-two", "--backend one", "EVENER_BACKEND=one"):
        assert part in str(raised.value)
    assert site.choose("two").backend.name == "two"


@pytest.mark.parametrize("body", ["raise OSError('driver too old')", "import signal\nsignal.pause()"])
def test_a_probe_that_fails_or_hangs_although_marks_fit_stops_start_up(site: Site, body: str) -> None:
    site.add("backend", "cpu", probe=score_of(10))
    site.add("backend", "chip", probe=probing(body))
    limit = 0.2 if "pause" in body else 60
    with pytest.raises(ProbeError) as raised:
        site.choose(timeout=limit)
    said = str(raised.value)
    assert "driver too old" in said or "did not answer" in said
    for part in ("dist-chip", "hardware is here", "evener doctor --fresh", "--backend"):
        assert part in said
    assert site.choose("cpu", timeout=limit).backend.name == "cpu"


def test_a_named_backend_whose_probe_fails_raises_with_the_cause(site: Site) -> None:
    site.add("backend", "cpu", probe=score_of(10))
    site.add("backend", "chip", probe=probing("raise OSError('driver too old')"))
    with pytest.raises(ProbeError, match=r"backend=chip: .*driver too old") as raised:
        site.choose("chip")
    assert raised.value.__cause__ is not None


def test_a_named_backend_without_its_hardware_is_an_error_with_the_reasons(site: Site) -> None:
    site.add("backend", "cpu", probe=score_of(10))
    site.add("backend", "chip", probe=NO_MARKS)
    with pytest.raises(NoBackendError, match=r"backend=chip: .*no /dev/chip"):
        site.choose("chip")
    assert site.choose().backend.name == "cpu"


def test_a_backend_that_is_not_installed_is_an_error_with_a_suggestion_and_a_pip_command(site: Site) -> None:
    site.add("backend", "mychip")
    with pytest.raises(NoBackendError) as raised:
        site.choose("mychop")
    assert "did you mean 'mychip'?" in str(raised.value)
    assert "pip install evener-backend-mychop" in str(raised.value)
    with pytest.raises(NoBackendError) as raised:
        site.choose("no such; thing")
    assert "pip install" not in str(raised.value)


def test_a_named_backend_that_is_disabled_is_an_error_with_the_variable(site: Site) -> None:
    site.add("backend", "chip")
    with pytest.raises(NoBackendError, match=r"disabled: EVENER_DISABLE_PLUGINS lists 'chip'"):
        site.choose("chip", EVENER_DISABLE_PLUGINS="chip")


def test_when_nothing_can_run_every_backends_reasons_are_listed(site: Site) -> None:
    with pytest.raises(NoBackendError, match=r"no backend is installed; .*pip install evener-backend-"):
        site.choose()
    site.add("backend", "absent", probe=NO_MARKS)
    site.add("backend", "declines", probe=score_of(0, "another vendor's build"))
    site.add("backend", "broken", init="raise OSError('torn')")
    with pytest.raises(NoBackendError) as raised:
        site.choose()
    for part in ("no /dev/chip", "another vendor's build", "torn"):
        assert part in str(raised.value)


def test_a_declining_or_broken_backend_gives_one_warning(site: Site) -> None:
    site.add("backend", "cpu", probe=score_of(10))
    site.add("backend", "declines", probe=score_of(0, "another vendor's build"))
    site.add("backend", "broken", init="raise OSError('torn')")
    site.add("backend", "blind", probe="def marks():\n    raise OSError('sysfs')\ndef probe(): ...\n")
    warnings = site.choose().report.warnings
    assert len(warnings) == 3
    assert all(any(word in line for line in warnings) for word in ("another vendor's build", "torn", "sysfs"))


def pci_device(root: Path, address: str, kind: str, ident: str, aperture: int | None = None) -> None:
    folder = root / "devices" / address
    folder.mkdir(parents=True)
    vendor, device = ident.split(":")
    for name, text in (("class", kind), ("vendor", f"0x{vendor}"), ("device", f"0x{device}")):
        (folder / name).write_text(f"{text}\n")
    if aperture is not None:
        (folder / "resource").write_text(f"0x{0:016x} 0x{aperture - 1:016x} 0x{0:016x}\n" + "0x0 0x0 0x0\n" * 2)


def test_an_accelerator_that_no_backend_supports_is_one_warning_line(site: Site, tmp_path: Path) -> None:
    root = tmp_path / "pci"
    pci_device(root, "0000:01:00.0", "0x120000", "1abc:0001")
    pci_device(root, "0000:02:00.0", "0x030200", "1abc:0002")
    pci_device(root, "0000:03:00.0", "0x030000", "2def:0003", aperture=1 << 30)
    pci_device(root, "0000:04:00.0", "0x030000", "3aaa:0004", aperture=64 << 20)  # a management controller's display
    pci_device(root, "0000:05:00.0", "0x020000", "4bbb:0005")  # a network card
    site.add("backend", "cpu", probe=score_of(10))
    assert len(choose(site.discover(), environ={}, pci_root=root).report.warnings) == 1
    (line,) = choose(site.discover(), environ={}, pci_root=root).report.warnings
    assert all(ident in line for ident in ("1abc:0001", "1abc:0002", "2def:0003"))
    assert "3aaa" not in line and "4bbb" not in line
    claims = MARKS_FIT.replace('there",)', 'there",), pci_ids=("1ABC:*", "2def:0003")')
    site.add("backend", "chip", probe=score_of(100).replace(MARKS_FIT, claims))
    assert choose(site.discover(), environ={}, pci_root=root).report.warnings == ()


def test_packages_are_chosen_if_the_backend_serves_every_tag_they_need(site: Site) -> None:
    site.add("backend", "chip", 'serves=frozenset({"triton", "wave:64"})')
    site.add("kernels", "fits", 'needs=frozenset({"triton"}), ops=("x",)', module="")
    site.add("kernels", "lacks", 'needs=frozenset({"triton", "wave:32", "tma"}), ops=("x",)', module="")
    site.add("graphs", "any", module="")
    selection = site.choose()
    assert [package.name for package in selection.packages] == ["fits", "any"]
    refused = next(each for each in selection.report.candidates if each.name == "lacks")
    assert (refused.verdict, refused.reason) == ("refused", "needs tma, wave:32, which backend 'chip' does not serve")
    assert [step.name for step in refused.steps] == ["found", "contracts", "needs"]


def test_probes_that_were_started_earlier_are_used(site: Site) -> None:
    site.add("backend", "chip")
    catalog = site.discover()
    run = ProbeRun.start(catalog.backends, environ={}, cache=site.cache)
    assert choose(catalog, probes=run, environ={}).backend.name == "chip"
    assert choose(catalog, probes=run.result(), environ={}).backend.name == "chip"


def test_an_assessment_has_every_candidates_steps_even_when_nothing_is_chosen(site: Site) -> None:
    site.add("backend", "cpu", probe=score_of(10))
    site.add("backend", "chip", probe=probing("raise OSError('driver too old')"))
    site.add("kernels", "fast", 'ops=("x",)', module="")
    catalog = site.discover()
    run = ProbeRun.start(catalog.backends, environ={}, cache=site.cache)
    assessment = assess(catalog, probes=run, environ={}, pci_root=site.folder / "no-pci")
    assert assessment.selection is None and isinstance(assessment.error, ProbeError)
    assert not assessment.report.ok and "driver too old" in str(assessment.report.error)
    steps = {each.name: [(step.name, step.ok) for step in each.steps] for each in assessment.report.candidates}
    assert steps["cpu"] == [("found", True), ("contracts", True), ("marks", True), ("probe", True)]
    assert steps["chip"] == [("found", True), ("contracts", True), ("marks", True), ("probe", False)]
    assert steps["fast"] == [("found", True), ("contracts", True)]
