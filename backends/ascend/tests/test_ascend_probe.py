"""The probe's marks on machines that this one is not, what a chip's number means, and the child process. Level L0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from warm import warm

from evener.backend.torch_marks import TorchMarks
from evener.config.build import from_overrides
from evener.config.packages import Packages
from evener_backend_ascend import descriptor
from evener_backend_ascend.chip import CHIPS, capabilities, chip_of
from evener_backend_ascend.probe import advice, marks

TORCH = TorchMarks("2.13.0+cpu", {"cuda": None})


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    return tmp_path


def test_marks_fit_with_a_node_its_manager_and_a_torch_npu_of_torchs_version_L0(dev: Path) -> None:
    found = marks(dev, TORCH, "2.13.0.post1")
    assert (found.fit, found.reasons) == (True, ("/dev/davinci0, torch_npu 2.13.0.post1",))


@pytest.mark.parametrize(
    ("torch", "extension", "word"),
    [
        (TORCH, "", "pip install 'torch-npu==2.13.*' pyyaml"),
        (TORCH, "2.11.0", "torch_npu 2.11.0 does not fit torch 2.13.0+cpu"),
        (TorchMarks(None, reason="torch is not installed"), "2.13.0", "torch is not installed"),
    ],
)
def test_marks_do_not_fit_without_software_for_the_node_and_say_what_to_type_L0(
    dev: Path, torch: TorchMarks, extension: str, word: str
) -> None:
    found = marks(dev, torch, extension)
    assert not found.fit
    assert word in found.reasons[0]


def test_marks_do_not_fit_without_the_nodes_and_still_claim_the_bus_L0(tmp_path: Path) -> None:
    found = marks(tmp_path, TORCH, "2.13.0")
    assert (found.fit, found.reasons) == (False, ("no /dev/davinci0",))
    assert "19e5:d802" in found.pci_ids
    (tmp_path / "davinci0").touch()
    assert "no /dev/davinci_manager; pass it" in marks(tmp_path, TORCH, "2.13.0").reasons[0]


def test_the_probes_result_depends_on_visible_devices_and_settings_L0(
    dev: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = marks(dev, TORCH, "2.13.0").cache_key
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    assert marks(dev, TORCH, "2.13.0").cache_key != before


@pytest.mark.parametrize(
    ("number", "name"), [(202, "310p"), (221, "910b"), (250, "910_93"), (260, "950"), (100, None), (104, None)]
)
def test_a_chips_number_gives_its_generation_L0(number: int, name: str | None) -> None:
    chip = chip_of(number)
    assert (chip and chip.name) == name


def test_capabilities_say_what_each_generation_can_do_L0() -> None:
    for chip in CHIPS:
        can = capabilities(chip)
        assert can.host_lengths
        assert can.graphs == can.graph_update == (chip.name in ("910b", "910_93"))
        assert ("bfloat16" in can.dtypes) == (chip.name != "310p")
        assert can.features == frozenset(), "Triton's kernels are offered only if they are asked for"
        with_triton = capabilities(chip, triton=True).features
        assert ("triton:rows" in with_triton) == (chip.name != "310p")
        assert ("triton:argmax" in with_triton) == (chip.name in ("910b", "910_93"))


def test_advice_names_settings_that_are_missing_or_do_harm_L0() -> None:
    given = {"HCCL_OP_EXPANSION_MODE": "AIV", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert advice(given) == ()
    assert len(advice({})) == 2
    (line,) = advice({**given, "ASCEND_LAUNCH_BLOCKING": "1"})
    assert "NPU graphs fail" in line


def test_descriptor_and_probe_import_no_torch_L0() -> None:
    code = (
        "import sys, evener_backend_ascend, evener_backend_ascend.probe as p; p.marks(); "
        "print('torch' in sys.modules or 'torch_npu' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
    assert descriptor.serves == {"namespace:npu", "triton:rows"}


def test_a_torch_npu_without_cann_fails_the_probe_with_what_to_type_L0(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import evener_backend_ascend.probe as p; p.probe()"
    done = subprocess.run([warm() / "python", "-c", code], capture_output=True, text=True, timeout=60)
    assert "BackendError: torch_npu cannot be imported: libhccl.so" in done.stderr
    assert "type: source /usr/local/Ascend/ascend-toolkit/set_env.sh" in done.stderr


def test_chitus_name_for_this_attention_asks_for_whichever_state_of_this_package_fits_L0() -> None:
    built = from_overrides("m", {"infer.attn_type": "npu"}, Packages(lambda: [descriptor]))
    assert built.config.ops == {"attention": "ascend"}
