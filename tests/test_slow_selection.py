"""Which slow tests a change can reach (``scripts/slow_tests.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_kernels_for_hardware_that_is_not_there_are_reached_by_tests_that_name_it_only() -> None:
    plugin, probe = (f"backends/cuda/src/evener_backend_cuda/{name}.py" for name in ("plugin", "probe"))
    silent = ("tests/test_gguf_models.py", "core/tests/engine/test_forks.py", "tests/test_http_fuzz.py")
    for name in silent:
        found = slow_tests.reached(ROOT / name)
        assert plugin not in found and probe in found, f"{name} does not name the hardware, but it looks for devices"
    for name in ("tests/test_containers.py", "tests/test_packaging.py"):
        assert plugin in slow_tests.reached(ROOT / name), f"{name} is about every package"


def test_a_test_that_starts_processes_reaches_everything() -> None:
    found = slow_tests.reached(ROOT / "tests/test_http_fuzz.py")
    assert "server/src/evener_server/app.py" in found
    assert "core/src/evener/cli/main.py" in found
    # But not the modules of other tests, in whatever folder they are.
    assert not {"core/tests/engine/test_forks.py", "core/tests/test_logs.py"} & found


def test_pages_of_packages_are_reached_by_tests_of_the_documents_only() -> None:
    page = "backends/cpu/README.md"
    assert page in slow_tests.reached(ROOT / "tests/test_docs_packages.py")
    for name in ("tests/test_real_models.py", "tests/test_http_fuzz.py", "backends/cpu/tests/test_cpu_stored.py"):
        assert page not in slow_tests.reached(ROOT / name)


def test_a_script_that_is_named_stands_for_the_process_that_runs_it() -> None:
    found = slow_tests.reached(ROOT / "backends/triton/tests/test_triton_compiles.py")
    assert "backends/triton/tests/aot.py" in found
    assert not [name for name in found if name.startswith("server/")]


def test_passed_tests_are_left_out_until_a_file_that_they_reach_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_tests, "RECORD", tmp_path / "record.json")
    some = [path for path in slow_tests.slow_files() if "test_triton_k" in path.name or path.parent.name == "config"]
    monkeypatch.setattr(slow_tests, "slow_files", lambda: some)
    every = {str(path.relative_to(ROOT)) for path in slow_tests.slow_files()}
    assert set(slow_tests.select()) == every
    name = "backends/triton/tests/test_triton_kernels.py"
    slow_tests.write_record([name])
    assert set(slow_tests.select()) == every - {name}
    record = json.loads((tmp_path / "record.json").read_text())
    record[name]["digest"] = "of another tree"
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert set(slow_tests.select()) == every


def test_comments_docstrings_and_line_breaks_of_a_python_file_change_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_tests, "ROOT", tmp_path)
    texts = ('"""Old."""\ndef f(x):\n    return x + 1\n', 'def f(x):  # new\n    """New."""\n    return (x\n   + 1)\n',
             '"""Old."""\ndef f(x):\n    return x + 2\n')  # fmt: skip
    for number, text in enumerate(texts):
        (tmp_path / f"digest_{number}.py").write_text(text)
    old, same, other = (slow_tests.content(f"digest_{number}.py") for number in range(3))
    assert old == same != other


def test_a_file_whose_every_test_needs_a_gpu_is_never_selected() -> None:
    found = {str(path.relative_to(ROOT)) for path in slow_tests.slow_files()}
    assert "tests/test_accelerator.py" not in found
    assert "tests/test_real_models.py" in found


#: In capitals, so that this file is none of those with slow tests.
SLOW_FILE = """import pytest
@pytest.mark.SLOW
@pytest.mark.parametrize("number", range(3))
def test_number(number):
    {0}
"""
OUTCOMES = """import slow_tests
from pathlib import Path
slow_tests.slow_files = lambda: [slow_tests.ROOT / "test_numbers.py"]
slow_tests.write_record = lambda names: Path("written").write_text(" ".join(names))
from slow_tests import pytest_configure
"""


@pytest.mark.parametrize(
    ("body", "flags", "recorded"),
    [
        ("pass", "-p xdist -n1", True),
        ("pass", "-k 1", False),
        pytest.param("assert number < 2", "", False, marks=pytest.mark.slow),
        ("number < 2 or pytest.skip('not here')", "-p xdist -n1", False),
        pytest.param("if number == 1: raise KeyboardInterrupt", "", False, marks=pytest.mark.slow),
    ],
)
def test_a_file_is_recorded_when_all_its_slow_tests_passed(
    body: str, flags: str, recorded: bool, tmp_path: Path
) -> None:
    (tmp_path / "test_numbers.py").write_text(SLOW_FILE.format(body).replace("SLOW", "slow"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: s\n    gpu: g\n")
    (tmp_path / "outcomes.py").write_text(OUTCOMES)
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}:{tmp_path}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "outcomes", "-m", "slow and not gpu", *flags.split()]
    done = subprocess.run([*command, "test_numbers.py"], cwd=tmp_path, env=environ, capture_output=True, check=False)
    assert (done.returncode == 0) == (body == "pass" or "skip" in body), done.stdout
    written = tmp_path / "written"
    assert (written.read_text() if written.exists() else "") == ("test_numbers.py" if recorded else "")


def test_a_file_with_slow_tests_is_found_whichever_distribution_it_is_in() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in slow_tests.slow_files()}
    assert found >= {"tests", "backends", "core", "conformance"}
