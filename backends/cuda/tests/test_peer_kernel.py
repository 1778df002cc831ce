"""The sum over ranks compiles for its GPUs; numbers are checked on them (``benchmarks/rank_check.py``)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TILES = ("bf16 1024", "fp32 512", "bf16 16384")
CASES = [f"{ranks} {tile}" for ranks in (2, 4) for tile in TILES]


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """The kernel's PTX in each case. Where Triton's interpreter is on, nothing compiles, so in a process of its own."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("peer_ptx.py")
    command = [sys.executable, str(script), *CASES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_uses_16_byte_accesses_and_release_acquire_signals(case: str, compiled: dict[str, str]) -> None:
    text, ranks = compiled[case], int(case.split()[0])
    assert text.count("atom.global.sys.release.exch") == ranks - 1
    assert len(re.findall(r"(?:atom|ld)\S*\.acquire\S*", text)) >= ranks - 1
    assert not re.search(r"(?:ld|st)\.global(?:\.cg)?\.b16", text), "elements are moved one by one"
    assert "ld.global.cg.v4" in text and "st.global.v4" in text
