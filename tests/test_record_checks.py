"""The records behind docs/support.md are written by the command that ran the check (``scripts/record_checks.py``)."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import record_checks
import support_page
from importlib_metadata import PackageNotFoundError, distribution
from source_tree import ROOT

from evener_conformance.first_contact.levels import reached, read_records


def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **codes: str) -> None:
    """A file of checks, each of which runs some Python."""
    lines = []
    for name, code in codes.items():
        command = json.dumps(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}")
        lines.append(f"{name}: {{file: here, subject: {name}, check: it runs, command: {command}}}")
    (tmp_path / "checks.yaml").write_text("\n".join(lines))
    monkeypatch.setattr(record_checks, "CHECKS", tmp_path / "checks.yaml")
    monkeypatch.setattr(record_checks.read_checks, "__defaults__", (tmp_path / "checks.yaml",))


def written(tmp_path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (tmp_path / "support-here.jsonl").read_text().splitlines()]


def test_a_record_says_what_came_of_the_command_and_replaces_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = "print('=== 3 passed, 1 skipped in 0.12s ===')"
    checks(tmp_path, monkeypatch, good=good, bad="raise SystemExit(3)")
    assert record_checks.main(["good", "bad", "--out", str(tmp_path)]) == 1
    assert [r["outcome"] for r in written(tmp_path)] == ["passed: 3 passed, 1 skipped", "failed with exit code 3"]
    checks(tmp_path, monkeypatch, bad="print('mended')")
    assert record_checks.main(["bad", "--out", str(tmp_path)]) == 0
    assert [r["outcome"] for r in written(tmp_path)] == ["passed: 3 passed, 1 skipped", "passed"]


def test_a_check_that_nobody_knows_is_refused_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        record_checks.main(["no-such-check"])
    assert "no check no-such-check; known: cpu, " in capsys.readouterr().err


def test_every_check_names_files_that_exist() -> None:
    for name, check in record_checks.read_checks().items():
        paths = [word for word in shlex.split(check["command"]) if "/" in word]
        assert [word for word in paths if not (ROOT / word).exists()] == [], name


def test_a_check_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checks.yaml").write_text("one: {file: a, subject: b, check: c, comand: d}")
    with pytest.raises(ValueError, match=r"\[one\] needs .*'command'"):
        record_checks.read_checks(tmp_path / "checks.yaml")


def test_the_level_of_each_backend_in_its_descriptor_is_that_of_its_records() -> None:
    for row in support_page.ROWS:
        file = support_page.RESULTS / f"support-{row.results}.jsonl"
        found = reached(read_records([file]) if file.is_file() else (), row.package)
        try:
            points = [
                p for p in distribution(row.package).entry_points if p.group in ("evener.backends", "evener.kernels")
            ]
        except PackageNotFoundError:
            assert not found.levels, f"{row.package} has records, and is not installed"
            continue
        # Of a distribution with several packages one has the highest level, and each has a level with records.
        levels = [point.load().evidence.partition(":")[0] for point in points]
        assert set(levels) <= set(found.levels) and max(levels, default=None) == found.highest, row.package


def test_a_page_without_the_marked_table_is_refused() -> None:
    with pytest.raises(ValueError, match="needs one table"):
        support_page.with_table("# Support\n")
    assert "| `evener-backend-cpu` |" in support_page.with_table("<!-- backends -->\nold\n<!-- end -->\n")
