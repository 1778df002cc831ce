"""torch's version file, read as text."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from evener.backend import torch_marks


def test_the_installed_torch_is_read_without_importing_it() -> None:
    version = torch_marks.read().version
    assert version is not None
    assert version.split("+")[0] == importlib.metadata.version("torch").split("+")[0]


def test_every_simple_assignment_is_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "version.py"
    file.write_text(
        "from typing import Optional\n__version__ = '2.9.0+x'\ndebug = False\n"
        "one: Optional[str] = None\ntwo: Optional[str] = '6.4'\nthree = four = 3\nfive = str(5)\nsix: int\n"
    )
    marks = torch_marks.read(file)
    assert marks.version == "2.9.0+x"
    assert marks.values == {
        "__version__": "2.9.0+x",
        "debug": False,
        "one": None,
        "two": "6.4",
        "three": 3,
        "four": 3,
    }


def test_a_version_file_that_cannot_be_read_is_a_reason(tmp_path: Path) -> None:
    assert "cannot be read" in torch_marks.read(tmp_path / "none.py").reason
    (tmp_path / "torn.py").write_text("x = (")
    assert "cannot be read" in torch_marks.read(tmp_path / "torn.py").reason
    (tmp_path / "empty.py").touch()
    assert "no __version__" in torch_marks.read(tmp_path / "empty.py").reason
