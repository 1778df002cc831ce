// The id of the largest logit of one token, without reading all of the head (screened_head.py has the method).
//
// PROGRAMS programs of THREADS threads stay for the whole search. First they read the codes of all ROWS rows, four bits a
// weight, and give each row a bound that its logit does not exceed. A program's row that seems the best gets its logit, and
// the largest of these is known to be reached. Then the rows whose bound reaches it get theirs, and the best one wins.

#define WARPS (THREADS / 32)
// Columns of a lane at a time, of a scale of the codes, and of all lanes at a time.
#define CHUNK 32
#define GROUP 128
#define CHUNKS (HIDDEN / CHUNK)
#define GROUPS ((HIDDEN + GROUP - 1) / GROUP)
#define STEPS ((CHUNKS + 31) / 32)
// Rows of a warp at a time, so that a lane has eight loads under way.
#define TALL (STEPS == 1 ? 8 : STEPS == 2 ? 4 : STEPS <= 4 ? 2 : 1)
// Rows come in blocks of TALL, which the warps of all programs take in turns.
#define BLOCKS ((ROWS + TALL - 1) / TALL)
#define ROUNDS ((BLOCKS + PROGRAMS * WARPS - 1) / (PROGRAMS * WARPS))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
// Loads of a row at a time.
#define WIDE (STEPS < 8 ? STEPS : 8)
// Columns of a lane in the norm, and turns of the program for all columns.
#define EACH 4
#define TURNS ((HIDDEN + EACH * THREADS - 1) / (EACH * THREADS))
// x as whole numbers is at most this, so that the upper of its two bytes has room for a carry.
#define LARGEST 32512.f
// Places in shared memory: the bytes of x, four vectors of 16 for each chunk; a record for each chunk; x in bfloat16; bounds
// of each warp's rows; sums and keys of the warps.
#define AT_RECORDS (CHUNKS * 64)
#define AT_X (AT_RECORDS + CHUNKS * 16)
#define AT_BOUNDS (AT_X + HIDDEN * 2)
#define AT_SUMS (AT_BOUNDS + WARPS * ROUNDS * TALL * 4)
#define AT_KEYS (AT_SUMS + (2 * WARPS * 4 + 15) / 16 * 16)
#define SHARED (AT_KEYS + WARPS * 8)

struct Screen {
    const float *x, *norm, *dither;  // [HIDDEN]: the stream, the norm's weight or null (NORMED: x is normed), and what is added to codes
    const u16 *values, *mean;    // [ROWS, HIDDEN]; [HIDDEN], the mean of all rows
    const unsigned char* codes;  // [ROWS, HIDDEN / 2]
    const u16* scales;           // [ROWS, GROUPS]
    // Zeros, also after the launch. [0]: key of the best logit and its id; [1]: key of the largest logit that is known, of
    // those of programs; [2], words: programs that have written to [1], and to [0].
    u64* found;
    int* id;
    u32* report;
};

// A chunk's record has what its bytes of x mean: a factor, the sum of x times what codes have too much (7.5 and the dither),
// and the sum of the squares of x.

__device__ __forceinline__ float widen(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float widen_high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float warp_total(float v) {
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) v += __shfl_xor_sync(~0u, v, bit);
    return v;
}
// Sums over the program, each thread gets them.
template <int N>
__device__ __forceinline__ void program_totals(float (&v)[N]) {
    float* sums = (float*)(shared + AT_SUMS);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int n = 0; n < N; n++) {
        v[n] = warp_total(v[n]);
        if (lane == 0) sums[n * WARPS + warp] = v[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) {
        v[n] = 0.f;
        for (int w = 0; w < WARPS; w++) v[n] += sums[n * WARPS + w];
    }
    __syncthreads();
}
// Numbers that compare as logits do, from 1 on; NaN is 1.
__device__ __forceinline__ u32 key_of(float v) {
    const u32 bits = __float_as_uint(v + 0.f);  // zero has one sign
    return v == v ? bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u) : 1;
}

// The value of a key; of 0 it is less than all others.
__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key ? key ^ (key >> 31 ? 0x80000000u : 0xffffffffu) : 0xff800000u);
}

// The codes of TALL rows, and their scales.
struct Codes {
    uint4 words[TALL][WIDE];
    u16 scales[TALL][WIDE];

    __device__ __forceinline__ void read(const Screen& launch, int block, int first) {
        const u32 lane = threadIdx.x & 31;
#pragma unroll
        for (int r = 0; r < TALL; r++)
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                const long long row = (long long)block * TALL + r;
                const int chunk = (first + j) * 32 + lane;
                const bool there = row < ROWS && chunk < CHUNKS;
                words[r][j] = there ? read_once(launch.codes + row * (HIDDEN / 2) + chunk * 16) : make_uint4(0, 0, 0, 0);
                scales[r][j] = there ? launch.scales[row * GROUPS + chunk / (GROUP / CHUNK)] : 0;
            }
    }
    // Add the lane's part of each row: of its approximate logit, and of the square of its bound's distance.
    __device__ __forceinline__ void add(int first, float (&sums)[2 * TALL]) const {
        const u32 lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            const int chunk = MIN((first + j) * 32 + (int)lane, CHUNKS - 1);  // what is behind the last has scale 0
            u32 x[16];
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const uint4 v = *(const uint4*)(shared + (p * CHUNKS + chunk) * 16);
                x[4 * p] = v.x, x[4 * p + 1] = v.y, x[4 * p + 2] = v.z, x[4 * p + 3] = v.w;
            }
            const float4 record = *(const float4*)(shared + AT_RECORDS + chunk * 16);
#pragma unroll
            for (int r = 0; r < TALL; r++) {
                const u32 w[4] = {words[r][j].x, words[r][j].y, words[r][j].z, words[r][j].w};
                int upper = 0, lower = 0;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const u32 even = w[k] & 0x0f0f0f0fu, odd = w[k] >> 4 & 0x0f0f0f0fu;
                    upper = dot_bytes(even, x[2 * k], upper), upper = dot_bytes(odd, x[2 * k + 1], upper);
                    lower = dot_bytes(even, x[8 + 2 * k], lower), lower = dot_bytes(odd, x[8 + 2 * k + 1], lower);
                }
                const float scale = widen(scales[r][j]), whole = (float)(upper * 256 + lower);
                sums[2 * r] = fmaf(scale, fmaf(whole, record.x, -record.y), sums[2 * r]);
                sums[2 * r + 1] = fmaf(scale * scale, record.z, sums[2 * r + 1]);
            }
        }
    }
};

// Sums over a warp of N numbers, a power of two; lane l gets that of number l / (32 / N).
template <int N>
__device__ __forceinline__ float spread_totals(float (&v)[N]) {
    const u32 lane = threadIdx.x & 31;
    int bit = 16;
#pragma unroll
    for (int half = N / 2; half; half /= 2, bit /= 2)
#pragma unroll
        for (int n = 0; n < half; n++) {
            const float kept = lane & bit ? v[n + half] : v[n], given = lane & bit ? v[n] : v[n + half];
            v[n] = kept + __shfl_xor_sync(~0u, given, bit);
        }
#pragma unroll
    for (; bit; bit /= 2) v[0] += __shfl_xor_sync(~0u, v[0], bit);
    return v[0];
}

// The norm of x, as bfloat16 and as bytes, in shared memory. Returns the sum of x times the mean row, and that of its size.
__device__ __forceinline__ float2 enter(const Screen& launch) {
    const u32 tid = threadIdx.x;
    float4 x[TURNS];
    float square[1] = {};
#pragma unroll
    for (int n = 0; n < TURNS; n++) {
        const int i = (n * THREADS + tid) * EACH;
        x[n] = i < HIDDEN ? *(const float4*)(launch.x + i) : make_float4(0.f, 0.f, 0.f, 0.f);
        square[0] += x[n].x * x[n].x + x[n].y * x[n].y + x[n].z * x[n].z + x[n].w * x[n].w;
    }
    program_totals(square);
    const float scale = NORMED ? 1.f : rsqrtf(square[0] / HIDDEN + EPS);
    float sums[2] = {};
#pragma unroll
    for (int n = 0; n < TURNS; n++) {
        const int i = (n * THREADS + tid) * EACH;
        const bool there = i < HIDDEN;
        const float4 gain = there && !NORMED ? *(const float4*)(launch.norm + i) : make_float4(0.f, 0.f, 0.f, 0.f);
        const uint2 mean = there ? *(const uint2*)(launch.mean + i) : make_uint2(0, 0);
        const u32 first = pack(x[n].x * scale * (gain.x + OFFSET), x[n].y * scale * (gain.y + OFFSET));
        const u32 second = pack(x[n].z * scale * (gain.z + OFFSET), x[n].w * scale * (gain.w + OFFSET));
        const float y[EACH] = {widen(first), widen_high(first), widen(second), widen_high(second)};
        const float m[EACH] = {widen(mean.x), widen_high(mean.x), widen(mean.y), widen_high(mean.y)};
        float most = 0.f, squares = 0.f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            sums[0] = fmaf(y[e], m[e], sums[0]), sums[1] += fabsf(y[e] * m[e]);
            most = fmaxf(most, fabsf(y[e])), squares = fmaf(y[e], y[e], squares);
        }
#pragma unroll
        for (int bit = 1; bit < CHUNK / EACH; bit *= 2) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, bit));
            squares += __shfl_xor_sync(~0u, squares, bit);
        }
        const float into = most > 0.f ? LARGEST / most : 0.f;
        const float4 dither = there ? *(const float4*)(launch.dither + i) : make_float4(0.f, 0.f, 0.f, 0.f);
        const float more[EACH] = {7.5f + dither.x, 7.5f + dither.y, 7.5f + dither.z, 7.5f + dither.w};
        u32 upper = 0, lower = 0;
        float total = 0.f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int whole = (int)rintf(y[e] * into), above = whole + 128 >> 8;
            upper |= (u32)(above & 255) << 8 * e, lower |= (u32)(whole - above * 256 & 255) << 8 * e;
            total = fmaf((float)whole, more[e], total);
        }
#pragma unroll
        for (int bit = 1; bit < CHUNK / EACH; bit *= 2) total += __shfl_xor_sync(~0u, total, bit);
        if (!there) continue;
        const int chunk = i / CHUNK, four = i / EACH % (CHUNK / EACH);
        *(uint2*)(shared + AT_X + i * 2) = make_uint2(first, second);
        *(u32*)(shared + ((four / 4) * CHUNKS + chunk) * 16 + four % 4 * 4) = upper;
        *(u32*)(shared + ((2 + four / 4) * CHUNKS + chunk) * 16 + four % 4 * 4) = lower;
        const float factor = most / LARGEST;
        if (four == 0) *(float4*)(shared + AT_RECORDS + chunk * 16) = make_float4(factor, factor * total, squares, 0.f);
    }
    program_totals(sums);  // and everybody has written
    return make_float2(sums[0], sums[1]);
}

// This thread's parts of the logits of two rows, by threads `at`, `at + step` and so on; x is in bfloat16.
__device__ __forceinline__ float2 parts_of(const u16* one, const u16* two, const u16* x, int at, int step) {
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll 4
    for (int i = at * 8; i < HIDDEN; i += step * 8) {
        const uint4 a = *(const uint4*)(one + i), b = *(const uint4*)(two + i), c = *(const uint4*)(x + i);
        const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w}, given[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            sums.x = fmaf(widen(left[n]), widen(given[n]), sums.x), sums.y = fmaf(widen(right[n]), widen(given[n]), sums.y);
            sums.x = fmaf(widen_high(left[n]), widen_high(given[n]), sums.x);
            sums.y = fmaf(widen_high(right[n]), widen_high(given[n]), sums.y);
        }
    }
    return sums;
}

// Wait until all programs have counted.
__device__ __forceinline__ void await_all(u32* count, u32* report) {
    u32 looks = 0;
    while (*(volatile u32*)count < PROGRAMS) {
        __nanosleep(32);
        if (++looks == PATIENCE) {
            if (report) { atomicExch_system(report, 1 | blockIdx.x << 16); __threadfence_system(); }
            __trap();
        }
    }
}

static_assert(SHARED == SHARED_BYTES, "screened_head.py has another size of shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) screened_head(const __grid_constant__ Screen launch) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int first = blockIdx.x * WARPS + warp;
    float* bounds = (float*)(shared + AT_BOUNDS) + warp * (ROUNDS * TALL);
    Codes codes;
    codes.read(launch, first, 0);  // weights do not wait for the launch ahead
    grid_wait();
    const float2 mean = enter(launch);
    float most = -__uint_as_float(0x7f800000u);
    int best = -1;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
        const int block = first + round * (PROGRAMS * WARPS);
        float sums[2 * TALL] = {};
        codes.add(0, sums);
#pragma unroll 1
        for (int step = WIDE; step < STEPS; step += WIDE) {
            codes.read(launch, block, step);
            codes.add(step, sums);
        }
        if (round + 1 < ROUNDS) codes.read(launch, block + PROGRAMS * WARPS, 0);
        // Every other group of 16 / TALL lanes has a row's sum, and the next one its square.
        const float sum = spread_totals(sums), square = __shfl_xor_sync(~0u, sum, 16 / TALL);
        const int number = lane / (16 / TALL), row = block * TALL + number / 2;
        if (lane % (16 / TALL) == 0 && number % 2 == 0) {
            bounds[round * TALL + number / 2] = sum + DISTANCE * sqrtf(square) + ROUNDING * mean.y;
            if (row < ROWS && sum > most) most = sum, best = row;
        }
    }
    // The row of this program that seems the best: its logit is known to be reached.
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) {
        const float other = __shfl_xor_sync(~0u, most, bit);
        const int its = __shfl_xor_sync(~0u, best, bit);
        if (other > most) most = other, best = its;
    }
    float* sums = (float*)(shared + AT_SUMS);
    if (lane == 0) sums[warp] = most, ((int*)sums)[WARPS + warp] = best;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (sums[w] > most || w == 0) most = sums[w], best = ((int*)sums)[WARPS + w];
    __syncthreads();
    const u16* x = (const u16*)(shared + AT_X);
    float logit[1] = {0.f};
    if (best >= 0) {
        const u16* row = launch.values + (long long)best * HIDDEN;
        logit[0] = parts_of(row, row, x, threadIdx.x, THREADS).x;
    }
    program_totals(logit);
    u32* counts = (u32*)(launch.found + 2);
    if (threadIdx.x == 0) {
        if (best >= 0) atomicMax((u32*)(launch.found + 1), key_of(logit[0] - mean.x));
        __threadfence();
        atomicAdd(counts, 1u);
        await_all(counts, launch.report);
        __threadfence();
        sums[0] = value_of(*(volatile u32*)(launch.found + 1));
    }
    __syncthreads();
    launch_next();
    const float known = sums[0];
    u64 key = 0;
#pragma unroll 1
    for (int at = 0; at < ROUNDS * TALL; at += 32) {
        const int own = at + lane, row = (first + own / TALL * (PROGRAMS * WARPS)) * TALL + own % TALL;
        u32 candidates = __ballot_sync(~0u, own < ROUNDS * TALL && row < ROWS && bounds[own] >= known);
        // Two at a time: the memory's latency is most of a row's time.
        while (candidates) {
            const int one = __ffs(candidates) - 1;
            candidates &= candidates - 1;
            const int two = candidates ? __ffs(candidates) - 1 : one;
            candidates &= candidates - 1;
            const int ids[2] = {__shfl_sync(~0u, row, one), __shfl_sync(~0u, row, two)};
            const float2 parts = parts_of(
                launch.values + (long long)ids[0] * HIDDEN, launch.values + (long long)ids[1] * HIDDEN, x, lane, 32);
            const float logits[2] = {warp_total(parts.x), warp_total(parts.y)};
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const u64 its = (u64)key_of(logits[n]) << 32 | (u32)~ids[n];
                key = its > key ? its : key;
            }
        }
    }
    u64* keys = (u64*)(shared + AT_KEYS);
    if (lane == 0) keys[warp] = key;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < WARPS; w++) key = keys[w] > key ? keys[w] : key;
    if (key) atomicMax(launch.found, key);
    __threadfence();
    if (atomicAdd(counts + 1, 1u) + 1 < PROGRAMS) return;
    // All others are done. No bound reaches anything where logits are no numbers.
    __threadfence();
    key = atomicExch(launch.found, (u64)0);
    atomicExch(launch.found + 1, (u64)0);
    atomicExch(launch.found + 2, (u64)0);
    *launch.id = key ? (int)~(u32)key : 0;
}
