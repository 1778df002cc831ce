"""Tests over torch_npu's real wheel and a fake Ascend runtime; ``make test-vendors-ascend`` runs them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import int8_rows
import npu_reference
import pytest
import torch

if "torch_npu" not in os.environ.get("EVENER_VENDOR", ""):
    pytest.exit("these tests need torch_npu over a fake runtime; type: make test-vendors-ascend", returncode=2)

from simulator import SimulatedNpu

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener_conformance.distributions import install_reference_backend, write_distribution
from evener_conformance.reference.engine import small_config

Start = Callable[..., Controller]


@pytest.fixture(scope="session", autouse=True)
def references() -> Iterator[None]:
    """The vendor's kernels as plain torch, on CPU tensors."""
    library = npu_reference.register(None)
    yield
    library.close()


@pytest.fixture(scope="session", autouse=True)
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The backend's own entry point, with device nodes in a temporary folder; and the reference backend."""
    folder, dev = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("dev")
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (dev / name).touch()
    write_distribution(folder, "evener-backend-ascend", {"evener.backends": {"ascend": "fake_probe:descriptor"}})
    write_distribution(folder, "evener-int8-rows", {"evener.plugins": {"int8-rows": "int8_rows:descriptor"}})
    install_reference_backend(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        paths = [str(folder), str(Path(__file__).parent), os.environ["PYTHONPATH"]]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("EVENER_TEST_DEV", str(dev))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def npu() -> Iterator[SimulatedNpu]:
    """Ops on npu tensors are computed while a test runs."""
    torch.set_num_threads(1)
    with SimulatedNpu() as mode, mode.graphs.patched():
        yield mode


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """``start("Llama", {"num_hidden_layers": 1}, backend="ascend")``: an engine over a tiny model in this process. Its
    weights are random, or, with ``load="auto"``, a checkpoint in int8."""
    numbers = itertools.count()

    def make(family: str, changes: Mapping[str, Any] | None = None, **overrides: Any) -> Controller:
        common = {"infer.max_seq_len": 400, "infer.kv_memory": 2**24, "dtype": "float16", "infer.block_size": 128,
                  "seed": 7}  # fmt: skip
        shape = {"max_position_embeddings": 512, **(changes or {})}
        folder = tmp_path / f"model{next(numbers)}"
        config = small_config(folder, family, shape, **{**common, **overrides})
        if config.load != "dummy":
            int8_rows.write_llama(folder)
        # Weights are random: the reference seeds torch's generator of the CPU, which here also fills npu tensors.
        torch.manual_seed(7)
        return build_controller(config)[0]

    return make
