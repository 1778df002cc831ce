"""The conformance kit on every installed host backend; accelerators are checked on their own machines."""

from __future__ import annotations

from functools import cache

import pytest

from evener.builtin import BUILTINS
from evener.plugins.discover import installed_catalog
from evener_conformance.kit import formats
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


def wrong(
    backend: str, area: str, dtypes: tuple[str, ...] = (), thorough: bool = False, of: tuple[str, ...] | None = None
) -> list[str]:
    """What did not pass; ``of``: only these ops."""
    asked = [check for check in checks(backend, area, dtypes, thorough) if of is None or check.subject in of]
    results = [r for check in asked for r in check.run()]
    assert any(r.outcome == "passed" for r in results)
    return [str(r) for r in results if r.outcome in ("failed", "unknown")]


def test_some_backend_runs_on_the_host() -> None:
    assert HOSTS


#: What the quick test runs of the large areas: the composites that have the most parts, and products of one
#: matrix. The others, and every dtype, are among the slow tests.
FEW = {"composites": ("decoder_layer", "moe_block"), "formats": ("linear",)}


@pytest.mark.parametrize("area", ["device", "primitives", "attention", "composites", "formats", "model"])
@pytest.mark.parametrize("backend", HOSTS)
def test_a_host_backend_passes_the_kit(backend: str, area: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Deep and wide matrices of a few blocks; as large as the kit has them they are slow.
    monkeypatch.setattr(formats, "_DEEP", 768)
    monkeypatch.setattr(formats, "_WIDE", 273)
    monkeypatch.setattr(formats, "_large_parts", formats._large_parts.__wrapped__)  # others keep theirs
    few = {"formats": ("bfloat16",), "composites": ("float32",), "primitives": ("bfloat16",)}
    assert wrong(backend, area, few.get(area, ()), of=FEW.get(area)) == []


@pytest.mark.slow
@pytest.mark.parametrize("area", ["primitives", "attention", "composites", "formats"])
@pytest.mark.parametrize("backend", HOSTS)
def test_a_host_backend_passes_the_kit_at_many_sizes(backend: str, area: str) -> None:
    assert wrong(backend, area, thorough=True) == []
