"""Tiny random models on the reference backend, installed into a temporary folder for this process and its children."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harsh_traffic import shrink
from lively_weights import write_lively

from evener.config.schema import Config
from evener.engine.controller.controller import Controller
from evener.engine.wire.messages import NewRequest, Ready
from evener_conformance.distributions import install_reference_backend
from evener_conformance.reference import engine as reference_engine
from evener_conformance.reference.device import HostDevice
from evener_conformance.reference.engine import RunResult, small_config
from evener_kv import host_memory

from .late_streams import LateEvent, LateStream


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


#: A layer of each kind is enough here: an engine's step costs as many small ops as the model has layers.
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 2},
    "Gemma2": {"num_hidden_layers": 2},
    "Gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "DeepseekV2": {"num_hidden_layers": 2},
    "DeepseekV3": {"num_hidden_layers": 2},
    "DeepseekV32": {"num_hidden_layers": 2},
    "Qwen3Next": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [],
    },
}  # fmt: skip


@pytest.fixture
def make_config(reference: Path, tmp_path: Path) -> Callable[..., Config]:
    """``make_config("Llama", {"vocab_size": 99}, **{"infer.depth": 1})``; see ``small_config``. A model has few layers
    unless the changes tell how many."""
    del reference
    numbers = itertools.count()

    def make(family: str = "Llama", changes: Mapping[str, Any] | None = None, **overrides: Any) -> Config:
        few = {} if changes and {"num_hidden_layers", "layer_types"} & set(changes) else FEW_LAYERS.get(family, {})
        return small_config(tmp_path / f"model{next(numbers)}", family, {**few, **(changes or {})}, **overrides)

    return make


@pytest.fixture
def make_lively(make_config: Callable[..., Config]) -> Callable[..., Config]:
    """``make_config`` with weights so large that whatever a token reads shows in the next one."""

    def make(*args: Any, **overrides: Any) -> Config:
        config = make_config(*args, **{"load": "auto", **overrides})
        write_lively(config.model)
        return config

    return make


@pytest.fixture
def shrink_pool() -> Callable[[Controller, int], None]:
    """``shrink_pool(controller, 9)``: the scheduler may use 9 blocks of the pool only, so that few requests fill it."""

    return shrink


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference device has streams, on which work is done as late as it may be."""
    monkeypatch.setattr(host_memory, "_streams", lambda device: [LateStream(), LateStream()])
    monkeypatch.setattr(HostDevice, "new_event", lambda self: LateEvent())
    monkeypatch.setattr(host_memory, "_BUFFER", 1)  # a block at a time


@pytest.fixture
def play() -> Callable[..., RunResult]:
    """See ``reference_engine.play``."""
    return reference_engine.play


@pytest.fixture
def drive() -> Callable[..., RunResult]:
    """``drive(client, messages)``: send all over a client and receive until each has ended or the engine is dead."""

    def run(client: Any, messages: Sequence[NewRequest]) -> RunResult:
        played, open_ids = RunResult(), {m.id for m in messages}
        for message in messages:
            client.send(message)
        while open_ids and not played.dead:
            events = client.receive(120)
            assert events, "nothing came for 120 seconds"
            assert not any(isinstance(e, Ready) for e in events) or not played.tokens, "Ready comes first"
            open_ids -= set(played.see(events))
        return played

    return run
