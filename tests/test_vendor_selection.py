"""When the tests over vendors' own software run: a package or a contract changed since they passed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import vendor_tests
from source_tree import ROOT


def repository(folder: Path) -> Path:
    """A repository with one file in each watched folder."""
    for name in vendor_tests.WATCHED:
        (folder / name).mkdir(parents=True)
        (folder / name / "a.py").write_text("x = 1\n")
        (folder / name / "README.md").write_text("words\n")
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def test_a_change_of_code_is_seen_and_one_of_prose_is_not(tmp_path: Path) -> None:
    root, record = repository(tmp_path / "root"), tmp_path / "record.json"
    assert vendor_tests.changed(record, root) == list(vendor_tests.WATCHED), "nothing is recorded"
    record.write_text(json.dumps({"folders": vendor_tests.digests(root)}))
    (root / "backends/gcu/README.md").write_text("other words\n")
    assert vendor_tests.changed(record, root) == []
    (root / "core/src/evener/contracts/a.py").write_text("x = 2\n")
    (root / "backends/ascend/a.py").rename(root / "backends/ascend/b.py")
    assert vendor_tests.changed(record, root) == ["backends/ascend", "core/src/evener/contracts"]


def test_every_watched_folder_exists_and_every_vendors_package_is_watched() -> None:
    assert all((ROOT / folder).is_dir() for folder in vendor_tests.WATCHED)
    others = {"cpu", "cuda", "triton", "triton-binaries"}
    vendors = {path.parent.name for path in ROOT.glob("backends/*/pyproject.toml")} - others
    assert {f"backends/{name}" for name in vendors} <= set(vendor_tests.WATCHED)
