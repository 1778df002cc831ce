"""Triton kernels compiled for Ascend chips by Huawei's own compilers, down to HIVM with its plan of the on-chip memory.

Level L4; ``make test-vendors-ascend-triton`` runs it. It downloads 215 MB once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from triton_environment import environment

from evener_kernels_triton import row_kernels

#: A second for each launch, on a machine that does nothing else.
pytestmark = pytest.mark.timeout(1800)
HERE = Path(__file__).parent
AOT = HERE.parents[1] / "triton/tests/aot.py"
#: Generation → a chip by the compiler's name. The compiler has no 310P.
CHIPS = {"910b": "Ascend910B2", "910_93": "Ascend910_9391", "950": "Ascend910_9589"}
#: Kernels that the compiler does not take, and words of its reason. They are not offered on Ascend.
_CHAINED = "chained boolean operators"
REFUSED = {
    "route_kernel": _CHAINED, "single_token_up_kernel": _CHAINED, "single_token_down_kernel": _CHAINED,
    "stored_kernel": _CHAINED, "dequantize_kernel": _CHAINED, "packed_kernel": _CHAINED,
    "packed_grouped_kernel": _CHAINED, "unpack_kernel": _CHAINED, "write_kernel": "unsupported tensor index",
    "mixed_kernel": "ub overflow, requires 2186240 bits", "logprobs_kernel": "UNREACHABLE executed",
    # With pieces of 8,192 ids; the package for rows takes smaller ones, which compile.
    "filtered_sample_kernel": "ub overflow, requires 3670016 bits",
}  # fmt: skip


def run(*words: str, given: str = "", **environ: str) -> Any:
    """The JSON that a script prints, in a process whose Triton compiles."""
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    command, environ = [sys.executable, *words], {**clean, **environ}
    done = subprocess.run(command, env=environ, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def errors(launches: list[dict[str, Any]], chip: str) -> list[str | None]:
    """For each launch None, or the compiler's reason."""
    site = str(environment() / "site")
    script = str(HERE / "compile_launches.py")
    found: list[str | None] = run(script, chip, given=json.dumps(launches), PYTHONPATH=site)
    return found


@cache
def rows(variant: str) -> dict[str, Any]:
    found: dict[str, Any] = run(str(HERE / "row_launches.py"), variant, PYTHONPATH=str(AOT.parent))
    return found


@pytest.mark.parametrize("variant", CHIPS)
def test_every_launch_that_the_backend_offers_compiles_L4(variant: str) -> None:
    launches = rows(variant)["launches"]
    missing = {"greedy", "sample"} if variant == "950" else set()
    assert set(rows(variant)["ops"]) == set(row_kernels.ops) - missing
    assert len(launches) >= 70
    found = zip(launches, errors(launches, CHIPS[variant]), strict=True)
    assert {f"{each['name']} {each['constants']}": reason for each, reason in found if reason} == {}


def test_for_950_a_reduction_to_an_index_is_refused_which_is_why_sampling_is_not_offered_there_L4() -> None:
    launches = rows("910b")["launches"]
    choice = next(each for each in launches if each["name"] == "chunk_argmax_kernel")
    assert "'linalg.reduce'" in (errors([choice], CHIPS["950"])[0] or "")


def test_a_row_that_does_not_fit_the_on_chip_memory_is_refused_L4() -> None:
    norm = next(each for each in rows("910b")["launches"] if each["name"] == "rms_norm_kernel")
    longer = {**norm, "constants": {**norm["constants"], "BLOCK": 16384}}
    (reason,) = errors([longer], CHIPS["910b"])
    assert "ub overflow, requires 1835264 bits while 1572864 bits available" in (reason or "")


def test_each_kernel_of_the_whole_package_compiles_or_is_listed_with_the_compilers_reason_L4() -> None:
    """The first launch of each, as tiny models make it. Those that compile could be offered; those over rows are."""
    recorded = run(str(AOT), "--list", "npu")
    launches = list({each["name"]: each for each in reversed(recorded)}.values())
    found = dict(zip((each["name"] for each in launches), errors(launches, CHIPS["910b"]), strict=True))
    refused = {name: reason for name, reason in found.items() if reason}
    assert refused.keys() == REFUSED.keys()
    assert {name: reason for name, reason in refused.items() if REFUSED[name] not in reason} == {}
    assert len(found) - len(refused) >= 25
