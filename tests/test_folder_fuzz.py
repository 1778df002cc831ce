"""Ten thousand mutated model folders: each is refused with an error of evener's own, or works. None ends the
process, hangs, or raises anything else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import folder_fuzzer
import pytest
from folder_fuzzer import Report, fuzz
from model_folders import Folder, Folders
from warm import warm

PROGRAM = Path(folder_fuzzer.__file__)


def start(mode: str, first: int, count: int) -> subprocess.Popen[str]:
    """The fuzzer, over ``count`` folders from number ``first`` on."""
    command = [warm() / "python", str(PROGRAM), "--mode", mode, "--first", str(first), "--count", str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outcomes(*started: subprocess.Popen[str]) -> dict[str, int]:
    """How many folders had which outcome; a failure fails the test with its trace and how to repeat it."""
    found: dict[str, int] = {}
    # All of them end before the first failure is reported.
    for process, (said, _) in [(each, each.communicate()) for each in started]:
        assert process.returncode == 0, said[-8000:]
        for name, count in json.loads(said.splitlines()[-1])["outcomes"]:
            found[name] = found.get(name, 0) + count
    return found


def test_200_mutated_folders_are_planned_or_refused() -> None:
    found = outcomes(start("plan", 0, 200))
    assert sum(found.values()) == 200
    # Not all of them are broken, and not all of them are sound.
    assert found["planned"] > 20 and found["refused: ArchitectureError"] > 20 and found["refused: CheckpointError"] > 20


# In parts, so that each has its own time limit.
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 2_000))
def test_10_000_mutated_folders_are_planned_or_refused(first: int) -> None:
    found = outcomes(start("plan", first, 1_000), start("plan", first + 1_000, 1_000))
    assert sum(found.values()) == 2_000


@pytest.mark.slow
def test_300_mutated_folders_are_run_or_refused() -> None:
    found = outcomes(start("run", 50_000, 150), start("run", 60_000, 150))
    assert sum(found.values()) == 300 and found["ran to length"] > 50


def test_the_fuzzer_reports_signals_hangs_and_exceptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(mode: str, folder: Path) -> str:
        number = int((folder / "number").read_text())
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            time.sleep(60)
        if number == 3:
            raise KeyError("hidden_size")
        return "fine"

    class Numbered(Folders):
        def make(self, number: int) -> Folder:
            return Folder({"number": str(number).encode()}, (f"change {number}",))

    monkeypatch.setattr(folder_fuzzer, "attempt", attempt)
    monkeypatch.setattr(folder_fuzzer, "LIMIT_S", 0.5)
    report: Report = fuzz(Numbered(tmp_path), range(5), "plan", tmp_path)
    assert [failure["number"] for failure in report.failures] == [1, 2, 3]
    signalled, late, raised = (failure["trace"] for failure in report.failures)
    assert "signal 9" in signalled and "more than 0.5 s" in late and "KeyError: 'hidden_size'" in raised
    assert report.outcomes["fine"] == 2


def test_the_same_number_gives_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = Folders(tmp_path / "one"), Folders(tmp_path / "two")
    assert all(one.make(number) == two.make(number) for number in range(20))
    assert one.make(0) != one.make(1)
