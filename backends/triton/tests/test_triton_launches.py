"""Kernels that remember what Triton said reach the launcher as Triton's own do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime.interpreter import InterpretedFunction
from warm import warm

from evener_kernels_triton.jit.launch import fast_launch
from evener_kernels_triton.jit.rows import softcap_kernel

SCRIPT = Path(__file__).parent / "launches.py"
#: Calls that are refused, or whose grid, constants or tensors are not of the plain kinds.
ALWAYS = (
    "FORM=(", "FORM=constexpr", "FORM=triton.", "grid", "n='text'", "n=constexpr", "n=-9223372036854775809",
    "n=18446744073709551616", "nothing", "too few", "twice", "x=None", "x[7]", "x[8]",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What ``launches.py`` says, in a process whose Triton compiles instead of interpreting."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([warm() / "python", str(SCRIPT)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_each_call_reaches_the_launcher_as_tritons_own_does(found: dict[str, Any]) -> None:
    assert found["wrong"] == []


def test_only_unusual_calls_use_tritons_own_launch_every_time(found: dict[str, Any]) -> None:
    asked = [name for name in found["asked"] if name not in ("grid (1,)", "grid (2, 3)", "grid (4, 5, 6)")]
    assert asked == found["asked"], "a grid that is a tuple goes the short way"
    assert [name for name in asked if not name.startswith(ALWAYS)] == []
    assert [start for start in ALWAYS if not any(name.startswith(start) for name in asked)] == []


def test_prepared_kernels_reach_the_launcher_as_plain_ones_do(found: dict[str, Any]) -> None:
    assert found["prepared"] == []
    assert [name for name in found["asked again"] if not name.startswith(ALWAYS)] == []
    assert [start for start in ("x=None", "FORM=(") if not any(n.startswith(start) for n in found["asked again"])] == []


def test_hooks_and_debugging_get_tritons_own_launch_and_only_while_they_are_on(found: dict[str, Any]) -> None:
    heard, asked, other_when_debugged = found["hooks"]
    assert heard[:2] == ["tiny", "tiny"]  # of the enter hook, of the exit hook
    assert {"x", "y", "n", "scale", "flag", "FORM"} <= set(heard[2])  # of the hook before a run
    assert len(heard) == 3
    # twice the first call, each hook on and off again, the hook before a run, debugging on and off
    assert asked == [True, False, True, False, True, False, True, True, False]
    assert other_when_debugged


def test_triton_is_asked_each_time_where_a_backend_has_rules_of_its_own(found: dict[str, Any]) -> None:
    assert found["elsewhere"] == [True, True]


def test_nothing_is_remembered_of_a_launch_that_compiled_nothing(found: dict[str, Any]) -> None:
    assert found["kept"] == 0


def test_interpreted_functions_are_not_wrapped() -> None:
    function = triton.jit(softcap_kernel.fn)
    assert type(function) is InterpretedFunction
    assert fast_launch(function) is function
    assert type(function) is InterpretedFunction
