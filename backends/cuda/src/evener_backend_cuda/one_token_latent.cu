// Where a thread is: its program, that one's place in its team, and the barriers in shared memory.
struct Here {
    u32 tid, lane, warp, program, team, rank, base, full, empty, state_full, state_empty, meta_full, newest;

    __device__ __forceinline__ Here()
        : tid(threadIdx.x), lane(tid & 31), warp(tid >> 5), program(blockIdx.x), team(program / SHARE), rank(program % SHARE),
          base((u32)__cvta_generic_to_shared(shared)), full(base + AT_BARRIERS), empty(full + STAGES * 8),
          state_full(empty + STAGES * 8), state_empty(state_full + STATE_STAGES * 8), meta_full(state_empty + STATE_STAGES * 8),
          newest(meta_full + 8) {}
};

// Tokens of this program: its share of all that are before the new one, which the last program of the team has too.
struct Span {
    int begin, end, newest;

    __device__ __forceinline__ Span(int length, u32 rank) {
        const int old = length > 0 ? length - 1 : 0, each = UP(old, SHARE);
        begin = MIN(rank * each, old), end = MIN(begin + each, old), newest = end + (rank == SHARE - 1);
    }
};

// Marks the messages of this launch.
__device__ __forceinline__ u32 flag_of(const Latent& launch) {
    return (((volatile u32*)launch.messages)[launch.site] << 8) + launch.site + 1;
}
__device__ __forceinline__ long long slot_of(const Latent& launch) {
    return launch.wide_slots ? fresh((const long long*)launch.slots) : (long long)fresh((const int*)launch.slots);
}

// Send what the first words of AT_WORDS are to the team, COUNT messages: one copy, as few programs read it.
template <int COUNT>
__device__ __forceinline__ void tell_team(u64* region, u32 program, u32 flag) {
    const float* words = (const float*)(shared + AT_WORDS) + 3 * threadIdx.x;
    together();
    if (threadIdx.x < COUNT) post_wide(region + (program * COUNT + threadIdx.x) * 2, words[0], words[1], words[2], flag);
}
// Wait for the words of the team; those of each program come one behind the other, to AT_TEAM. All lanes look at once: of
// what only a team reads, that makes messages no slower.
template <int COUNT>
__device__ __forceinline__ void hear_team(const u64* region, u32 team, u32 flag, u32* report, u32 code) {
    constexpr int ALL = SHARE * COUNT, MANY = UP(ALL, THREADS), CHUNK = MIN(MANY, 4);
    const u64* from = region + team * ALL * 2;
#pragma unroll 1
    for (int first = 0; first < MANY; first += CHUNK) {
        uint4 v[CHUNK];
        u32 looks = 0;
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
                all = all && (e >= ALL || is_there<3>(v[n], flag));
            }
            if (all) break;
            too_long(looks, report, code);
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < CHUNK; n++) {
            const int e = threadIdx.x + (first + n) * THREADS;
            if (e >= ALL) continue;
            u32* to = (u32*)(shared + AT_TEAM) + e * 3;
            to[0] = v[n].x, to[1] = v[n].y, to[2] = v[n].z;
        }
    }
    together();
}

// All weights of the program, in the order of their use, as there is room for them in the ring.
__device__ __forceinline__ void read_weights(const Latent& launch, const Here& here) {
    const u64 policy = evict_first();
    const u32 to = here.base + AT_RING, program = here.program;
    Ring ring{0, 0}, landed{0, 0};
    u32 issued = 0;
    const auto down = [&](int i) {
        const int row = down_row(program, i);
        return row < 0 ? nullptr : launch.down + (long long)row * HIDDEN;
    };
    stream<HIDDEN, 1, 8>(ring, landed, issued, to, here.full, here.empty, policy, launch.report, [&](int, int i) { return down(i); });
    stream<HIDDEN, DOWN_TILES - 1, 8>(ring, landed, issued, to, here.full, here.empty, policy, launch.report, [&](int t, int i) { return down(t * 8 + 8 + i); });
    const u16* head = launch.kv_b + (long long)here.team * (NOPE + VALUE) * RANK;
#pragma unroll 1
    for (int row = 0; row < NOPE_ROWS; row += NOPE_TILE_ROWS) {
        const u32 bytes = MIN(NOPE_TILE_ROWS, NOPE_ROWS - row) * RANK * 2;
        make_room(ring, landed, issued, here.full, here.empty, launch.report);
        if (here.lane == 0) {
            expect(here.full + ring.stage * 8, bytes);
            bulk(to + ring.stage * STAGE_BYTES, head + (here.rank * NOPE_ROWS + row) * RANK, bytes, here.full + ring.stage * 8, policy);
        }
        __syncwarp();
        ring.next();
    }
    stream<RANK, VALUE_TILES, 8>(ring, landed, issued, to, here.full, here.empty, policy, launch.report, [&](int t, int i) {
        i += t * 8;
        return i < VALUE_ROWS ? head + (NOPE + here.rank * VALUE_ROWS + i) * RANK : nullptr;
    });
    stream<ATTENDED, OUT_TILES, 8>(ring, landed, issued, to, here.full, here.empty, policy, launch.report, [&](int t, int i) {
        i += t * 8;
        return i < OUT_ROWS ? launch.o + (long long)(program * OUT_ROWS + i) * ATTENDED : nullptr;
    });
}

// What the step is, and the state of earlier tokens, stage by stage.
__device__ __forceinline__ void read_state(const Latent& launch, const Here& here) {
    const u32 lane = here.lane;
    grid_wait();
    launch_next();
    const int length = fresh(launch.kv_lens), position = fresh(launch.positions);
    const Span span(length, here.rank);
    const int page_mask = (1 << launch.page_bits) - 1;
    // Numbers of 32 pages at a time, one a lane.
    int pages_from = span.begin >> launch.page_bits;
    int page = span.begin < span.end && pages_from + (int)lane <= (span.end - 1) >> launch.page_bits ? fresh(launch.table + pages_from + lane) : 0;
    float* angles = (float*)(shared + AT_ANGLES);
    for (int d = lane; d < ROPE; d += 32) angles[d] = launch.cos_sin[(long long)position * ROPE + d];
    if (lane == 0) *(int*)(shared + AT_META) = length;
    arrive(here.meta_full);
    const u64 policy = evict_first();
    u32 stage = 0, parity = 0;
#pragma unroll 1
    for (int from = span.begin; from < span.end; from += STAGE_TOKENS) {
        const int count = MIN(span.end - from, STAGE_TOKENS);
        wait(here.state_empty + stage * 8, parity ^ 1, launch.report, 3);
        if (lane == 0) expect(here.state_full + stage * 8, count * WIDTH * 2);
        __syncwarp();
        // Tokens of one page are next to each other: one copy each, asked for by a lane.
        const int first = from >> launch.page_bits, nth = lane;
        const int of = __shfl_sync(~0u, page, first + nth - pages_from & 31);
        const int start = MAX(from, first + nth << launch.page_bits), stop = MIN(from + count, first + nth + 1 << launch.page_bits);
        if (start < stop)
            bulk(here.base + AT_STATE + stage * STATE_BYTES + (start - from) * WIDTH * 2,
                 launch.rows + (long long)of * launch.page + (long long)(start & page_mask) * WIDTH, (stop - start) * WIDTH * 2,
                 here.state_full + stage * 8, policy);
        // A stage has at most as many pages as tokens, and begins in these.
        const int next = from + STAGE_TOKENS >> launch.page_bits;
        if (next + (STAGE_TOKENS - 1 >> launch.page_bits) + 1 - pages_from >= 32) {
            pages_from = next;
            page = next + (int)lane <= (span.end - 1) >> launch.page_bits ? fresh(launch.table + next + lane) : 0;
        }
        if (++stage == STATE_STAGES) stage = 0, parity ^= 1;
    }
}

// The new token's state, from all programs: normed and rotated, for its team, and in one program for the pages.
__device__ __forceinline__ void make_newest(const Latent& launch, const Here& here) {
    constexpr int SOURCES = PROGRAMS / 32, WORDS = LATENT_ROWS / 2;
    const u32 lane = here.lane;
    u32 gains[SOURCES][WORDS];
#pragma unroll
    for (int n = 0; n < SOURCES; n++)
#pragma unroll
        for (int m = 0; m < WORDS; m++) gains[n][m] = ((const u32*)launch.kv_norm)[(lane + 32 * n) * WORDS + m];
    grid_wait();
    const u32 flag = flag_of(launch);
    const long long slot = slot_of(launch);
    const float* angles = launch.cos_sin + (long long)fresh(launch.positions) * ROPE;
    const float cosine = lane < HALF ? angles[lane] : 0.f, sine = lane < HALF ? angles[HALF + lane] : 0.f;
    const u64* from = launch.messages + AT_LATENTS + here.team % COPIES * PROGRAMS * 2;
    uint4 v[SOURCES];
    u32 looks = 0;
    if (lane == 0)
        while (look_wide(from).w != flag) too_long(looks, launch.report, 4);
    __syncwarp();
    while (true) {
        bool all = true;
#pragma unroll
        for (int n = 0; n < SOURCES; n++) v[n] = look_wide(from + (lane + 32 * n) * 2);
#pragma unroll
        for (int n = 0; n < SOURCES; n++) all = all && is_there<LATENT_WORDS>(v[n], flag);
        if (__all_sync(~0u, all)) break;
        too_long(looks, launch.report, 4);
    }
    float square = 0.f;
#pragma unroll
    for (int n = 0; n < SOURCES; n++)
#pragma unroll
        for (int m = 0; m < WORDS; m++) {
            const u32 word = m ? v[n].y : v[n].x;
            square = fmaf(low(word), low(word), fmaf(high(word), high(word), square));
        }
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) square += __shfl_xor_sync(~0u, square, bit);
    const float scale = rsqrtf(square / RANK + INNER_EPS);
    u32* row = (u32*)(shared + AT_NEWEST);
    u16* key = (u16*)(shared + AT_NEWEST + RANK * 2);
#pragma unroll
    for (int n = 0; n < SOURCES; n++) {
        const int source = lane + 32 * n;
#pragma unroll
        for (int m = 0; m < WORDS; m++) {
            const u32 word = m ? v[n].y : v[n].x;
            row[source * WORDS + m] = pack(low(word) * scale * low(gains[n][m]), high(word) * scale * high(gains[n][m]));
        }
        if (source % KEY_EVERY == 0) key[source / KEY_EVERY] = (u16)(WORDS > 1 ? v[n].z : v[n].y);
    }
    __syncwarp();
    const int first = INTERLEAVED ? 2 * lane : lane, second = INTERLEAVED ? 2 * lane + 1 : HALF + lane;
    const float a = lane < HALF ? widen(key[first]) : 0.f, b = lane < HALF ? widen(key[second]) : 0.f;
    __syncwarp();
    const u32 turned = pack(a * cosine - b * sine, b * cosine + a * sine);
    if (lane < HALF) key[first] = (u16)turned, key[second] = (u16)(turned >> 16);
    __syncwarp();
    arrive(here.newest);
    if (here.team) return;
    u32* to = (u32*)(launch.rows + (slot >> launch.page_bits) * launch.page + (slot & ((1 << launch.page_bits) - 1)) * WIDTH);
    for (int n = lane; n < WIDTH / 2; n += 32) to[n] = row[n];
}

// Attention of one warp to tokens, in base 2: a lane has 8 numbers of each 256 of a latent, and a pair of the key.
struct Attention {
    float query[PIECES_OF_LANE][8], key[2], sum[PIECES_OF_LANE][8], most, mass;

    __device__ __forceinline__ explicit Attention(u32 lane) : most(-1e30f), mass(0.f) {
        const float* from = (const float*)(shared + AT_QUERY);
#pragma unroll
        for (int l = 0; l < PIECES_OF_LANE; l++)
#pragma unroll
            for (int n = 0; n < 8; n += 4) {
                const float4 four = *(const float4*)(from + l * 256 + lane * 8 + n);
                query[l][n] = four.x, query[l][n + 1] = four.y, query[l][n + 2] = four.z, query[l][n + 3] = four.w;
                sum[l][n] = sum[l][n + 1] = sum[l][n + 2] = sum[l][n + 3] = 0.f;
            }
#pragma unroll
        for (int n = 0; n < 2; n++) key[n] = lane < HALF ? from[RANK + 2 * lane + n] : 0.f;
    }

    // `at(n)`: where a token's state is in shared memory; the first `count` are there, at least one.
    template <typename At>
    __device__ __forceinline__ void attend(u32 lane, int count, At at) {
        constexpr int TOKENS = WARP_TOKENS;
        uint4 rows[TOKENS][PIECES_OF_LANE];
        float score[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const unsigned char* from = shared + at(t < count ? t : 0);
            const u32 pair = lane < HALF ? *(const u32*)(from + RANK * 2 + lane * 4) : 0;
            score[t] = key[0] * low(pair) + key[1] * high(pair);
#pragma unroll
            for (int l = 0; l < PIECES_OF_LANE; l++) rows[t][l] = *(const uint4*)(from + l * 512 + lane * 16);
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int l = 0; l < PIECES_OF_LANE; l++) {
                const u32 words[4] = {rows[t][l].x, rows[t][l].y, rows[t][l].z, rows[t][l].w};
                float part[2] = {};  // two sums wait less for each other
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    part[0] = fmaf(query[l][2 * n], low(words[n]), part[0]);
                    part[1] = fmaf(query[l][2 * n + 1], high(words[n]), part[1]);
                }
                score[t] += part[0] + part[1];
            }
#pragma unroll
        for (int bit = 16; bit; bit >>= 1)
#pragma unroll
            for (int t = 0; t < TOKENS; t++) score[t] += __shfl_xor_sync(~0u, score[t], bit);
        float top = most, weight[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) top = t < count ? fmaxf(top, score[t]) : top;
        const float keep = power(most - top);
        most = top, mass *= keep;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) weight[t] = t < count ? power(score[t] - top) : 0.f, mass += weight[t];
#pragma unroll
        for (int l = 0; l < PIECES_OF_LANE; l++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float a = sum[l][2 * n] * keep, b = sum[l][2 * n + 1] * keep;
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    const u32 word = n == 0 ? rows[t][l].x : n == 1 ? rows[t][l].y : n == 2 ? rows[t][l].z : rows[t][l].w;
                    a = fmaf(weight[t], low(word), a), b = fmaf(weight[t], high(word), b);
                }
                sum[l][2 * n] = a, sum[l][2 * n + 1] = b;
            }
    }

    __device__ __forceinline__ void leave(u32 lane, u32 warp) const {
#pragma unroll
        for (int l = 0; l < PIECES_OF_LANE; l++) {
            float4* to = (float4*)(shared + AT_SUMS + (warp * RANK + l * 256 + lane * 8) * 4);
            to[0] = make_float4(sum[l][0], sum[l][1], sum[l][2], sum[l][3]);
            to[1] = make_float4(sum[l][4], sum[l][5], sum[l][6], sum[l][7]);
        }
        if (lane == 0) *(float2*)(shared + AT_STATS + warp * 8) = make_float2(most, mass);
    }
};

// This program's rows of the latent and of the key, to all. Its first eight rows are summed.
__device__ __forceinline__ void tell_state(const Latent& launch, const Here& here, float scale, u32 flag) {
    const u32 tid = here.tid;
    float* own = (float*)(shared + AT_OWN);
    if (tid < 8) own[tid] = down_row(here.program, tid) < 0 ? 0.f : rounded(row_sum<WARPS>(tid) * scale);
    together();  // the next product has its sums in the same place
    if (tid >= COPIES) return;
    const u32 key = pack(own[LATENT_ROWS], 0.f), first = pack(own[0], own[1]);
    const u32 second = LATENT_ROWS > 2 ? pack(own[LATENT_ROWS - 2], own[LATENT_ROWS - 1]) : key;
    post_wide(launch.messages + AT_LATENTS + (tid * PROGRAMS + here.program) * 2, __uint_as_float(first),
              __uint_as_float(second), __uint_as_float(LATENT_ROWS > 2 ? key : flag), flag);
}

// A part of the query in latent space, from this program's rows of it, and its rotated pairs, to the team. `scale`: of the
// sums of the first product.
__device__ __forceinline__ void tell_query(const Latent& launch, const Here& here, Ring& ring, float scale, u32 flag) {
    const u32 tid = here.tid, lane = here.lane;
    float* own = (float*)(shared + AT_OWN);
    if (tid < (DOWN_TILES - 1) * 8) own[8 + tid] = rounded(row_sum<WARPS>(tid) * scale);
    together();
    const float *query = own + STATE_ROWS, *pair = query + NOPE_ROWS + 2 * tid;
    float a = 0.f, b = 0.f;  // of the two columns of this thread
#pragma unroll 1
    for (int row = 0; row < NOPE_ROWS; row += NOPE_TILE_ROWS) {
        await_tile(ring, here.full, launch.report);
        const u32* from = (const u32*)(shared + AT_RING + ring.stage * STAGE_BYTES) + tid;
        if (tid < RANK / 2)
#pragma unroll 4
            for (int n = 0; n < NOPE_TILE_ROWS; n++)
                if (NOPE_ROWS % NOPE_TILE_ROWS == 0 || row + n < NOPE_ROWS) {
                    const u32 w = from[n * (RANK / 2)];
                    a = fmaf(query[row + n], low(w), a), b = fmaf(query[row + n], high(w), b);
                }
        __syncwarp();
        if (lane == 0) arrive(here.empty + ring.stage * 8);
        ring.next();
    }
    u32* words = (u32*)(shared + AT_WORDS);
    if (tid < RANK / 2) words[tid] = pack(a, b);
    if (tid < PAIRS) {
        wait(here.meta_full, 0, launch.report, 5);
        const float* angles = (const float*)(shared + AT_ANGLES) + here.rank * PAIRS + tid;
        const float cosine = angles[0], sine = angles[HALF];
        words[RANK / 2 + tid] = pack(pair[0] * cosine - pair[1] * sine, pair[1] * cosine + pair[0] * sine);
    }
    tell_team<MESSAGES(QUERY_WORDS)>(launch.messages + AT_QUERIES, here.program, flag);
}

// The query in latent space, from its parts in AT_TEAM, times the scale of scores.
__device__ __forceinline__ void sum_query(u32 tid) {
    constexpr int APART = MESSAGES(QUERY_WORDS) * 3;
    const u32* words = (const u32*)(shared + AT_TEAM);
    float* query = (float*)(shared + AT_QUERY);
    if (tid < RANK / 2) {
        float a = 0.f, b = 0.f;
#pragma unroll
        for (int n = 0; n < SHARE; n++) a += low(words[n * APART + tid]), b += high(words[n * APART + tid]);
        *(float2*)(query + 2 * tid) = make_float2(a * SCALE, b * SCALE);
    }
    if (tid < HALF) {
        const u32 pair = words[tid / PAIRS * APART + RANK / 2 + tid % PAIRS];
        query[RANK + (INTERLEAVED ? 2 * tid : tid)] = low(pair) * SCALE;
        query[RANK + (INTERLEAVED ? 2 * tid + 1 : HALF + tid)] = high(pair) * SCALE;
    }
    together();
}

// This program's share of attention, summed over its warps, as words for the team.
__device__ __forceinline__ void attend_share(const Latent& launch, const Here& here) {
    const u32 tid = here.tid, lane = here.lane, warp = here.warp;
    wait(here.meta_full, 0, launch.report, 6);
    const Span span(*(const int*)(shared + AT_META), here.rank);
    Attention attention(lane);
    u32 stage = 0, parity = 0;
#pragma unroll 1
    for (int from = span.begin; from < span.newest; from += STAGE_TOKENS) {
        if (from < span.end) wait(here.state_full + stage * 8, parity, launch.report, 7);
        // Warps have a token each in turn. The new one is not in the stage.
        const int first = from + warp, count = UP(MIN(span.newest - from, STAGE_TOKENS) - (int)warp, WARPS);
        const u32 at = AT_STATE + stage * STATE_BYTES + warp * WIDTH * 2;
        if (count > 0) {
            if (first + (count - 1) * WARPS == span.end) wait(here.newest, 0, launch.report, 8);
            attention.attend(lane, count, [&](int n) { return first + n * WARPS == span.end ? AT_NEWEST : at + n * (WARPS * WIDTH * 2); });
        }
        __syncwarp();
        if (lane == 0 && from < span.end) arrive(here.state_empty + stage * 8);
        if (++stage == STATE_STAGES) stage = 0, parity ^= 1;
    }
    attention.leave(lane, warp);
    together();
    if (tid < RANK / 2) {
        float top = -1e30f, mass = 0.f, a = 0.f, b = 0.f;
        float2 stats[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) stats[w] = *(const float2*)(shared + AT_STATS + w * 8), top = fmaxf(top, stats[w].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = power(stats[w].x - top);
            const float2 two = *(const float2*)(shared + AT_SUMS + (w * RANK + 2 * tid) * 4);
            mass = fmaf(weight, stats[w].y, mass), a = fmaf(weight, two.x, a), b = fmaf(weight, two.y, b);
        }
        u32* words = (u32*)(shared + AT_WORDS);
        words[2 + tid] = pack(a, b);
        if (tid == 0) words[0] = __float_as_uint(top), words[1] = __float_as_uint(mass);
    }
}

// The parts of the team in AT_TEAM become the head's result in latent space.
__device__ __forceinline__ void merge_parts(u32 tid) {
    constexpr int APART = MESSAGES(PART_WORDS) * 3;
    const u32* words = (const u32*)(shared + AT_TEAM);
    if (tid < RANK / 2) {
        float top = -1e30f, mass = 0.f, a = 0.f, b = 0.f;
#pragma unroll
        for (int n = 0; n < SHARE; n++) top = fmaxf(top, __uint_as_float(words[n * APART]));
#pragma unroll
        for (int n = 0; n < SHARE; n++) {
            const u32* part = words + n * APART;
            const float weight = power(__uint_as_float(part[0]) - top);
            mass = fmaf(weight, __uint_as_float(part[1]), mass);
            a = fmaf(weight, low(part[2 + tid]), a), b = fmaf(weight, high(part[2 + tid]), b);
        }
        const float scale = 1.f / mass;
        ((u32*)(shared + AT_FOUND))[tid] = pack(a * scale, b * scale);
    }
    together();
}

__device__ __forceinline__ void compute_latent(const Latent& launch, const Here& here) {
    const u32 tid = here.tid, program = here.program, full = here.full, empty = here.empty;
    STAMP(0);
    u32 weights[EACH / 2];
#pragma unroll
    for (int n = 0; n < EACH / 2; n++) weights[n] = ((const u32*)launch.norm)[tid * (EACH / 2) + n];
    grid_wait();
    const u32 flag = flag_of(launch);
    float total[EACH];
    take_stream(total, launch.x, launch.residual);
    enter(total, weights, tid, 0);
    const float scale = scale_of(0, EPS);
    STAMP(1);
    Ring ring{0, 0};
    const auto none = [](int, int) { return 0; };  // scales, of which plain weights have none
    Product<HIDDEN, 1, 8> first;
    first.take(ring, full, empty, launch.report);
    first.multiply(ring, full, empty, AT_VECTOR, 0, launch.report, none);
    tell_state(launch, here, scale, flag);
    STAMP(2);
    Product<HIDDEN, DOWN_TILES - 1, 8> down;
    down.take(ring, full, empty, launch.report);
    down.multiply(ring, full, empty, AT_VECTOR, 0, launch.report, none);
    STAMP(3);
    tell_query(launch, here, ring, scale, flag);
    STAMP(4);
    hear_team<MESSAGES(QUERY_WORDS)>(launch.messages + AT_QUERIES, here.team, flag, launch.report, 9);
    STAMP(5);
    sum_query(tid);
    attend_share(launch, here);
    STAMP(6);
    tell_team<MESSAGES(PART_WORDS)>(launch.messages + AT_PART_MESSAGES, program, flag);
    Product<RANK, VALUE_TILES, 8> values;
    values.take(ring, full, empty, launch.report);
    hear_team<MESSAGES(PART_WORDS)>(launch.messages + AT_PART_MESSAGES, here.team, flag, launch.report, 10);
    STAMP(7);
    merge_parts(tid);
    values.multiply(ring, full, empty, AT_FOUND, 0, launch.report, none);
    if (tid < VALUE_ROWS) ((u16*)(shared + AT_WORDS))[tid] = (u16)pack(row_sum<WARPS>(tid), 0.f);
    tell<VALUE_WORDS, VALUE_ROWS>(launch.messages + AT_VALUES, program, flag);
    Product<ATTENDED, OUT_TILES, 8> output;
    output.take(ring, full, empty, launch.report);
    STAMP(8);
    hear<VALUE_WORDS>(launch.messages + AT_VALUES, program, flag, launch.report, 11, [](int word, u32 value) {
        ((u32*)(shared + AT_WIDE))[word] = value;
    });
    together();
    STAMP(9);
    // Everybody has read x and the stream: values came from all programs.
    if (tid / (OUT_ROWS / EACH) == program)
#pragma unroll
        for (int n = 0; n < EACH; n++) launch.stream[tid * EACH + n] = total[n];
    output.multiply(ring, full, empty, AT_WIDE, 0, launch.report, none);
    if (tid < OUT_ROWS) launch.x[program * OUT_ROWS + tid] = (u16)pack(row_sum<WARPS>(tid), 0.f);
    if (program == 0 && tid == 0) ((volatile u32*)launch.messages)[launch.site] = (flag - 1 >> 8) + 1;
    STAMP(10);
}

static_assert(SHARED == SHARED_BYTES, "one_token_latent.py has another size of shared memory");
static_assert(ALL_MESSAGES == MESSAGES_HELD, "one_token_latent.py has other messages");

extern "C" __global__ void __launch_bounds__(352, 1) one_token_latent(const __grid_constant__ Latent launch) {
    const Here here;
    if (here.tid == 0) {
        for (int i = 0; i < STAGES; i++) init(here.full + i * 8, 1), init(here.empty + i * 8, WARPS);
        for (int i = 0; i < STATE_STAGES; i++) init(here.state_full + i * 8, 1), init(here.state_empty + i * 8, WARPS);
        init(here.meta_full, 32), init(here.newest, 32);
        barriers_made();
    }
    __syncthreads();
    if (here.warp < WARPS) compute_latent(launch, here);
    else if (here.warp == WARPS) read_weights(launch, here);
    else if (here.warp == WARPS + 1) read_state(launch, here);
    else if (here.rank == SHARE - 1) make_newest(launch, here);
}
