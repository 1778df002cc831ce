"""First contact with backends that fail in the ways vendors' do: the part fails with a reason, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from warm import CHILDREN, warm

from evener_conformance.distributions import write_distribution
from evener_conformance.first_contact.evidence_file import Evidence, read
from evener_conformance.first_contact.parts import PARTS

PACKAGE = Path(__file__).resolve().parents[3] / "tests/packages/evener-backend-failing/evener_backend_failing"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the failing backend installed, as by pip."""
    folder = tmp_path_factory.mktemp("failing") / "site-packages"
    (folder / PACKAGE.name).mkdir(parents=True)
    for file in PACKAGE.glob("*.py"):
        (folder / PACKAGE.name / file.name).write_text(file.read_text())
    info = write_distribution(
        folder, "evener-backend-failing", {"evener.backends": {"failing": "evener_backend_failing:descriptor"}}
    )
    (info / "RECORD").write_text("")
    return folder


def contact(site: Path, out: Path, fails: str, *words: str, timeout: float = 240) -> tuple[int, Evidence | None, str]:
    """Exit code, evidence and progress of a run, which ends within ``timeout`` seconds."""
    environ = {
        **os.environ,
        "FAILS": fails,
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
    }
    environ.update({"XDG_CACHE_HOME": str(out.parent / "cache"), CHILDREN: str(warm() / "python")})
    done = subprocess.run(
        [warm() / "evener", "first-contact", "--backend", "failing", "--out", str(out), *words],
        env=environ, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    return done.returncode, read(out) if out.is_file() else None, done.stderr


def part(evidence: Evidence | None, name: str) -> tuple[str, str]:
    """A part's outcome, and everything that it says."""
    assert evidence is not None
    found = evidence.part(name)
    assert found is not None
    return found.outcome, " ".join([found.detail, *(case.detail for case in found.cases), found.printed])


def test_a_kernel_that_crashes_fails_alone_and_the_other_kernel_is_still_checked(site: Path, tmp_path: Path) -> None:
    code, evidence, progress = contact(
        site, tmp_path / "e.json", "a kernel crashes", "--part", "primitives", "--seed", "3"
    )
    outcome, said = part(evidence, "primitives")
    assert (code, outcome) == (1, "failed")
    assert "killed by SIGSEGV" in said
    assert "it was killed by SIGSEGV" in progress  # whoever watches sees the first failure
    assert evidence is not None and evidence.level == ""
    (found,) = (each for each in evidence.parts if each.name == "primitives")
    assert [case.subject for case in found.cases] == ["primitives/act_and_mul[failing/failing_activation]"]
    assert found.counts["failed"] == 1 and found.counts["passed"] > 50


@pytest.mark.slow  # each check imports torch
def test_with_two_jobs_each_check_has_a_process_and_the_file_has_the_same_cases(site: Path, tmp_path: Path) -> None:
    words = ("--part", "device", "--part", "primitives", "--seed", "3")
    _, alone, _ = contact(site, tmp_path / "1.json", "a kernel crashes", *words)
    code, evidence, _ = contact(site, tmp_path / "2.json", "a kernel crashes", *words, "--jobs", "2")
    outcome, said = part(evidence, "primitives")
    assert (code, outcome) == (1, "failed")
    assert "killed by SIGSEGV" in said
    assert alone is not None and evidence is not None
    before, after = alone.part("primitives"), evidence.part("primitives")
    assert before is not None and after is not None
    assert after.counts == before.counts and len(after.cases) == len(before.cases) == 1
    code, _, said = contact(site, tmp_path / "3.json", "", "--jobs", "0")
    assert code == 2 and "--jobs 0: it takes a number of processes from 1 on" in said


def test_private_data_does_not_reach_the_file(site: Path, tmp_path: Path) -> None:
    code, evidence, progress = contact(
        site, tmp_path / "e.json", "the device does not open", "--part", "primitives", "--part", "device"
    )
    text = (tmp_path / "e.json").read_text()
    outcome, said = part(evidence, "device")
    assert (code, outcome) == (1, "failed")
    assert "no chip at <address>" in said and "driver.log" in said
    assert part(evidence, "primitives") == ("not run", "it needs the part 'device' ")
    for private in ("192.168.7.12", str(Path.home()) + "/", "alice", str(site), str(tmp_path)):
        assert private not in text, private
    assert "device: memory, streams, events, random numbers … failed" in progress


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "name", "words"),
    [
        ("the probe hangs", "packages", "did not answer within 5 seconds"),
        ("the probe aborts", "packages", "SIGABRT"),
        ("opening the device hangs", "device", "nothing was heard of it for 20 seconds"),
        ("a kernel hangs", "primitives", "nothing was heard of it for 20 seconds"),
        ("a kernel is wrong", "primitives", "elements differ"),
        ("a kernel raises", "primitives", "error code 507011"),
        ("a kernel ends the process quietly", "primitives", "it ended with exit code 0"),
        ("a kernel prints without end", "primitives", "nothing was heard of it for 20 seconds"),
        ("a kernel leaves a daemon that holds the pipes", "primitives", "killed by SIGABRT"),
    ],
)
def test_each_failure_ends_one_part_and_is_named(fails: str, name: str, words: str, site: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    # Nothing is heard while a part imports torch, either: a busy machine takes its time for that.
    code, evidence, _ = contact(
        site, tmp_path / "e.json", fails, "--part", "device", "--part", "primitives", "--limit", "20"
    )
    outcome, said = part(evidence, name)
    assert (code, outcome) == (1, "failed")
    assert words in said
    assert "0123456789" not in said
    assert evidence is not None and evidence.level == ""
    assert time.monotonic() - start < 200
    if name == "packages":
        assert part(evidence, "device")[0] == "not run"
    if name == "primitives" and fails != "a kernel is wrong":
        found = evidence.part("primitives")
        assert found is not None and found.counts["passed"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1000)  # the whole kit; beside other work it takes over four minutes
def test_a_backend_that_is_right_reaches_its_level_in_every_part(site: Path, tmp_path: Path) -> None:
    code, evidence, _ = contact(site, tmp_path / "e.json", "", timeout=900)
    assert evidence is not None
    assert [each.name for each in evidence.parts] == [each.name for each in PARTS]
    assert [each.name for each in evidence.parts if each.outcome == "failed"] == []
    assert (code, evidence.level, evidence.simulated) == (0, "L3", True)
    assert {timing.what.split()[0] for timing in evidence.timings} >= {"copy", "rms_norm", "decode"}
    assert all(timing.seconds >= 0 for timing in evidence.timings)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_run_leaves_no_process(jobs: str, site: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "FAILS": "a kernel hangs", "XDG_CACHE_HOME": str(tmp_path)}
    environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    words = ["first-contact", "--backend", "failing", "--part", "primitives", "--out", str(tmp_path / "e.json"),
             "--jobs", jobs]  # fmt: skip
    # A shell lets its background jobs ignore the signal, and so would the run inside of one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-m", "evener", *words], env=environ, stderr=subprocess.PIPE, text=True
    ) as run:
        signal.signal(signal.SIGINT, before)
        try:
            assert run.stderr is not None
            said = ""
            # The line of the part that runs has no end yet.
            while not said.endswith("reference … "):
                said += run.stderr.read(1)
            child = _wait_for(lambda: next((pid for pid in map(int, _processes()) if _parent(pid) == run.pid), 0))
            run.send_signal(signal.SIGINT)
            assert run.wait(120) == 130
            _wait_for(lambda: not Path(f"/proc/{child}").exists())
        finally:
            run.kill()
    assert not (tmp_path / "e.json").exists()
    _, evidence, _ = contact(site, tmp_path / "e.json", "", "--part", "primitives", "--jobs", jobs, "--resume")
    assert part(evidence, "primitives")[0] == "passed"
    assert [path.name for path in tmp_path.glob("*.journal")] == []


T = TypeVar("T")


def _wait_for(condition: Callable[[], T]) -> T:
    until = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < until, "it did not happen within 20 seconds"
        time.sleep(0.02)
    return found


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    """The parent of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_an_unknown_part_and_a_folder_that_does_not_exist_are_named(site: Path, tmp_path: Path) -> None:
    code, _, said = contact(site, tmp_path / "e.json", "", "--part", "ops")
    assert code == 2 and "--part ops: there is no such part; the parts are packages, device" in said
    code, _, said = contact(site, tmp_path / "none/e.json", "")
    assert code == 2 and "does not exist" in said
    assert not json.dumps(said).count("Traceback")
