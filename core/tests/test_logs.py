"""Where log lines go."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from evener.config.schema import LogConfig
from evener.errors import ConfigError
from evener.logs import request_id, set_up_logging, stderr_level

log = logging.getLogger("evener.somewhere")


@pytest.fixture
def set_up() -> Iterator[Callable[..., None]]:
    """``set_up_logging`` as in a new process: pytest's own handlers are put aside until the test is over."""
    root = logging.getLogger()
    foreign, level = list(root.handlers), root.level

    def call(**settings: Any) -> None:
        root.handlers[:] = [handler for handler in root.handlers if not type(handler).__module__.startswith("_pytest")]
        set_up_logging(LogConfig(**settings))

    yield call
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = foreign
    root.setLevel(level)


def test_warnings_go_to_standard_error_and_more_into_the_file(
    set_up: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up(file=str(tmp_path / "log"))
    log.warning("loud")
    log.info("soft")
    log.debug("whisper")
    text = (tmp_path / "log").read_text()
    assert "loud" in text and "soft" in text and "whisper" not in text
    assert "loud" in (err := capfd.readouterr().err) and "soft" not in err


def test_a_configured_level_applies_to_stderr_and_file(
    set_up: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up(file=str(tmp_path / "log"), level="debug")
    log.debug("whisper")
    assert "whisper" in (tmp_path / "log").read_text() and "whisper" in capfd.readouterr().err
    assert stderr_level() == logging.DEBUG


def test_repeated_setup_replaces_earlier_handlers(set_up: Any, tmp_path: Path) -> None:
    set_up(file=str(tmp_path / "first"))
    set_up(file=str(tmp_path / "second"))
    log.info("once")
    assert (tmp_path / "first").read_text() == "" and (tmp_path / "second").read_text().count("once") == 1


def test_a_program_with_handlers_of_its_own_keeps_them(set_up: Any, tmp_path: Path) -> None:
    own = logging.NullHandler()
    logging.getLogger().addHandler(own)
    set_up(file=str(tmp_path / "log"))
    assert logging.getLogger().handlers == [own]
    assert not (tmp_path / "log").exists()


def test_json_lines_hold_the_request_the_fields_and_the_trace(set_up: Any, tmp_path: Path) -> None:
    set_up(file=str(tmp_path / "log"), format="json")
    token = request_id.set("req-1")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed", extra={"fields": {"status": 500, "path": Path("/x"), "model": None}})
    finally:
        request_id.reset(token)
    log.info("after")
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert first["request_id"] == "req-1" and first["status"] == 500 and first["path"] == "/x" and "model" not in first
    assert first["level"] == "error" and first["logger"] == "evener.somewhere" and "two\nlines" in first["exception"]
    assert second["message"] == "after" and "request_id" not in second
    said = datetime.strptime(second["time"], "%Y-%m-%dT%H:%M:%S.%f%z")  # with its zone: collectors read it elsewhere
    assert abs(said.timestamp() - time.time()) < 600


def test_text_lines_end_with_the_request(set_up: Any, tmp_path: Path) -> None:
    set_up(file=str(tmp_path / "log"))
    token = request_id.set("req-1")
    log.info("plain")
    log.info("request_id=req-1 said already")
    request_id.reset(token)
    plain, said = (tmp_path / "log").read_text().splitlines()
    assert plain.endswith("plain request_id=req-1") and said.count("req-1") == 1


def write_lines(path: str, word: str) -> None:
    """In a process of its own."""
    set_up_logging(LogConfig(file=path))
    for _ in range(50):
        log.info(word * 3000)


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=write_lines, args=(str(path), word)) for word in "ab"]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    words = [line.rpartition(" ")[2] for line in path.read_text().splitlines()]
    assert sorted(words) == sorted(50 * ["a" * 3000] + 50 * ["b" * 3000])


def test_a_rotated_log_file_is_reopened(set_up: Any, tmp_path: Path) -> None:
    set_up(file=str(tmp_path / "log"))
    log.info("old")
    (tmp_path / "log").rename(tmp_path / "log.1")
    log.info("new")
    assert "old" in (tmp_path / "log.1").read_text() and "new" in (tmp_path / "log").read_text()


def test_an_unwritable_log_file_is_a_config_error_with_its_key(set_up: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log\.file=.*/missing/log cannot be written: No such file"):
        set_up(file=str(tmp_path / "missing/log"))


def test_a_full_disk_is_one_line_on_standard_error_and_no_stack_trace(
    set_up: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    set_up(file="/dev/full")
    for number in range(5):
        log.info("line %d", number)
    log.warning("loud")
    told, loud = capfd.readouterr().err.splitlines()
    assert "log.file=/dev/full cannot be written: No space left on device; its lines are lost until it can be" in told
    assert "loud" in loud


def test_a_log_file_that_can_be_written_again_is_used_and_a_second_full_disk_is_told(
    set_up: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    set_up(file=str(path))
    for lines, target in (("lost", None), ("kept", tmp_path / "room"), ("lost again", Path("/dev/full"))):
        if target is not None:
            path.unlink()
            path.symlink_to(target)
        log.info(lines)
    assert capfd.readouterr().err.count("cannot be written: No space left on device") == 2
    text = (tmp_path / "room").read_text()
    assert "kept" in text and "lost" not in text


def test_a_log_file_whose_folder_is_gone_does_not_stop_the_run_and_is_used_when_it_is_back(
    set_up: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    set_up(file=str(folder / "log"))
    log.info("kept")
    folder.rename(tmp_path / "old")
    for _ in range(3):
        log.info("lost")
    assert capfd.readouterr().err.count("cannot be written: No such file or directory") == 1
    folder.mkdir()
    log.info("found again")
    assert "found again" in (folder / "log").read_text()
