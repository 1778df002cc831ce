"""Large copies by a driver that is made up, small ones by the kernel, whose source is compiled for the host and
launched there. A card runs the real ones."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from evener_backend_cuda.compiled import CompiledKernel, Driver
from evener_backend_cuda.many_copies import BATCH, LARGE, MOST, ManyCopies

#: What a card's compiler knows by itself; programs and their threads run one after the other.
SHIM = """
struct uint4 { unsigned x, y, z, w; };
struct { unsigned x; } blockIdx, gridDim, threadIdx;
static uint4 __ldcs(const uint4* at) { return *at; }
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
"""
LAUNCH = """
extern "C" void launch(const Copies* copies, unsigned programs) {
  gridDim.x = programs;
  for (blockIdx.x = 0; blockIdx.x < programs; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) copy_many(*copies);
}
"""


class HostKernels(Driver):
    """Compiles for the host, and launches there. ``launched``: how many copies each launch had."""

    def __init__(self, folder: Path) -> None:
        super().__init__("host")
        self._folder, self.launched = folder, list[int]()

    def compile(self, source: str, defines: Mapping[str, object]) -> bytes:
        made, library = self._folder / "kernel.cpp", self._folder / "kernel.so"
        made.write_text(SHIM + source + LAUNCH)
        macros = [f"-D{name}={value}" for name, value in defines.items()]
        subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-w", *macros, "-o", library, made], check=True)
        return str(library).encode()

    def kernel(self, code: bytes, name: str, grid: int, *how: Any, **more: Any) -> CompiledKernel:
        assert name == "copy_many" and more == {"early": False}
        launch = ctypes.CDLL(code.decode()).launch

        def run(stream: int, argument: Any) -> None:
            assert stream == 7 and ctypes.sizeof(argument) <= 4096
            self.launched.append(argument.count)
            launch(ctypes.byref(argument), grid)

        return cast(CompiledKernel, run)


class NoKernels(Driver):
    """A machine without a compiler for the card."""

    asked = 0

    def compile(self, source: str, defines: Mapping[str, object]) -> bytes:
        self.asked += 1
        raise OSError("there is no NVRTC")


class CardDriver:
    """Copies host memory to host memory. ``code``: what the call for many copies returns."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, list[int]()

    def cuMemcpyBatchAsync_v2(self, to: Any, sources: Any, sizes: Any, count: Any, *how: Any) -> int:
        self.calls.append(count.value)
        if not self.code:
            lists = ((ctypes.c_uint64 * count.value).from_address(each.value) for each in (to, sources, sizes))
            for target, source, size in zip(*lists, strict=True):
                ctypes.memmove(target, source, size)
        return self.code

    def cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        self.calls.append(1)
        ctypes.memmove(to.value, source.value, size.value)
        return 0


class OldDriver:
    """Has no call for many copies, and refuses others with ``code``."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        if not self.code:
            ctypes.memmove(to.value, source.value, size.value)
        return self.code


def copy(many: ManyCopies, sizes: Sequence[int], device: str = "cpu", shift: int = 0, stream: int = 7) -> None:
    """Copy random bytes to ``device``, and look that all of them are there, and nothing else has changed."""
    draw = torch.Generator().manual_seed(len(sizes))
    sources = [torch.randint(0, 256, (size + 16,), dtype=torch.uint8, generator=draw) for size in sizes]
    if device != "cpu":
        sources = [source.pin_memory() for source in sources]
    targets = [torch.full((size + 64,), 77, dtype=torch.uint8, device=device) for size in sizes]
    places = ([each.data_ptr() + at for each in all_] for all_, at in ((targets, 16), (sources, shift)))
    to, begin = (np.array(each, np.uint64) for each in places)
    if device != "cpu":
        torch.cuda.synchronize()
    many(to, begin, np.array(sizes, np.uint64), stream)
    if device != "cpu":
        torch.cuda.synchronize()
    for source, target, size in zip(sources, targets, sizes, strict=True):
        found = target.cpu()
        assert torch.equal(found[16 : 16 + size], source[shift : shift + size])
        assert (found[:16] == 77).all() and (found[16 + size :] == 77).all()


#: Smaller and larger than a tile of 32 KiB, and as large.
SIZES = (16, 32768, 48, 32784, 131056, 7 * 32768, 512)


def test_small_copies_are_one_launch_and_large_ones_one_call(tmp_path: Path) -> None:
    kernels, driver = HostKernels(tmp_path), CardDriver()
    many = ManyCopies(kernels, lambda: driver)
    copy(many, SIZES)
    copy(many, (LARGE, 16, LARGE + 48, 16 * 1001))
    copy(many, (LARGE,))
    assert kernels.launched == [len(SIZES), 2] and driver.calls == [2, 1]


def test_more_copies_than_fit_are_several_launches_and_calls(tmp_path: Path) -> None:
    kernels, driver = HostKernels(tmp_path), CardDriver()
    sizes = [16 * (1 + number % 3) for number in range(2 * MOST + 5)]
    copy(ManyCopies(kernels, lambda: driver), sizes)
    assert kernels.launched == [MOST, MOST, 5]
    copy(ManyCopies(kernels, lambda: driver, large=0), sizes[: BATCH + 1])
    assert driver.calls == [BATCH, 1]


@pytest.mark.parametrize("sizes, shift", [((48, 24), 0), ((48, 32), 8)])
def test_bytes_that_are_no_vectors_are_copied_by_the_driver(tmp_path: Path, sizes: Sequence[int], shift: int) -> None:
    kernels, driver = HostKernels(tmp_path), CardDriver()
    copy(ManyCopies(kernels, lambda: driver), sizes, shift=shift)
    assert not kernels.launched and driver.calls == [2]


def test_without_a_compiler_the_driver_copies_and_nobody_asks_again(caplog: pytest.LogCaptureFixture) -> None:
    kernels, driver = NoKernels(), CardDriver()
    many = ManyCopies(kernels, lambda: driver)
    copy(many, SIZES)
    copy(many, SIZES)
    assert kernels.asked == 1 and driver.calls == [len(SIZES)] * 2
    assert "there is no NVRTC; small tensors of experts are copied by calls of the driver" in caplog.text


def test_the_default_stream_takes_no_batches() -> None:
    driver = CardDriver()
    many = ManyCopies(NoKernels(), lambda: driver)
    copy(many, SIZES[:2], stream=0)
    copy(many, SIZES[:2])
    assert driver.calls == [1, 1, 2]


def test_a_driver_that_refuses_the_call_gets_one_for_each_copy_and_is_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = CardDriver(code=801)
    many = ManyCopies(NoKernels(), lambda: driver)
    copy(many, SIZES[:2])
    copy(many, SIZES[:2])
    assert driver.calls == [2, 1, 1, 1, 1]
    assert "cuMemcpyBatchAsync failed with 801" in caplog.text


def test_an_older_driver_gets_a_call_for_each_copy_and_an_error_is_raised() -> None:
    copy(ManyCopies(NoKernels(), lambda: OldDriver(0)), SIZES[:2])
    with pytest.raises(RuntimeError, match="failed with 700 for 16 bytes"):
        copy(ManyCopies(NoKernels(), lambda: OldDriver(700)), SIZES[:2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [SIZES, [LARGE, 16, LARGE + 48], [16 * (1 + number % 3) for number in range(2 * MOST + 5)]]
)
def test_a_card_copies_page_locked_memory_in_both_ways(sizes: Sequence[int]) -> None:
    major, minor = torch.cuda.get_device_capability()
    many, stream = ManyCopies(Driver(f"sm_{major}{minor}")), torch.cuda.Stream()
    copy(many, sizes, "cuda", stream=stream.cuda_stream)
    assert many._launch is not None and many._batches, "the kernel and the call for many copies are there"
