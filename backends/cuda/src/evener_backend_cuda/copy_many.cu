// Many copies of page-locked memory of the host to the device in one launch. Each thread has UNROLL loads of 16 bytes under way, so that
// some programs keep the bus busy, and copy engines and the thread that submits have nothing to do with it.

// As in many_copies.py. Arguments of a kernel are at most 4 KB.
struct Copies {
  unsigned long long to[MOST], from[MOST];
  unsigned size[MOST], count;
};

extern "C" __global__ void __launch_bounds__(THREADS) copy_many(const __grid_constant__ Copies copies) {
  // All copies are cut into tiles, which programs take in turns, whichever copy they are of.
  unsigned tile = blockIdx.x, first = 0;
  for (unsigned i = 0; i < copies.count; i++) {
    const unsigned vectors = copies.size[i] / sizeof(uint4), each = THREADS * UNROLL;
    const unsigned end = first + (vectors + each - 1) / each;
    const uint4* from = (const uint4*)copies.from[i];
    uint4* to = (uint4*)copies.to[i];
    for (; tile < end; tile += gridDim.x) {
      const unsigned at = (tile - first) * each + threadIdx.x;
      uint4 held[UNROLL];
#pragma unroll
      for (unsigned j = 0; j < UNROLL; j++)
        if (at + j * THREADS < vectors) held[j] = __ldcs(from + at + j * THREADS);
#pragma unroll
      for (unsigned j = 0; j < UNROLL; j++)
        if (at + j * THREADS < vectors) to[at + j * THREADS] = held[j];
    }
    first = end;
  }
}
