"""The conformance kit on every installed host backend; accelerators are checked on their own machines."""

from __future__ import annotations

from functools import cache

import pytest

from evener.builtin import BUILTINS
from evener.plugins.discover import installed_catalog
from evener_conformance.kit.checklist import Checklist, CheckRequest
from evener_conformance.kit.outcome import Check
from evener_conformance.kit.subject import Subject, open_subject

HOSTS = sorted(p.name for p in installed_catalog(builtins=BUILTINS).backends if "host" in p.descriptor.serves)
SEED = 11


@cache
def subject(backend: str) -> Subject:
    return open_subject(backend)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def checks(backend: str, area: str, dtypes: tuple[str, ...] = (), thorough: bool = False) -> list[Check]:
    return Checklist(subject(backend), CheckRequest(SEED, (area,), dtypes, thorough)).checks


def wrong(backend: str, area: str, dtypes: tuple[str, ...] = (), thorough: bool = False) -> list[str]:
    """What did not pass."""
    results = [r for check in checks(backend, area, dtypes, thorough) for r in check.run()]
    assert any(r.outcome == "passed" for r in results)
    return [str(r) for r in results if r.outcome in ("failed", "unknown")]


def test_some_backend_runs_on_the_host() -> None:
    assert HOSTS


@pytest.mark.parametrize("area", ["device", "primitives", "attention", "model"])
@pytest.mark.parametrize("backend", HOSTS)
def test_a_host_backend_passes_the_kit(backend: str, area: str) -> None:
    """Composites and formats, and every dtype, are among the slow tests."""
    assert wrong(backend, area, ("bfloat16",) if area == "primitives" else ()) == []


@pytest.mark.slow
@pytest.mark.parametrize("area", ["primitives", "attention", "composites", "formats"])
@pytest.mark.parametrize("backend", HOSTS)
def test_a_host_backend_passes_the_kit_at_many_sizes(backend: str, area: str) -> None:
    assert wrong(backend, area, thorough=True) == []
