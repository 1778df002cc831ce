"""Forked torches that answer to this backend's namespace: its probe declines, and the vendor's package is chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener_conformance.distributions import write_distribution
from evener_conformance.fake_torch import FakeTorch, install_vendor_fork_backend

DCU = FakeTorch(namespace="cuda", version="2.5.1+das.opt1.dtk25041", marks={"cuda": None, "hip": "6.1"})
C500 = FakeTorch(
    namespace="cuda", version="2.10.0+metax3.8.0.7", marks={"cuda": "11.6", "hip": None, "maca": "3.8.1.0"}
)
OURS = FakeTorch(namespace="cuda", version="2.11.0+cu130", marks={"cuda": "13.0", "hip": None})

#: This backend on a machine with its device node, whose driver would not answer: its marks alone are asked.
ON_A_MACHINE = """
from dataclasses import replace
from pathlib import Path

from evener.contracts.probe import ProbedDevice, ProbeResult
from evener_backend_cuda import descriptor as own, probe as own_probe

descriptor = replace(own, probe="on_a_machine")


def marks():
    return own_probe.marks(Path(__file__).parent / "dev")


def result_from_marks(marks):
    return ProbeResult(100, (ProbedDevice(0, "its own"),), marks.reasons)
"""

CHOOSE = """
import json, sys
from pathlib import Path
from evener.errors import EvenerError
from evener.plugins.choose import choose
from evener.plugins.discover import discover
from evener.plugins.probe import ProbeRun
from evener.plugins.probe import ProbeCache

catalog = discover(path=[sys.argv[1]], environ={})
probes = ProbeRun.start(catalog.backends, environ={}, cache=ProbeCache(Path(sys.argv[1]) / "cache")).result()
try:
    chosen = choose(catalog, None, probes=probes, environ={}).backend.name
except EvenerError as error:
    chosen = str(error)
print(json.dumps([chosen, {name: list((p.result or p.marks).reasons) for name, p in probes.items()}]))
assert "torch" not in sys.modules
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with this backend, on a machine that has its device node."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "on_a_machine.py").write_text(ON_A_MACHINE)
    write_distribution(tmp_path, "evener-backend-cuda", {"evener.backends": {"cuda": "on_a_machine:descriptor"}})
    return tmp_path


def chosen(folder: Path) -> tuple[str, dict[str, Any]]:
    """Who is chosen where ``folder`` comes first, and every backend's reasons."""
    done = subprocess.run(
        [sys.executable, "-c", CHOOSE, str(folder)], env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name, reasons = json.loads(done.stdout)
    return name, reasons


@pytest.mark.parametrize(
    ("torch", "vendor", "mark"), [(DCU, "dcu", "hip"), (C500, "c500", "maca")], ids=["hip", "maca"]
)
def test_a_fork_is_declined_and_its_vendors_package_is_chosen(
    machine: Path, torch: FakeTorch, vendor: str, mark: str
) -> None:
    torch.write(machine)
    install_vendor_fork_backend(machine, vendor, "cuda", (mark,), score=100)
    name, reasons = chosen(machine)
    assert name == vendor
    assert f"is built for {mark.upper()}" in reasons["cuda"][0]
    assert reasons[vendor] == [f"torch {torch.version}"], "its own probe has imported the fork in its child"


def test_an_unforked_torch_is_served_even_with_fork_packages_installed(machine: Path) -> None:
    OURS.write(machine)
    install_vendor_fork_backend(machine, "dcu", "cuda", ("hip",))
    install_vendor_fork_backend(machine, "c500", "cuda", ("maca",))
    name, reasons = chosen(machine)
    assert name == "cuda" and "nvidia0" in reasons["cuda"][0]
    assert reasons["c500"] == ["torch 2.11.0+cu130 has none of maca"]


def test_a_fork_without_its_vendors_package_is_served_by_nobody(machine: Path) -> None:
    C500.write(machine)
    name, _ = chosen(machine)
    assert "no installed backend can run here" in name and "MACA" in name


def test_two_packages_that_claim_one_fork_are_a_tie(machine: Path) -> None:
    C500.write(machine)
    for vendor in ("c500", "also-c500"):
        install_vendor_fork_backend(machine, vendor.replace("-", "_"), "cuda", ("maca",))
    name, _ = chosen(machine)
    assert "both fit this machine (score 100)" in name and "--backend" in name
