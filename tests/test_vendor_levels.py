"""The level of evidence (docs/support.md) in the name of each test of a vendor's backend, and in the records; and how
large such a package is."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import record_checks
from source_tree import ROOT
from test_architecture import BACKENDS, code_lines

VENDORS = ("ascend", "hygon", "muxi", "gcu")
#: What these targets of the Makefile run.
FOLDERS_OF_TARGETS = {
    "test-vendors-ascend": ROOT / "backends/ascend/vendor_tests",
    "test-vendors-ascend-triton": ROOT / "backends/ascend/triton_tests",
}
_LEVEL = re.compile(r"_(L[0-4])$")


def names(where: Path) -> list[str]:
    """The tests of a file, or of all files below a folder."""
    files = [where] if where.is_file() else sorted(where.rglob("test_*.py"))
    trees = (ast.parse(file.read_text("utf-8")) for file in files)
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if function.name.startswith("test_")]


def levels(where: Path) -> set[str]:
    return {found[1] for name in names(where) if (found := _LEVEL.search(name))}


@pytest.mark.parametrize("folder", [*VENDORS, "parts"])
def test_every_test_of_a_vendors_backend_names_its_level(folder: str) -> None:
    found = [name for where in (ROOT / "backends" / folder).glob("*tests") for name in names(where)]
    assert found
    assert [name for name in found if not _LEVEL.search(name)] == [], "end its name with the level, such as _L1"


def test_a_record_claims_only_a_level_that_tests_of_its_command_name() -> None:
    claims = 0
    for name, check in record_checks.read_checks().items():
        if check["file"] not in VENDORS or "level" not in check:
            continue
        words = shlex.split(check["command"])
        paths = [ROOT / word for word in words if (ROOT / word).exists() and "/" in word]
        paths += [FOLDERS_OF_TARGETS[word] for word in words if word in FOLDERS_OF_TARGETS]
        named = set().union(*(levels(path) for path in paths))
        assert check["level"] in named, f"{name} claims {check['level']}, and its tests name {sorted(named)}"
        claims += 1
    assert claims >= len(VENDORS)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendors_package_stays_small(vendor: str) -> None:
    """What two of them share belongs into ``backends/parts``; what core lacks, into a contract."""
    modules = [m for name, m in BACKENDS.items() if name.partition(".")[0] == f"evener_backend_{vendor}"]
    assert modules and sum(code_lines(module) for module in modules) <= 1200
