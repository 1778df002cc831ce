// Marks the messages of this launch.
__device__ __forceinline__ u32 flag_of(const Experts& launch) {
    return (((volatile u32*)launch.messages)[launch.site] << 8) + launch.site + 1;
}
__device__ __forceinline__ Choice& choice(int k) { return ((Choice*)(shared + AT_CHOICES))[k]; }

// Numbers that compare as logits do, from 1 on; NaN is 1, so it goes before nothing.
__device__ __forceinline__ u32 key_of(float v) {
    const u32 bits = __float_as_uint(v + 0.f);  // zero has one sign
    return v == v ? bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u) : 1;
}
__device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }

// The experts with the largest logits, the lower number first of two that are equal: by one warp, as soon as the logits
// are there. A lane has RANKED experts.
__device__ __forceinline__ void choose(const Experts& launch, u32 flag) {
    constexpr int COUNT = MESSAGES(ROUTED);
    const u32 lane = threadIdx.x & 31;
    u32 *kept = (u32*)(shared + AT_KEYS), *top = (u32*)(shared + AT_TOP);
    int* slots = (int*)(shared + AT_SLOTS);
#pragma unroll
    for (int n = 0; n < RANKED; n++) {
        const int expert = lane * RANKED + n;
        slots[expert] = expert < EXPERTS ? ((volatile const int*)launch.slots)[expert * launch.copies] : 0;
    }
    const u64* from = launch.messages + AT_ROUTER + blockIdx.x % COPIES * (PROGRAMS * COUNT) * 2;
    u32 keys[RANKED] = {}, looks = 0;
    // One lane looks until its message is there: looks of all lanes would make messages slower.
    if (lane == 0)
        while (look_wide(from).w != flag) too_long(looks, launch.report, 4);
    __syncwarp();
    while (true) {
        bool all = true;
#pragma unroll
        for (int n = 0; n < RANKED; n++) {
            const int expert = lane * RANKED + n, word = expert % ROUTED;
            if (expert >= EXPERTS) continue;
            const uint4 v = look_wide(from + (expert / ROUTED * COUNT + word / 3) * 2);
            all = all && is_there<ROUTED>(v, flag);
            keys[n] = key_of(__uint_as_float(word % 3 == 0 ? v.x : word % 3 == 1 ? v.y : v.z));
        }
        if (all) break;
        too_long(looks, launch.report, 4);
    }
    __syncwarp();
    // Each lane's experts in order, the best first.
    int experts[RANKED];
#pragma unroll
    for (int n = 0; n < RANKED; n++) kept[lane * RANKED + n] = keys[n], experts[n] = lane * RANKED + n;
#pragma unroll
    for (int last = RANKED - 1; last > 0; last--)
#pragma unroll
        for (int n = 0; n < last; n++) {
            const bool swap = keys[n + 1] > keys[n];
            const u32 key = swap ? keys[n] : keys[n + 1];
            const int expert = swap ? experts[n] : experts[n + 1];
            keys[n] = swap ? keys[n + 1] : keys[n], experts[n] = swap ? experts[n + 1] : experts[n];
            keys[n + 1] = key, experts[n + 1] = expert;
        }
#pragma unroll
    for (int rank = 0; rank < TOP; rank++) {
        const u32 most = warp_most(keys[0]);
        if (lane != __ffs(__ballot_sync(~0u, keys[0] == most)) - 1) continue;
        top[rank] = experts[0];
#pragma unroll
        for (int n = 0; n + 1 < RANKED; n++) keys[n] = keys[n + 1], experts[n] = experts[n + 1];
        keys[RANKED - 1] = 0;
    }
    __syncwarp();
    if (lane < TOP) {
        const long long slot = MAX(slots[top[lane]], 0);
        choice(lane) = {launch.gate_up + slot * (2 * INNER * HIDDEN), launch.down + slot * (INNER * HIDDEN)};
    }
    __syncwarp();
}

// The rows of the chosen experts, as there is room for them in the ring.
__device__ __forceinline__ void read_experts(const Experts& launch, u32 base, u32 full, u32 empty, u32 chosen) {
    const u64 policy = evict_first();
    const u32 program = blockIdx.x, own = program / SHARE, rank = program % SHARE;
    Ring ring{0, 0}, landed{0, 0};
    u32 issued = 0;
    grid_wait();
    choose(launch, flag_of(launch));
    if ((threadIdx.x & 31) == 0) arrive(chosen);
    stream<HIDDEN, INNER_TILES, 8>(ring, landed, issued, base + AT_RING, full, empty, policy, launch.report, [&](int t, int i) {
        i += t / 2 * 8;
        return i < INNER_ROWS ? choice(own).gate_up + (long long)(t % 2 * INNER + rank * INNER_ROWS + i) * HIDDEN : nullptr;
    });
    constexpr int PIECES = INNER / DOWN_COLUMNS;
    stream_pieces<ACTIVATED, OUT_TILES, DOWN_COLUMNS>(ring, landed, issued, base + AT_RING, full, empty, policy, launch.report, [&](int t, int i, int piece) {
        const int k = piece / PIECES;
        i += t * 8;
        return i < OUT_ROWS ? choice(k).down + (long long)(program * OUT_ROWS + i) * INNER + piece % PIECES * DOWN_COLUMNS : nullptr;
    });
}

// The weight of a choice; 0: its expert is not here. All lanes of a warp ask.
__device__ __forceinline__ float share_of(int k) {
    const u32 *top = (const u32*)(shared + AT_TOP), *keys = (const u32*)(shared + AT_KEYS);
    const float own = logit_of(keys[top[k]]);
    float sum = 0.f;
    if (RENORMALIZE) {
#pragma unroll
        for (int n = 0; n < TOP; n++) sum += power(1.44269504f * (logit_of(keys[top[n]]) - own));
    } else {
#pragma unroll
        for (int n = 0; n < RANKED; n++) {
            const int expert = n * 32 + (threadIdx.x & 31);
            sum += expert < EXPERTS ? power(1.44269504f * (logit_of(keys[expert]) - own)) : 0.f;
        }
#pragma unroll
        for (int bit = 16; bit; bit >>= 1) sum += __shfl_xor_sync(~0u, sum, bit);
    }
    return ((const int*)(shared + AT_SLOTS))[top[k]] < 0 ? 0.f : SCALE / sum;
}

__device__ __forceinline__ void compute_experts(const Experts& launch, u32 full, u32 empty, u32 chosen) {
    const u32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, program = blockIdx.x;
    STAMP(0);
    u32 weights[EACH / 2], router[ROUTED][EACH / 2];
#pragma unroll
    for (int n = 0; n < EACH / 2; n++) weights[n] = ((const u32*)launch.norm)[tid * (EACH / 2) + n];
#pragma unroll
    for (int r = 0; r < ROUTED; r++) {
        const int row = program * ROUTED + r;
#pragma unroll
        for (int n = 0; n < EACH / 2; n++)
            router[r][n] = row < EXPERTS ? ((const u32*)launch.router)[row * (HIDDEN / 2) + tid * (EACH / 2) + n] : 0;
    }
    grid_wait();
    const u32 flag = flag_of(launch);
    float total[EACH];
    take_stream(total, launch.x, launch.stream);
    STAMP(1);
#pragma unroll
    for (int r = 0; r < ROUTED; r++) {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < EACH / 2; n++) {
            sum = fmaf(total[2 * n] * (low(weights[n]) + OFFSET), low(router[r][n]), sum);
            sum = fmaf(total[2 * n + 1] * (high(weights[n]) + OFFSET), high(router[r][n]), sum);
        }
#pragma unroll
        for (int bit = 16; bit; bit >>= 1) sum += __shfl_xor_sync(~0u, sum, bit);
        if (lane == 0) ((float*)(shared + AT_PARTIAL))[r * WARPS + warp] = sum;
    }
    enter(total, weights, tid, 0);
    const float scale = scale_of(0, EPS);
    if (tid < ROUTED) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += ((const float*)(shared + AT_PARTIAL))[tid * WARPS + w];
        ((float*)(shared + AT_WORDS))[tid] = sum * scale;
    }
    tell<ROUTED, ROUTED>(launch.messages + AT_ROUTER, program, flag);
    STAMP(2);
    Ring ring{0, 0};
    Product<HIDDEN, INNER_TILES, 8> gate_up;
    gate_up.take(ring, full, empty, launch.report);
    STAMP(3);
    gate_up.multiply(ring, full, empty, AT_VECTOR, 0, launch.report, [](int, int) { return 0; });
    wait(chosen, 0, launch.report, 3);
    const float share = share_of(program / SHARE);
    if (tid < INNER_ROWS) {
        const u32 at = tid / 8 * 16 + tid % 8;
        const float gate = row_sum<WARPS>(at) * scale, up = row_sum<WARPS>(at + 8) * scale;
        const float v = __fdividef(gate, 1.f + power(-1.44269504f * gate)) * up * share;
        ((u16*)(shared + AT_WORDS))[tid] = (u16)pack(share != 0.f ? v : 0.f, 0.f);
    }
    tell<INNER_WORDS, INNER_ROWS>(launch.messages + AT_INNER, program, flag);
    Product<ACTIVATED, OUT_TILES, 8, DOWN_COLUMNS> down;
    down.take(ring, full, empty, launch.report);
    STAMP(4);
    hear<INNER_WORDS>(launch.messages + AT_INNER, program, flag, launch.report, 5, [](int word, u32 value) {
        ((u32*)(shared + AT_WIDE))[word] = value;
    });
    together();
    STAMP(5);
    launch_next();
    // Everybody has read x and the stream: activations came from all programs.
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int i = (int)(tid * EACH + n) - (int)(program * OUT_ROWS);
        if (i >= 0 && i < OUT_ROWS) launch.stream[tid * EACH + n] = total[n];
    }
    down.multiply(ring, full, empty, AT_WIDE, 0, launch.report, [](int, int) { return 0; });
    if (tid < OUT_ROWS) launch.x[program * OUT_ROWS + tid] = (u16)pack(row_sum<WARPS>(tid), 0.f);
    if (program == 0 && tid == 0) ((volatile u32*)launch.messages)[launch.site] = (flag - 1 >> 8) + 1;
    STAMP(6);
}

static_assert(SHARED == SHARED_BYTES, "one_token_experts.py has another size of shared memory");

extern "C" __global__ void __launch_bounds__(288, 1) one_token_experts(const __grid_constant__ Experts launch) {
    const u32 base = (u32)__cvta_generic_to_shared(shared), full = base + AT_BARRIERS, empty = full + STAGES * 8;
    const u32 chosen = empty + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init(full + i * 8, 1), init(empty + i * 8, WARPS);
        init(chosen, 1);
        barriers_made();
    }
    __syncthreads();
    if (threadIdx.x >> 5 == WARPS) read_experts(launch, base, full, empty, chosen);
    else compute_experts(launch, full, empty, chosen);
}
