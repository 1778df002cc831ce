"""The simulated backend, installed into a temporary folder for this process and its children, and engines on it."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evener.builtin.kinds import BUILTIN_KINDS
from evener.engine.controller.controller import Controller
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import StateManager
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest
from evener.engine.worker.inline_executor import InlineExecutor
from evener_conformance.distributions import install_reference_backend
from evener_conformance.reference.engine import RunResult, play, small_config
from evener_conformance.simulated import install_simulated_backend
from evener_conformance.simulated.constraints import Constraints
from evener_conformance.simulated.device import SimulatedDevice

#: Blocks hold 128 tokens, so requests of several blocks need room.
SIMULATED = {"backend": "simulated", "infer.max_seq_len": 400, "infer.kv_memory": 2**24}


class Run:
    """A controller over an inline worker."""

    def __init__(self, controller: Controller) -> None:
        assert isinstance(controller.executor, InlineExecutor)
        self.controller, self.worker = controller, controller.executor.worker

    @property
    def device(self) -> Any:
        return self.worker.assembly.device

    @property
    def notes(self) -> list[str]:
        """The run's manifest."""
        return self.worker.assembly.resolver.manifest.notes

    def shrink(self, blocks: int) -> None:
        """Leave the scheduler this many blocks of the pool."""
        old, kinds = self.controller.scheduler, {kind.name: kind for kind in BUILTIN_KINDS}
        was = old.state
        state = StateManager(was.specs, kinds, was.block_size, blocks + 1, was.prefix_cache, was.cuts)
        assert blocks < was.slabs and self.controller.idle
        self.controller.scheduler = Scheduler(state, len(old._slots), old.step_tokens, batches=old.batches)

    def play(self, messages: Sequence[NewRequest], **how: Any) -> RunResult:
        return play(self.controller, messages, **how)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture(scope="session")
def installed_simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    install_simulated_backend(folder)
    install_reference_backend(folder)
    return folder


@pytest.fixture
def simulated(installed_simulated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The simulated and the reference backend on ``sys.path`` and, for child processes, in PYTHONPATH."""
    monkeypatch.syspath_prepend(str(installed_simulated))
    paths = [str(installed_simulated), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return installed_simulated


@pytest.fixture
def collected() -> None:
    """Engines of earlier tests are reference cycles: collect them now, so that none frees memory during the test."""
    gc.collect()


@pytest.fixture
def used(collected: None) -> int:
    """Bytes of the chip that this process holds, from earlier tests too."""
    memory = SimulatedDevice(0, Constraints.all_on(memory=1 << 40)).memory()
    return memory.total - memory.free


Start = Callable[..., Run]


@pytest.fixture
def start(simulated: Path, tmp_path: Path) -> Start:
    """``start("Llama", {"num_hidden_layers": 1}, **{"simulated.chip": "older"})``, or with ``backend``
    "reference", whose tokens are the right ones."""
    numbers = itertools.count()

    def make(family: str = "Llama", changes: Mapping[str, Any] | None = None, **overrides: Any) -> Run:
        folder = tmp_path / f"model{next(numbers)}"
        shape = {"max_position_embeddings": 512, **(changes or {})}
        alike = {"infer.block_size": 128} if overrides.get("backend") == "reference" else {}
        return Run(build_controller(small_config(folder, family, shape, **{**SIMULATED, **alike, **overrides}))[0])

    return make
