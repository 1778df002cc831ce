#if !PACKED
// Where the rows of a program are: row `i` of tile `t` of each product, or null.
struct Rows {
    const Layer& p;
    u32 program, team, rank;

    __device__ __forceinline__ const Weight* qkv(int t, int i) const {
        i += t * 8;
        return i < QKV_ROWS ? p.qkv + (long long)qkv_row(team, rank, i) * HIDDEN : nullptr;
    }
    __device__ __forceinline__ const Weight* o(int t, int i) const {
        i += t * 8;
        return i < OUT_ROWS ? p.o + (long long)(program * OUT_ROWS + i) * ATTENDED : nullptr;
    }
    __device__ __forceinline__ const Weight* gate_up(int t, int i) const {
        i += t / 2 * 8;
        return i < INNER_ROWS ? p.gate_up + (long long)(t % 2 * INNER + program * INNER_ROWS + i) * HIDDEN : nullptr;
    }
    __device__ __forceinline__ const Weight* down(int t, int i) const {
        i += t * 8;
        return i < OUT_ROWS ? p.down + (long long)(program * OUT_ROWS + i) * INNER : nullptr;
    }
};

// The rows of one program, tile by tile, into the ring. `row(tile, i)`: row `i` of a tile [K], or null.
template <int K, int TILES, int TALL, typename Row>
__device__ __forceinline__ void stream(Ring& ring, Ring& landed, u32& issued, u32 to, u32 full, u32 empty, u64 policy, u32* report, Row row) {
    constexpr int C = WIDE(K), STEP = AT_ONCE(TILES);
    const u32 lane = threadIdx.x & 31;
#pragma unroll 1
    for (int first = 0; first < TILES; first += STEP)
#pragma unroll 1
        for (int piece = 0; piece < K / C; piece++)
#pragma unroll 1
            for (int t = first; t < first + STEP && t < TILES; t++) {
                const Weight* from = lane < 8 ? row(t, lane) : nullptr;
                const u32 count = __popc(__ballot_sync(~0u, from != nullptr));
                make_room(ring, landed, issued, full, empty, report);
                if (lane == 0) expect(full + ring.stage * 8, count * C * WEIGHT_BYTES);
                __syncwarp();
                if (from)
                    bulk(to + ring.stage * STAGE_BYTES + lane * PITCH(C), from + piece * C, C * WEIGHT_BYTES, full + ring.stage * 8, policy);
                ring.next();
            }
}

// Products of one program's rows with the vector [K] at `vector` in shared memory. A warp has an eighth of the columns of
// each tile; its sums go to AT_ROWS. A lane reads 16 bytes of a row at a time: four pairs of columns, in the order in which
// the tensor cores take their left operand. So a row is two of that operand's, 1 and 9: of its pairs 0 and 2, and 1 and 3.
// Of the right operand, even columns are the vector's pairs 0 and 2, odd ones 1 and 3.
// Two tiles are in registers at a time: two of the same columns, or two pieces of the only one.
// Of stored weights the 16 bytes become two such operands of float16, and the vector is float16. Of the first operand,
// even columns are the vector's pairs 0 and 1, odd ones 4 and 5; of the second, pairs 2 and 3, and 6 and 7.
template <int K, int TILES, int TALL>
struct Product {
    static_assert(TALL == 8, "so many rows a tile has");
    static constexpr int PARTS = WARPS;
    static constexpr int C = WIDE(K), LOADS = C * WEIGHT_BYTES / 512, STEP = K == C ? MIN(TILES, 2) : AT_ONCE(TILES), PIECES = STEP == 1 ? 2 : 1;
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

// Where a thread is: its program, that one's place in its team, and the barriers in shared memory.
struct Here {
    u32 tid, lane, warp, program, team, head, rank, base, full, empty, kv_full, kv_empty, meta_full, meta_free;

    __device__ __forceinline__ Here()
        : tid(threadIdx.x), lane(tid & 31), warp(tid >> 5), program(blockIdx.x), team(program / SHARE), head(team / TWINS),
          rank(program % SHARE), base((u32)__cvta_generic_to_shared(shared)), full(base + AT_BARRIERS), empty(full + STAGES * 8),
          kv_full(empty + STAGES * 8), kv_empty(kv_full + KV_STAGES * 8), meta_full(kv_empty + KV_STAGES * 8), meta_free(meta_full + 8) {}
};

// All layers' weights, as there is room for them in the ring.
__device__ __forceinline__ void read_weights(const Layers& launch, const Here& here) {
    const u64 policy = evict_first();
    Ring ring{0, 0}, landed{0, 0};
    u32 issued = 0;
#pragma unroll 1
    for (u32 n = 0; n < COUNT_OF(launch); n++) {
        const Rows rows{launch.layer[n], here.program, here.team, here.rank};
        stream<HIDDEN, QKV_TILES, QKV_HIGH>(ring, landed, issued, here.base + AT_RING, here.full, here.empty, policy, launch.report, [&](int t, int i) { return rows.qkv(t, i); });
        stream<ATTENDED, OUT_TILES, OUT_HIGH>(ring, landed, issued, here.base + AT_RING, here.full, here.empty, policy, launch.report, [&](int t, int i) { return rows.o(t, i); });
#if MLP
        stream<HIDDEN, INNER_TILES, INNER_HIGH>(ring, landed, issued, here.base + AT_RING, here.full, here.empty, policy, launch.report, [&](int t, int i) { return rows.gate_up(t, i); });
        stream<INNER, OUT_TILES, OUT_HIGH>(ring, landed, issued, here.base + AT_RING, here.full, here.empty, policy, launch.report, [&](int t, int i) { return rows.down(t, i); });
#endif
    }
}

// What the step is to a layer, and its keys and values, stage by stage.
__device__ __forceinline__ void read_state(const Layers& launch, u32 n, const Here& here, u32& stage, u32& parity) {
    const Layer& p = launch.layer[n];
    const u32 lane = here.lane, head = here.head, rank = here.rank, base = here.base, kv_full = here.kv_full,
        kv_empty = here.kv_empty, meta_full = here.meta_full, meta_free = here.meta_free;
    // What the step is was written before the first layer, which waits. Later ones start as soon as there is room.
    if (!p.before) grid_wait();
    if (n + 1 == COUNT_OF(launch)) launch_next();
    const int page_mask = (1 << p.page_bits) - 1;
    const u64 policy = evict_first();
    const int length = fresh(p.kv_lens), position = fresh(p.positions);
    const long long slot = p.wide_slots ? fresh((const long long*)p.slots) : (long long)fresh((const int*)p.slots);
    const int old = length > 0 ? length - 1 : 0, each = UP(old, SHARE);
    const int begin = rank * each, end = begin + each < old ? begin + each : old;
    // Numbers of 32 pages at a time, one a lane.
    int pages_from = begin >> p.page_bits;
    int page = pages_from + lane <= (end - 1) >> p.page_bits ? fresh(p.table + pages_from + lane) : 0;
    wait(meta_free, n & 1 ^ 1, launch.report, 14);  // the layer before needs them no more
    float* angles = (float*)(shared + AT_ANGLES);
    for (int d = lane; d < D; d += 32) angles[d] = p.cos_sin[(long long)position * D + d];
    if (lane == 0) {
        *(int*)(shared + AT_META) = length;
        *(long long*)(shared + AT_META + 8) = slot;
    }
    arrive(meta_full);
    for (int from = begin; from < end; from += STAGE_KEYS) {
        const int count = end - from < STAGE_KEYS ? end - from : STAGE_KEYS;
        wait(kv_empty + stage * 8, parity ^ 1, launch.report, 3);
        if (lane == 0) expect(kv_full + stage * 8, count * D * 4);
        __syncwarp();
        // The keys of a head in one page are next to each other, so are its values: one copy each, asked for by a lane.
        const int first = from >> p.page_bits, pages = (from + count - 1 >> p.page_bits) - first + 1;
        for (int part = 0; part < 2 * pages; part += 32) {
            const int which = lane & 1, nth = part + lane >> 1;
            const int of = __shfl_sync(~0u, page, first + nth - pages_from & 31);
            const int start = MAX(from, first + nth << p.page_bits), stop = MIN(from + count, first + nth + 1 << p.page_bits);
            if (nth < pages) {
                const u16* rows = which ? p.values + (long long)of * p.value_page : p.keys + (long long)of * p.key_page;
                bulk(base + AT_KV + stage * KV_STAGE_BYTES + (which * STAGE_KEYS + start - from) * D * 2,
                     rows + (long long)((head << p.page_bits) + (start & page_mask)) * D, (stop - start) * D * 2,
                     kv_full + stage * 8, policy);
            }
        }
        // A stage has at most as many pages as keys, and begins in these.
        const int next = from + STAGE_KEYS >> p.page_bits;
        if (next + (STAGE_KEYS - 1 >> p.page_bits) + 1 - pages_from >= 32) {
            pages_from = next;
            page = next + lane <= (end - 1) >> p.page_bits ? fresh(p.table + next + lane) : 0;
        }
        if (++stage == KV_STAGES) stage = 0, parity ^= 1;
    }
    // This launch ends after the one before: who waits for this one has waited for all.
    if (p.before) grid_wait();
}

// A layer: the warps that compute.
__device__ __forceinline__ void compute_layer(const Layers& launch, u32 number, const Here& here, Ring& ring, u32& stage, u32& parity) {
    const Layer& p = launch.layer[number];
    const u32 tid = here.tid, lane = here.lane, warp = here.warp, program = here.program, team = here.team, head = here.head,
        rank = here.rank, full = here.full, empty = here.empty, kv_full = here.kv_full, kv_empty = here.kv_empty,
        meta_full = here.meta_full, meta_free = here.meta_free;
    STAMP(0);
    u32 count;  // how often this site was launched
    u32 weights[EACH / 2];
#pragma unroll
    for (int n = 0; n < EACH / 2; n++) weights[n] = ((const u32*)p.norm)[tid * (EACH / 2) + n];
    // The pairs that a lane rotates: words of a head's first half, and of its second.
    constexpr int HALF = D / 4, MANY_WORDS = UP(HALF, 32);
    u32 first_gain[MANY_WORDS], second_gain[MANY_WORDS];
    const u32* head_norm = (const u32*)(warp < GROUP ? p.q_norm : p.k_norm);
#pragma unroll
    for (int n = 0; n < MANY_WORDS; n++) {
        const int word = lane + 32 * n;
        first_gain[n] = QK_NORM && word < HALF ? head_norm[word] : 0;
        second_gain[n] = QK_NORM && word < HALF ? head_norm[HALF + word] : 0;
    }
    // Of the row that this thread sums.
    const float qkv_bias = p.qkv_bias && tid < QKV_ROWS ? widen(p.qkv_bias[qkv_row(team, rank, tid)]) : 0.f;
    const float o_bias = p.o_bias && tid < OUT_ROWS ? widen(p.o_bias[program * OUT_ROWS + tid]) : 0.f;

    // Scales of rows, and of blocks.
    const bool by_rows = STORED && !BLOCK;
    const float qkv_factor = by_rows && tid < QKV_ROWS ? p.qkv_scales[qkv_row(team, rank, tid)] : 1.f;
    const float o_factor = by_rows && tid < OUT_ROWS ? p.o_scales[program * OUT_ROWS + tid] : 1.f;
    const bool inner_row = by_rows && MLP && tid < INNER_ROWS;
    const float gate_factor = inner_row ? p.gate_up_scales[program * INNER_ROWS + tid] : 1.f;
    const float up_factor = inner_row ? p.gate_up_scales[INNER + program * INNER_ROWS + tid] : 1.f;
    const float down_factor = by_rows && MLP && tid < OUT_ROWS ? p.down_scales[program * OUT_ROWS + tid] : 1.f;
    constexpr int QKV_ALL = (HEADS + 2 * KV_HEADS) * D;
    take_scales<HIDDEN>(QKV_SCALES, p.qkv_scales, qkv_row(team, rank, 0) / MAX(BLOCK, 1), 1, QKV_ALL);
    take_scales<HIDDEN>(QKV_SCALES + SCALE_ROWS(HIDDEN, 1), p.qkv_scales, qkv_row(team, rank, Q_ROWS) / MAX(BLOCK, 1), 1, QKV_ALL);
    take_scales<HIDDEN>(QKV_SCALES + SCALE_ROWS(HIDDEN, 2), p.qkv_scales, qkv_row(team, rank, Q_ROWS + K_ROWS) / MAX(BLOCK, 1), 1, QKV_ALL);
    take_scales<ATTENDED>(OUT_SCALES, p.o_scales, program * OUT_ROWS / MAX(BLOCK, 1), 2, HIDDEN);
#if MLP
    take_scales<HIDDEN>(INNER_SCALES, p.gate_up_scales, program * INNER_ROWS / MAX(BLOCK, 1), 2, 2 * INNER);
    take_scales<HIDDEN>(INNER_SCALES + SCALE_ROWS(HIDDEN, 2), p.gate_up_scales, (INNER + program * INNER_ROWS) / MAX(BLOCK, 1), 2, 2 * INNER);
    take_scales<INNER>(DOWN_SCALES, p.down_scales, program * OUT_ROWS / MAX(BLOCK, 1), 2, HIDDEN);
#endif

    Product<HIDDEN, QKV_TILES, QKV_HIGH> qkv;
    qkv.take(ring, full, empty, launch.report);
    float total[EACH];
    if (p.before) {
        // The launch before the last has ended, and the last one is of another site.
        count = ((volatile u32*)launch.messages)[p.site];
        if (warp == 0) {  // most of the time is spent here, so one place is asked, and rarely
            u32 looks = 0;
            const u64* at = launch.messages + AT_NEXT + (program % COPIES * PROGRAMS + (program + PROGRAMS / 2) % PROGRAMS) * MESSAGES(NEXT_WORDS) * 2;
            while (look_wide(at).w != p.before) {
                __nanosleep(NAP);
                too_long(looks, launch.report, 12);
            }
        }
        together();
        hear<NEXT_WORDS>(launch.messages + AT_NEXT, program, p.before, launch.report, 4, [](int word, u32 value) {
            ((u32*)(shared + AT_WIDE))[word] = value;
        });
        together();
#pragma unroll
        for (int n = 0; n < EACH; n++) total[n] = ((const float*)(shared + AT_WIDE))[tid * EACH + n];
    } else {
        grid_wait();
        count = ((volatile u32*)launch.messages)[p.site];
#pragma unroll
        for (int n = 0; n < EACH / 2; n++) {
            const u32 v = ((volatile const u32*)p.x)[tid * (EACH / 2) + n];
            total[2 * n] = low(v), total[2 * n + 1] = high(v);
        }
        if (p.residual) {
#pragma unroll
            for (int n = 0; n < EACH; n++) total[n] += ((volatile const float*)p.residual)[tid * EACH + n];
        }
    }
    const u32 flag = (count << 8) + p.site + 1;
    STAMP(1);
    const float entered = enter(total, weights, tid, 0);
    STAMP(2);
    const float qkv_scale = scale_of(0, EPS) * entered;
    qkv.multiply(ring, full, empty, AT_VECTOR, QKV_SCALES, launch.report, [](int t, int row) {
        const int i = t * 8 + row;
        return i < Q_ROWS ? 0 : i < Q_ROWS + K_ROWS ? 1 : 2;
    });
    if (tid < UP(QKV_ROWS, 32) * 32) {
        const int i = tid;
        const float sum = i < QKV_ROWS ? row_sum<decltype(qkv)::PARTS>(i) * (qkv_scale * qkv_factor) + qkv_bias : 0.f, next = __shfl_down_sync(~0u, sum, 1);
        if (i < QKV_ROWS && i % 2 == 0) {
            int word = (rank * Q_ROWS + i) / 2;
            if (i >= Q_ROWS) word = (GROUP * D + rank * K_ROWS + i - Q_ROWS) / 2;
            if (i >= Q_ROWS + K_ROWS) word = ((GROUP + 1) * D + rank * K_ROWS + i - Q_ROWS - K_ROWS) / 2;
            post(launch.messages + AT_QKV + team * HEAD_WORDS + word, pack(sum, next), flag);
        }
    }
    STAMP(3);
    wait(meta_full, number & 1, launch.report, 5);
    const int length = *(const int*)(shared + AT_META);
    const long long slot = *(const long long*)(shared + AT_META + 8);
    const int old = length > 0 ? length - 1 : 0, each = UP(old, SHARE);
    const int begin = rank * each, end = begin + each < old ? begin + each : old;
    const long long in_page = (((long long)head << p.page_bits) + (slot & ((1 << p.page_bits) - 1))) * D;
    if (warp <= GROUP + 1) {  // queries, the key, the value
        const u64* from = launch.messages + AT_QKV + team * HEAD_WORDS + warp * (D / 2);
        u32 first[MANY_WORDS], second[MANY_WORDS];
        u32 looks = 0;
        for (bool all = false; !all;) {
            all = true;
#pragma unroll
            for (int n = 0; n < MANY_WORDS; n++) {
                const int word = lane + 32 * n;
                const uint2 none = make_uint2(0, flag), a = word < HALF ? look(from + word) : none;
                const uint2 b = word < HALF ? look(from + HALF + word) : none;
                first[n] = a.x, second[n] = b.x;
                all = all && a.y == flag && b.y == flag;
            }
            if (!all) too_long(looks, launch.report, 6);
        }
        __syncwarp();
        STAMP(4);
        if (warp <= GROUP) {
            float square = 0.f;
#pragma unroll
            for (int n = 0; n < MANY_WORDS; n++) {
                square = fmaf(low(first[n]), low(first[n]), fmaf(high(first[n]), high(first[n]), square));
                square = fmaf(low(second[n]), low(second[n]), fmaf(high(second[n]), high(second[n]), square));
            }
            float scale = 1.f;
            if (QK_NORM) {
#pragma unroll
                for (int bit = 16; bit; bit >>= 1) square += __shfl_xor_sync(~0u, square, bit);
                scale = rsqrtf(square / D + EPS);
            }
            const float* angles = (const float*)(shared + AT_ANGLES);
#pragma unroll
            for (int n = 0; n < MANY_WORDS; n++) {
                const int word = lane + 32 * n;
                if (word >= HALF) continue;
                float a[2] = {low(first[n]), high(first[n])}, b[2] = {low(second[n]), high(second[n])};
                if (QK_NORM) {
                    a[0] *= scale * (low(first_gain[n]) + OFFSET), a[1] *= scale * (high(first_gain[n]) + OFFSET);
                    b[0] *= scale * (low(second_gain[n]) + OFFSET), b[1] *= scale * (high(second_gain[n]) + OFFSET);
                }
                const float2 cosine = *(const float2*)(angles + 2 * word), sine = *(const float2*)(angles + D / 2 + 2 * word);
                first[n] = pack(a[0] * cosine.x - b[0] * sine.x, a[1] * cosine.y - b[1] * sine.y);
                second[n] = pack(b[0] * cosine.x + a[0] * sine.x, b[1] * cosine.y + a[1] * sine.y);
            }
        }
        u32* in_shared = (u32*)(shared + (warp == GROUP ? AT_KEY : AT_VALUE));
        u32* in_memory = (u32*)((warp == GROUP ? p.keys + (slot >> p.page_bits) * p.key_page
                                               : p.values + (slot >> p.page_bits) * p.value_page) + in_page);
#pragma unroll
        for (int n = 0; n < MANY_WORDS; n++) {
            const int word = lane + 32 * n;
            if (word >= HALF) continue;
            if (warp < GROUP) {
                float2* to = (float2*)(shared + AT_QUERY + warp * D * 4);
                to[word] = make_float2(low(first[n]) * SCALE, high(first[n]) * SCALE);
                to[HALF + word] = make_float2(low(second[n]) * SCALE, high(second[n]) * SCALE);
            } else {
                in_shared[word] = first[n], in_shared[HALF + word] = second[n];
                if (rank == 0 && team % TWINS == 0) in_memory[word] = first[n], in_memory[HALF + word] = second[n];
            }
        }
    }
    together();
    if (tid == 0) arrive(meta_free);
    STAMP(5);
    {
        const u32 part = lane % KEY_LANES, member = warp * WARP_KEYS + lane / KEY_LANES;
        float q[GROUP][8], sum[GROUP][8], most[GROUP], mass[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            most[g] = -1e30f, mass[g] = 0.f;
#pragma unroll
            for (int n = 0; n < 8; n++) q[g][n] = ((const float*)(shared + AT_QUERY))[g * D + part * 8 + n], sum[g][n] = 0.f;
        }
        auto attend = [&](const uint4 k, uint4 v, bool seen) {
            const float kf[8] = {low(k.x), high(k.x), low(k.y), high(k.y), low(k.z), high(k.z), low(k.w), high(k.w)};
            if (!seen) v = make_uint4(0, 0, 0, 0);
            const float vf[8] = {low(v.x), high(v.x), low(v.y), high(v.y), low(v.z), high(v.z), low(v.w), high(v.w)};
            float score[GROUP];
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                score[g] = 0.f;
#pragma unroll
                for (int n = 0; n < 8; n++) score[g] = fmaf(q[g][n], kf[n], score[g]);
            }
#pragma unroll
            for (int bit = KEY_LANES / 2; bit; bit >>= 1)
#pragma unroll
                for (int g = 0; g < GROUP; g++) score[g] += __shfl_xor_sync(~0u, score[g], bit);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                const float s = seen ? score[g] : -1e30f, top = fmaxf(most[g], s);
                const float keep = power(most[g] - top), weight = seen ? power(s - top) : 0.f;
                most[g] = top, mass[g] = fmaf(mass[g], keep, weight);
#pragma unroll
                for (int n = 0; n < 8; n++) sum[g][n] = fmaf(sum[g][n], keep, weight * vf[n]);
            }
        };
        if (rank == SHARE - 1 && warp == 0) {
            const uint4 k = *(const uint4*)(shared + AT_KEY + part * 16), v = *(const uint4*)(shared + AT_VALUE + part * 16);
            attend(k, v, lane < KEY_LANES);
        }
#pragma unroll 1
        for (int from = begin; from < end; from += STAGE_KEYS) {
            wait(kv_full + stage * 8, parity, launch.report, 7);
            const unsigned char* at = shared + AT_KV + stage * KV_STAGE_BYTES + member * D * 2 + part * 16;
            const uint4 k = *(const uint4*)at, v = *(const uint4*)(at + STAGE_KEYS * D * 2);
            attend(k, v, from + (int)member < end);
            __syncwarp();
            if (lane == 0) arrive(kv_empty + stage * 8);
            if (++stage == KV_STAGES) stage = 0, parity ^= 1;
        }
#pragma unroll
        for (int bit = KEY_LANES; bit < 32; bit <<= 1)
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                const float other = __shfl_xor_sync(~0u, most[g], bit), top = fmaxf(most[g], other);
                const float mine = power(most[g] - top);
                mass[g] *= mine, most[g] = top;
                mass[g] += __shfl_xor_sync(~0u, mass[g], bit);
#pragma unroll
                for (int n = 0; n < 8; n++) sum[g][n] *= mine, sum[g][n] += __shfl_xor_sync(~0u, sum[g][n], bit);
            }
        if (lane < KEY_LANES) {
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float4* to = (float4*)(shared + AT_SUMS + ((warp * GROUP + g) * D + part * 8) * 4);
                to[0] = make_float4(sum[g][0], sum[g][1], sum[g][2], sum[g][3]);
                to[1] = make_float4(sum[g][4], sum[g][5], sum[g][6], sum[g][7]);
                if (lane == 0) *(float2*)(shared + AT_STATS + (warp * GROUP + g) * 8) = make_float2(most[g], mass[g]);
            }
        }
    }
    together();
    STAMP(6);
#pragma unroll
    for (int e = tid; e < GROUP * D; e += THREADS) {
        const int g = e / D;
        float2 stats[WARPS];
        float top = -1e30f, sum = 0.f, mass = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            stats[w] = *(const float2*)(shared + AT_STATS + (w * GROUP + g) * 8);
            top = fmaxf(top, stats[w].x);
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = power(stats[w].x - top);
            sum = fmaf(weight, ((const float*)(shared + AT_SUMS))[(w * GROUP) * D + e], sum);
            mass = fmaf(weight, stats[w].y, mass);
        }
        const u32 peer = e / MERGED, j = e % MERGED;
        float three[3];
#pragma unroll
        for (int n = 0; n < 3; n++) {
            const u32 from = 3 * j + n;
            const float other = __shfl_sync(~0u, sum, from < MERGED ? from : 0, MERGED);
            three[n] = from < MERGED ? other : from == MERGED ? top : mass;
        }
        if (j < PART_MESSAGES)
            post_wide(launch.messages + AT_PART_MESSAGES + (((team * SHARE + peer) * SHARE + rank) * PART_MESSAGES + j) * 2,
                      three[0], three[1], three[2], flag);
    }
    if (tid < SHARE * PART_MESSAGES) {
        u32 looks = 0;
        uint4 v;
        while (true) {
            v = look_wide(launch.messages + AT_PART_MESSAGES + (program * SHARE * PART_MESSAGES + tid) * 2);
            if (v.w == flag) break;
            too_long(looks, launch.report, 8);
        }
        u32* to = (u32*)(shared + AT_PARTS) + tid * 3;
        to[0] = v.x, to[1] = v.y, to[2] = v.z;
    }
    together();
    STAMP(7);
    {
        constexpr int ROUNDS = UP(MERGED, 16);
        const u32 source = lane % SHARE, half = tid / SHARE;
        const float* part = (const float*)(shared + AT_PARTS) + source * PART_MESSAGES * 3;
        const float2 stats = make_float2(part[MERGED], part[MERGED + 1]);
        float top = stats.x, results[ROUNDS];
#pragma unroll
        for (int bit = 8; bit; bit >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
        const float weight = power(stats.x - top);
        float mass = weight * stats.y;
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            const u32 j = half * ROUNDS + n;
            results[n] = j < MERGED ? weight * part[j] : 0.f;
        }
#pragma unroll
        for (int bit = 8; bit; bit >>= 1) {
            mass += __shfl_xor_sync(~0u, mass, bit);
#pragma unroll
            for (int n = 0; n < ROUNDS; n++) results[n] += __shfl_xor_sync(~0u, results[n], bit);
        }
        const float scale = 1.f / mass;
        u32* to = (u32*)(shared + AT_WORDS);
        if (ROUNDS == 1) {
            const float other = __shfl_xor_sync(~0u, results[0], 16);
            if (lane == 0 && warp * 2 < MERGED) to[warp] = pack(results[0] * scale, other * scale);
        } else if (source == 0) {
#pragma unroll
            for (int n = 0; n + 1 < ROUNDS; n += 2)
                to[(half * ROUNDS + n) / 2] = pack(results[n] * scale, results[n + 1 < ROUNDS ? n + 1 : 0] * scale);
        }
    }
    tell<ATTENDED_WORDS, THREADS>(launch.messages + AT_ATTENDED, program, flag);
    Product<ATTENDED, OUT_TILES, OUT_HIGH> output;
    output.take(ring, full, empty, launch.report);
    STAMP(8);
    u32 most = 0;
    hear<ATTENDED_WORDS>(launch.messages + AT_ATTENDED, program, flag, launch.report, 9, [&](int word, u32 value) {
        ((u32*)(shared + AT_WIDE))[word] = value, most = larger(most, value);
    });
    const float attended = arrived<ATTENDED>(AT_WIDE, most);
    STAMP(9);
    output.multiply(ring, full, empty, AT_WIDE, OUT_SCALES, launch.report, [&](int t, int row) {
        return next_block(program * OUT_ROWS, t * 8 + row);
    });
#if MLP
    if (tid < OUT_ROWS) {
        const u32 v = pack(row_sum<decltype(output)::PARTS>(tid) * (attended * o_factor) + o_bias, 0.f);
        ((u16*)(shared + AT_WORDS))[tid] = (u16)v;
    }
    tell<OUT_WORDS, OUT_ROWS>(launch.messages + AT_STREAM, program, flag);
#pragma unroll
    for (int n = 0; n < EACH / 2; n++) weights[n] = ((const u32*)p.mlp_norm)[tid * (EACH / 2) + n];
    Product<HIDDEN, INNER_TILES, INNER_HIGH> gate_up;
    gate_up.take(ring, full, empty, launch.report);
    STAMP(10);
    hear<OUT_WORDS>(launch.messages + AT_STREAM, program, flag, launch.report, 10, [](int word, u32 value) {
        ((u32*)(shared + AT_VECTOR))[word] = value;
    });
    together();
#pragma unroll
    for (int n = 0; n < EACH / 2; n++) {
        const u32 v = ((const u32*)(shared + AT_VECTOR))[tid * (EACH / 2) + n];
        total[2 * n] += low(v), total[2 * n + 1] += high(v);
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int i = (int)(tid * EACH + n) - (int)(program * OUT_ROWS);
        if (i >= 0 && i < OUT_ROWS) {
            grid_wait();  // the launch before, which has ended by now, wrote there too
            ((float*)(shared + AT_OWN))[i] = total[n];
            p.stream[tid * EACH + n] = total[n];
        }
    }
    STAMP(11);
    const float mlp_entered = enter(total, weights, tid, 1);
    const float mlp_scale = scale_of(1, MLP_EPS) * mlp_entered;
    gate_up.multiply(ring, full, empty, AT_VECTOR, INNER_SCALES, launch.report, [&](int t, int row) {
        return t % 2 * 2 + next_block(program * INNER_ROWS, t / 2 * 8 + row);
    });
    if (tid < INNER_ROWS) {
        const u32 at = tid / INNER_HIGH * (2 * INNER_HIGH) + tid % INNER_HIGH;
        constexpr int PARTS = decltype(gate_up)::PARTS;
        const float gate = rounded(row_sum<PARTS>(at) * (mlp_scale * gate_factor));
        const float up = rounded(row_sum<PARTS>(at + INNER_HIGH) * (mlp_scale * up_factor));
        const u32 v = pack(__fdividef(gate, 1.f + power(-1.44269504f * gate)) * up, 0.f);
        ((u16*)(shared + AT_WORDS))[tid] = (u16)v;
    }
    tell<INNER_WORDS, INNER_ROWS>(launch.messages + AT_INNER, program, flag);
    Product<INNER, OUT_TILES, OUT_HIGH> down;
    down.take(ring, full, empty, launch.report);
    STAMP(12);
    most = 0;
    hear<INNER_WORDS>(launch.messages + AT_INNER, program, flag, launch.report, 11, [&](int word, u32 value) {
        ((u32*)(shared + AT_WIDE))[word] = value, most = larger(most, value);
    });
    const float activated = arrived<INNER>(AT_WIDE, most);
    STAMP(13);
    down.multiply(ring, full, empty, AT_WIDE, DOWN_SCALES, launch.report, [&](int t, int row) {
        return next_block(program * OUT_ROWS, t * 8 + row);
    });
    if (tid < OUT_ROWS) {
        const float y = rounded(row_sum<decltype(down)::PARTS>(tid) * (activated * down_factor));
        ((float*)(shared + AT_WORDS))[tid] = ((const float*)(shared + AT_OWN))[tid] + y;
        p.out[program * OUT_ROWS + tid] = (u16)(__float_as_uint(y) >> 16);
    }
    tell<NEXT_WORDS, OUT_ROWS>(launch.messages + AT_NEXT, program, p.after);
#else
    // Everybody has read x and the stream: attention came from all programs.
    if (tid < OUT_ROWS) p.out[program * OUT_ROWS + tid] = (u16)pack(row_sum<decltype(output)::PARTS>(tid) * (attended * o_factor) + o_bias, 0.f);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int i = (int)(tid * EACH + n) - (int)(program * OUT_ROWS);
        if (i >= 0 && i < OUT_ROWS) p.stream[tid * EACH + n] = total[n];
    }
#endif
    if (program == 0 && tid == 0) ((volatile u32*)launch.messages)[p.site] = count + 1;
    STAMP(14);
}

extern "C" __global__ void __launch_bounds__(320, RESIDENT) one_token_layers(const __grid_constant__ Layers launch) {
    const Here here;
    if (here.tid == 0) {
        for (int i = 0; i < STAGES; i++) init(here.full + i * 8, 1), init(here.empty + i * 8, WARPS);
        for (int i = 0; i < KV_STAGES; i++) init(here.kv_full + i * 8, 1), init(here.kv_empty + i * 8, WARPS);
        init(here.meta_full, 32), init(here.meta_free, 1);
        barriers_made();
    }
    __syncthreads();
    if (here.warp == WARPS) {
        read_weights(launch, here);
        return;
    }
    Ring ring{0, 0};
    u32 stage = 0, parity = 0;  // of keys and values
#pragma unroll 1
    for (u32 n = 0; n < COUNT_OF(launch); n++) {
        if (here.warp == WARPS + 1) read_state(launch, n, here, stage, parity);
        else compute_layer(launch, n, here, ring, stage, parity);
    }
}
