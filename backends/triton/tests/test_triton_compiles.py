"""Every launch compiles ahead of time for targets that this machine does not have (evidence of level L4)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# runs: backends/triton/tests/aot.py
SCRIPT = Path(__file__).parent / "aot.py"
TARGETS = ("cuda:75", "cuda:80", "cuda:90", "cuda:100", "hip:gfx906", "hip:gfx90a", "hip:gfx942")


def compiled(target: str, *flags: str) -> dict[str, object]:
    """What ``aot.py`` says, in a process whose Triton compiles instead of interpreting."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, target], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout)[target]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles_for(target: str) -> None:
    found = compiled(target)
    assert found["errors"] == {}
    assert found["launches"] >= 45  # type: ignore[operator]
