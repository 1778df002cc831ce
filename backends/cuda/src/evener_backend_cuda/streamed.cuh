// What kernels have in common whose programs stream weights through a ring and send each other vectors. Comes after sizes
// and places in shared memory (one_token.cuh, one_token_experts.cuh, one_token_latent.cuh).
//
// PROGRAMS programs. In each, warps 0-7 compute, and warp 8 streams weights.

// Copies of what all programs read.
#define COPIES 4
// FLIGHT tiles are under way at once, of one program. Who asks memory for more makes messages wait behind the rest.

// -DSTAMPS writes the clock at the borders of phases to `stamps`, 16 for each program.
#ifdef STAMPS
#define STAMP(i) if (tid == 0 && launch.stamps) { launch.stamps[blockIdx.x * 16 + (i)] = clock64(); if ((i) == 1) launch.stamps[blockIdx.x * 16 + 15] = now(); }
#else
#define STAMP(i)
#endif

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
// Its bits without the sign, which compare as sizes do.
__device__ __forceinline__ u32 size_of(float v) { return __float_as_uint(v) & 0x7fffffffu; }
__device__ __forceinline__ float rounded(float a) { return low(pack(a, 0.f)); }
__device__ __forceinline__ float widen(u16 v) { return __uint_as_float((u32)v << 16); }
template <typename T>
__device__ __forceinline__ T fresh(const T* at) { return *(const volatile T*)at; }

__device__ __noinline__ void give_up(u32* report, u32 code) {
    if (report) { atomicExch_system(report, code | blockIdx.x << 16); __threadfence_system(); }
    __trap();
}

// Every wait ends: after PATIENCE looks the launch fails.
__device__ __forceinline__ void too_long(u32& looks, u32* report, u32 code) {
    if (++looks == PATIENCE) give_up(report, code);
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity, u32* report, u32 code) {
    u32 looks = 0;
    while (!try_wait(barrier, parity)) too_long(looks, report, code);
}

// Send WORDS words of this program, in shared memory, to all programs, in COPIES copies: programs that all read one wait
// for each other, and so do many stores. The first WRITERS threads wrote the words; all threads call it.
template <int WORDS, int WRITERS>
__device__ __forceinline__ void tell(u64* region, u32 program, u32 flag) {
    constexpr int COUNT = MESSAGES(WORDS);
    if (WRITERS > 32) together();
    else __syncwarp();
    const float* words = (const float*)(shared + AT_WORDS);
#pragma unroll
    for (int n = 0; n < UP(COPIES * COUNT, WRITERS > 32 ? THREADS : 32); n++) {
        const int e = threadIdx.x + n * (WRITERS > 32 ? THREADS : 32), copy = e / COUNT, m = e % COUNT;
        if ((WRITERS > 32 || threadIdx.x < 32) && e < COPIES * COUNT)
            post_wide(region + ((copy * PROGRAMS + program) * COUNT + m) * 2, words[3 * m], WORDS > 1 ? words[3 * m + 1] : __uint_as_float(flag),
                      WORDS > 2 ? words[3 * m + 2] : __uint_as_float(flag), flag);
    }
}
// Is a message there? Words that none of them uses have the flag too, and are looked at: of a message that is not used as a
// whole, the compiler reads each word by a load of its own, and those may see different times.
template <int WORDS>
__device__ __forceinline__ bool is_there(const uint4& v, u32 flag) {
    return v.w == flag && (WORDS > 1 || v.y == flag) && (WORDS > 2 || v.z == flag);
}

// Wait for the words of all programs; `take` gets their numbers and values.
template <int WORDS, typename Take>
__device__ __forceinline__ void hear(const u64* region, u32 program, u32 flag, u32* report, u32 code, Take take) {
    constexpr int COUNT = MESSAGES(WORDS), ALL = PROGRAMS * COUNT, MANY = UP(ALL, THREADS), CHUNK = MANY < 4 ? MANY : 4;
    const u64* from = region + program % COPIES * ALL * 2;
#pragma unroll 1
    for (int first = 0; first < MANY; first += CHUNK) {
        uint4 v[CHUNK];
        u32 looks = 0;
        // One lane of a warp looks until its message is there: looks of all lanes would make messages slower.
        if (threadIdx.x % 32 == 0 && threadIdx.x + first * THREADS < ALL)
            while (look_wide(from + (threadIdx.x + first * THREADS) * 2).w != flag) too_long(looks, report, code);
        __syncwarp();
        while (true) {
            bool all = true;
#pragma unroll
            for (int n = 0; n < CHUNK; n++) {
                const int e = threadIdx.x + (first + n) * THREADS;
                if (e < ALL) v[n] = look_wide(from + e * 2);
            }
#pragma unroll
            for (int n = 0; n < CHUNK; n++) {
                const int e = threadIdx.x + (first + n) * THREADS;
                all = all && (e >= ALL || is_there<WORDS>(v[n], flag));
            }
            if (all) break;
            too_long(looks, report, code);
        }
        // A warp counts at the barrier that follows as soon as some of its lanes are there.
        __syncwarp();
#pragma unroll
        for (int n = 0; n < CHUNK; n++) {
            const int e = threadIdx.x + (first + n) * THREADS, source = e / COUNT, word = e % COUNT * 3;
            if (e >= ALL) continue;
            take(source * WORDS + word, v[n].x);
            if (word + 1 < WORDS) take(source * WORDS + word + 1, v[n].y);
            if (word + 2 < WORDS) take(source * WORDS + word + 2, v[n].z);
        }
    }
}

struct Ring {
    u32 stage, parity;
    __device__ __forceinline__ void next() { if (++stage == STAGES) { stage = 0; parity ^= 1; } }
};

// Wait until the ring has room for one more tile, and fewer than FLIGHT are under way.
__device__ __forceinline__ void make_room(const Ring& ring, Ring& landed, u32& issued, u32 full, u32 empty, u32* report) {
    issued++;
    if (FLIGHT < STAGES && issued > FLIGHT) {
        wait(full + landed.stage * 8, landed.parity, report, 13);
        landed.next();
    }
    wait(empty + ring.stage * 8, ring.parity ^ 1, report, 1);
}
// Wait until the next tile is there.
__device__ __forceinline__ void await_tile(const Ring& ring, u32 full, u32* report) {
    wait(full + ring.stage * 8, ring.parity, report, 2);
}

// A vector of bfloat16 becomes whole numbers (four_bits.cuh).
template <int K>
__device__ __forceinline__ void integers(u32 at);

#if !PACKED
template <int K>
__device__ __forceinline__ void integers(u32 at) {}

// The rows of one program, tile by tile, into the ring. `at(tile, i, piece)`: C columns of row `i` of a tile, or null.
template <int K, int TILES, int C, typename At>
__device__ __forceinline__ void stream_pieces(Ring& ring, Ring& landed, u32& issued, u32 to, u32 full, u32 empty, u64 policy, u32* report, At at) {
    constexpr int STEP = AT_ONCE(TILES);
    const u32 lane = threadIdx.x & 31;
#pragma unroll 1
    for (int first = 0; first < TILES; first += STEP)
#pragma unroll 1
        for (int piece = 0; piece < K / C; piece++)
#pragma unroll 1
            for (int t = first; t < first + STEP && t < TILES; t++) {
                const Weight* from = lane < 8 ? at(t, lane, piece) : nullptr;
                const u32 count = __popc(__ballot_sync(~0u, from != nullptr));
                make_room(ring, landed, issued, full, empty, report);
                if (lane == 0) expect(full + ring.stage * 8, count * C * WEIGHT_BYTES);
                __syncwarp();
                if (from)
                    bulk(to + ring.stage * STAGE_BYTES + lane * PITCH(C), from, C * WEIGHT_BYTES, full + ring.stage * 8, policy);
                ring.next();
            }
}
// `row(tile, i)`: row `i` of a tile [K], or null.
template <int K, int TILES, int TALL, typename Row>
__device__ __forceinline__ void stream(Ring& ring, Ring& landed, u32& issued, u32 to, u32 full, u32 empty, u64 policy, u32* report, Row row) {
    stream_pieces<K, TILES, WIDE(K)>(ring, landed, issued, to, full, empty, policy, report, [&](int t, int i, int piece) {
        const Weight* from = row(t, i);
        return from ? from + piece * WIDE(K) : nullptr;
    });
}

// Products of one program's rows with the vector [K] at `vector` in shared memory. A warp has an eighth of the columns of
// each tile; its sums go to AT_ROWS. A lane reads 16 bytes of a row at a time: four pairs of columns, in the order in which
// the tensor cores take their left operand. So a row is two of that operand's, 1 and 9: of its pairs 0 and 2, and 1 and 3.
// Of the right operand, even columns are the vector's pairs 0 and 2, odd ones 1 and 3.
// Two tiles are in registers at a time: two of the same columns, or two pieces of the only one.
// Of stored weights the 16 bytes become two such operands of float16, and the vector is float16. Of the first operand,
// even columns are the vector's pairs 0 and 1, odd ones 4 and 5; of the second, pairs 2 and 3, and 6 and 7.
// A tile has C columns.
template <int K, int TILES, int TALL, int C = WIDE(K)>
struct Product {
    static_assert(TALL == 8, "so many rows a tile has");
    static constexpr int PARTS = WARPS, LOADS = C * WEIGHT_BYTES / 512, STEP = K == C ? MIN(TILES, 2) : AT_ONCE(TILES), PIECES = STEP == 1 ? 2 : 1;
    static constexpr int SETS = STEP > 2 ? 1 : 2;  // a second set of sums waits less for the first
    uint4 w[2][LOADS];

    // Is there the n-th tile of the two that begin with tile first + t and this piece?
    __device__ __forceinline__ static bool there(int first, int t, int piece, int n) {
        return PIECES == 2 ? piece + n < K / C : t + n < STEP && (TILES % STEP == 0 || first + t + n < TILES);
    }

    // Take two tiles out of the ring, which then has room for others: the first two before the vector is there.
    __device__ __forceinline__ void take(Ring& ring, u32 full, u32 empty, u32* report, int first = 0, int t = 0, int piece = 0) {
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        u32 done[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (!there(first, t, piece, n)) continue;
            await_tile(ring, full, report);
            const unsigned char* tile = shared + AT_RING + ring.stage * STAGE_BYTES + lane / 4 * PITCH(C) + warp * (C / 8 * WEIGHT_BYTES) + lane % 4 * 16;
#pragma unroll
            for (int j = 0; j < LOADS; j++) w[n][j] = *(const uint4*)(tile + j * 64);
            done[n] = empty + ring.stage * 8;
            ring.next();
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 2; n++)
            if (lane == 0 && there(first, t, piece, n)) arrive(done[n]);
    }

    // After `take` of the first two. `slot(tile, row)`: where a row's scales are, in rows of them from `scales` on.
    template <typename Slot>
    __device__ __forceinline__ void multiply_stored(Ring& ring, u32 full, u32 empty, u32 vector, u32 scales, u32* report, Slot slot) {
        constexpr int PER = BLOCK ? MIN(LOADS, 2) : LOADS;  // loads that have one scale
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const unsigned char* pairs = shared + vector + warp * (C / 4) + lane % 4 * 32 + lane / 4 % 2 * 16;
#pragma unroll 1
        for (int first = 0; first < TILES; first += STEP) {
            float sums[STEP] = {};
#pragma unroll 1
            for (int piece = 0; piece < K / C; piece += PIECES)
#pragma unroll
                for (int t = 0; t < STEP; t += 2) {
                    if (first || piece || t) take(ring, full, empty, report, first, t, piece);
#pragma unroll
                    for (int load = 0; load < LOADS; load += PER)
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            if (!there(first, t, piece, n)) continue;
                            const int column = (PIECES == 2 ? piece + n : piece) * C + load * 64;
                            float part[2][4] = {};
#pragma unroll
                            for (int j = 0; j < PER; j++) {
                                const uint4 x = *(const uint4*)(pairs + column * 2 + j * 128), y = w[n][load + j];
                                product_f16(part[0], make_uint4(widen_e4m3(y.x), widen_e4m3(y.z), widen_e4m3(y.x >> 16), widen_e4m3(y.z >> 16)), make_uint2(x.x, x.y));
                                product_f16(part[1], make_uint4(widen_e4m3(y.y), widen_e4m3(y.w), widen_e4m3(y.y >> 16), widen_e4m3(y.w >> 16)), make_uint2(x.z, x.w));
                            }
                            const float sum = (part[0][0] + part[0][3]) + (part[1][0] + part[1][3]);
                            const int at = PIECES == 2 ? 0 : t + n;
                            if (BLOCK) {
                                const float* row = (const float*)(shared + AT_SCALES) + scales + slot(first + t + (PIECES == 2 ? 0 : n), lane / 4) * SCALE_ROWS(K, 1);
                                sums[at] = fmaf(sum, row[(column + warp * (C / 8)) / MAX(BLOCK, 1)], sums[at]);
                            } else {
                                sums[at] += sum;
                            }
                        }
                }
#pragma unroll
            for (int t = 0; t < STEP; t++)
                if (lane % 4 == 0 && first + t < TILES)
                    *(float*)(shared + AT_ROWS + (warp * MOST_ROWS + (first + t) * 8 + lane / 4) * 4) = sums[t];
        }
        together();
    }

    template <typename Slot>
    __device__ __forceinline__ void multiply(Ring& ring, u32 full, u32 empty, u32 vector, u32 scales, u32* report, Slot slot) {
        if constexpr (STORED) multiply_stored(ring, full, empty, vector, scales, report, slot);
        else multiply_plain(ring, full, empty, vector, report);
    }

    __device__ __forceinline__ void multiply_plain(Ring& ring, u32 full, u32 empty, u32 vector, u32* report) {
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const unsigned char* pairs = shared + vector + warp * (C / 4) + lane % 4 * 16 + lane / 4 % 2 * 4;
#pragma unroll 1
        for (int first = 0; first < TILES; first += STEP) {
            float sums[STEP][SETS][4] = {};
#pragma unroll(K / C <= 4 && TILES <= 2 ? K / C : 1)
            for (int piece = 0; piece < K / C; piece += PIECES)
#pragma unroll
                for (int t = 0; t < STEP; t += 2) {
                    if (first || piece || t) take(ring, full, empty, report, first, t, piece);
#pragma unroll
                    for (int j = 0; j < LOADS; j++)
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            if (!there(first, t, piece, n)) continue;
                            const unsigned char* at = pairs + (PIECES == 2 ? piece + n : piece) * C * 2 + j * 64;
                            const uint2 x = make_uint2(*(const u32*)at, *(const u32*)(at + 8));
                            product(sums[PIECES == 2 ? 0 : t + n][PIECES == 2 ? n : j % SETS], w[n][j], x);
                        }
                }
#pragma unroll
            for (int t = 0; t < STEP; t++) {
                float sum = 0.f;
#pragma unroll
                for (int n = 0; n < SETS; n++) sum += sums[t][n][0] + sums[t][n][3];
                if (lane % 4 == 0 && first + t < TILES)
                    *(float*)(shared + AT_ROWS + (warp * MOST_ROWS + (first + t) * 8 + lane / 4) * 4) = sum;
            }
        }
        together();
    }
};
#endif

// A row's sum over all columns, of which PARTS sets of warps have one each.
template <int PARTS>
__device__ __forceinline__ float row_sum(u32 row) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < PARTS; w++) sum += ((const float*)(shared + AT_ROWS))[w * MOST_ROWS + row];
    return sum;
}

// What a vector is multiplied by before it is rounded to float16, and sums of products with it afterwards: the largest is
// between 2^14 and 2^15, so a bfloat16 that is at least 2^-31 of it keeps all bits.
struct Lift { float up, down; };
// `most`: of this thread's values, without sign.
__device__ __forceinline__ Lift lift_of(u32 most) {
    most = warp_most(most);
    if ((threadIdx.x & 31) == 0) ((u32*)(shared + AT_MOST))[threadIdx.x >> 5] = most;
    together();
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = MAX(most, ((const u32*)(shared + AT_MOST))[w]);
    const u32 exponent = MAX(most >> 23, 15u);
    return {__uint_as_float((268 - exponent) << 23), __uint_as_float((exponent - 14) << 23)};
}

// A vector [K] of bfloat16 in shared memory is there, of which this thread wrote values up to `most`. Of stored weights it
// becomes float16. Returns what sums of products with it are multiplied by.
template <int K>
__device__ __forceinline__ float arrived(u32 at, u32 most) {
    if constexpr (!STORED) {
        if constexpr (PACKED) {
            together();
            integers<K>(at);
        }
        together();
        return 1.f;
    } else {
        const Lift lift = lift_of(most);
        u32* words = (u32*)(shared + at);
#pragma unroll 4
        for (int n = 0; n < K / 2 / THREADS; n++) {
            const u32 v = words[threadIdx.x + n * THREADS];
            words[threadIdx.x + n * THREADS] = pack_f16(low(v) * lift.up, high(v) * lift.up);
        }
        together();
        return lift.down;
    }
}
// The larger of both bfloat16 numbers of a word and `most`.
__device__ __forceinline__ u32 larger(u32 most, u32 word) {
    if constexpr (!STORED) return 0;
    else return MAX(most, MAX(size_of(low(word)), size_of(high(word))));
}

// Scales of a program's blocks, `rows` rows of them from row `first` on of a matrix with `all`; no row is after its last.
template <int K>
__device__ __forceinline__ void take_scales(int to, const Scale* from, int first, int rows, int all) {
    if constexpr (BLOCK != 0) {
        constexpr int EVERY = SCALE_ROWS(K, 1);
        for (int i = threadIdx.x; i < rows * EVERY; i += THREADS)
            ((float*)(shared + AT_SCALES))[to + i] = from[MIN(first + i / EVERY, UP(all, BLOCK) - 1) * EVERY + i % EVERY];
    }
}
// The row of blocks of row `i` of those that begin with `first`: 0 or 1.
__device__ __forceinline__ int next_block(u32 first, int i) { return BLOCK && (first % MAX(BLOCK, 1) + i) / MAX(BLOCK, 1) ? 1 : 0; }

// The sum of x and the stream, which may be null, of the launch before. Four words at a time, where a thread has so many:
// with one at a time, its warp would ask for four times as much.
__device__ __forceinline__ void take_stream(float (&total)[EACH], const u16* x, const float* stream) {
    const u32* pairs = (const u32*)x + threadIdx.x * (EACH / 2);
    const u32* words = (const u32*)stream + threadIdx.x * EACH;
    if constexpr (EACH % 8 == 0) {
#pragma unroll
        for (int n = 0; n < EACH; n += 8) {
            const uint4 v = fresh_four(pairs + n / 2);
            const u32 four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int m = 0; m < 4; m++) total[n + 2 * m] = low(four[m]), total[n + 2 * m + 1] = high(four[m]);
        }
    } else {
#pragma unroll
        for (int n = 0; n < EACH / 2; n++) {
            const u32 v = fresh(pairs + n);
            total[2 * n] = low(v), total[2 * n + 1] = high(v);
        }
    }
    if (!stream) return;
    if constexpr (EACH % 4 == 0) {
#pragma unroll
        for (int n = 0; n < EACH; n += 4) {
            const uint4 v = fresh_four(words + n);
            const u32 four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int m = 0; m < 4; m++) total[n + m] += __uint_as_float(four[m]);
        }
    } else {
#pragma unroll
        for (int n = 0; n < EACH; n++) total[n] += __uint_as_float(fresh(words + n));
    }
}

// The stream times the norm's weights, rounded, as the vector [HIDDEN] in shared memory. Products with it are to be
// multiplied by `scale_of`, which needs the sums of all warps, and so nobody waits for them here, and by the result.
__device__ __forceinline__ float enter(const float (&total)[EACH], const u32 (&weights)[EACH / 2], u32 tid, int turn) {
    float square = 0.f;
#pragma unroll
    for (int n = 0; n < EACH; n++) square = fmaf(total[n], total[n], square);
    u32* to = (u32*)(shared + AT_VECTOR) + tid * (EACH / 2);
    Lift lift{1.f, 1.f};
    if constexpr (STORED) {
        u32 most = 0;
#pragma unroll
        for (int n = 0; n < EACH / 2; n++) {
            const float a = total[2 * n] * (low(weights[n]) + OFFSET), b = total[2 * n + 1] * (high(weights[n]) + OFFSET);
            most = MAX(most, MAX(size_of(a), size_of(b)));
        }
        lift = lift_of(most);
#pragma unroll
        for (int n = 0; n < EACH / 2; n++)
            to[n] = pack_f16(total[2 * n] * (low(weights[n]) + OFFSET) * lift.up, total[2 * n + 1] * (high(weights[n]) + OFFSET) * lift.up);
    } else {
#pragma unroll
        for (int n = 0; n < EACH / 2; n++)
            to[n] = pack(total[2 * n] * (low(weights[n]) + OFFSET), total[2 * n + 1] * (high(weights[n]) + OFFSET));
    }
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) square += __shfl_xor_sync(~0u, square, bit);
    if ((tid & 31) == 0) ((float*)(shared + AT_NORMS))[turn * WARPS + (tid >> 5)] = square;
    together();
    if constexpr (PACKED) {
        integers<HIDDEN>(AT_VECTOR);
        together();
    }
    return lift.down;
}
__device__ __forceinline__ float scale_of(int turn, float eps) {
    float square = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) square += ((const float*)(shared + AT_NORMS))[turn * WARPS + w];
    return rsqrtf(square / HIDDEN + eps);
}
