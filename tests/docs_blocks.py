"""The fenced blocks of the documents, by what their info strings say of them.

``file=PATH``     a file of an example package; a later block with the same path takes its place
``from=PATH``     an excerpt, line by line, of a file below ``docs/examples``
``smallest``      (beside ``file=``) the file belongs to the smallest version of the package
``run``           a shell command or Python program that works as it stands
``serve``         a shell command that serves until it is stopped
``client``        a program that talks to that server
``error=NAME``    what evener says when NAME happens
``name=NAME``     output or data that a test compares with the real thing

In blocks that are run, ``MODEL_DIR`` stands for a model folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from source_tree import ROOT
from warm import EVENER, warm

DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```(\S*)[ \t]*(.*?)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the words after it (``flags``), its ``key=value`` words, and its text."""

    document: str
    line: int
    language: str
    text: str
    flags: frozenset[str] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    """Every fenced block of ``document``, in order."""
    source = document.read_text(encoding="utf-8")
    for match in _FENCE.finditer(source):
        words = match[2].split()
        yield Block(
            document=document.relative_to(ROOT).as_posix(),
            line=source.count("\n", 0, match.start()) + 1,
            language=match[1],
            text=match[3],
            flags=frozenset(word for word in words if "=" not in word),
            values=dict(word.split("=", 1) for word in words if "=" in word),
        )


def documents() -> list[Path]:
    """README in both languages, CONTRIBUTING, SECURITY and everything in ``docs``."""
    names = ("README", "README.zh", "CONTRIBUTING", "SECURITY")
    return [*(ROOT / f"{name}.md" for name in names), *sorted(DOCS.rglob("*.md"))]


def package_files(document: Path, smallest: bool = False) -> dict[str, str]:
    """The files that ``document`` shows, by path; of the smallest version, or the last version of each."""
    found: dict[str, str] = {}
    for block in blocks(document):
        if "file" in block.values and (not smallest or "smallest" in block.flags):
            found[block.values["file"]] = block.text
    return found


def named(document: Path, key: str) -> dict[str, str]:
    """Texts of the blocks that have ``key=NAME``, by name."""
    return {block.values[key]: block.text for block in blocks(document) if key in block.values}


def write(files: Mapping[str, str], folder: Path) -> None:
    """Write ``files`` below ``folder``."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def install(files: Mapping[str, str], source: Path, target: Path) -> None:
    """Write packages below ``source`` and let pip install each that has a project file into ``target``, offline."""
    write(files, source)
    projects = sorted(str(path.parent) for path in source.glob("*/pyproject.toml"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"),
            *("--no-deps", "--no-build-isolation", "--target", str(target), *projects),
        ],
        check=True,
    )


def wheel_site(example: Path, folder: Path) -> Path:
    """The wheel of the package ``example``, built offline and unpacked into a folder for PYTHONPATH."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
         "--no-build-isolation", "--wheel-dir", str(folder), str(example)],
        check=True,
    )  # fmt: skip
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "site")
    return folder / "site"


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a child process that has ``folders`` before what this process has."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))


def python(site: Path | tuple[Path, ...], home: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder ``home``, with the packages in ``site`` (one folder or several) and no settings of
    evener's."""
    folders = site if isinstance(site, tuple) else (site,)
    mine = {key: value for key, value in os.environ.items() if not key.startswith("EVENER_")}
    mine |= {
        "PYTHONPATH": python_path(*folders),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(home),
        "COLUMNS": "400",
    }
    program = warm() / "python"
    return subprocess.run([program, *words], cwd=home, env={**mine, **environ}, capture_output=True, text=True)


def evener(site: Path, home: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command ``evener`` as ``python`` does."""
    return python(site, home, "-c", EVENER, *words, **environ)
