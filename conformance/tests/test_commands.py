"""The commands and the pytest plugin refuse a core of another version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.cli.main import main
from evener_conformance.distributions import write_distribution

REFUSED = "evener 0.0.9 is installed; type: pip install evener-conformance==0.0.9"


@pytest.fixture
def other_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose metadata says that evener 0.0.9 is installed."""
    write_distribution(tmp_path, "evener", {}, "0.0.9")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [["conformance", "--backend", "cpu"], ["new", "backend", "chip"]])
def test_a_command_refuses_a_core_of_another_version(
    words: list[str], other_core: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert REFUSED in capsys.readouterr().err


def test_the_pytest_plugin_refuses_a_core_of_another_version(other_core: Path) -> None:
    words = ["-m", "pytest", "-c", os.devnull, "--evener-backend", "cpu"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(other_core), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *words], cwd=other_core, env=environ, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and REFUSED in done.stderr, done.stdout + done.stderr


def test_an_option_of_no_package_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--backend", "cpu", "threads=2"]) == 2
    assert "'threads=2' belongs to no package; write PACKAGE.threads=VALUE" in capsys.readouterr().err
    assert main(["conformance", "--seed", "1"]) == 2
    assert "--backend; type `evener conformance --help`" in capsys.readouterr().err
