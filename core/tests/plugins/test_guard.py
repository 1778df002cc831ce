"""What packages do in this process before anything is chosen: it ends, it names them, and it cannot end the process."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evener.plugins.guard import guarded, printable
from evener_conformance.distributions import write_distribution

DESCRIPTOR = """
from evener.contracts.descriptor import Descriptor
{before}
descriptor = Descriptor(
    name="odd", summary={summary!r}, contracts={{"probe": 2, "device": 2}}, module="odd_backend.plugin",
    probe="odd_backend.probe",
)
"""
PROBE = """
from evener.contracts.probe import Marks, ProbeResult
def marks():
    {body}
    return Marks(False, ({reason!r},))
def result_from_marks(found):
    return ProbeResult(0)
"""


def install(folder: Path, before: str = "", summary: str = "Odd.", body: str = "pass", reason: str = "no chip") -> None:
    write_distribution(folder, "evener-backend-odd", {"evener.backends": {"odd": "odd_backend:descriptor"}})
    (folder / "odd_backend").mkdir()
    (folder / "odd_backend/__init__.py").write_text(DESCRIPTOR.format(before=before, summary=summary))
    (folder / "odd_backend/probe.py").write_text(PROBE.format(body=body, reason=reason))


def doctor(folder: Path, limit: float = 20.0, without: str = "") -> subprocess.CompletedProcess[str]:
    """``without``: a package that is not used. Without a backend that serves, torch is not imported: two seconds."""
    program = (
        f"import sys; from evener.plugins import guard; guard.SECONDS = {limit}; "
        "from evener.cli.main import main; sys.exit(main(['doctor']))"
    )
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    environ |= {"EVENER_DISABLE_PLUGINS": without} if without else {}
    return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("where", "what"), [("before", "its descriptor 'odd_backend:descriptor'"), ("body", "its marks()")]
)
def test_a_package_that_hangs_is_named_and_the_command_fails(where: str, what: str, tmp_path: Path) -> None:
    install(tmp_path, **{where: "import time; time.sleep(600)"})
    done = doctor(tmp_path, limit=0.5)
    assert done.returncode == 1
    assert f"backend 'odd' (evener-backend-odd 1.0): {what} did not end within 0.5 seconds; uninstall" in done.stderr


@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.slow), "body"])
def test_a_package_that_ends_the_process_is_a_broken_package(where: str, tmp_path: Path) -> None:
    install(tmp_path, **{where: "import os; os._exit(0)"})
    done = doctor(tmp_path)
    assert "os._exit(0), which would end the process" in " ".join(done.stdout.split())
    assert "\nbackend: cpu (" in done.stdout


@pytest.mark.parametrize(
    ("where", "what"), [("before", "its descriptor 'odd_backend:descriptor'"), ("body", "its marks()")]
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot forget a function at exit")
def test_a_package_whose_c_code_ends_the_process_is_named_and_the_command_fails(
    where: str, what: str, tmp_path: Path
) -> None:
    install(tmp_path, **{where: "import ctypes; ctypes.CDLL(None).exit(0)"})
    done = doctor(tmp_path)
    assert done.returncode == 1
    named = f"backend 'odd' (evener-backend-odd 1.0): {what} called exit(), which ends the process; uninstall"
    assert done.stderr.splitlines()[-1].startswith(f"error: {named} the package")


@pytest.mark.parametrize("where", ["before", "body"])
def test_a_package_whose_c_code_aborts_is_named(where: str, tmp_path: Path) -> None:
    install(tmp_path, **{where: "import ctypes; ctypes.CDLL(None).abort()"})
    done = doctor(tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr and "odd_backend" in done.stderr


def test_the_process_ends_as_usual_after_the_block() -> None:
    program = (
        "import ctypes, atexit; atexit.register(print, 'at exit')\n"
        "from evener.plugins.guard import guarded\n"
        "for _ in range(3):\n with guarded('a test'): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "at exit\n", "")
    program += "ctypes.CDLL(None).exit(5)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (5, "")


def test_a_chosen_package_that_cannot_be_imported_is_an_error_of_doctor_too(tmp_path: Path) -> None:
    install(tmp_path)
    probe = PROBE.format(body="return Marks(True, ('chip',))", reason="").replace("ProbeResult(0)", "ProbeResult(99)")
    (tmp_path / "odd_backend/probe.py").write_text(probe)
    (tmp_path / "odd_backend/plugin.py").write_text("import a_library_that_is_missing\n")
    done = doctor(tmp_path)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and "backend: odd" in said
    assert "error: backend 'odd' (evener-backend-odd 1.0): " in said and "a_library_that_is_missing" in said


def test_escapes_in_a_packages_texts_reach_no_terminal(tmp_path: Path) -> None:
    install(tmp_path, summary="Nice\x1b[2J\x07.", reason="\x1b]0;title\x07 no\x9bchip")
    done = doctor(tmp_path, without="evener-backend-cpu")
    assert "\\x1b[2J" in done.stdout
    assert not set(done.stdout + done.stderr) & {"\x1b", "\x07", "\x9b"}


def test_escapes_in_an_error_reach_no_terminal() -> None:
    command = [sys.executable, "-m", "evener", "no\x1b[31msuch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no\\x1b[31msuch" in done.stderr and "\x1b" not in done.stderr


def test_other_threads_and_their_children_end_as_usual() -> None:
    codes: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with guarded("a test"):
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="would end the process"):
            os._exit(0)
    assert codes == [7]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é 漢字\nline", "plain é 漢字\nline"), ("a\tb\r\x00", r"a\tb\r\x00"), ("\u202e", r"\u202e")],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert json.dumps(shown)
