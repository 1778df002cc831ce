"""Build wheels of our distributions, and optionally of their dependencies: ``make wheels``, ``make wheelhouse``."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def main() -> int:
    """Build into ``--out``, which is emptied first, and print each wheel's path."""
    parser = argparse.ArgumentParser(description="Build wheels.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--with-dependencies", action="store_true", help="add the dependencies' wheels, but not torch")
    parser.add_argument("distributions", type=Path, nargs="+", help="folders that hold a pyproject.toml")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    wheels = build(args.distributions, args.out)
    if args.with_dependencies:
        pinned = [f"{name}=={importlib.metadata.version(name)}" for name in dependencies(map(_name, wheels))]
        _pip_wheel(args.out, pinned)
    print(*sorted(args.out.glob("*.whl")), sep="\n")
    return 0


def build(distributions: Sequence[Path], out: Path) -> list[Path]:
    """Build one wheel for each of the folders ``distributions`` into ``out``."""
    _pip_wheel(out, ["--no-build-isolation", *(str(folder.resolve()) for folder in distributions)])
    return sorted(out.glob("*.whl"))


def dependencies(ours: Iterable[str]) -> list[str]:
    """Dependencies of ``ours`` and their extras that are installed here, without torch and those of torch alone."""
    own = {canonicalize_name(name) for name in ours}
    todo = [(name, extra) for name in own for extra in ("", *_extras(name))]
    seen = set(todo)
    while todo:
        name, extra = todo.pop()
        for line in importlib.metadata.requires(name) or []:
            need = Requirement(line)
            if need.name == "torch" or (need.marker and not need.marker.evaluate({"extra": extra})):
                continue
            if extra and not _is_here(need.name):  # a library for hardware that this machine does not have
                continue
            for entry in ((canonicalize_name(need.name), wanted) for wanted in ("", *need.extras)):
                if entry not in seen:
                    seen.add(entry)
                    todo.append(entry)
    return sorted({name for name, _ in seen} - own)


def _extras(name: str) -> list[str]:
    return importlib.metadata.metadata(name).get_all("Provides-Extra") or []


def _is_here(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _name(wheel: Path) -> str:
    return wheel.name.split("-")[0]


def _pip_wheel(out: Path, what: Sequence[str]) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--wheel-dir", str(out), *what], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
