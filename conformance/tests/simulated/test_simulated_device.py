"""The simulated device as torch and core see it, compiled or in Python; and its probe."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import warm

from evener.errors import BackendError, NoBackendError, ProbeError
from evener.plugins.choose import choose
from evener.plugins.discover import discover
from evener.plugins.probe import ProbeCache, ProbeRun
from evener_conformance.simulated.build import compiled
from evener_conformance.simulated.constraints import Constraints
from evener_conformance.simulated.device import SimulatedDevice
from evener_conformance.simulated.probe import BEHAVIOUR


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(0, Constraints.all_on(host_reads=True))


def test_the_device_name_says_how_it_is_implemented(device: SimulatedDevice) -> None:
    assert device.name == "simulated chip 0, compiled"
    assert device.torch_device == torch.device("simulated:0")


def test_views_slices_and_strides_are_those_of_one_memory(device: SimulatedDevice) -> None:
    x = torch.zeros(4, 6, device=device.torch_device)
    x[1:3] = 5.0
    x.t()[2, 1] = 7.0
    x.view(2, 12)[1].add_(1.0)
    x.index_copy_(0, torch.tensor([0], device=x.device), torch.ones(1, 6, device=x.device))
    want = torch.zeros(4, 6)
    want[1:3] = 5.0
    want[1, 2] = 7.0
    want[2:] += 1.0
    want[0] = 1.0
    assert torch.equal(x.cpu(), want)
    assert torch.equal(x[:, ::2].t().contiguous().cpu(), want[:, ::2].t())


def test_tensors_in_host_memory_are_no_inputs_but_for_numbers_and_indices(device: SimulatedDevice) -> None:
    """As on other devices, so that a weight that was left in host memory is found here."""
    x = torch.arange(4.0, device=device.torch_device)
    assert (x * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0, 6.0] and x[torch.tensor([3, 1])].tolist() == [3.0, 1.0]
    with pytest.raises(RuntimeError, match=r"index_select was given .* in host memory, float \[4\]; a chip reads its"):
        torch.ones(4).index_select(0, torch.zeros(2, dtype=torch.int32, device=device.torch_device))
    with pytest.raises(RuntimeError, match="tensors to be on the same device, but found at least two devices"):
        x * torch.ones(4)


def test_resized_outputs_are_returned(device: SimulatedDevice) -> None:
    x = torch.tensor([3.0, 1.0, 2.0], device=device.torch_device)
    out = torch.empty(0, device=device.torch_device)
    torch.mul(x, 2, out=out)
    assert out.tolist() == [6.0, 2.0, 4.0] and x.sort().values.tolist() == [1.0, 2.0, 3.0]
    assert x.nonzero().flatten().tolist() == [0, 1, 2]


def test_streams_and_events_are_torchs(device: SimulatedDevice) -> None:
    stream, first, last = device.new_stream(), device.new_event(), device.new_event()
    with stream:
        assert torch.accelerator.current_stream() == stream
        first.record()
        torch.ones(10, device=device.torch_device).add_(1)
        last.record()
    device.synchronize()
    assert last.query() and first.elapsed_time(last) >= 0.0
    assert torch.accelerator.current_stream() != stream


def test_devices_have_memory_of_their_own(device: SimulatedDevice, collected: None) -> None:
    other = SimulatedDevice(1, Constraints.all_on(memory=1 << 20))
    here, there = device.memory(), other.memory()
    held = torch.zeros(1000, device=other.torch_device)
    assert there.free - other.memory().free == held.nbytes and device.memory() == here
    other.select()
    try:
        assert torch.empty(1, device="simulated").device == other.torch_device
    finally:
        device.select()  # every later test of this process takes it for the current one
    with pytest.raises(BackendError, match="torch sees 4 devices of simulated, so not 9"):
        SimulatedDevice(9, Constraints.all_on())


def test_a_process_has_one_kind_of_simulated_device(device: SimulatedDevice) -> None:
    with pytest.raises(BackendError, match=r"simulated\.python=true, but this process has the compiled device"):
        SimulatedDevice(0, Constraints.all_on(python=True))


def test_the_library_is_compiled_once() -> None:
    path = compiled()
    assert isinstance(path, Path) and compiled() == path


IN_PYTHON = """
import json, sys, torch
from pathlib import Path
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.processes.start import build_controller
from evener_conformance.reference.engine import play, small_config

torch.set_num_threads(1)
messages = [NewRequest(id=f"r{i}", prompt=list(range(3 + i, 30 + 20 * i)), max_tokens=6,
                       sampling=Sampling(temperature=0.6 * i, seed=4)) for i in range(3)]
answers = []
for backend in ("reference", "simulated"):
    config = small_config(Path(sys.argv[1]) / backend, "Llama", {"num_hidden_layers": 1}, backend=backend)
    controller, _ = build_controller(config)
    answers.append(play(controller, messages).tokens)
device = controller.executor.worker.assembly.device
print(json.dumps([answers, device.name, device.capabilities.graphs, device.host_fallbacks()]))
"""


def test_without_a_compiler_the_device_is_made_in_python_and_gives_the_same_tokens(
    simulated: Path, tmp_path: Path
) -> None:
    environ = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    environ.pop("CXX", None)
    done = subprocess.run(
        [warm() / "python", "-c", IN_PYTHON, str(tmp_path)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (want, got), name, graphs, fallbacks = json.loads(done.stdout.splitlines()[-1])
    assert got == want and name == "simulated chip 0, in Python"
    assert not graphs and fallbacks == 0
    assert "is the Python one: no C++ compiler was found" in done.stderr


def asked(folder: Path, tmp_path: Path, seconds: float | None = None, name: str | None = None) -> Any:
    catalog = discover(path=[str(folder)], environ={})
    cache = ProbeCache(tmp_path / "cache", boot_id="this boot")
    probes = ProbeRun.start(catalog.backends, only=name, timeout=seconds, environ={}, cache=cache)
    return choose(catalog, name, probes=probes, environ={})


def test_a_slow_probe_is_waited_for_and_a_real_backend_goes_first(
    simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BEHAVIOUR, "slow:0.2")
    assert asked(simulated, tmp_path, name="simulated").backend.name == "simulated"
    monkeypatch.setenv(BEHAVIOUR, "absent")
    assert asked(simulated, tmp_path).backend.name == "reference"
    with pytest.raises(NoBackendError, match=f"{BEHAVIOUR}=absent"):
        asked(simulated, tmp_path, name="simulated")


def test_two_backends_of_one_score_are_a_tie(simulated: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"'reference' .* and backend 'simulated' .* both fit this machine"):
        asked(simulated, tmp_path)


@pytest.mark.parametrize(("how", "why"), [("hang", "did not answer within 0.5 seconds"), ("crash", "=crash")])
def test_a_probe_that_hangs_or_crashes_stops_start_up(
    how: str, why: str, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BEHAVIOUR, how)
    with pytest.raises(ProbeError, match=why):
        asked(simulated, tmp_path, 0.5 if how == "hang" else None)
