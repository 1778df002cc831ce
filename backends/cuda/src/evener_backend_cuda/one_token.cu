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
#endif

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
        take_stream(total, p.x, p.residual);
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
    __syncwarp();
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
