"""Kernels in CUDA C++: compiled by NVRTC, which torch's wheels carry, and launched by the driver."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from triton.runtime.cache import get_cache_manager

_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
#: Of the cached code.
_FILE = "kernel.cubin"
#: Newest first; the name says the major version.
_NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("gap", ctypes.c_int), ("on", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class _Node(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2``."""

    _fields_ = [
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    ]  # fmt: skip


@cache
def nvrtc() -> ctypes.CDLL:
    """NVIDIA's run-time compiler. Raises OSError without one."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    for name in _NVRTC:
        for path in (*(str(p) for folder in folders for p in sorted(folder.glob(f"*/lib/{name}"))), name):
            try:
                return ctypes.CDLL(path)
            except OSError:
                continue
    raise OSError("there is no NVRTC: install torch's build for CUDA, or nvidia-cuda-nvrtc")


@cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    """Raises RuntimeError with the driver's name of an error."""
    if result:
        name = ctypes.c_char_p()
        _cuda().cuGetErrorName(result, ctypes.byref(name))
        raise RuntimeError(f"CUDA driver: {(name.value or b'?').decode()} ({result})")


def compile_source(source: str, defines: Mapping[str, object], architecture: str) -> bytes:
    """Machine code of ``source`` with these macros. Raises RuntimeError with the compiler's words."""
    lib, program = nvrtc(), ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{k}={v}" for k, v in defines.items())]
    held = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise RuntimeError("NVRTC made no program")
    try:
        code, size = lib.nvrtcCompileProgram(program, len(options), held), ctypes.c_size_t()
        if code:
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {log.value.decode(errors='replace')}")
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


class Place(NamedTuple):
    """Where a launch goes: the stream, the number of its capture (0: none), and the nodes of the captured graph that it
    waits for. Right after a launch in a capture, they are this launch alone."""

    stream: int
    capture: int = 0
    nodes: tuple[int, ...] = ()


class CompiledKernel:
    """A kernel of machine code.

    Args:
        binary: its machine code; name: its function there.
        grid, threads: programs, and threads of one.
        shared: bytes of shared memory of a program.
        early: it may start before the launch ahead of it has ended (programmatic dependent launch).
    """

    def __init__(self, binary: bytes, name: str, grid: int, threads: int, shared: int, early: bool = True) -> None:
        lib, self._module, self._function = _cuda(), ctypes.c_void_p(), ctypes.c_void_p()
        _check(lib.cuModuleLoadData(ctypes.byref(self._module), binary))
        _check(lib.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        _check(lib.cuFuncSetAttribute(self._function, _SHARED, shared))
        self._attribute = _Attribute(id=_OVERLAP, on=1)
        self._config = _Config((grid, 1, 1), (threads, 1, 1), shared, None, ctypes.pointer(self._attribute), int(early))
        self._held = (ctypes.c_void_p * 1)()

    def place(self, device: torch.device) -> Place:
        """Where the next launch on the current stream of ``device`` goes."""
        stream = torch.cuda.current_stream(device).cuda_stream
        status, number, count = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_size_t()
        nodes, edges, lib = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p(), _cuda()
        asked = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, ctypes.byref(nodes)
        if hasattr(lib, "cuStreamGetCaptureInfo_v3"):  # since CUDA 12.3, edges carry data and must be asked for
            _check(lib.cuStreamGetCaptureInfo_v3(*asked, ctypes.byref(edges), ctypes.byref(count)))
        else:
            _check(lib.cuStreamGetCaptureInfo_v2(*asked, ctypes.byref(count)))
        if not status.value:
            return Place(stream)
        return Place(stream, number.value, tuple(nodes[at] or 0 for at in range(count.value)))

    def __call__(self, stream: int, argument: ctypes.Structure) -> None:
        """Launch it with one argument, which is copied."""
        self._config.stream = stream
        self._held[0] = ctypes.addressof(argument)
        _check(_cuda().cuLaunchKernelEx(ctypes.byref(self._config), self._function, self._held, None))

    def change(self, place: Place, argument: ctypes.Structure) -> bool:
        """Give another argument, which is copied, to the launch in a captured graph after which ``place`` is. False:
        the driver is older than CUDA 12.0, which brought this."""
        lib = _cuda()
        if not hasattr(lib, "cuGraphKernelNodeSetParams_v2"):
            return False
        (node,), config = place.nodes, self._config
        self._held[0] = ctypes.addressof(argument)
        changed = _Node(self._function, config.grid, config.block, config.shared, ctypes.addressof(self._held))
        _check(lib.cuGraphKernelNodeSetParams_v2(ctypes.c_void_p(node), ctypes.byref(changed)))
        return True


class Driver:
    """Compiles and loads kernels for one kind of GPU, by default Hopper. Triton's cache folder keeps machine code."""

    def __init__(self, architecture: str = "sm_90a") -> None:
        self.architecture = architecture

    def refusal(self) -> str | None:
        """Why nothing can be compiled; None if it can."""
        try:
            nvrtc()
        except OSError as error:
            return str(error)
        return None

    def compile(self, source: str, defines: Mapping[str, object]) -> bytes:
        """Machine code, from the cache or made now.

        Raises:
            OSError: there is no compiler.
            RuntimeError: the source has errors; with the compiler's words.
        """
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        what = repr((source, sorted(defines.items()), self.architecture, major.value, minor.value))
        cache = get_cache_manager(hashlib.sha256(what.encode()).hexdigest())
        found = cache.get_file(_FILE)
        if found is None:
            found = cache.put(compile_source(source, defines, self.architecture), _FILE, binary=True)
        return Path(found).read_bytes()

    def kernel(
        self, code: bytes, name: str, grid: int, threads: int, shared: int, early: bool = True
    ) -> CompiledKernel:
        """Load it. Raises RuntimeError if the driver refuses."""
        return CompiledKernel(code, name, grid, threads, shared, early)
