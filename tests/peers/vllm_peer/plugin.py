"""The pytest plugin: ``python -m pytest -p vllm_peer.plugin --peer-evener … --peer-model … --peer-report FILE TESTS``.

It writes one JSON object a line for each test: what came of it, whether a server of ours ran meanwhile, and which code
of vLLM it called.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from .adapters import downloaded
from .flags import MissingFeature
from .package import Package
from .server import Launcher
from .utilities import NoPictures, Reference, real_things, redirect_names, tests_utils

#: Stood in for: vLLM, what only its own code needs, and helpers of tests that are not about a server.
_ROOTS = frozenset({"vllm", "gpt_oss", "tests.conftest", "tests.models"})
_MESSAGE = 2000
_LAUNCHER = pytest.StashKey[Launcher]()
_SERVER_RUNS = "needs {} run by the server; with evener, clients run tools"
#: Files and names of tests that cannot run here, and why.
_LEFT_OUT = {
    ("test_openai_schema.py", "test_openapi_stateless"): (
        "it sends fields that are not vLLM's, and knows no 504 after max_time; schemathesis is among the clients"
    ),
    ("test_harmony.py", "test_web_search"): _SERVER_RUNS.format("web search"),
    ("test_harmony.py", "test_code_interpreter"): _SERVER_RUNS.format("Python code"),
    ("test_harmony.py", "test_code_interpreter_streaming"): _SERVER_RUNS.format("Python code"),
    ("test_harmony.py", "test_mcp_tool_multi_turn"): _SERVER_RUNS.format("MCP tools"),
    ("test_parsable_context.py", "test_mcp_tool_call"): _SERVER_RUNS.format("MCP tools"),
}


@dataclass(frozen=True)
class Seen:
    """What came of one test, or of a file that could not be imported.

    Attributes:
        test: its id below ``tests/entrypoints``.
        outcome: passed, failed or skipped, in pytest's sense; or left out, because the command asked for others.
        message: the error or the reason, without its stack.
        served: whether a server ran during the test.
        missing: the feature without which its server cannot be started.
        called: the first code of vLLM that it called.
    """

    test: str
    outcome: str
    message: str
    served: bool
    missing: str
    called: str


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's options."""
    group = parser.getgroup("peer")
    group.addoption("--peer-evener", type=Path, required=True, help="the command evener")
    group.addoption("--peer-model", type=Path, required=True, help="folder of the model to serve")
    group.addoption("--peer-larger", type=Path, required=True, help="folder of the one under names of Qwen's models")
    group.addoption("--peer-report", type=Path, required=True, help="file to write")


def pytest_configure(config: pytest.Config) -> None:
    """Put the stand-ins in place before any file is imported."""
    launcher = Launcher(*(config.getoption(f"--peer-{name}") for name in ("evener", "model", "larger")))
    package = Package(_ROOTS, real_things(launcher))
    package.install()
    redirect_names(launcher)
    config.stash[_LAUNCHER] = launcher
    # The same requests in every run.
    settings.register_profile("peers", derandomize=True, database=None)
    settings.load_profile("peers")
    sys.modules["tests.utils"] = tests_utils(launcher, config.rootpath, package)
    config.pluginmanager.register(Recorder(launcher, package, config.getoption("--peer-report")), "peer-recorder")


@pytest.hookimpl(tryfirst=True)  # before a choice by -k: all tests are there
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what cannot run here.

    Raises:
        pytest.UsageError: vLLM has no test of a name that is listed.
    """
    names = {id(item): (item.path.name, getattr(item, "originalname", item.name)) for item in items}
    if unknown := _LEFT_OUT.keys() - names.values():
        raise pytest.UsageError(f"vLLM has no such tests to leave out: {sorted(unknown)}")
    for item in items:
        if (why := _LEFT_OUT.get(names[id(item)])) is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def local_asset_server() -> NoPictures:
    """Of vLLM's top conftest."""
    return NoPictures()


@pytest.fixture(scope="session")
def hf_runner(pytestconfig: pytest.Config) -> type[Reference]:
    """Of vLLM's top conftest: transformers with the model of a test, here with the one that is served."""
    return type("Reference", (Reference,), {"launcher": pytestconfig.stash[_LAUNCHER]})


@pytest.fixture(scope="session")
def opt125_lora_files() -> str:
    """Of vLLM's top conftest: the folder of an adapter; a server gets one of its own model there."""
    return downloaded("adapter")


class Recorder:
    """Writes what came of each test as soon as it has ended."""

    def __init__(self, launcher: Launcher, package: Package, path: Path) -> None:
        self._launcher, self._package = launcher, package
        self._served, self._missing = False, ""
        self._file = path.open("w", encoding="utf-8")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Between its setup and its teardown, a test may not call vLLM's code."""
        self._package.calls.clear()
        self._served, self._missing, self._package.running = False, "", True
        started = self._launcher.started
        self._write = lambda report: self._note(report, started)
        result = yield
        self._package.running = False
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Note what the report cannot say."""
        if call.excinfo is not None and isinstance(call.excinfo.value, MissingFeature):
            self._missing = str(call.excinfo.value)
        report = yield
        report.user_properties = []
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's end: of its call, or of a setup without one. A teardown that fails is a failure of its own."""
        if report.when == "call" or not report.passed:
            self._write(report)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Tests that exist and were not asked for."""
        for item in items:
            self._put(Seen(item.nodeid.removeprefix("tests/entrypoints/"), "left out", "", False, "", ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that could not be imported."""
        if report.failed:
            self._put(Seen(report.nodeid, "failed", _message(report), False, "", ""))

    def pytest_sessionfinish(self) -> None:
        """Every line is on disk."""
        self._file.close()

    def _note(self, report: pytest.TestReport, started: int) -> None:
        served = bool(self._launcher.running) or self._launcher.started > started
        called = self._package.calls[0] if self._package.calls else ""
        outcome = "failed" if hasattr(report, "wasxfail") and report.passed else report.outcome
        test = report.nodeid.removeprefix("tests/entrypoints/")
        self._put(Seen(test, outcome, _message(report), served, self._missing, called))

    def _put(self, seen: Seen) -> None:
        self._file.write(json.dumps(asdict(seen), ensure_ascii=False) + "\n")
        self._file.flush()


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)[:_MESSAGE]
    lines = str(report.longrepr or "").splitlines()
    # What pytest says of a missing fixture ends with the error, behind the test's source.
    return "\n".join([line for line in lines if line.startswith("E ")] or lines)[:_MESSAGE]
