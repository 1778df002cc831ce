"""``make test-tools``, without its tools: what is pinned, which program writes, and what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run_tools
from omegaconf import OmegaConf
from peer_results import read_records, write_records

REPORT = """<testsuites><testsuite><testcase name="a"><properties><property name="tool" value="torchao"/><property
name="version" value="0.18.0"/><property name="case" value="int8-weights"/></properties></testcase></testsuite>
</testsuites>"""


def pinned() -> dict[str, list[str]]:
    found: Any = OmegaConf.to_container(OmegaConf.load(run_tools.REQUIREMENTS))
    return found


def test_every_tool_is_pinned_and_has_a_program_that_writes_its_checkpoints() -> None:
    writers = {path.stem.removeprefix("with_") for path in run_tools.WRITERS.glob("with_*.py")}
    assert writers == set(pinned())
    for tool, requirements in pinned().items():
        assert requirements[0].partition("==")[0] in (tool, f"nvidia-{tool}")
        names = [each.partition("==")[0] for each in requirements]
        assert all("==" in each for each in requirements) and "torch" not in names


def test_an_environment_that_has_what_is_pinned_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran: list[list[str]] = []
    monkeypatch.setattr(run_tools.subprocess, "run", lambda command, **_: ran.append(command))
    python = run_tools.environment("one", ["pypcre==1", "one==2"])
    assert python == tmp_path / "evener/tools/one/bin/python" and python.exists()
    assert [command[-1] for command in ran] == ["one==2", "pypcre==1"]
    assert all("--no-deps" in command and str(run_tools.CONSTRAINTS) in command for command in ran)
    run_tools.environment("one", ["pypcre==1", "one==2"])
    assert len(ran) == 2
    run_tools.environment("one", ["one==3"])
    assert ran[2][-1] == "one==3"


def test_records_of_a_tool_are_written_anew_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tools, "RECORDS", tmp_path / "tools.jsonl")
    (tmp_path / "report.xml").write_text(REPORT)
    write_records(run_tools.RECORDS, [{"tool": "torchao", "case": "old"}, {"tool": "autoawq", "case": "b"}], {})
    run_tools.record(tmp_path / "report.xml", ["torchao"])
    first, second = read_records(run_tools.RECORDS)
    assert first == {"tool": "autoawq", "case": "b"}
    assert (
        second.items() >= {"tool": "torchao", "version": "0.18.0", "case": "int8-weights", "outcome": "passed"}.items()
    )
    assert second.keys() >= {"device", "model", "date", "command"}


def test_the_record_is_of_the_pinned_versions_and_of_every_case() -> None:
    found = read_records(run_tools.RECORDS)
    for tool, requirements in pinned().items():
        version = requirements[0].partition("==")[2]
        assert {each["version"] for each in found if each["tool"] == tool} == {version}, "type: make test-tools"
    assert len({(each["tool"], each["case"]) for each in found}) == len(found) > 50
    assert {each["outcome"] for each in found} == {"passed"}
