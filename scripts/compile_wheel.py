"""Turn the Python modules of wheels into compiled ones.

    python scripts/compile_wheel.py dist/evener-*.whl --out compiled

Cython translates each module to C, and a C compiler makes an extension module of it, which takes its place. The
wheel that comes out is for this version of Python and this platform. Some modules stay as they are:

- ``__init__.py`` and ``__main__.py``, which Python looks for by name;
- modules with coroutines: ``inspect.iscoroutinefunction`` says no to compiled ones, and web frameworks ask it;
- modules of Triton, whose compiler reads the source of its kernels;
- modules that Cython cannot translate: they are named.

Needs ``pip install cython`` and a C compiler.
"""

from __future__ import annotations

import argparse
import ast
import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from packaging.tags import sys_tags

_DIRECTIVES = "language_level=3str,binding=True,annotation_typing=False,embedsignature=False"
_FLAGS = ("-O2", "-fPIC", "-shared", "-fwrapv", "-fno-strict-aliasing", "-w")


def main(argv: Sequence[str]) -> int:
    """Compile each wheel into ``--out`` and print its path; 1 if the C compiler refused a module."""
    parser = argparse.ArgumentParser(description="Compile the Python modules of wheels.")
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for the compiled wheels")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time; default: %(default)s")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for wheel in options.wheels:
            made, refused = compile_wheel(wheel, options.out, options.jobs)
            print(made, *(f"  stays as source, Cython cannot translate it: {name}" for name in refused), sep="\n")
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))}\n{error.stdout}{error.stderr}", file=sys.stderr)
        return 1
    return 0


def compile_wheel(wheel: Path, out: Path, jobs: int) -> tuple[Path, list[str]]:
    """Write a compiled copy of ``wheel`` into the folder ``out``; returns its path and the modules that Cython refused.

    Raises:
        subprocess.CalledProcessError: the C compiler refused a module.
    """
    tag = next(sys_tags())
    name = "-".join((*wheel.name.split("-")[:2], str(tag))) + ".whl"
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root)
        sources = [path for path in sorted(root.rglob("*.py")) if can_be_compiled(path)]
        with ThreadPoolExecutor(jobs) as threads:
            refused = list(filter(None, threads.map(partial(_compile, root), sources)))
        (info,) = root.glob("*.dist-info")
        _retag(info / "WHEEL", str(tag))
        _record(root, info / "RECORD")
        with zipfile.ZipFile(out / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(filter(Path.is_file, root.rglob("*"))):
                archive.write(path, path.relative_to(root))
    return out / name, refused


def can_be_compiled(path: Path) -> bool:
    """Whether a compiled form of a module behaves as its source does: see the beginning of this file."""
    if path.name in ("__init__.py", "__main__.py"):
        return False
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.AsyncFunctionDef):
            return False
        if isinstance(node, ast.Import) and any(each.name.split(".")[0] == "triton" for each in node.names):
            return False
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
            return False
    return True


def _compile(root: Path, source: Path) -> str | None:
    """Put an extension module in the place of ``source``; returns the module's name if Cython refuses it."""
    name = ".".join(source.relative_to(root).with_suffix("").parts)
    translated = source.with_suffix(".c")
    module = source.with_name(source.stem + sysconfig.get_config_var("EXT_SUFFIX"))
    cython = [sys.executable, "-m", "cython", "-3", "-X", _DIRECTIVES, "--module-name", name]
    done = subprocess.run([*cython, "-o", str(translated), str(source)], cwd=root, capture_output=True, check=False)
    if done.returncode:
        translated.unlink(missing_ok=True)
        return name
    compiler = [os.environ.get("CC", "cc"), *_FLAGS, f"-I{sysconfig.get_path('include')}"]
    command = [*compiler, str(translated), "-o", str(module)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    source.unlink()
    translated.unlink()
    return None


def _retag(file: Path, tag: str) -> None:
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    file.write_text("\n".join((*lines, "Root-Is-Purelib: false", f"Tag: {tag}", "")), "utf-8")


def _record(root: Path, record: Path) -> None:
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for path in sorted(filter(Path.is_file, root.rglob("*"))):
        if path != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            writer.writerow((path.relative_to(root).as_posix(), f"sha256={digest}", path.stat().st_size))
    writer.writerow((record.relative_to(root).as_posix(), "", ""))
    record.write_text(rows.getvalue(), "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
