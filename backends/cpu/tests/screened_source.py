"""The search of the largest logit alone, compiled from its source for a level, and with faults that a test plants."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.backend.native_code import compile_library
from evener_backend_cpu.levels import Level
from evener_backend_cpu.native_library import SOURCES, compile_flags

#: What the library of all kernels exports, without the others, which take a minute to compile.
_ENTRY = """
static int planted = 0;
#define FAULT(n) (planted == n)
#include "screened.h"
extern "C" {
void plant(int number) { planted = number; }
int evener_largest(const Screened* s, const float* x, const float* norm, const bf16* bias, float eps, float offset,
                   float certainty, int64_t few, int32_t* id, int64_t* candidates, int64_t threads, float factor,
                   float cap) {
  static thread_local Scratch memory;
  return largest(s, x, norm, bias, eps, offset, certainty, few, id, candidates, threads, factor, cap, memory);
}
int evener_code_rows(const Screened* s, const bf16* from, int64_t threads) {
  PASS(check_screened(s, threads));
  return code_rows(*s, from, threads);
}
}
"""


class SearchLibrary:
    """Compiled into ``folder``, and kept in the user's cache.

    Args:
        level: None: this machine's processor.
        faults: places of the source, and what stands there with faults; ``FAULT(3)`` is true while 3 is planted.
    """

    def __init__(
        self, folder: Path, level: Level | None = None, faults: Mapping[str, str] | None = None, *flags: str
    ) -> None:
        made = folder / "native"
        shutil.copytree(SOURCES, made)
        (made / "search.cpp").write_text(_ENTRY)
        text = (made / "screened.h").read_text()
        for place, other in (faults or {}).items():
            assert text.count(place) == 1, f"{text.count(place)} times in the source: {place}"
            text = text.replace(place, other)
        (made / "screened.h").write_text(text)
        words = ["-O1" if flag == "-O3" else flag for flag in (*compile_flags(level), *flags)]
        path = compile_library(made / "search.cpp", words, "cpu-kernels-tests", "the search of a test")
        assert isinstance(path, Path), path
        library = ctypes.CDLL(str(path))
        self.plant: Any = library.plant
        pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self.largest: Any = library.evener_largest
        self.largest.argtypes = (*(pointer,) * 4, *(number,) * 3, size, pointer, pointer, size, number, number)
        self.code_rows: Any = library.evener_code_rows
        self.code_rows.argtypes = pointer, pointer, size
