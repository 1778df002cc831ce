"""Fixtures of these tests: the simulated chip beside the CPU."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expert_families import FAMILIES, Configured
from harsh_traffic import LIMITS

from evener.config.schema import Config
from evener_conformance.reference.engine import small_config
from evener_conformance.simulated import install_simulated_backend


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread a rank, and finds the chip's memory empty: what earlier tests left in circles
    of references counts until it is collected."""
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the simulated backend for this process and its children."""
    folder = tmp_path_factory.mktemp("installed")
    install_simulated_backend(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny experts would all get slots."""
    monkeypatch.setattr("evener_offload.streamed_layers.HALF_BYTES", 1)


@pytest.fixture
def configured(tmp_path: Path) -> Configured:
    """``configured("Qwen3Moe", **keys)``: the family on the simulated chip."""
    numbers = itertools.count()

    def make(family: str = "Qwen3Moe", **more: Any) -> Config:
        # On a chip that computes on the host, measured costs say nothing.
        known = "evener-offload" not in os.environ.get("EVENER_DISABLE_PLUGINS", "")
        keys = {**LIMITS, "backend": "simulated", **({"offload.stream_prompts": "off"} if known else {}), **more}
        return small_config(tmp_path / f"model{next(numbers)}", family, FAMILIES[family][0], **keys)

    return make
