"""The kit finds faults that were planted by somebody who had not seen it: some of each area here, all of them with
``scripts/planted_defects.py``, whose result is in docs/conformance.md."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from planted_defects import PACKAGE, install, run_kit


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "site"
    install(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "part"),
    [
        ("norm-padded", "rms_norm"),
        ("linear-tail", "linear"),
        ("activation-in-place", "act_and_mul"),
        ("greedy-last", "greedy"),
        ("readback-live", "device"),
        ("block-forgets-norm", "mlp_block"),
        ("block-tall", "mlp_block"),
        ("window-long", "attention"),
        ("scratch-unnamed", "rms_norm"),
        ("eps-fixed", "add_rms_norm"),
        ("linear-deep", "linear"),
        ("linear-wide", "linear"),
        ("float32-rounded", "linear"),
        ("norm-tall", "rms_norm"),
    ],
)
def test_a_planted_fault_is_caught_and_the_backend_passes_without_it(defect: str, part: str, site: Path) -> None:
    # Only a result that is wider than the compute dtype can be rounded to it.
    dtype = "bfloat16" if defect == "float32-rounded" else "float32"
    words = ("--op", part, "--dtype", dtype, "--seed", "1")
    assert run_kit(site, "", *words) == (True, [])
    passes, failed = run_kit(site, defect, *words)
    assert not passes and failed


def test_every_fault_is_in_the_code_of_the_backend() -> None:
    known = runpy.run_path(str(PACKAGE / "evener_backend_planted/defects.py"))["DEFECTS"]
    code = "".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "defects.py")
    assert len(known) >= 20
    assert [name for name in known if f'planted("{name}")' not in code] == []
