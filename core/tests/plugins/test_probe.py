"""Probing: marks here, probes in children with a time limit, answers cached."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from evener.errors import ConfigError, DescriptorError, ProbeError
from evener.folders.cache import cache_folder
from evener.plugins.probe import ProbeCache, ProbeRun
from evener.plugins.report import error_text
from evener_conformance.package_site import MARKS_FIT, Site, probing, score_of

ANSWER = 'return ProbeResult(50, (ProbedDevice(0, "chip", 8),), ("fine",))'


def holds_fifo(fifo: Path) -> str:
    """Statements that start a grandchild which holds ``fifo`` open for as long as it lives."""
    return f"""
        import os, subprocess, sys
        held = os.open({str(fifo)!r}, os.O_WRONLY)
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[held])
        os.write(held, b"up")
        """


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "alive"
    os.mkfifo(path)
    return path


def read(descriptor: int) -> bytes:
    ready, _, _ = select.select([descriptor], [], [], 120)
    assert ready, "nothing happened on the fifo"
    return os.read(descriptor, 2)


def test_the_probe_runs_in_another_process_and_its_answer_comes_back(site: Site) -> None:
    site.add("backend", "chip", probe=probing(f"import os\nassert os.getpid() != {os.getpid()}\n{ANSWER}"))
    probed = site.probe().result()["chip"]
    assert probed.error is None and probed.result is not None
    assert (probed.source, probed.result.score) == ("child", 50)
    assert probed.result.devices[0].name == "chip"


def test_an_sdk_that_floods_stdout_and_stderr_does_no_harm(site: Site) -> None:
    flood = "import os, sys\nprint('{' * 200_000)\nos.write(1, b'x' * 200_000)\nprint('noise', file=sys.stderr)\n"
    site.add("backend", "chip", probe=probing(flood + ANSWER))
    probed = site.probe().result()["chip"]
    assert probed.result is not None and probed.result.score == 50


def test_a_probe_cannot_read_the_operators_terminal_and_leaves_no_files_behind(site: Site, tmp_path: Path) -> None:
    body = "import pathlib, sys\nassert sys.stdin.read() == ''\npathlib.Path('kernel_meta').touch()\n"
    site.add("backend", "chip", probe=probing(body + ANSWER))
    assert site.probe().result()["chip"].error is None
    assert not Path("kernel_meta").exists()


def test_a_hanging_probe_is_ended_at_its_time_limit(site: Site) -> None:
    site.add("backend", "chip", probe=probing("import threading\nthreading.Event().wait()"))
    probed = site.probe(timeout=0.2).result()["chip"]
    assert isinstance(probed.error, ProbeError)
    assert "did not answer within 0.2 seconds" in str(probed.error)
    assert "dist-chip" in str(probed.error)


def test_the_time_limit_comes_from_the_environment_or_the_descriptor(site: Site) -> None:
    hang = probing("import threading\nthreading.Event().wait()")
    site.add("backend", "chip", "probe_timeout=0.3", probe=hang)
    backends = site.discover().backends
    for environ, limit in (({"EVENER_PROBE_TIMEOUT": "0.1"}, "0.1"), ({}, "0.3")):
        run = ProbeRun.start(backends, environ=environ, cache=site.cache)
        assert f"within {limit} seconds" in str(run.result()["chip"].error)
    for text in ("soon", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="EVENER_PROBE_TIMEOUT"):
            ProbeRun.start(backends, environ={"EVENER_PROBE_TIMEOUT": text}, cache=site.cache)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise OSError('no driver')", "raised OSError: no driver"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("import os\nos._exit(7)", "ended without an answer (exit code 7)"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended without an answer (killed by SIGSEGV)"),
        ("return 'yes'", "raised TypeError: probe() returned 'yes', not a ProbeResult"),
        ("return ProbeResult(-1)", "a probe's score is a whole number, 0 or more, not -1"),
    ],
)
def test_the_error_of_a_failing_probe_has_the_reason(site: Site, body: str, says: str) -> None:
    site.add("backend", "chip", probe=probing(f"print('the last words')\n{body}"))
    probed = site.probe().result()["chip"]
    assert isinstance(probed.error, ProbeError) and probed.result is None
    assert says in str(probed.error)


def test_the_output_of_a_failed_probe_is_part_of_the_cause(site: Site) -> None:
    body = "import os\nos.write(1, b'libchip.so: version mismatch')\nos._exit(1)"
    site.add("backend", "chip", probe=probing(body))
    error = site.probe().result()["chip"].error
    assert error is not None and "libchip.so: version mismatch" in error_text(error)


def test_probes_of_several_backends_run_beside_each_other(site: Site, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meet")
    # Opening a fifo blocks until the other end is opened: neither can answer unless both run.
    site.add("backend", "one", probe=probing(f"open({str(tmp_path / 'meet')!r}, 'w')\n{ANSWER}"))
    site.add("backend", "two", probe=probing(f"open({str(tmp_path / 'meet')!r})\n{ANSWER}"))
    probed = site.probe(timeout=60).result()
    assert [each.error for each in probed.values()] == [None, None]


def test_a_probe_that_kills_itself_leaves_no_orphan(site: Site, fifo: Path) -> None:
    body = holds_fifo(fifo) + "\n        import signal\n        os.kill(os.getpid(), signal.SIGKILL)"
    site.add("backend", "chip", probe=probing(body))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    probed = site.probe(timeout=60).result()["chip"]
    assert "killed by SIGKILL" in str(probed.error)
    assert (read(reader), read(reader)) == (b"up", b"")
    os.close(reader)


def test_a_daemon_that_left_the_probes_session_ends_with_it(site: Site, fifo: Path) -> None:
    body = holds_fifo(fifo).replace("pass_fds=[held]", "pass_fds=[held], start_new_session=True")
    site.add("backend", "chip", probe=probing(body + "\n        " + ANSWER))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    probed = site.probe(timeout=60).result()["chip"]
    assert probed.result is not None and probed.result.score == 50
    assert (read(reader), read(reader)) == (b"up", b"")
    os.close(reader)


def test_closing_a_run_ends_hanging_probes_and_their_children(site: Site, fifo: Path) -> None:
    site.add("backend", "chip", probe=probing(holds_fifo(fifo) + "\n        import signal\n        signal.pause()"))
    with closing(site.probe(timeout=60)):
        reader = os.open(fifo, os.O_RDONLY)
        assert read(reader) == b"up"
    assert read(reader) == b""
    os.close(reader)


def test_probes_end_when_the_program_that_started_them_dies(site: Site, fifo: Path) -> None:
    site.add("backend", "chip", probe=probing(holds_fifo(fifo) + "\n        import signal\n        signal.pause()"))
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from evener.plugins.discover import discover\n"
        "from evener.plugins.probe import ProbeRun\n"
        "run = ProbeRun.start(discover(path=[sys.argv[1]], environ={}).backends, fresh=True, timeout=60)\n"
        "sys.stdin.read()\n"
        "os._exit(0)"
    )
    environ = {**os.environ, "TMPDIR": str(site.folder)}
    program = subprocess.Popen([sys.executable, "-c", code, str(site.folder)], stdin=subprocess.PIPE, env=environ)
    reader = os.open(fifo, os.O_RDONLY)
    assert read(reader) == b"up"
    program.communicate()
    assert read(reader) == b""
    os.close(reader)


def counting(count: Path, key: str = "a", answer: str = ANSWER) -> str:
    """A probe that adds a line to ``count`` each time it runs."""
    marks = MARKS_FIT.replace("there,)", f"there,), cache_key={{'driver': {key!r}}}")
    body = f"with open({str(count)!r}, 'a') as file:\n    file.write('ran ')\n{answer}"
    return probing(body).replace(MARKS_FIT, marks)


def test_an_answer_is_cached_and_fresh_ignores_the_cache(site: Site, tmp_path: Path) -> None:
    count = tmp_path / "count"
    site.add("backend", "chip", probe=counting(count))
    first, second = site.probe().result()["chip"], site.probe().result()["chip"]
    assert (first.source, second.source) == ("child", "cache")
    assert first.result == second.result
    assert site.probe(fresh=True).result()["chip"].source == "child"
    assert count.read_text() == "ran ran "


def test_a_new_boot_driver_package_or_torch_invalidates_the_cache(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("backend", "chip", probe=counting(tmp_path / "count"))
    backends = site.discover().backends

    def source(cache: ProbeCache) -> str:
        return ProbeRun.start(backends, environ={}, cache=cache).result()["chip"].source

    assert (source(site.cache), source(site.cache)) == ("child", "cache")
    assert source(ProbeCache(tmp_path / "cache", boot_id="another boot")) == "child"
    probe = sys.modules["dist_chip.probe"]
    with monkeypatch.context() as patch:
        marks = probe.marks()
        patch.setattr(probe, "marks", lambda: type(marks)(True, marks.reasons, cache_key={"driver": "b"}))
        assert source(site.cache) == "child"
    with monkeypatch.context() as patch:
        patch.setattr("evener.backend.torch_marks.read", lambda: type("M", (), {"version": "9.9"}))
        assert source(site.cache) == "child"
    os.utime(tmp_path / "dist_chip" / "probe.py", (1, 1))
    assert source(site.cache) == "child"
    assert source(site.cache) == "cache"


@pytest.mark.parametrize("answer", ["raise OSError('busy')", "return ProbeResult(0, (), ('not now',))"])
def test_failures_are_never_cached(site: Site, tmp_path: Path, answer: str) -> None:
    site.add("backend", "chip", probe=counting(tmp_path / "count", answer=answer))
    assert site.probe().result()["chip"].source != "cache"
    assert site.probe().result()["chip"].source != "cache"
    assert (tmp_path / "count").read_text() == "ran ran "


def test_a_corrupt_cache_is_ignored_and_an_unwritable_one_is_reported(site: Site, tmp_path: Path) -> None:
    site.add("backend", "chip", probe=probing(ANSWER))
    assert site.probe().result()["chip"].source == "child"
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("{")
    assert site.probe().result()["chip"].source == "child"
    (tmp_path / "file").touch()
    site.cache = ProbeCache(tmp_path / "file", boot_id="this boot")
    probed = site.probe().result()["chip"]
    assert probed.result is not None and "not cached: " in probed.note


def test_an_answer_does_not_outlive_a_change_of_installed_libraries(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the vendor's torch extension, or a library that it loads, is upgraded or removed."""
    site.add("backend", "chip", probe=probing(ANSWER))
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    assert [site.probe().result()["chip"].source for _ in range(2)] == ["child", "cache"]
    (packages / "vendor_torch-2.dist-info").mkdir()
    assert [site.probe().result()["chip"].source for _ in range(2)] == ["child", "cache"]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/vendor/lib")
    assert site.probe().result()["chip"].source == "child"


def test_an_answer_that_others_could_have_written_is_not_read(site: Site, tmp_path: Path) -> None:
    site.add("backend", "chip", probe=probing(ANSWER))
    assert [site.probe().result()["chip"].source for _ in range(2)] == ["child", "cache"]
    (file,) = (tmp_path / "cache").iterdir()
    file.chmod(0o666)
    assert site.probe().result()["chip"].source == "child"


def test_the_cache_is_in_the_users_cache_folder() -> None:
    assert cache_folder("probes", {"XDG_CACHE_HOME": "/c"}) == Path("/c/evener/probes")
    assert cache_folder("probes", {}) == Path.home() / ".cache/evener/probes"


def test_a_probe_whose_marks_give_the_result_starts_no_process(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("backend", "chip", probe=score_of(10))
    monkeypatch.setattr("subprocess.Popen", None)
    probed = site.probe().result()["chip"]
    assert probed.source == "marks" and probed.result is not None and probed.result.score == 10


def test_marks_that_do_not_fit_start_no_process(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("backend", "chip", probe=probing(ANSWER).replace("Marks(True", "Marks(False"))
    monkeypatch.setattr("subprocess.Popen", None)
    probed = site.probe().result()["chip"]
    assert probed.result is None and probed.error is None and not probed.hardware_seen


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def marks():\n    raise OSError('sysfs')\ndef probe(): ...", "its marks() raised OSError: sysfs"),
        ("def marks():\n    return True\ndef probe(): ...", "its marks() returned True, not Marks"),
        ("def probe(): ...", "has no function marks()"),
        ("def marks(): ...", "must have either probe() or result_from_marks(marks)"),
        ("import nowhere_to_be_found", "importing its probe dist_chip.probe failed with ModuleNotFoundError"),
    ],
)
def test_marks_that_cannot_be_read_are_recorded_with_the_reason(site: Site, source: str, says: str) -> None:
    site.add("backend", "chip", probe=source)
    error = site.probe().result()["chip"].error
    assert isinstance(error, (ProbeError, DescriptorError)) and says in str(error)


def test_only_a_named_backend_is_probed(site: Site) -> None:
    site.add("backend", "chip", probe=probing(ANSWER))
    site.add("backend", "other", probe=probing("raise AssertionError"))
    probed = site.probe(only="chip").result()
    assert probed["chip"].source == "child"
    assert probed["other"].note == "not probed: another backend was asked for"
