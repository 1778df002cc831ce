"""The fixture of these tests that start an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener_conformance.distributions import write_distribution


@pytest.fixture
def interpreted_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The backend ``interpreted`` of ``triton_host``, installed for one test."""
    packages = tmp_path / "packages"
    write_distribution(
        packages, "evener-backend-interpreted", {"evener.backends": {"interpreted": "triton_host:descriptor"}}
    )
    monkeypatch.syspath_prepend(str(packages))
