"""Tiny models on the recording backend, and a driver that plays requests to their end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evener.config import from_overrides
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Abort, Finished, NewRequest, Tokens
from evener.engine.worker.inline_executor import InlineExecutor
from evener.engine.worker.worker import Worker
from evener_conformance.graph.backend import install_graph_backend
from evener_conformance.naive.model import find_architecture


class Run:
    """A controller over a recording worker, and what its requests got."""

    def __init__(self, controller: Controller) -> None:
        assert isinstance(controller.executor, InlineExecutor)
        self.controller = controller
        self.worker: Worker = controller.executor.worker
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.sizes: list[int] = []

    @property
    def replays(self) -> list[Any]:
        device: Any = self.worker.assembly.device
        return list(device.capture.replays)

    @property
    def notes(self) -> list[str]:
        return list(self.worker.assembly.resolver.manifest.notes)

    def play(
        self, messages: Sequence[NewRequest], every: int = 0, aborts: Mapping[str, int] | None = None
    ) -> dict[str, list[int]]:
        """Send a request every so many steps (0: all at once) and step until all have ended."""
        waiting, left = list(messages), dict(aborts or {})
        for step in range(2000):
            while waiting and (not every or step % every == 0):
                self._see(self.controller.handle([waiting.pop(0)]))
                if every:
                    break
            if not waiting and self.controller.idle:
                return self.tokens
            self._see(self.controller.step())
            self.sizes.append(len(self.controller.scheduler.running))
            for name in [n for n, count in left.items() if len(self.tokens.get(n, [])) >= count]:
                del left[name]
                self._see(self.controller.handle([Abort(name)]))
        raise AssertionError("requests are open after 2000 steps")

    def _see(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.tokens.setdefault(event.id, []).extend(event.ids)
            elif isinstance(event, Finished):
                assert event.id not in self.ends, "one terminal event a request"
                assert event.reason != "error", event.error
                self.ends[event.id] = event.reason


Start = Callable[..., Run]


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture(scope="session")
def installed_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_graph_backend(tmp_path_factory.mktemp("graphs")).parent


@pytest.fixture
def start(installed_graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """``start("Llama", {"num_hidden_layers": 1}, **{"graphs.update": True})``."""
    monkeypatch.syspath_prepend(str(installed_graphs))
    numbers = itertools.count()

    def make(family: str = "Llama", changes: Mapping[str, Any] | None = None, **overrides: Any) -> Run:
        folder = tmp_path / f"model{next(numbers)}"
        folder.mkdir()
        config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **(changes or {})}
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        small = {
            "backend": "graphs", "load": "dummy", "dtype": "float32", "infer.max_reqs": 9, "infer.max_seq_len": 64,
            "infer.step_tokens": 32, "infer.threads": 1, "infer.kv_memory": 2**22,
        }  # fmt: skip
        return Run(build_controller(from_overrides(str(folder), {**small, **overrides}))[0])

    return make
