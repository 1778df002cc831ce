"""Which slow tests a change can reach (``scripts/slow_tests.py``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import slow_tests
from source_tree import ROOT


def test_a_kernel_test_reaches_its_kernels_and_the_kit_but_not_the_server() -> None:
    found = slow_tests.reached(ROOT / "backends/triton/tests/test_triton_kernels.py")
    assert "backends/triton/src/evener_kernels_triton/jit/attention.py" in found
    assert "conformance/src/evener_conformance/kit/composites.py" in found
    assert "core/src/evener/ops/composites.py" in found
    assert not [name for name in found if name.startswith("server/")]


def test_a_test_of_engines_reaches_every_backend_with_its_native_sources() -> None:
    found = slow_tests.reached(ROOT / "tests/test_real_models.py")
    assert "backends/cpu/src/evener_backend_cpu/native/kernels.cpp" in found
    assert "models/src/evener_models/llama.py" in found
    assert "benchmarks/offline.py" not in found


def test_a_test_that_starts_processes_reaches_everything() -> None:
    found = slow_tests.reached(ROOT / "tests/test_http_fuzz.py")
    assert "server/src/evener_server/app.py" in found
    assert "core/src/evener/cli/main.py" in found


def test_a_script_that_is_named_stands_for_the_process_that_runs_it() -> None:
    found = slow_tests.reached(ROOT / "backends/triton/tests/test_triton_compiles.py")
    assert "backends/triton/tests/aot.py" in found
    assert not [name for name in found if name.startswith("server/")]


def test_what_passed_is_left_out_until_a_file_that_it_reaches_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_tests, "RECORD", tmp_path / "record.json")
    every = {str(path.relative_to(ROOT)) for path in slow_tests.slow_files()}
    assert set(slow_tests.select()) == every
    name = "backends/triton/tests/test_triton_kernels.py"
    slow_tests.write_record([name])
    assert set(slow_tests.select()) == every - {name}
    record = json.loads((tmp_path / "record.json").read_text())
    record[name]["digest"] = "of another tree"
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert set(slow_tests.select()) == every


def test_a_file_with_slow_tests_is_found_whichever_distribution_it_is_in() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in slow_tests.slow_files()}
    assert found >= {"tests", "backends", "core", "conformance"}
