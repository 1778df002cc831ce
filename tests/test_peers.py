"""``make test-peers``, without its programs: how outcomes are judged, what stands in for vLLM, what is unpacked."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import client_programs
import pytest
import run_peers
from peer_results import judge, page, read_records, read_reviewed, shortened, write_records
from peer_sources import UNPACKED, PeerError, unpack

# The plugin's package, as PYTHONPATH has it in the other environment.
sys.path.append(str(run_peers.REVIEWED.parent))

from vllm_peer.adapters import named_adapter
from vllm_peer.flags import MissingFeature, settings
from vllm_peer.package import OwnCode, Package


def seen(test: str, outcome: str = "failed", message: str = "", **more: Any) -> dict[str, Any]:
    """What the plugin writes of one test against a server."""
    return {"test": test, "outcome": outcome, "message": message, "served": True, "missing": "", "called": ""} | more


def reviewed(folder: Path, text: str) -> list[Any]:
    """A reviewed list with this text."""
    path = folder / "reviewed.yaml"
    path.write_text(text, "utf-8")
    return read_reviewed(path)


TOOLS = "- missing: tool calls\n  tests: ['a.py::tools.*']\n  error: tools is not supported\n"
WORDS = "- different: other words\n  why: the error names the field\n  tests: ['a.py::words']\n  error: seed\n"
HOLLOW = "- missing: tool calls\n  tests: ['a.py::bad_tool']\n  passes: true\n"


def test_a_failure_counts_as_judged_only_with_the_error_that_was_judged(tmp_path: Path) -> None:
    entries = reviewed(tmp_path, TOOLS + WORDS)
    right = [seen("a.py::tools[1]", message="400: tools is not supported"), seen("a.py::words", message="seed is 3")]
    records, problems = judge(right, entries)
    assert [(record["outcome"], record["what"]) for record in records] == [
        ("missing", "tool calls"), ("different", "other words"),
    ]  # fmt: skip
    assert problems == []
    records, problems = judge([right[1], seen("a.py::tools[1]", message="500: internal error")], entries)
    assert [record["test"] for record in records] == ["a.py::words"]
    assert problems == [
        "not judged yet: a.py::tools[1]: 500: internal error",
        "covers nothing any more: tool calls: (?:a.py::tools.*)",
    ]


def test_a_difference_of_slow_machines_only_may_be_absent(tmp_path: Path) -> None:
    entries = reviewed(tmp_path, WORDS + "  may pass: true\n")
    records, problems = judge([seen("a.py::words", "passed")], entries)
    assert ([record["outcome"] for record in records], problems) == (["passed"], [])
    records, problems = judge([seen("a.py::words", message="seed is 3")], entries)
    assert ([record["outcome"] for record in records], problems) == (["different"], [])


def test_a_test_that_passes_because_everything_is_refused_is_missing_until_the_feature_comes(tmp_path: Path) -> None:
    entries = reviewed(tmp_path, TOOLS + HOLLOW)
    refused = seen("a.py::bad_tool", "passed")
    records, problems = judge([refused, seen("a.py::tools", message="tools is not supported")], entries)
    assert [record["outcome"] for record in records] == ["missing", "missing"] and problems == []
    _, problems = judge([refused, seen("a.py::tools", "passed")], entries)
    assert problems[-1].startswith("no longer missing, so these tests do pass: tool calls")


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        (seen("a.py::x", "passed"), "passed"),
        (seen("a.py::x", "passed", served=False), "vLLM's own code"),
        (seen("a.py::x", called="vllm.LLM"), "vLLM's own code"),
        (seen("a.py::x", missing="tool calls", served=False), "missing"),
        (seen("a.py::x", "skipped", "Skipped: needs several GPUs"), "not run"),
    ],
)
def test_outcomes_that_a_test_states_itself_need_no_judgement(what: dict[str, Any], outcome: str) -> None:
    (record,), problems = judge([what], [])
    assert (record["outcome"], problems) == (outcome, [])


@pytest.mark.parametrize(
    "text",
    ["- tests: [x]\n  error: y\n", "- missing: z\n  tests: [x]\n", "- different: z\n  tests: [x]\n  error: y\n",
     "- missing: z\n  tests: [x]\n  error: y\n  passes: true\n", "- missing: z\n  tests: [x]\n  error: y\n  typo: 1\n"],
)  # fmt: skip
def test_an_entry_of_the_reviewed_list_that_is_not_whole_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="entry 1 has the keys"):
        reviewed(tmp_path, text)


def test_the_reviewed_list_and_the_page_belong_to_the_records() -> None:
    tests, clients = read_records(run_peers.TEST_RECORDS), read_records(run_peers.CLIENT_RECORDS)
    assert run_peers.PAGE.read_text("utf-8") == page(tests, clients), "peers.md is stale; type: make test-peers"
    recorded = {(record["outcome"], record.get("what")) for record in tests}
    entries = [entry for entry in read_reviewed(run_peers.REVIEWED) if entry.outcome != "vLLM's own code"]
    assert entries and {(entry.outcome, entry.what) for entry in entries if not entry.may_pass} <= recorded


def test_some_tests_run_again_in_place_of_what_the_last_run_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, some = tmp_path / "vllm-all.jsonl", tmp_path / "vllm-some.jsonl"

    def ran(*lines: dict[str, Any]) -> dict[str, str]:
        write_records(some, lines, {})
        run_peers.merge(whole, some)
        return {each["test"]: each["outcome"] for each in read_records(whole)}

    assert ran(seen("a", "passed"), seen("b", "left out")) == {"a": "passed", "b": "left out"}
    assert run_peers.judge_vllm(whole, tmp_path / "model", tmp_path / "larger", complete=True) > 0
    assert "1 tests have not run yet, the first is b" in capsys.readouterr().out
    assert ran(seen("a", "left out"), seen("b")) == {"a": "passed", "b": "failed"}
    assert ran(seen("a", "left out"), seen("b", "passed")) == {"a": "passed", "b": "passed"}


def test_tests_of_vllms_own_code_are_one_record_a_file() -> None:
    own = [{"test": f"a.py::{name}", "outcome": "vLLM's own code"} for name in "xyz"]
    passed = {"test": "a.py::p", "outcome": "passed"}
    assert shortened([*own, passed]) == [passed, {"test": "a.py", "outcome": "vLLM's own code", "tests": 3}]


def test_flags_become_keys_and_a_flag_without_a_key_is_a_missing_feature() -> None:
    keys = settings("org/model", ["--max_model_len", "512", "--enforce-eager", "--lora-modules", "a=b", "--seed=3"])
    assert keys == {
        "serve.served_model_name": "org/model", "infer.max_seq_len": "512", "infer.use_cuda_graph": "false",
        "infer.lora_modules": "a=b", "seed": "3", "server.show_cached_tokens": "false",
    }  # fmt: skip
    assert settings("m", ["--runner", "pooling", "--dtype", "float32"]).items() >= {
        "infer.task": "embed", "dtype": "float32",
    }.items()  # fmt: skip
    for flags, feature in (
        (["--speculative-config", "{}"], "speculative decoding"),
        (["--new-flag", "1"], "the server's option --new-flag"),
    ):
        with pytest.raises(MissingFeature, match=feature):
            settings("m", flags)
    assert settings("m", ["--tool-server", "demo", "--seed", "3"])["seed"] == "3", "tests without such tools can run"


def test_the_page_says_how_many_of_the_tests_that_can_run_pass() -> None:
    outcomes = ["passed"] * 3 + ["missing", "not run", "vLLM's own code"]
    tests = [{"test": f"a.py::{i}", "outcome": each, "what": "x"} for i, each in enumerate(outcomes)]
    common = {"peer": "vLLM", "model": "m", "date": "d"}
    assert "Of the 4 tests that are about a server and can run here, 75% pass." in page(
        [{**tests[0], **common}, *tests[1:]], []
    )


@pytest.fixture
def package() -> Iterator[Package]:
    """``peervllm`` can be imported."""
    found = Package(frozenset({"peervllm"}), {"peervllm.real": 7})
    found.install()
    yield found
    sys.meta_path.remove(found)
    for name in [name for name in sys.modules if name.partition(".")[0] == "peervllm"]:
        del sys.modules[name]


def test_files_that_import_vllm_can_be_imported_and_calls_of_it_in_a_test_are_noticed(package: Package) -> None:
    module = importlib.import_module("peervllm.some.module")
    assert module.real_class is module.real_class and issubclass(module.SomeError, Exception)
    assert not module.anything.is_there and list(module.anything()) == []
    assert importlib.import_module("peervllm").real == 7
    assert list(module.KINDS) == []
    package.running = True
    with pytest.raises(OwnCode, match="KINDS"):  # a loop over nothing would check nothing
        list(module.KINDS)
    package.calls.clear()
    with pytest.raises(OwnCode, match=r"peervllm\.some\.module\.real_class"):
        module.real_class(1)
    with pytest.raises(OwnCode):
        module.Server.__new__(module.Server)
    assert package.calls == ["peervllm.some.module.real_class", "peervllm.some.module.Server"]


def archive(folder: Path, names: list[str]) -> Path:
    """A source distribution with empty files of these names, and a link."""
    path = folder / "vllm-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(f"vllm-1/{name}"), io.BytesIO())
        link = tarfile.TarInfo("vllm-1/tests/entrypoints/openai/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def test_only_regular_files_of_the_list_are_unpacked(tmp_path: Path) -> None:
    names = [name + "test_x.py" if name.endswith("/") else name for name in UNPACKED]
    evil = ["setup.py", "tests/entrypoints/openai/../../../../evil.py", "vllm/__init__.py"]
    unpack(archive(tmp_path, names + evil), tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out/vllm-1")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == set(names)
    assert not list(tmp_path.rglob("evil.py")) and not list(tmp_path.rglob("link.py"))


def test_an_archive_without_a_wanted_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"vllm-1\.tar\.gz has no LICENSE"):
        unpack(archive(tmp_path, []), tmp_path / "out")


def test_clients_have_a_record_each_and_a_missing_feature_is_named(tmp_path: Path) -> None:
    said = "<properties><property name='client' value='c 1'/><property name='what' value='asks'/></properties>"
    cases = f"<testcase>{said}</testcase><testcase>{said}<skipped message='missing: tools'/></testcase>"
    (tmp_path / "report.xml").write_text(f"<testsuite>{cases}</testsuite>", "utf-8")
    assert run_peers.client_records(tmp_path / "report.xml") == [
        {"client": "c 1", "what": "asks", "outcome": "passed"},
        {"client": "c 1", "what": "asks", "outcome": "missing: tools"},
    ]


@pytest.mark.parametrize(("expression", "left"), [("", 1), ("not slow", 1), ("peers", 2)])
def test_clients_do_not_run_unless_they_are_asked_for(expression: str, left: int) -> None:
    spec = importlib.util.spec_from_file_location("peers_conftest", run_peers.REVIEWED.parent / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    items = [SimpleNamespace(get_closest_marker={"peers": True}.get), SimpleNamespace(get_closest_marker={}.get)]
    told: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    both = list(items)
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption={"markexpr": expression}.get, hook=hook), items)
    assert items == both[-left:] and told == both[:-left]


def test_an_adapter_is_named_as_in_vllms_flag_in_either_form() -> None:
    for flag in ("sql=/data/sql", '{"name": "sql", "path": "/data/sql"}'):
        assert named_adapter(flag) == ("sql", "/data/sql")


def test_what_a_client_started_ends_with_it_when_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_programs, "LIMIT", 0.5)
    lock = tmp_path / "lock"
    lock.touch()
    # The shell's child has the file open, and so its lock, as long as it lives.
    words = ("sh", "-c", "flock lock sleep 600 & wait")
    with pytest.raises(subprocess.TimeoutExpired):
        client_programs.run(*words, environ=dict(os.environ), folder=tmp_path)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # would wait for it, and the test would take too long
