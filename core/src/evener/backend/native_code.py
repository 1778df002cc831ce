"""C++ code of a package, compiled on first use by the machine's compiler and cached for the user. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evener.folders.cache import cache_folder, is_trusted, make_private

log = logging.getLogger("evener.native")
#: Ends a compiler after 300 seconds of processor time: on a busy machine it may take long. A limit on wall time would
#: also leave the compiler running that its driver started.
_LIMITED = ("/bin/sh", "-c", 'ulimit -t 300; exec "$@"', "sh")


@dataclass(frozen=True)
class Unavailable:
    """There is no library; ``reason`` says why, for ``evener explain``."""

    reason: str


def compile_library(
    source: Path, flags: Sequence[str], part: str, what: str, depends: Sequence[str] = (), compiler: str | None = None
) -> Path | Unavailable:
    """Return the shared library of ``source``, from the user's cache folder or compiled now.

    The cache key covers the compiler's version, all files in the folder of ``source``, ``flags`` and ``depends``. The
    file's name has a hash of its content: a file that is damaged, or that others could have written, is not loaded, but
    made again. A failed compilation leaves no file behind.

    Args:
        source: the file to compile.
        flags: arguments for the compiler, including libraries; they follow ``source``.
        part: subfolder of the cache folder, such as "cpu-kernels".
        what: name of the library in messages, such as "the kernels".
        depends: whatever else the library depends on: the processor, versions.
        compiler: default: the first of $CXX, g++, clang++ and c++ that is installed.
    """
    names = (compiler,) if compiler else (os.environ.get("CXX") or "g++", "g++", "clang++", "c++")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        none = f"the compiler {compiler} was not found" if compiler else "no C++ compiler was found (g++, clang++, c++)"
        return Unavailable(f"{none}; install one, e.g. apt install g++")
    folder = cache_folder(part)
    try:
        key = _key(found, source, (*flags, *depends))
        whole = (p for p in folder.glob(f"{key}-*.so") if is_trusted(p) and p.name == _file_name(key, p))
        return next(whole, None) or _compile([found, str(source), *flags], folder, key, what)
    except OSError as error:
        return Unavailable(f"{what} could not be compiled into {folder}: {error}")


def _key(compiler: str, source: Path, words: Sequence[str]) -> str:
    digest = hashlib.sha256(_run([compiler, "--version"]).stdout.encode())
    for file in sorted(source.parent.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update("\0".join((compiler, *words)).encode())
    return digest.hexdigest()[:24]


def _file_name(key: str, library: Path) -> str:
    return f"{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}.so"


def _compile(command: Sequence[str], folder: Path, key: str, what: str) -> Path | Unavailable:
    log.info("compiling %s for this machine, once: ten seconds to a minute", what)
    make_private(folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "library.so"
        done = _run([*command, "-o", str(made)])
        if done.returncode:
            error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            return Unavailable(f"{command[0]} could not compile {what}: {error}")
        # Atomic: two processes may compile the same library at the same time, and none may load half of a file.
        path = folder / _file_name(key, made)
        os.replace(made, path)
    return path


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_LIMITED, *command], capture_output=True, text=True, check=False)
