"""The kit against faults that were planted without sight of it: some of each area here, all of them by
``scripts/planted_defects.py``, whose result docs/conformance.md records."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from planted_defects import PACKAGE, install, judge


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
    ],
)
def test_a_planted_fault_is_caught_where_the_backend_passes_without_it(defect: str, part: str, site: Path) -> None:
    words = ("--op", part, "--dtype", "float32", "--seed", "1")
    assert judge(site, "", *words) == (True, [])
    passes, failed = judge(site, defect, *words)
    assert not passes and failed


def test_every_fault_is_in_the_code_of_the_backend() -> None:
    known = runpy.run_path(str(PACKAGE / "evener_backend_planted/defects.py"))["DEFECTS"]
    code = "".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "defects.py")
    assert len(known) >= 20
    assert [name for name in known if f'planted("{name}")' not in code] == []
