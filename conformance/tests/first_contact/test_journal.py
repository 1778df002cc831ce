"""The journal of first contact: an interrupted run goes on where it was, and no other run's results are taken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from evener.errors import ConfigError
from evener_conformance.first_contact import parallel
from evener_conformance.first_contact.child import Task
from evener_conformance.first_contact.evidence_file import Part, Timing
from evener_conformance.first_contact.journal import RunIdentity, journal_path, journal_seed, open_journal
from evener_conformance.first_contact.parallel import run_or_recall
from evener_conformance.first_contact.private_data import Redactor
from evener_conformance.first_contact.supervisor import Findings

IDENTITY = RunIdentity("failing", False, {}, 7, "0f", {"evener": "1.0"})


def task(part: str, only: str = "") -> Task:
    return Task(part, part, "failing", False, {}, 7, only=only)


def found() -> Findings:
    findings = Findings(timings=[Timing("copy", 0.5, 8)], level=("L3", True), listed={"device": ["device/chip"]})
    findings.facts["device"]["name"] = "a chip"
    return findings


def interrupt(out: Path, *results: tuple[Task, Part], cut: bytes = b"") -> None:
    with pytest.raises(KeyboardInterrupt), open_journal(out, IDENTITY, False) as journal:
        for each, part in results:
            journal.add(each, part, found())
        raise KeyboardInterrupt
    with journal_path(out).open("ab") as file:
        file.write(cut)


def test_a_resumed_run_runs_what_was_not_done_or_failed_and_takes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = tmp_path / "e.json", list[str]()
    done, failed = Part("primitives", "passed", 3.0, counts={"passed": 9}), Part("primitives", "failed", 1.0, "wrong")
    interrupt(out, (task("primitives", "a"), done), (task("primitives", "b"), failed), cut=b'{"check": "c", "pa')
    assert journal_seed(out) == 7

    def run(each: Task, *_: object) -> tuple[Part, Findings]:
        ran.append(each.only)
        return Part(each.part, "passed", 0.1), Findings()

    monkeypatch.setattr(parallel, "run_part", run)
    with open_journal(out, IDENTITY, True) as journal:
        results = [run_or_recall(task("primitives", name), 1.0, Redactor(), journal) for name in "abc"]
    assert ran == ["b", "c"]
    assert results[0] == (done, found())
    assert not journal_path(out).exists()


def test_a_run_that_was_interrupted_twice_keeps_the_results_of_both(tmp_path: Path) -> None:
    out = tmp_path / "e.json"
    interrupt(out, (task("device"), Part("device", "passed", 1.0)))
    with pytest.raises(KeyboardInterrupt), open_journal(out, IDENTITY, True) as journal:
        journal.add(task("graphs"), Part("graphs", "not applicable", 1.0), Findings())
        raise KeyboardInterrupt
    with open_journal(out, IDENTITY, True) as journal:
        assert journal.find(task("graphs")) is not None and journal.find(task("graphs", "one")) is None
        assert journal.find(task("model")) is None


def test_results_of_another_device_are_refused(tmp_path: Path) -> None:
    out, passed, other = tmp_path / "e.json", Part("device", "passed", 1.0), found()
    interrupt(out, (task("device"), passed))
    other.facts["device"]["name"] = "another chip"
    said = "was on the device 'a chip', and this is 'another chip'"
    with pytest.raises(ConfigError, match=said), open_journal(out, IDENTITY, True) as journal:
        assert journal.find(task("device")) is None, "it is asked again"
        journal.add(task("device"), passed, found())
        journal.add(task("device"), passed, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 8}, "the interrupted run has seed 7, and this one 8"),
        ({"wheel": "1e"}, "the interrupted run has wheel 0f, and this one 1e"),
        ({"options": {"failing": {"chip": "b"}}}, "has options {}"),
    ],
)
def test_results_of_another_run_are_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    out = tmp_path / "e.json"
    interrupt(out, (task("device"), Part("device", "passed", 1.0)))
    with pytest.raises(ConfigError, match=said), open_journal(out, msgspec.structs.replace(IDENTITY, **change), True):
        pass
    assert journal_path(out).exists()


@pytest.mark.parametrize("data", [None, b"", b"\xff\xfe\n", b"[]\n", msgspec.json.encode(IDENTITY) + b"\n{}\n"])
def test_something_other_than_a_journal_is_refused_with_what_to_type(data: bytes | None, tmp_path: Path) -> None:
    if data is not None:
        journal_path(tmp_path / "e.json").write_bytes(data)
    with pytest.raises(ConfigError, match="leave --resume out to start again"):
        journal_seed(tmp_path / "e.json")
