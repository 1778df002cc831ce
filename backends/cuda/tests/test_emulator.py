"""The emulator of a card does what the card does: numbers, products, lanes together, copies, messages, launches.

It says what a kernel does wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from emulated import HOPPER, EmulatedDriver, Schedule

SOURCE = """
struct Argument { const u32* in; u32* out; u64* messages; u32* report; u32 which; };
#define LANE (threadIdx.x & 31)
static void wait_for(u64* at, u32 flag, u32* report) {
    u32 looks = 0;
    while (look(at).y != flag)
        if (++looks == PATIENCE) { atomicExch_system(report, 77); __trap(); }
}
extern "C" __global__ void numbers(const __grid_constant__ Argument p) {
    const float a = __uint_as_float(p.in[2 * threadIdx.x]), b = __uint_as_float(p.in[2 * threadIdx.x + 1]);
    u32* to = p.out + 4 * threadIdx.x;
    to[0] = pack(a, b), to[1] = pack_f16(a, b), to[2] = pack_e4m3(a, b), to[3] = widen_e4m3(to[2]);
}
extern "C" __global__ void products(const __grid_constant__ Argument p) {
    const u32* from = p.in + LANE * 6;
    float sums[4] = {1.f, 1.f, 1.f, 1.f};
    const uint4 left = make_uint4(from[0], from[1], from[2], from[3]);
    const uint2 right = make_uint2(from[4], from[5]);
    if (p.which == 0) product(sums, left, right);
    if (p.which == 1) product_f16(sums, left, right);
    if (p.which == 2) product_e4m3(sums, left, right);
    for (int n = 0; n < 4; n++) p.out[LANE * 4 + n] = __float_as_uint(sums[n]);
}
extern "C" __global__ void whole(const __grid_constant__ Argument p) {
    const u32* from = p.in + LANE * 6;
    int sums[4] = {1 << 28, 1 << 28, 1 << 28, 1 << 28};
    product_bytes(sums, make_uint4(from[0], from[1], from[2], from[3]), make_uint2(from[4], from[5]));
    for (int n = 0; n < 4; n++) p.out[LANE * 4 + n] = sums[n] - (1 << 28);
    p.out[128 + LANE] = __byte_perm(from[0], from[1], 0x3275);
    p.out[160 + LANE] = warp_sum((int)LANE - 20);
    p.out[192 + LANE] = __float_as_uint(widen_f16(from[0] & 0xfbff3bffu));
}
extern "C" __global__ void lanes(const __grid_constant__ Argument p) {
    u32* to = p.out + threadIdx.x * 6;
    to[0] = __shfl_sync(~0u, LANE, 5), to[1] = __shfl_sync(~0u, LANE, 3, 8), to[2] = __shfl_xor_sync(~0u, LANE, 9);
    to[3] = __shfl_down_sync(~0u, LANE, 4), to[4] = __shfl_up_sync(~0u, LANE, 4, 16);
    to[5] = __ballot_sync(LANE < 16 ? 0xffff : 0xffff0000, LANE % 3 == 0);
}
extern "C" __global__ void copies(const __grid_constant__ Argument p) {
    const u32 base = (u32)__cvta_generic_to_shared(shared), barrier = base + 512;
    if (threadIdx.x == 0) {
        init(barrier, 1);
        expect(barrier, 512);
        for (int n = 0; n < 32; n++) bulk(base + n * 16, p.in + n * 4, 16, barrier, evict_first());
    }
    __syncthreads();
    p.out[threadIdx.x] = ((u32*)shared)[threadIdx.x];
    while (!try_wait(barrier, 0)) {}
    p.out[128 + threadIdx.x] = ((u32*)shared)[threadIdx.x];
}
extern "C" __global__ void messages(const __grid_constant__ Argument p) {
    if (blockIdx.x == 0) post(p.messages, 1, 1), post(p.messages + 1, 2, 1);
    if (blockIdx.x == 1) wait_for(p.messages + 1, 1, p.report), p.out[0] = look(p.messages).x;
}
extern "C" __global__ void launches(const __grid_constant__ Argument p) {
    launch_next();
    if (p.which == 0) wait_for(p.messages, 1, p.report), p.out[0] = 1;
    if (p.which == 1) {
        post(p.messages, 1, 1);
        grid_wait();
        p.out[1] = p.out[0];
    }
}
extern "C" __global__ void mistakes(const __grid_constant__ Argument p) {
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    if (p.which == 0) LANE ? __syncwarp() : (void)__shfl_sync(~0u, 1, 0);
    if (p.which == 1 && LANE) __syncwarp();
    if (p.which == 2) p.out[0] = ((u32*)shared)[2000];
    if (p.which == 3) arrive(base);
    if (p.which == 4) init(base, 1), *(u32*)shared = 0, arrive(base);
    if (p.which == 5 && !LANE) init(base, 1), bulk(base + 16, p.in, 16, base, 0);
    if (p.which == 6) bulk(base + 512, p.in, 1024, base, 0);
    if (p.which == 7) p.out[0] = make_uint4(0, 0, 0, 0).x + ((const uint4*)(shared + 4))->x;
    if (p.which == 8) __syncwarp(0xfffffffe);
    if (p.which == 9 && threadIdx.x < 32) together();
}
"""


class Argument(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("in", "out", "messages", "report")), ("which", ctypes.c_uint),
    ]  # fmt: skip


class Kernels:
    """The kernels of SOURCE, with room for 1,024 words of results."""

    def __init__(self, folder: Path) -> None:
        self.driver = EmulatedDriver(folder)
        self._code = self.driver.compile(HOPPER + SOURCE, {"PATIENCE": 1})
        self.messages = torch.zeros(8, dtype=torch.int64)
        self.out = torch.zeros(1024, dtype=torch.int32)

    def __call__(self, name: str, words: torch.Tensor | None = None, threads: int = 32, programs: int = 1,
                 which: int = 0) -> torch.Tensor:  # fmt: skip
        self.held = torch.zeros(512, dtype=torch.int32) if words is None else words.contiguous()
        argument = Argument(self.held.data_ptr(), self.out.data_ptr(), self.messages.data_ptr(), None, which)
        self.driver.kernel(self._code, name, programs, threads, 1024)(7, argument)
        return self.out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def kernels(made: Kernels) -> Iterator[Kernels]:
    made.out.zero_(), made.messages.zero_()
    made.driver.schedule = Schedule()
    yield made


def test_numbers_are_rounded_as_torch_does(kernels: Kernels) -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(1))
    values *= torch.tensor([1.0, 100.0, 1e-3, 1e-6]).repeat(16)
    values[:4] = torch.tensor([0.0, -448.0, 65504.0, 2.0**-9])
    got = kernels("numbers", values.view(torch.int32)).view(-1, 4)[:32]
    assert torch.equal(got[:, 0].contiguous().view(torch.bfloat16), values.bfloat16())
    assert torch.equal(got[:, 1].contiguous().view(torch.float16), values.half())
    narrow = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(got[:, 2].contiguous().view(torch.uint8).view(32, 4)[:, :2].flatten(), narrow.view(torch.uint8))
    assert torch.equal(got[:, 3].contiguous().view(torch.float16), narrow.half())


@pytest.mark.parametrize("which, dtype", list(enumerate((torch.bfloat16, torch.float16, torch.float8_e4m3fn))))
def test_products_of_a_warp_are_matrix_products(kernels: Kernels, which: int, dtype: torch.dtype) -> None:
    """Fragments as the PTX ISA's figures of mma.m16n8k16 and mma.m16n8k32 have them: element i of a lane's operand."""
    each, noise = 4 // dtype.itemsize, torch.Generator().manual_seed(2)
    k = 8 * each
    left, right = (torch.randn(rows, k, generator=noise).to(dtype) for rows in (16, 8))
    words = torch.zeros(32, 6 * each, dtype=dtype)
    for lane in range(32):
        group, member = lane // 4, lane % 4
        for i in range(4 * each):
            row = group if i // each in (0, 2) else group + 8
            column = member * each + i % each + (k // 2 if i >= 2 * each else 0)
            words[lane, i] = left[row, column]
        for i in range(2 * each):
            words[lane, 4 * each + i] = right[group, member * each + i % each + (k // 2 if i >= each else 0)]
    got = kernels("products", words.view(torch.int32), which=which)[:128].view(torch.float32).view(32, 4)
    found = torch.zeros(16, 8)
    for lane in range(32):
        for i in range(4):
            found[lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + i % 2] = got[lane, i]
    torch.testing.assert_close(found, left.float() @ right.float().T + 1)


def test_whole_numbers_are_exact(kernels: Kernels) -> None:
    """Products of bytes, of which the left ones have no sign; bytes of words; sums of a warp; float16 to float32."""
    noise = torch.Generator().manual_seed(3)
    left = torch.randint(0, 256, (16, 32), generator=noise)
    right = torch.randint(-128, 128, (8, 32), generator=noise)
    bytes_ = torch.zeros(32, 6, 4, dtype=torch.uint8)
    for lane in range(32):
        group, first = lane // 4, lane % 4 * 4
        for i in range(4):
            bytes_[lane, i] = left[group + i % 2 * 8, first + i // 2 * 16 :][:4]
        for i in range(2):
            bytes_[lane, 4 + i] = right[group, first + i * 16 :][:4] & 255
    got = kernels("whole", bytes_.view(torch.int32).squeeze(-1))
    found = torch.zeros(16, 8, dtype=torch.long)
    for lane in range(32):
        for i in range(4):
            found[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] = got[lane * 4 + i]
    assert torch.equal(found, left @ right.T)
    chosen = torch.stack((bytes_[:, 1, 1], bytes_[:, 1, 3], bytes_[:, 0, 2], bytes_[:, 0, 3]), 1)
    assert torch.equal(got[128:160].contiguous().view(torch.uint8).view(32, 4), chosen)
    assert set(got[160:192].tolist()) == {sum(range(-20, 12))}
    half = (bytes_.view(torch.int32)[:, 0, 0] & 0x3BFF).to(torch.int16).view(torch.float16)
    assert torch.equal(got[192:224].contiguous().view(torch.float32), half.float())


@pytest.mark.parametrize("seed", range(3))
def test_lanes_exchange_values(kernels: Kernels, seed: int) -> None:
    kernels.driver.schedule = Schedule(seed)
    got = kernels("lanes", threads=64)[:384].view(64, 6).tolist()
    for thread, row in enumerate(got):
        lane = thread % 32
        votes = sum(1 << n for n in range(32) if n % 3 == 0 and n // 16 == lane // 16)
        down, up = lane + 4 if lane < 28 else lane, lane - 4 if lane % 16 >= 4 else lane
        assert row == [5, lane // 8 * 8 + 3, lane ^ 9, down, up, votes - (1 << 32 if votes >> 31 else 0)]


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_is_there_after_a_wait_and_not_a_number_before(kernels: Kernels, seed: int) -> None:
    kernels.driver.schedule, words = Schedule(seed), torch.arange(128, dtype=torch.int32)
    got = kernels("copies", words, threads=128)
    assert torch.equal(got[128:256], words)
    early = got[:128]
    assert set(early[early != words].tolist()) == {-1}


def test_messages_overtake_each_other_in_some_orders(kernels: Kernels) -> None:
    seen = set()
    for seed in range(20):
        kernels.driver.schedule = Schedule(seed)
        kernels.messages.zero_()
        seen.add(int(kernels("messages", threads=1, programs=2)[0]))
    assert seen == {0, 1}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_launch_starts_before_the_one_ahead_has_ended_if_it_may(kernels: Kernels, overlap: bool) -> None:
    kernels.driver.schedule = Schedule(overlap=overlap)
    stuck = pytest.raises(RuntimeError, match="32 threads wait in wait 77, first launch 0 program 0 warp 0 lane 0")
    with nullcontext() if overlap else stuck, kernels.driver.graph():
        kernels("launches", which=0)
        kernels("launches", which=1)
    assert kernels.out[:2].tolist() == [overlap, overlap]


@pytest.mark.parametrize("which, message", list(enumerate([
    "call different functions together", "names lanes ffffffff, of which 00000001 have ended",
    r"accesses memory at 0x\w+, which is 8000 bytes from the start of shared memory", "there is no barrier at 1024",
    "the barrier at 1024 of shared memory was overwritten", "its program ends while 1 copies are under way",
    "a copy of 1024 bytes at 1536 is outside of shared memory of 1024", "an address is not aligned",
    "thread 0: is not in the mask fffffffe", "32 threads wait at barrier 1 of their program",
])))  # fmt: skip
def test_a_mistake_is_described(kernels: Kernels, which: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        kernels("mistakes", which=which)
