"""Wheels whose Python modules are compiled: what stays a source, and that the rest runs as before."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import compile_wheel
import pytest

FILES = {
    "__init__.py": "from small.sizes import Size\n",
    "__main__.py": "from small import Size\nprint(Size(2, 3).area())\n",
    "sizes.py": """
from __future__ import annotations
from dataclasses import dataclass, fields
from typing import get_type_hints


@dataclass(frozen=True)
class Size:
    \"\"\"A size.\"\"\"

    width: int
    height: int = 1

    def area(self) -> int:
        return self.width * self.height


def scaled(size: Size, by: int = 2) -> Size:
    return Size(**{field.name: getattr(size, field.name) * by for field in fields(size)})
""",
    "answer.py": "async def answer() -> int:\n    return 1\n",
    "kernel.py": "def launch():\n    from triton import jit\n",
    "strange.py": "import triton.language as tl\n",
    # Cython 3 fails at a function without a name in the index of such an assignment.
    "counts.py": "def count(held, able):\n    held[min(able, key=lambda at: held[at])] += 1\n    return held\n",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A small wheel, compiled and unpacked; and the modules that Cython refused."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = folder / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"small/{name}", text)
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        archive.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.0.dist-info/RECORD", "")
    made, refused = compile_wheel.compile_wheel(wheel, folder, jobs=2)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(folder / "there")]
    subprocess.run([*pip, str(made)], check=True)
    return folder / "there", refused


@pytest.mark.slow
def test_plain_modules_are_compiled_and_the_others_stay_sources(compiled: tuple[Path, list[str]]) -> None:
    folder, refused = compiled
    names = {path.name for path in (folder / "small").iterdir()} - {"__pycache__"}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    sources = {"__init__.py", "__main__.py", "answer.py", "kernel.py", "strange.py"}
    assert names == sources | {f"sizes{suffix}"} | ({"counts.py"} if refused else {f"counts{suffix}"})
    assert refused in ([], ["small.counts"])


@pytest.mark.slow
def test_a_compiled_package_runs_and_its_signatures_can_be_read(compiled: tuple[Path, list[str]]) -> None:
    code = (
        "import inspect, runpy; from small import Size, sizes\n"
        "assert not sizes.__file__.endswith('.py')\n"
        "assert sizes.scaled(Size(2, 3)) == Size(4, 6) and Size(5).area() == 5\n"
        "assert list(inspect.signature(sizes.scaled).parameters) == ['size', 'by']\n"
        "runpy.run_module('small', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=compiled[0], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


def test_the_c_compilers_messages_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small/one.py", "ONE = 1\n")
    monkeypatch.setenv("CC", str(broken))
    assert compile_wheel.main([str(wheel), "--out", str(tmp_path / "out")]) == 1
    assert "no such header" in capsys.readouterr().err
