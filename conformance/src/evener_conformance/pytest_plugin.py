"""The kit as a pytest plugin: ``pytest --evener-backend NAME``. Without that option it does nothing. Torch-free.

Every check is one test, ``area/subject[provider]``; ``-k`` selects. A check without anything to check is skipped with
the reason; one whose outcome is unknown fails if its area is required.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evener_conformance.kit.outcome import CaseResult, Check

if TYPE_CHECKING:
    from evener_conformance.kit.checklist import CheckRequest
    from evener_conformance.kit.subject import Subject


class CheckFailed(Exception):
    """A check failed; the message says why."""


class ConformanceCollector(pytest.Collector):
    """All checks of one backend.

    Attributes:
        found: results so far.
    """

    def __init__(self, *, subject: Subject, request: CheckRequest, **rest: Any) -> None:
        super().__init__(**rest)
        self.subject, self.request, self.found = subject, request, list[CaseResult]()

    def collect(self) -> list[pytest.Item]:
        from evener_conformance.kit.checklist import Checklist

        return [
            ConformanceItem.from_parent(self, name=c.name, check=c)
            for c in Checklist(self.subject, self.request).checks
        ]


class ConformanceItem(pytest.Item):
    """One check."""

    parent: ConformanceCollector

    def __init__(self, *, check: Check, **rest: Any) -> None:
        super().__init__(**rest)
        self._check = check

    def runtest(self) -> None:
        from evener_conformance.kit.result import Result

        results = list(self._check.run())
        self.parent.found += results
        if causes := Result(results, {}).causes:
            raise CheckFailed("\n".join(_summarize(cases) for cases in causes[:20]))
        if all(case.outcome == "not applicable" for case in results):
            pytest.skip(results[0].detail if results else "nothing to check")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CheckFailed):
            return f"{excinfo.value}\nagain: --evener-seed {self.parent.request.seed}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def _summarize(cases: Sequence[CaseResult]) -> str:
    return str(cases[0]) + (f"; and {len(cases) - 1} more like it" if len(cases) > 1 else "")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's options."""
    add = parser.getgroup("evener", "conformance of an evener backend").addoption
    add("--evener-backend", metavar="NAME", help="check this backend with evener's conformance kit")
    add("--evener-pretend", action="store_true", help="no probe, and host memory if the device does not open")
    add("--evener-seed", type=int, metavar="N", help="seed of the random inputs; default: a new one for each run")
    add("--evener-thorough", action="store_true", help="check many more sizes")
    add("--evener-json", metavar="FILE", help="write the kit's result to this file")


def pytest_report_header(config: pytest.Config) -> str | None:
    """The seed, which is needed to repeat a failure."""
    if config.getoption("--evener-backend") is None:
        return None
    return f"evener: backend {config.getoption('--evener-backend')}, seed {_seed(config)}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Append the kit's checks to the collected tests."""
    backend = config.getoption("--evener-backend")
    if backend is None:
        return
    from evener.errors import EvenerError
    from evener_conformance.core_version import check_core_version

    try:
        check_core_version()
        from evener_conformance.kit.checklist import CheckRequest
        from evener_conformance.kit.subject import open_subject

        subject = open_subject(backend, config.getoption("--evener-pretend"))
    except EvenerError as error:
        raise pytest.UsageError(str(error)) from error
    request = CheckRequest(_seed(config), thorough=config.getoption("--evener-thorough"))
    kit = ConformanceCollector.from_parent(session, name="evener", nodeid="evener", subject=subject, request=request)
    config.stash[_KIT] = kit
    items += kit.collect()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the result file."""
    config = session.config
    path, kit = config.getoption("--evener-json"), config.stash.get(_KIT, None)
    if path is None or kit is None:
        return
    from evener_conformance.kit.result import Result, run_facts

    facts = run_facts(kit.subject, "test", kit.request.seed, kit.request.thorough)
    result = Result(kit.found, facts, whole=not config.getoption("keyword"))
    Path(path).write_text(json.dumps(result.to_json(), indent=1) + "\n", "utf-8")


_KIT = pytest.StashKey[ConformanceCollector]()
_SEED = pytest.StashKey[int]()


def _seed(config: pytest.Config) -> int:
    if _SEED not in config.stash:
        given = config.getoption("--evener-seed")
        config.stash[_SEED] = secrets.randbelow(2**31) if given is None else given
    return config.stash[_SEED]
