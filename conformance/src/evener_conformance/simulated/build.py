"""Compiling the device: on first use; the result is cached by torch's version and the source."""

from __future__ import annotations

from pathlib import Path

import torch

from evener.backend import native_code
from evener.backend.native_code import Unavailable

SOURCE = Path(__file__).parent / "native" / "device.cpp"


def compiled() -> Path | Unavailable:
    """The path of the shared library, from the user's cache or compiled now."""
    root = Path(torch.__file__).parent
    flags = (
        # Not optimized: it moves little data, so the compile time matters more.
        *("-O0", "-std=c++20", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"),
        *(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"),
    )
    return native_code.compile_library(SOURCE, flags, "simulated-device", "the simulated device", [torch.__version__])
