"""The C++ kernels: compiled on first use, cached, and called through ctypes, which releases the GIL."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener_backend_cpu.isa import Processor

SOURCES = Path(__file__).parent / "native"
log = logging.getLogger("evener.backend.cpu")
_TIMEOUT_S = 120
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "layer": (ctypes.c_int, (_P, _P, _I, _P, _P, _P, _P, _I, _I, _I)),
    "scratch": (_I, (_P, _I, _I, _I)),
    "linear": (ctypes.c_int, (_P, _I, _P, _P, _P, _I, _I, _P, _I)),
    "linear_wide": (ctypes.c_int, (_P, _I, _P, _P, _P, _I, _I, _P, _I)),
    "grouped": (ctypes.c_int, (_P, _I, _P, _I, _I, _P, _P, _I, _I, _P, _I)),
    "experts": (ctypes.c_int, (_P, _I, _P, _P, _I)),
    "experts_scratch": (_I, (_P, _I, _I)),
    "attend": (ctypes.c_int, (_P, _P, _P, _P, _P, _I)),
    "write": (None, (_P, _P, _P, _I, _P, _I, _I)),
    "norm": (None, (_P, _I, _P, _P, _P, _I, _I, _F, _F, _I)),
    "rotary": (None, (_P, _I, _P, _I, _I, _P, _I, _I, _I, _I, _I, _I, _P, _I)),
    "act": (None, (_P, _P, _I, _I, _I, _I)),
    "greedy": (None, (_P, _I, _I, _P)),
    "sample": (None, (_P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _I)),
}
_SUFFIXES = {"float32": "f32", "bfloat16": "bf16"}


class Geometry(ctypes.Structure):
    """``struct Geometry`` of attention.h."""

    _fields_ = [
        *((name, _I) for name in ("heads", "kv_heads", "d", "dv", "block", "page_bytes", "window", "chunked")),
        ("scale", _F),
        ("softcap", _F),
        ("pages", _P),
    ]


class Step(ctypes.Structure):
    """``struct Step`` of attention.h."""

    _fields_ = [
        *((name, _I) for name in ("tokens", "requests", "slots64", "table_stride", "items", "parts")),
        *((name, _P) for name in ("slots", "query_start", "kv_lens", "table", "plan")),
    ]


class Segment(ctypes.Structure):
    """``struct Segment`` of quant_gemm.h."""

    _fields_ = [*((name, _I) for name in ("kind", "first", "rows")), ("data", _P)]


class Blocks(ctypes.Structure):
    """``struct Blocks`` of quant_gemm.h."""

    _fields_ = [("count", _I), ("segments", ctypes.POINTER(Segment))]


class Matrix(ctypes.Structure):
    """``struct Matrix`` of quant_gemm.h: one of the two is null."""

    _fields_ = [("plain", _P), ("blocks", _P)]


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


@dataclass(frozen=True)
class Unavailable:
    """No compiled kernels, and why, in words for ``explain``."""

    reason: str


class Native:
    """The loaded kernels.

    Attributes:
        path: the shared library.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, str], Any] = {}
        self.plan = self._library.evener_plan
        self.plan.restype, self.plan.argtypes = _I, (_P, _P, _P, _I, _P, _P)
        self.tile_bytes, self.pack = self._library.evener_tile_bytes, self._library.evener_pack
        self.tile_bytes.restype, self.tile_bytes.argtypes = _I, (_I, _I)
        self.pack.restype, self.pack.argtypes = None, (_I, _P, _I, _I, _I, _P, _I)

    def function(self, name: str, dtype: str) -> Any:
        """Kernel ``name`` for a dtype of ``DTYPES``; takes addresses and integers."""
        function = self._functions.get((name, dtype))
        if function is None:
            function = self._functions[name, dtype] = getattr(self._library, f"evener_{name}_{_SUFFIXES[dtype]}")
            function.restype, function.argtypes = _SIGNATURES[name]
        return function


DTYPES = frozenset(_SUFFIXES)


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "evener" / "cpu-kernels"


def load(processor: Processor, compiler: str | None = None) -> Native | Unavailable:
    """The kernels for this processor, from the cache or compiled now."""
    found = _compiler(compiler)
    if isinstance(found, Unavailable):
        return found
    flags = _flags()
    path = cache_folder() / f"{_key(found, flags, processor)}.so"
    if not path.exists():
        problem = _compile(found, flags, path)
        if problem is not None:
            return problem
    try:
        return Native(path)
    except OSError as error:
        return Unavailable(f"the compiled kernels cannot be loaded: {error}")


def _compiler(wanted: str | None) -> str | Unavailable:
    if wanted:
        found = shutil.which(wanted)
        return found or Unavailable(f"cpu.compiler={wanted} was not found; install it or leave the option out")
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return Unavailable("no C++ compiler was found (g++, clang++, c++); install one, e.g. apt install g++")


def _flags() -> tuple[str, ...]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return ("-O3", native, "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=fast", "-w")


def _key(compiler: str, flags: tuple[str, ...], processor: Processor) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    for word in (compiler, *flags, processor.name, *sorted(processor.features)):
        digest.update(word.encode() + b"\0")
    digest.update(version)
    return digest.hexdigest()[:24]


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> Unavailable | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "kernels.so"
            command = [compiler, *flags, str(SOURCES / "kernels.cpp"), "-o", str(made)]
            log.info("compiling the kernels for this machine, once: about ten seconds")
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode:
                lines = done.stderr.splitlines()
                error = next((line for line in lines if "error" in line), done.stderr.strip()[-200:])
                return Unavailable(f"{compiler} could not compile the kernels: {error}")
            os.replace(made, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(f"the kernels could not be compiled into {path.parent}: {error}")
    return None
