"""Which backend is chosen on machines with marks of any vendor: present, absent, half-present, contradicting.

A machine is a folder with device nodes and toolkits, and what its torch reports; probes of runtimes are answered by the
table. To add a vendor: its ``marks`` in ``MARKS`` and rows in ``MACHINES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import evener_backend_ascend.probe
import evener_backend_cuda.probe
import evener_backend_gcu.probe
import evener_backend_hygon.probe
import evener_backend_muxi.probe
from evener.backend.torch_marks import TorchMarks
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.errors import EvenerError, PluginError
from evener.plugins.choose import accelerators, assess, unclaimed
from evener.plugins.discover import discover
from evener.plugins.probe import ProbeOutcome
from evener_conformance.distributions import write_distribution

STOCK = TorchMarks("2.13.0+cpu", {"cuda": None, "hip": None})
CUDA = TorchMarks("2.13.0+cu130", {"cuda": "13.0", "hip": None})
DTK = TorchMarks("2.5.1+das.opt1.dtk25041", {"cuda": None, "hip": "6.1"})
ROCM = TorchMarks("2.9.0+rocm6.4", {"cuda": None, "hip": "6.4"})
MACA = TorchMarks("2.10.0+metax3.8.0.7", {"cuda": "11.6", "hip": None, "maca": "3.8.1.0"})
#: A MACA build that lost its value, and one that has two vendors' values.
MACA_TAG = TorchMarks("2.10.0+metax3.8.0.7", {"cuda": "11.6", "hip": None})
BOTH = TorchMarks("2.10.0+metax3.8.0.7", {"cuda": "11.6", "hip": "6.1", "maca": "3.8.1.0"})
NONE = TorchMarks(None, reason="torch is not installed")

#: Vendor → its marks on a machine.
MARKS: Mapping[str, Callable[[Path, TorchMarks, frozenset[str]], Marks]] = {
    "cuda": lambda root, torch, _: evener_backend_cuda.probe.marks(root / "dev", root / "proc/version", torch),
    "hygon": lambda root, torch, _: evener_backend_hygon.probe.marks(root, torch),
    "muxi": lambda root, torch, _: evener_backend_muxi.probe.marks(root, torch),
    "ascend": lambda root, torch, modules: evener_backend_ascend.probe.marks(
        root / "dev", torch, "2.13.0" if "torch_npu" in modules else ""
    ),
    "gcu": lambda root, torch, modules: evener_backend_gcu.probe.marks(root, torch, "torch_gcu" in modules),
}


@dataclass(frozen=True)
class Machine:
    """``files``: what exists; ``modules``: extensions of torch that are installed. ``chosen``: the backend, or words of
    the error; ``said``: (backend, words of its reason); ``fails``: (backend, what its probe raises)."""

    torch: TorchMarks
    files: str
    chosen: str
    said: tuple[str, str] = ("cpu", "")
    modules: frozenset[str] = frozenset()
    installed: tuple[str, ...] = ("ascend", "cuda", "hygon", "muxi", "gcu")
    pci: str = ""
    warned: str = ""
    fails: tuple[str, str] = ("", "")


GCU, NPU = frozenset({"torch_gcu"}), frozenset({"torch_npu"})
MACHINES = {
    "nothing": Machine(STOCK, "", "cpu", ("gcu", "no /dev/gcu0")),
    "no torch": Machine(NONE, "dev/mxcd", "cpu", ("muxi", "torch is not installed")),
    "nvidia": Machine(CUDA, "dev/nvidia0", "cuda"),
    "dcu": Machine(DTK, "dev/kfd dev/mkfd opt/dtk", "hygon", ("cuda", "no /dev/nvidia0")),
    "dcu whose container hides mkfd": Machine(DTK, "dev/kfd", "hygon"),
    "dcu whose torch lost its tag": Machine(ROCM, "dev/kfd dev/mkfd opt/hyhal", "hygon"),
    "dcu without device nodes": Machine(DTK, "opt/dtk", "cpu", ("hygon", "--device=/dev/kfd")),
    "hip without a dcu": Machine(ROCM, "dev/kfd", "cpu", ("hygon", "nothing else here is of Hygon DCU")),
    "c550": Machine(MACA, "dev/mxcd dev/dri", "muxi", ("hygon", "torch.version.hip is not set")),
    "c550 whose torch lost its value": Machine(MACA_TAG, "dev/mxcd", "muxi"),
    "c550 without its node": Machine(MACA, "dev/dri", "cpu", ("muxi", "--device=/dev/mxcd")),
    "nvidia's node, metax's torch": Machine(MACA, "dev/nvidia0", "cpu", ("cuda", "built for MACA")),
    "nvidia host with evener-backend-muxi": Machine(CUDA, "dev/nvidia0", "cuda", ("muxi", "not a build for MetaX")),
    "dcu card, stock torch": Machine(STOCK, "dev/mkfd opt/dtk", "cpu", ("hygon", "torch.version.hip is not set")),
    "one torch with two vendors' values": Machine(BOTH, "dev/mxcd dev/mkfd", "cpu", ("muxi", "builds of two vendors")),
    "gcu": Machine(STOCK, "dev/gcu0 dev/gcuctl", "gcu", modules=GCU),
    "gcu without torch_gcu": Machine(STOCK, "dev/gcu0", "cpu", ("gcu", "torch_gcu is not installed")),
    "torch_gcu without a gcu": Machine(STOCK, "", "cpu", ("gcu", "--device=/dev/gcu0"), modules=GCU),
    "gcu under another vendor's torch": Machine(
        MACA, "dev/gcu0", "cpu", ("gcu", "another vendor's build"), modules=GCU
    ),
    "ascend": Machine(STOCK, "dev/davinci0 dev/davinci_manager", "ascend", modules=NPU),
    "ascend without its manager": Machine(
        STOCK, "dev/davinci0", "cpu", ("ascend", "no /dev/davinci_manager"), modules=NPU
    ),
    "ascend without torch_npu": Machine(
        STOCK, "dev/davinci0 dev/davinci_manager", "cpu", ("ascend", "torch_npu is not installed")
    ),
    "torch_npu without CANN": Machine(
        STOCK,
        "dev/davinci0 dev/davinci_manager",
        "libhccl.so: cannot open shared object file",
        modules=NPU,
        fails=("ascend", "torch_npu cannot be imported: libhccl.so: cannot open shared object file"),
    ),
    "dcu whose driver does not answer": Machine(
        DTK, "dev/kfd dev/mkfd opt/dtk", "no HIP device answers", fails=("hygon", "no HIP device answers")
    ),
    "ascend under another vendor's torch": Machine(
        MACA, "dev/davinci0 dev/davinci_manager", "cpu", ("ascend", "does not fit torch"), modules=NPU
    ),
    "torch_npu without an npu": Machine(STOCK, "", "cpu", ("ascend", "no /dev/davinci0"), modules=NPU),
    "ascend and gcu at once": Machine(
        STOCK, "dev/davinci0 dev/davinci_manager dev/gcu0", "both fit this machine", modules=GCU | NPU
    ),
    "nvidia and gcu at once": Machine(CUDA, "dev/nvidia0 dev/gcu0", "both fit this machine", modules=GCU),
    "metax and gcu cards, metax's torch": Machine(MACA, "dev/mxcd dev/gcu0", "muxi", modules=GCU),
    "a card whose package is not installed": Machine(
        STOCK, "", "cpu", installed=("cuda", "hygon"), pci="0x1e36:0xc035", warned="supports 1e36:c035"
    ),
    "a claimed card": Machine(STOCK, "", "cpu", pci="0x9999:0x4001"),
    "a card of nobody": Machine(
        STOCK, "", "cpu", pci="0x1abc:0x0001", warned="no installed backend supports 1abc:0001"
    ),
}


#: PCI devices of public lists, and the backend of each. Hygon's, MetaX's and Enflame's are in pci.ids of 2026-08-22
#: (K100_AI; C500; S60, L300, L600), where Huawei's NPUs are not: theirs are in its driver's script that collects logs.
BUS = {
    "1d94:6211": "hygon", "9999:0a01": "muxi", "1e36:c035": "gcu", "1e36:c041": "gcu", "1e36:c042": "gcu",
    "19e5:d100": "ascend", "19e5:d500": "ascend", "19e5:d801": "ascend", "19e5:d802": "ascend", "19e5:d803": "ascend",
    "10de:2335": "cuda",
}  # fmt: skip
#: Accelerators that none of these backends serves: Huawei's for video, AMD's Instinct MI210.
NOT_SERVED = ("19e5:a127", "1002:740f")


@pytest.fixture
def no_visibility(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA", "HIP", "MACA", "TOPS", "ENFLAME", "ASCEND_RT"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("name", MACHINES)
def test_the_right_backend_or_the_right_refusal_L3(name: str, tmp_path: Path, no_visibility: None) -> None:
    machine, root, site = MACHINES[name], tmp_path / "machine", tmp_path / "site"
    for file in machine.files.split():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    points = {vendor: f"evener_backend_{vendor}:descriptor" for vendor in (*machine.installed, "cpu")}
    write_distribution(site, "evener-some-backends", {"evener.backends": points})
    catalog = discover(path=[str(site)], environ={})
    assert not catalog.problems
    outcomes, found = {}, {}
    for package in catalog.backends:
        ours = MARKS.get(package.name)
        found[package.name] = ours(root, machine.torch, machine.modules) if ours else Marks(True, ("a host",))
        score = 100 if ours else 10
        answer = ProbeResult(score, (ProbedDevice(0, package.name),)) if found[package.name].fit else None
        error = PluginError(machine.fails[1]) if package.name == machine.fails[0] else None
        outcomes[package.name] = ProbeOutcome(package, found[package.name], None if error else answer, error)
    bus = pci_bus(tmp_path / "pci", machine.pci)
    assessment = assess(catalog, None, probes=outcomes, environ={}, pci_root=bus)
    if assessment.selection is not None:
        assert assessment.selection.backend.name == machine.chosen
    else:
        assert isinstance(assessment.error, EvenerError) and machine.chosen in str(assessment.error)
        assert "--backend" in str(assessment.error)
    speaker, words = machine.said
    assert words in " ".join(found[speaker].reasons)
    assert machine.warned in " ".join(assessment.report.warnings) and bool(machine.warned) == bool(
        assessment.report.warnings
    )


def pci_bus(folder: Path, ident: str) -> Path:
    """A bus with one processing accelerator, if ``ident`` (vendor:device) is given."""
    if ident:
        slot = folder / "devices" / "0000:17:00.0"
        slot.mkdir(parents=True)
        for file, text in zip(("class", "vendor", "device"), ("0x120000", *ident.split(":")), strict=True):
            (slot / file).write_text(text + "\n")
    return folder


@pytest.mark.parametrize("ident", [*BUS, *NOT_SERVED])
def test_a_device_of_public_lists_is_claimed_by_its_vendors_backend_alone_L0(ident: str, tmp_path: Path) -> None:
    claims = {vendor: marks(tmp_path, STOCK, frozenset()).pci_ids for vendor, marks in MARKS.items()}
    on_bus = accelerators(pci_bus(tmp_path / "pci", ":".join(f"0x{part}" for part in ident.split(":"))))
    assert [device.ident for device in on_bus] == [ident]
    assert [vendor for vendor, claim in claims.items() if not unclaimed(on_bus, claim)] == [
        *filter(None, [BUS.get(ident)])
    ]


@pytest.mark.parametrize("vendor", sorted(MARKS))
def test_every_vendors_descriptor_and_probe_import_no_torch_L0(vendor: str) -> None:
    from test_architecture import heavy_after_import

    descriptor = importlib.import_module(f"evener_backend_{vendor}").descriptor
    assert heavy_after_import(f"evener_backend_{vendor}", descriptor.probe) == {}


def test_visibility_variables_that_disagree_are_pointed_out_L3(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/mkfd").touch()
    fork = evener_backend_hygon.probe.FORK
    agree = fork.marks(tmp_path, DTK, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"})
    differ = fork.marks(tmp_path, DTK, {"HIP_VISIBLE_DEVICES": "1"})
    assert agree.fit and len(agree.reasons) == 1
    assert "HIP_VISIBLE_DEVICES=1, CUDA_VISIBLE_DEVICES unset" in differ.reasons[1]
    assert agree.cache_key != differ.cache_key
