"""The C++ kernels, called through ctypes, which releases the GIL.

They come from the wheel, where it has them for this processor (``levels.py``), or are compiled on first use and cached.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.backend.native_code import Unavailable, compile_library
from evener_backend_cpu import levels
from evener_backend_cpu.isa import LIMITS, Processor

log = logging.getLogger("evener.native")
SOURCES = Path(__file__).parent / "native"
#: Where a wheel keeps libraries for levels of x86-64; a source tree has no such folder.
BUILT = Path(__file__).parent / "built"
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "layer": (ctypes.c_int, (_P, _P, _I, _P, _P, _P, _P, _I, _I, _I)),
    "scratch": (_I, (_P, _I, _I, _I)),
    "linear": (ctypes.c_int, (_P, _I, _P, _P, _P, _I, _I, _P, _I)),
    "linear_wide": (ctypes.c_int, (_P, _I, _P, _P, _P, _I, _I, _P, _I)),
    "rows_of": (ctypes.c_int, (_P, _I, _I, _P, _I, _I, _F, _P, _I)),
    "grouped": (ctypes.c_int, (_P, _I, _P, _I, _I, _P, _P, _I, _I, _P, _I)),
    "experts": (ctypes.c_int, (_P, _I, _P, _P, _I)),
    "routed": (ctypes.c_int, (_P, _I, _P, _P, _P, _P, _I)),
    "routed_aside": (ctypes.c_int, (_P, _P, _I, _P, _P, _P, _P, _I, _P)),
    "answer": (ctypes.c_int, (_P, _I, _I, _I, _P, _P)),
    "experts_scratch": (_I, (_P, _I, _I)),
    "attend": (ctypes.c_int, (_P, _P, _P, _P, _P, _I)),
    "write": (ctypes.c_int, (_P, _P, _P, _I, _P, _I, _I)),
    "norm": (ctypes.c_int, (_P, _I, _P, _P, _P, _I, _I, _F, _F, _I)),
    "rotary": (ctypes.c_int, (_P, _I, _P, _I, _I, _P, _I, _I, _I, _I, _I, _I, _P, _I, _I)),
    "act": (ctypes.c_int, (_P, _P, _I, _I, _I, _I)),
    "mix": (ctypes.c_int, (_P, _P, _P, _I, _I, _I, _I)),
    "greedy": (ctypes.c_int, (_P, _I, _I, _P)),
    "sample": (ctypes.c_int, (_P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _I)),
    "mask": (ctypes.c_int, (_P, _I, _I, _P, _I)),
}
#: Of ``enum Result`` in check.h.
_NO_MEMORY, _WRONG = 1, 2
_SUFFIXES = {"float32": "f32", "bfloat16": "bf16"}


class Geometry(ctypes.Structure):
    """``struct Geometry`` of attention.h."""

    _fields_ = [
        *(
            (name, _I)
            for name in ("heads", "kv_heads", "d", "dv", "block", "page_bytes", "window", "chunked", "blocks", "stored")
        ),
        ("scale", _F),
        ("softcap", _F),
        ("pages", _P),
        ("slopes", _P),
        ("key_scales", _P),
        ("value_scales", _P),
    ]


class Step(ctypes.Structure):
    """``struct Step`` of attention.h."""

    _fields_ = [
        *((name, _I) for name in ("tokens", "requests", "slots64", "table_stride", "table_columns", "items", "parts")),
        ("checked", ctypes.c_uint64),
        *((name, _P) for name in ("slots", "query_start", "kv_lens", "table", "plan")),
    ]


class Segment(ctypes.Structure):
    """``struct Segment`` of quant_gemm.h."""

    _fields_ = [*((name, _I) for name in ("kind", "first", "rows")), ("data", _P)]


class Stored(ctypes.Structure):
    """``struct Stored`` of stored_gemm.h."""

    _fields_ = [("weight", _P), ("scale", _P), *((name, _I) for name in ("high", "wide", "blocks"))]


class Ordered(ctypes.Structure):
    """``struct Ordered`` of quant_gemm.h."""

    _fields_ = [("tiles", _P), ("order", _P), ("columns", _I), ("form", _I)]


class Blocks(ctypes.Structure):
    """``struct Blocks`` of quant_gemm.h."""

    _fields_ = [("count", _I), ("segments", ctypes.POINTER(Segment))]


class Matrix(ctypes.Structure):
    """``struct Matrix`` of quant_gemm.h: one of the two is null."""

    _fields_ = [("plain", _P), ("blocks", _P)]


class Screened(ctypes.Structure):
    """``struct Screened`` of screened.h."""

    _fields_ = [
        *((name, _P) for name in ("values", "codes", "scales", "mean", "spread", "dither")),
        ("rows", _I),
        ("columns", _I),
    ]


class Layer(ctypes.Structure):
    """``struct Layer`` of layer.h."""

    _fields_ = [
        ("g", Geometry),
        *((name, _I) for name in ("hidden", "rotary", "interleaved", "inner", "activation", "packed")),
        *((name, _F) for name in ("eps", "offset", "mlp_eps", "mlp_offset")),
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *(
            (name, _P)
            for name in (
                "norm",
                "qkv_bias",
                "q_norm",
                "k_norm",
                "cos_sin",
                "o_bias",
                "sinks",
                "post_norm",
                "query_scale",
                "mlp_norm",
                "gate_up_bias",
                "down_bias",
                "mlp_post_norm",
            )
        ),
        ("positions", _I),
    ]


class Experts(ctypes.Structure):
    """``struct Experts`` of experts.h."""

    _fields_ = [
        *(
            (name, _I)
            for name in (
                "hidden",
                "inner",
                "count",
                "top",
                "slots",
                "copy_columns",
                "scoring",
                "groups",
                "top_groups",
                "group_best",
                "renormalize",
                "activation",
                "shared_inner",
                "packed",
                "packed_inner",
                "packed_shared",
            )
        ),
        *((name, _F) for name in ("eps", "offset", "scale", "alpha", "limit")),
        *((name, _P) for name in ("gate_up", "down")),
        *((name, Matrix) for name in ("router", "shared_gate_up", "shared_down", "shared_gate")),
        *(
            (name, _P)
            for name in (
                "norm",
                "post_norm",
                "router_bias",
                "gate_up_bias",
                "down_bias",
                "correction",
                "slot_of",
                "copies",
            )
        ),
    ]


class Native:
    """The loaded kernels.

    Attributes:
        path: the shared library.
        tiles_error: the error number with which the system refuses the AMX tile registers that the kernels were
            compiled for, so that they do without; else 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.tiles_error = int(self._library.evener_tiles_error())
        self._functions: dict[tuple[str, str], Any] = {}
        self._problem = self._library.evener_problem
        self._problem.restype = ctypes.c_char_p
        self.plan = self._library.evener_plan
        self.plan.restype, self.plan.argtypes, self.plan.errcheck = ctypes.c_int, (_P, _P, _I), self._check
        self._library.evener_aside_make.restype = _P
        self.tile_bytes, self.pack = self._library.evener_tile_bytes, self._library.evener_pack
        self.tile_bytes.restype, self.tile_bytes.argtypes = _I, (_I, _I)
        self.pack.restype, self.pack.argtypes = ctypes.c_int, (_I, _P, _I, _I, _I, _P, _I)
        self.pack.errcheck = self._check
        self.code_rows, self.largest = self._library.evener_code_rows, self._library.evener_largest
        self.code_rows.argtypes, self.code_rows.errcheck = (_P, _P, _I), self._check
        self.largest.argtypes, self.largest.errcheck = (_P, _P, _P, _P, _F, _F, _F, _I, _P, _P, _I, _F, _F), self._check
        self.largest_scratch = self._library.evener_largest_scratch
        self.largest_scratch.restype, self.largest_scratch.argtypes = _I, (_I, _I, _I)

    def aside(self) -> Aside:
        """A thread for one call of ``routed_aside`` at a time. It ends with the object.

        Raises:
            MemoryError: the system gives no thread.
        """
        handle = self._library.evener_aside_make()
        if not handle:
            raise MemoryError("the system gives no further thread; raise its limit of processes (ulimit -u)")
        return Aside(self._library, handle, self._check)

    def _check(self, result: Any, function: Any, arguments: Any) -> Any:
        """Raise what a kernel's ``Result`` (check.h) says."""
        if result == _NO_MEMORY:
            raise MemoryError("no memory for a kernel's scratch; lower infer.step_tokens or infer.kv_memory")
        if result == _WRONG:
            raise ValueError(f"{function.__name__} was called with wrong arguments: {self._problem().decode()}")
        return result

    def function(self, name: str, dtype: str) -> Any:
        """Kernel ``name`` for a dtype of ``DTYPES``; takes addresses and integers.

        A call raises ValueError, and touches no memory, if sizes do not fit each other or an index is out of range; it
        raises MemoryError if there is no memory for its scratch.
        """
        function = self._functions.get((name, dtype))
        if function is None:
            function = self._functions[name, dtype] = getattr(self._library, f"evener_{name}_{_SUFFIXES[dtype]}")
            function.restype, function.argtypes = _SIGNATURES[name]
            if function.restype is ctypes.c_int:  # the others return bytes
                function.errcheck = self._check
        return function


class Aside:
    """A thread of the library, which computes while Python goes on.

    Attributes:
        handle: its address.
    """

    def __init__(self, library: ctypes.CDLL, handle: int, check: Any) -> None:
        self.handle, self._end, close = handle, library.evener_aside_end, library.evener_aside_close
        self._end.restype, self._end.argtypes, self._end.errcheck = ctypes.c_int, (_P, _P), check
        close.restype, close.argtypes = None, (_P,)
        weakref.finalize(self, _close, close, handle, os.getpid()).atexit = False

    def end(self) -> int:
        """Wait for the call that has begun; the nanoseconds that it took. Raises what the call would."""
        taken = _I()
        self._end(self.handle, ctypes.addressof(taken))
        return taken.value


def _close(close: Any, handle: int, process: int) -> None:
    """End the thread, which a child of a fork does not have."""
    if os.getpid() == process:
        close(handle)


DTYPES = frozenset(_SUFFIXES)


def compile_flags(level: levels.Level | None = None) -> tuple[str, ...]:
    """What the compiler gets beside the source and the output: code for ``level``, else this machine's processor."""
    native = ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)
    target = native if level is None else level.flags
    return "-O3", *target, "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=fast", "-w"


def load(processor: Processor, compiler: str | None = None) -> Native | Unavailable:
    """The kernels for this processor: the wheel's, else from the cache or compiled now.

    Args:
        compiler: use this one, not what the wheel has.
    """
    if compiler and shutil.which(compiler) is None:
        return Unavailable(f"cpu.compiler={compiler} was not found; install it or leave the option out")
    for built in () if compiler else levels.usable(processor.words, SOURCES, BUILT):
        try:
            return _opened(built, processor)
        except OSError as error:  # built for a newer system
            log.info("%s, which the wheel brought, cannot be loaded: %s", built.name, error)
    # "-march=native" gives other code on another machine, which may share this home folder.
    depends = (processor.name, *sorted(processor.features)) if processor.limit is None else ()
    flags = compile_flags(None if processor.limit is None else LIMITS[processor.limit])
    if "avx512_bf16" in processor.slower:
        flags = (*flags, "-mno-avx512bf16")
    path = compile_library(SOURCES / "kernels.cpp", flags, "cpu-kernels", "the kernels", depends, compiler)
    if isinstance(path, Unavailable):
        return path
    try:
        return _opened(path, processor)
    except OSError as error:
        return Unavailable(f"the compiled kernels cannot be loaded: {error}")


def _opened(path: Path, processor: Processor) -> Native:
    native = Native(path)
    log.info("kernels of the CPU backend use %s: %s", processor.variant, path.name)
    if native.tiles_error:
        log.warning(
            "the kernels do without AMX, so prompts in bfloat16 take several times as long: the system refuses its "
            "tile registers (arch_prctl: %s); allow the system call arch_prctl, as in the seccomp profile of a "
            "container, or set cpu.isa=avx512_bf16 to leave them out", os.strerror(native.tiles_error),
        )  # fmt: skip
    return native
