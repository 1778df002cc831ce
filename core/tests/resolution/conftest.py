"""Tiny random models on the reference backend, installed into a temporary folder for this process and its children."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.config.schema import Config
from evener_conformance.distributions import install_reference_backend
from evener_conformance.reference.engine import small_config


@pytest.fixture(scope="session")
def installed_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_reference_backend(tmp_path_factory.mktemp("reference")).parent


@pytest.fixture
def reference(installed_reference: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reference backend on ``sys.path`` and, for child processes, in PYTHONPATH."""
    monkeypatch.syspath_prepend(str(installed_reference))
    paths = [str(installed_reference), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return installed_reference


@pytest.fixture
def make_config(reference: Path, tmp_path: Path) -> Callable[..., Config]:
    """``make_config("Llama", {"vocab_size": 99}, **{"infer.depth": 1})``; see ``small_config``."""
    del reference
    numbers = itertools.count()
    return lambda *args, **overrides: small_config(tmp_path / f"model{next(numbers)}", *args, **overrides)
