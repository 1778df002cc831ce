"""Weights in blocks, packed and multiplied by the CPU backend, and its kernels without vector instructions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight, WeightPart
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.native_library import SOURCES, Native
from evener_backend_cpu.primitives import NativeLinear


def pack(device: CpuDevice, *parts: WeightPart, dtype: str = "float32") -> PackedWeight:
    """The parts as one packed weight, which takes as many bytes as it was said before their tensors were there."""
    bare = [replace(each, tensors={}) for each in parts]
    assert device.blocks.supports(bare, dtype) is None
    packed = device.blocks.pack(parts, dtype, torch.device("cpu"))
    assert packed.nbytes == device.blocks.nbytes(bare, dtype)
    return packed


def multiply(
    device: CpuDevice, weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None, out: str | None = None
) -> torch.Tensor:
    """``x @ weightᵀ + bias`` by the kernel, in the dtype ``out`` or that of ``x``."""
    rows, columns = weight.shape
    dtype = str(x.dtype).removeprefix("torch.")
    static = {"rows": rows, "columns": columns, "dtype": dtype, "out": out or dtype}
    kernel = NativeLinear(device)
    call = OpCall("linear", static, Bucket(1, 512), device.capabilities, {"weight": weight.layout})
    assert kernel.supports(call) is None
    result = kernel.build(call)(x, weight, bias)
    assert isinstance(result, torch.Tensor)
    return result


def distance(got: torch.Tensor, x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """The largest error of ``x @ valuesᵀ + bias``, relative to the lengths of the two rows that were multiplied."""
    want = x.double() @ values.double().T + (0.0 if bias is None else bias.double())
    lengths = x.double().norm(dim=1)[:, None] * values.double().norm(dim=1)
    return float(((got.double() - want).abs() / lengths.clamp_min(1e-30)).max())


def check_products(
    device: CpuDevice, packed: PackedWeight, values: torch.Tensor, inputs: Iterable[torch.Tensor],
    close: Mapping[str, float],
) -> None:  # fmt: skip
    """Products of a packed weight are those with its ``values``, within ``close`` by the dtype of the result: in the
    dtype of the inputs, and in float32."""
    for x in inputs:
        for out in {str(x.dtype).removeprefix("torch."), "float32"}:
            got = multiply(device, packed, x, out=out)
            assert got.dtype == getattr(torch, out) and got.shape == (len(x), len(values))
            if len(x):
                assert distance(got, x, values) < close[out]


def portable_device(folder: Path) -> CpuDevice:
    """A device whose kernels have no vector instructions, compiled into ``folder``."""
    made = folder / "portable.so"
    # Nothing in these tests is large: to optimize takes ten times as long as all the rest.
    command = ["g++", "-O0", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w", "-DEVENER_PORTABLE"]
    subprocess.run([*command, str(SOURCES / "kernels.cpp"), "-o", str(made)], check=True, timeout=300)
    device = CpuDevice(0, {})
    device._native = Native(made)
    return device
