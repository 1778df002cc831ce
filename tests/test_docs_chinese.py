"""Each Chinese page says what its English page says, as far as a test can see: same headings, code, tables, links.

The code blocks of both are equal byte for byte, so the tests that run those of the English page
(``test_docs_examples.py``, ``test_docs_commands.py``, ``test_docs_packages.py``, ``test_docs_authors.py``) cover both.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest
from docs_blocks import DOCS, blocks
from source_tree import ROOT

_FENCE = re.compile(r"^```.*?^```[ \t]*$\n?", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`]+)`")
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
#: Pages for the owners of one kind of card, written shorter in Chinese; they only lead to each other.
_SHORTER = {"install-ascend", "install-gcu", "install-hygon", "install-muxi"}
TRANSLATED = (
    "README", "docs/serving", "docs/operator", "docs/troubleshooting", "docs/hybrid", "docs/first-contact",
    "docs/from-other-engines", "docs/api", "docs/backend-author", "docs/backend-author-advanced", "docs/model-author",
    "docs/quantization-author", "docs/state-author", "docs/architecture", "docs/simulated-devices", "docs/conformance",
    "docs/deploy",
)  # fmt: skip
CHINESE = sorted([*ROOT.glob("*.zh.md"), *DOCS.rglob("*.zh.md")])
EQUAL = [page for page in CHINESE if page.name.removesuffix(".zh.md") not in _SHORTER]


def english(page: Path) -> Path:
    """The English page of a Chinese one."""
    return page.with_name(page.name.removesuffix(".zh.md") + ".md")


def chinese(page: Path) -> Path:
    """The place of the Chinese page of an English one."""
    return page.with_name(page.name.removesuffix(".md") + ".zh.md")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its fenced blocks and without the line that leads to the other language."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    return re.sub(r"^\[(English|中文)\]\(.*\)$", "", text, count=1, flags=re.MULTILINE)


def spans(text: str) -> list[str]:
    """The code in a line or a section; a line's end in it counts as a space."""
    return [" ".join(span.split()) for span in _SPAN.findall(text)]


def headings(page: Path) -> list[tuple[str, str]]:
    """The level (``##``) and title of each heading."""
    return _HEADING.findall(prose(page))


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def sections(page: Path) -> list[str]:
    """What stands below each heading."""
    return _HEADING.split(prose(page))[3::3]


def tables(page: Path) -> list[list[str]]:
    """The rows of each table."""
    found = re.findall(r"(?:^\|.*\|[ ]*\n?)+", prose(page), re.MULTILINE)
    return [table.splitlines() for table in found]


def cells(row: str) -> int:
    """How many cells a row has; a bar in code is none."""
    return _SPAN.sub("", row).replace(r"\|", "").count("|") - 1


def translated(link: str, page: Path) -> str:
    """A link of the English ``page`` as its Chinese page must have it: to the Chinese page, if there is one."""
    name, _, place = link.partition("#")
    target = Path(posixpath.normpath(page.parent / name)) if name else page
    other = chinese(target)
    if "://" in link or other not in CHINESE or (place and other not in EQUAL):
        return link
    if place:
        titles = [anchor(title) for _, title in headings(target)]
        ours = [anchor(title) for _, title in headings(other)]
        index = titles.index(place) if place in titles else len(ours)
        place = ours[index] if index < len(ours) else place
    new = name.removesuffix(".md") + ".zh.md" if name else ""
    return f"{new}#{place}" if place else new


def differences(ours: Counter[str], theirs: Counter[str]) -> str:
    """What ``ours``, of a Chinese page, lacks of ``theirs``, and what it has too often."""
    lacks, more = (", ".join(f"`{name}`" for name in sorted(counter)) for counter in (theirs - ours, ours - theirs))
    return "; ".join(part for part in (lacks and f"lacks {lacks}", more and f"has {more} and must not") if part)


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_each_page_leads_to_its_other_language_at_the_top(page: Path) -> None:
    for here, line in ((page, f"[English]({english(page).name})"), (english(page), f"[中文]({page.name})")):
        assert line in here.read_text("utf-8").splitlines()[:4], f"{named(here)}: write {line} below the title"


def test_each_page_for_users_and_authors_of_packages_has_a_chinese_one() -> None:
    assert [name for name in TRANSLATED if ROOT / f"{name}.zh.md" not in EQUAL] == []


def code(text: str) -> Counter[str]:
    """The code that a text names, each once."""
    return Counter(set(spans(text)))


def check_headings(page: Path) -> None:
    """Fail with the first heading that a Chinese page lacks or has too much: where levels or the code below differ."""
    ours, theirs = headings(page), headings(english(page))
    if [level for level, _ in ours] == [level for level, _ in theirs]:
        return
    pairs = zip_longest(ours, theirs, sections(page), sections(english(page)), fillvalue="")
    for mine, other, below, there in pairs:
        if mine[:1] != other[:1] or code(below) != code(there):
            place = f"{named(english(page))} has “{' '.join(other)}” where it has “{' '.join(mine)}”"
            count = f"{len(ours)} headings and must have {len(theirs)}"
            pytest.fail(f"{named(page)} has {count}; first difference: {place}")
    pytest.fail(f"{named(page)} has other headings than {named(english(page))}")


@pytest.mark.parametrize("page", EQUAL, ids=lambda page: page.name)
def test_a_chinese_page_has_the_headings_of_the_english_one(page: Path) -> None:
    check_headings(page)


@pytest.mark.parametrize("page", EQUAL, ids=lambda page: page.name)
def test_a_chinese_page_has_the_code_blocks_of_the_english_one_byte_for_byte(page: Path) -> None:
    ours, theirs = list(blocks(page)), list(blocks(english(page)))
    for mine, block in zip(ours, theirs, strict=False):
        a, b = ((each.language, each.flags, each.values, each.text) for each in (mine, block))
        assert a == b, f"copy the block at {block} to {mine}, comments too"
    assert len(ours) == len(theirs), f"{named(page)} has {len(ours)} code blocks and must have {len(theirs)}"


@pytest.mark.parametrize("page", EQUAL, ids=lambda page: page.name)
def test_a_chinese_page_names_the_same_code_in_each_section(page: Path) -> None:
    check_headings(page)
    pairs = zip(headings(page), sections(page), sections(english(page)), strict=True)
    wrong = [
        f"{named(page)}, “{title}”: {found}"
        for (_, title), ours, theirs in pairs
        if (found := differences(code(ours), code(theirs)))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", EQUAL, ids=lambda page: page.name)
def test_a_chinese_page_has_the_tables_of_the_english_one(page: Path) -> None:
    ours, theirs = tables(page), tables(english(page))
    for mine, table in zip_longest(ours, theirs, fillvalue=["(no table)"]):
        for row, other in zip_longest(mine, table, fillvalue="(no row)"):
            assert cells(row) == cells(other), f"{named(page)}: the row {row} must have the cells of {other}"
            found = differences(Counter(spans(row)), Counter(spans(other)))
            assert not found, f"{named(page)}: the row {row} of {other} {found}"


@pytest.mark.parametrize("page", EQUAL, ids=lambda page: page.name)
def test_a_chinese_page_has_the_links_of_the_english_one(page: Path) -> None:
    check_headings(page)  # anchors are found by the place of their heading
    ours = Counter(set(_LINK.findall(prose(page))))
    theirs = Counter({translated(link, english(page)) for link in _LINK.findall(prose(english(page)))})
    found = differences(ours, theirs)
    assert not found, f"{named(page)}, links: {found}"
