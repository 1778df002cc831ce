"""The probe's marks on machines that this one is not, and what a compute capability means."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.backend.torch_marks import TorchMarks
from evener_backend_cuda import descriptor, nvml
from evener_backend_cuda.capability import capabilities
from evener_backend_cuda.probe import marks, probe

OURS = TorchMarks("2.11.0+cu130", {"cuda": "13.0", "hip": None})
FAKE_NVML = r"""
#include <string.h>
int nvmlInit_v2(void) { return FAIL; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "Driver/library version mismatch"; }
int nvmlSystemGetDriverVersion(char *to, unsigned n) { strncpy(to, "580.159.03", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = 0; return 0; }
int nvmlDeviceGetName(void *h, char *to, unsigned n) { strncpy(to, "NVIDIA H200", n); return 0; }
int nvmlDeviceGetUUID(void *h, char *to, unsigned n) { strncpy(to, "GPU-1", n); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { m[0] = 150ull << 30; m[1] = m[2] = 0; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
"""


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    return tmp_path


def test_marks_fit_where_there_is_a_node_and_a_torch_for_it(dev: Path) -> None:
    found = marks(dev, torch=OURS)
    assert found.fit
    assert "nvidia0" in found.reasons[0]
    assert found.pci_ids == ("10de:*",)


def test_marks_do_not_fit_without_a_node_and_still_claim_the_bus(tmp_path: Path) -> None:
    found = marks(tmp_path, torch=OURS)
    assert (found.fit, found.pci_ids) == (False, ("10de:*",))


@pytest.mark.parametrize(
    ("torch", "word"),
    [
        (TorchMarks("2.5.0+das.dtk", {"cuda": None, "hip": "6.1"}), "HIP"),
        (TorchMarks("2.10.0", {"cuda": "11.6", "maca": "3.8.1.0"}), "MACA"),
        (TorchMarks("2.10.0+metax3.8", {"cuda": "11.6"}), "another vendor"),
        (TorchMarks("2.13.0+cpu", {"cuda": None}), "without CUDA"),
        (TorchMarks(None, reason="torch is not installed"), "not installed"),
    ],
)
def test_marks_decline_a_torch_that_is_not_ours(dev: Path, torch: TorchMarks, word: str) -> None:
    found = marks(dev, torch=torch)
    assert not found.fit
    assert word in found.reasons[0]


def test_visible_devices_are_part_of_the_probe_cache_key(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = marks(dev, torch=OURS).cache_key
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert marks(dev, torch=OURS).cache_key != before


def test_the_probe_says_that_the_driver_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_LIBRARY", "libno-such-library.so.1")
    monkeypatch.setattr(nvml.read, "__defaults__", ("libno-such-library.so.1",))
    found = probe()
    assert found.score == 0
    assert "cannot be loaded" in found.reasons[0]


def fake(tmp_path: Path, fail: int) -> str:
    source, library = tmp_path / "nvml.c", tmp_path / f"libfake{fail}.so"
    source.write_text(FAKE_NVML.replace("FAIL", str(fail)))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def test_nvml_is_read_without_a_context(tmp_path: Path) -> None:
    machine = nvml.read(fake(tmp_path, 0))
    assert machine.driver == "580.159.03"
    assert machine.gpus == (nvml.Gpu("NVIDIA H200", "GPU-1", 150 << 30, (9, 0)),)


def test_nvml_says_why_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(nvml.NvmlError, match="version mismatch"):
        nvml.read(fake(tmp_path, 18))


@pytest.mark.parametrize(
    ("capability", "dtypes", "features"),
    [
        ((7, 0), {"float32", "float16"}, set()),
        ((8, 0), {"float32", "float16", "bfloat16"}, {"ptx", "int8"}),
        ((8, 9), {"float32", "float16", "bfloat16"}, {"ptx", "int8", "fp8"}),
        (
            (9, 0),
            {"float32", "float16", "bfloat16"},
            {"ptx", "int8", "fp8", "overlap", "warpgroups", "short:10240", "short-latent:4096"},
        ),
        ((10, 0), {"float32", "float16", "bfloat16"}, {"ptx", "int8", "fp8", "overlap"}),
    ],
)
def test_a_compute_capability_decides_dtypes_and_features(
    capability: tuple[int, int], dtypes: set[str], features: set[str]
) -> None:
    can = capabilities(capability, 132, 232448)
    assert can.dtypes == dtypes
    assert can.features == features | {"units:132", "shared:232448"}
    assert can.graphs
    assert not can.host_lengths


def test_importing_the_package_and_its_probe_loads_no_torch() -> None:
    script = "import sys, evener_backend_cuda.probe; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert "triton" in descriptor.serves


def test_the_structure_of_nvml_has_its_size() -> None:
    structure: Any = nvml._Memory
    assert ctypes.sizeof(structure) == 24
