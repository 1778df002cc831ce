"""The pages for authors: the paths through the code and the excerpts that they show are those of the files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_blocks import DOCS, blocks, documents
from source_tree import ROOT

#: The most hops that each path of architecture.md may have; at commit 4eb39e7 it was 20, 12 and 12, by the same rule.
HOPS = {
    "A request, from HTTP to kernel": 19,
    "A package, from entry point to op table": 11,
    "A weight, from file to packed weight": 11,
}
CORE = ROOT / "core/src/evener"
_ROW = re.compile(r"^\| \d+ \| `([^`]+)` \| ([^|]+) \|", re.MULTILINE)


def section(text: str, heading: str) -> str:
    """What follows ``heading``, up to the next heading of its level or above."""
    level = len(re.match("#+", heading)[0])  # type: ignore[index]
    return re.split(rf"^#{{1,{level}}} ", text.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def defined_names(file: Path) -> set[str]:
    """Classes and methods (``Class.method``), functions at any depth and assigned names of a module."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
            found |= {f"{node.name}.{each.name}" for each in methods}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("path", HOPS)
def test_every_hop_of_a_path_exists_and_no_path_has_become_longer(path: str) -> None:
    hops = _ROW.findall(section((DOCS / "architecture.md").read_text("utf-8"), f"### {path}"))
    assert 0 < len(hops) <= HOPS[path]
    for file, names in hops:
        for name in re.findall(r"`([^`]+)`", names):
            assert name in defined_names(ROOT / file), f"{file} has no {name}"


def test_every_area_of_the_core_stands_in_the_table_with_a_file_to_read_first() -> None:
    text = section((DOCS / "architecture.md").read_text("utf-8"), "## The areas of core")
    shown = dict(re.findall(r"^\| `([^`]+)/` \|[^|]+\| `([^`]+)`", text, re.MULTILINE))
    rooms = {path.parent for path in CORE.rglob("*.py")} - {CORE, CORE / "engine", CORE / "ops/reference"}
    assert shown.keys() == {path.relative_to(CORE).as_posix() for path in rooms}
    assert all((CORE / area / first).is_file() for area, first in shown.items())


def test_the_glossary_is_in_alphabetical_order() -> None:
    text = section((DOCS / "architecture.md").read_text("utf-8"), "## Glossary")
    words = re.findall(r"^\| ([a-z][\w ]*) \|", text, re.MULTILINE)[1:]
    assert words == sorted(words) and len(words) > 30


def test_every_name_in_capitals_in_the_glossary_is_a_class_of_the_core() -> None:
    classes = {name for file in CORE.rglob("*.py") for name in defined_names(file) if name[0].isupper()}
    for page, heading in (("architecture.md", "## Glossary"), ("architecture.zh.md", "## 术语表")):
        text = section((DOCS / page).read_text("utf-8"), heading)
        named = re.findall(r"`([A-Z]\w+)(?:\.\w+)?`", text)
        assert len(named) > 5 and set(named) - classes == set()


def excerpts() -> Iterator[tuple[str, str, str]]:
    """The page, the file and the text of every block that has ``from=``."""
    for page in documents():
        yield from ((str(block), block.values["from"], block.text) for block in blocks(page) if "from" in block.values)


def test_every_excerpt_stands_word_for_word_in_its_file() -> None:
    found = list(excerpts())
    assert found
    for page, file, text in found:
        assert text in (DOCS / "examples" / file).read_text("utf-8"), f"{page} shows what {file} does not hold"


@pytest.mark.parametrize("name", ["backend-author-advanced", "quantization-author", "state-author", "model-author"])
def test_every_path_that_a_page_names_exists(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text("utf-8")
    folders = "core|formats|generation|models|inspection|offload|deploy|conformance|server|backends|tests|docs"
    paths = re.findall(rf"`((?:{folders})/[\w./*-]*)`", text)
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []
