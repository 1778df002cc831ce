"""Kernels that were compiled when the wheel was built, one library for each level of x86-64. Torch-free.

A wheel may carry them (``hatch_build.py``), so that a machine without a compiler runs them and no first start compiles.
The wheel's builder and its reader both use this module; it imports nothing of evener, since a build has no evener.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_vnni", "avx512_bf16"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")


@dataclass(frozen=True)
class Level:
    """A set of instructions that a library is compiled for.

    Attributes:
        name: part of the library's file name.
        flags: arguments for g++ or clang++.
        needs: words that "flags" of ``/proc/cpuinfo`` must have.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


#: The best first. What the sources ask for by the compiler's macros differs between these and nowhere else.
LEVELS = (
    Level(
        "v4-amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
    ),
    Level("v4-bf16", _BF16_FLAGS, _BF16),
    Level("v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level("v4", ("-march=x86-64-v4",), _V4),
    Level("v3", ("-march=x86-64-v3",), _V3),
)
#: Follow the source and the level's flags. The C++ library is inside: another system may have an older one.
FLAGS = ("-O3", "-mtune=generic", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=fast",
         "-w", "-static-libstdc++", "-static-libgcc")  # fmt: skip
#: Hexadecimal digits of a hash in a file name.
_DIGITS = 24


def file_name(level: Level, sources: Path, library: bytes) -> str:
    """The name of a library: the level, a hash of the files that it was made from, and one of its content."""
    return f"{_prefix(level, sources)}-{_hash(library)}.so"


def usable(words: Collection[str], sources: Path, folder: Path) -> Iterator[Path]:
    """Libraries in ``folder`` that a processor can run, the best first.

    Libraries made from other sources than these and damaged ones are left out.

    Args:
        words: what ``/proc/cpuinfo`` says under "flags".
        sources: the folder of the C++ files.
        folder: where the wheel keeps its libraries; it may be missing.
    """
    if not folder.is_dir():
        return
    for level in LEVELS:
        if level.needs <= set(words):
            pattern = re.compile(re.escape(_prefix(level, sources)) + rf"-([0-9a-f]{{{_DIGITS}}})\.so")
            for path in sorted(folder.iterdir()):
                match = pattern.fullmatch(path.name)
                if match and match.group(1) == _hash(path.read_bytes()):
                    yield path


def _prefix(level: Level, sources: Path) -> str:
    digest = hashlib.sha256("\0".join((*level.flags, *FLAGS)).encode())
    for file in sorted(sources.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{level.name}-{digest.hexdigest()[:_DIGITS]}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
