"""The kit finds faults that were planted by somebody who had not seen it: some of each area here, all of them with
``scripts/planted_defects.py``, whose result is in docs/conformance.md."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache, partial

import pytest
from planted_defects import PACKAGE, install, run_kit
from warm import warm

Kit = Callable[..., tuple[bool, list[str]]]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """Runs the kit with a fault, or without; the same words give the same result."""
    folder = tmp_path_factory.mktemp("planted") / "site"
    install(folder)
    return cache(partial(run_kit, folder, python=warm() / "python"))


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
def test_a_planted_fault_is_caught_and_the_backend_passes_without_it(defect: str, part: str, kit: Kit) -> None:
    # Only a result that is wider than the compute dtype can be rounded to it.
    dtype = "bfloat16" if defect == "float32-rounded" else "float32"
    words = ("--op", part, "--dtype", dtype, "--seed", "1")
    assert kit("", *words) == (True, [])
    passes, failed = kit(defect, *words)
    assert not passes and failed


def test_every_fault_is_in_the_code_of_the_backend() -> None:
    known = runpy.run_path(str(PACKAGE / "evener_backend_planted/defects.py"))["DEFECTS"]
    code = "".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "defects.py")
    assert len(known) >= 20
    assert [name for name in known if f'planted("{name}")' not in code] == []
