"""Weights in blocks, packed by the CPU backend, and the backend's kernels without vector instructions."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import torch

from evener.contracts.quant import PackedWeight, WeightPart
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.native_library import SOURCES, Native


def pack(device: CpuDevice, *parts: WeightPart, dtype: str = "float32") -> PackedWeight:
    """The parts as one packed weight, which takes as many bytes as it was said before their tensors were there."""
    bare = [replace(each, tensors={}) for each in parts]
    assert device.blocks.supports(bare, dtype) is None
    packed = device.blocks.pack(parts, dtype, torch.device("cpu"))
    assert packed.nbytes == device.blocks.nbytes(bare, dtype)
    return packed


def portable_device(folder: Path) -> CpuDevice:
    """A device whose kernels have no vector instructions, compiled into ``folder``."""
    made = folder / "portable.so"
    # Nothing in these tests is large: to optimize takes ten times as long as all the rest.
    command = ["g++", "-O0", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w", "-DEVENER_PORTABLE"]
    subprocess.run([*command, str(SOURCES / "kernels.cpp"), "-o", str(made)], check=True, timeout=300)
    device = CpuDevice(0, {})
    device._native = Native(made)
    return device
