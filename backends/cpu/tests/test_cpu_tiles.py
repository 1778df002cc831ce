"""Products at the edges of memory, as AddressSanitizer does not see what AMX instructions read; and without AMX."""

from __future__ import annotations

import ctypes
import logging
import mmap
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evener_backend_cpu import isa
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.native_library import Native

_HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def native() -> Native:
    found = CpuDevice(0, {"native": "require"}).native
    assert isinstance(found, Native)
    return found


class Between:
    """Memory between two pages that nobody may touch."""

    def __init__(self, most: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
        self._size = -(-most // mmap.PAGESIZE) * mmap.PAGESIZE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._all = self._libc.mmap(None, self._size + 2 * mmap.PAGESIZE, 0, private, -1, 0)
        self._first = self._all + mmap.PAGESIZE
        wanted = mmap.PROT_READ | mmap.PROT_WRITE
        assert self._libc.mprotect(ctypes.c_void_p(self._first), ctypes.c_size_t(self._size), wanted) == 0

    def put(self, tensor: torch.Tensor, last: bool) -> int:
        """The address of a copy that ends where the memory does, or begins where it begins."""
        at = self._first + (self._size - tensor.nbytes if last else 0)
        ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
        return int(at)

    def close(self) -> None:
        self._libc.munmap(ctypes.c_void_p(self._all), ctypes.c_size_t(self._size + 2 * mmap.PAGESIZE))


@pytest.fixture
def places() -> Iterator[list[Between]]:
    made = [Between(1 << 18) for _ in range(4)]
    yield made
    for each in made:
        each.close()


def test_a_product_reads_and_writes_nothing_beside_its_matrices(native: Native, places: list[Between]) -> None:
    draw, noise = random.Random(1), torch.Generator().manual_seed(1)
    for number in range(60):
        tokens = draw.choice((1, 2, 5, 15, 16, 17, 31, 33, 48, 65, 513))
        columns, rows = draw.choice((draw.randint(1, 130), 32 * draw.randint(1, 4))), draw.randint(1, 70)
        x, w, b = (torch.randn(n, generator=noise).bfloat16() for n in ((tokens, columns), (rows, columns), (rows,)))
        last, biased, threads = bool(number % 2), draw.random() < 0.5, draw.choice((1, 3))
        y = torch.full((tokens, rows), torch.nan, dtype=torch.float32)
        at = places[3].put(y, last)
        native.function("linear_wide", "bfloat16")(
            places[0].put(x, last), tokens, places[1].put(w, last), None, places[2].put(b, last) if biased else None,
            rows, columns, at, threads,
        )  # fmt: skip
        ctypes.memmove(y.data_ptr(), at, y.nbytes)
        want = x.float() @ w.float().T + (b.float() if biased else 0)
        torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-4)


def test_products_of_many_rows_keep_little_memory_in_each_thread(native: Native) -> None:
    """The columns are no multiple of what tiles hold, so that rows are copied."""

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    tokens, rows, columns, threads = 1 << 17, 128, 33, 8
    x, w = torch.randn(tokens, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    y, multiply = torch.ones(tokens, rows, dtype=torch.bfloat16), native.function("linear", "bfloat16")

    def run(count: int) -> None:
        multiply(x.data_ptr(), count, w.data_ptr(), None, None, rows, columns, y.data_ptr(), threads)

    run(64)
    before = held()
    run(tokens)
    assert held() - before < 8 << 20, "a copy of all rows has 16 MiB"


_REFUSED = """
import logging, sys
sys.path.insert(0, sys.argv[1])
from refused_call import refuse
refuse(158, 0x1023)  # arch_prctl(ARCH_REQ_XCOMP_PERM)
logging.basicConfig(level=logging.INFO)
import numpy as np
from evener_backend_cpu import isa, native_library
multiply = native_library.load(isa.usable()).function("linear_wide", "bfloat16")
for tokens in (1, 40):
    x, w = (np.random.randn(n, 70).astype(np.float32).view(np.uint32) >> 16 << 16 for n in (tokens, 9))
    parts, y = [(each >> 16).astype(np.uint16) for each in (x, w)], np.zeros((tokens, 9), np.float32)
    multiply(parts[0].ctypes.data, tokens, parts[1].ctypes.data, None, None, 9, 70, y.ctypes.data, 2)
    np.testing.assert_allclose(y, x.view(np.float32) @ w.view(np.float32).T, atol=1e-4, rtol=1e-4)
"""


@pytest.mark.skipif(isa.usable().variant != "amx_bf16", reason="no tile registers to be refused")
def test_where_the_system_refuses_tile_registers_products_are_right_and_the_log_says_what_helps() -> None:
    done = subprocess.run([sys.executable, "-c", _REFUSED, str(_HERE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "do without AMX" in done.stderr and "(arch_prctl: Operation not permitted)" in done.stderr
    assert "seccomp" in done.stderr and "cpu.isa=avx512_bf16" in done.stderr


def test_nothing_is_said_of_tile_registers_where_they_are_granted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "evener.native"):
        assert CpuDevice(0, {"native": "require"}).native
    assert "AMX" not in caplog.text
