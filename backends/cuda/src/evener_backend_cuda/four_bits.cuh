// Products with integers of four bits (PACKED), between one_token.cuh and one_token.cu.
//
// Matrices are stored as evener_kernels_triton/blocks.py says: [spans, rows, 128 bytes], and their scales [spans, rows,
// words]. Of a row's span of 256 columns, each of two groups has 64 bytes. A group is four tiles of 32 columns. A word of
// 16 bits has a column of each: tiles 0 and 1 in the lower and upper half of its first byte, 2 and 3 in the second one.
//
// The tensor cores multiply bytes. Of a register of numbers, `& 0x0f0f0f0f` leaves two columns of tiles 0 and 2, and
// `& 0xf0f0f0f0` the same of tiles 1 and 3, times 16. x becomes whole numbers of 16 bits times a power of two for each
// span: of a bfloat16 that is at least 1/64 of the largest no bit is lost, and of others less than 2^-14 of the largest.
// Sums of whole numbers are exact.

#if PACKED
// A vector [K] of bfloat16 in shared memory becomes whole numbers, in place. The 256 bytes of a group are two planes, of
// upper bytes and of lower ones, both with a sign. In a plane, tiles 0 and 2 have the first half, 1 and 3 the second, and
// bytes are in the order of the numbers that they are multiplied with. AT_GROUPS gets what sums of products with a plane's
// bytes are multiplied by, and what is then subtracted, for both planes of a group.
template <int K>
__device__ __forceinline__ void integers(u32 at) {
    constexpr float base = 12582912.f;  // a whole number plus this has the number in its lower bits
    const u32 lane = threadIdx.x & 31, place = lane % 16;
#pragma unroll 1
    for (int span = threadIdx.x >> 5; span < K / SPAN; span += WARPS) {
        const int group = span * 2 + lane / 16;
        uint2* upper = (uint2*)(shared + at + group * 256 + place * 8);
        uint2* lower = upper + 16;
        const uint2 a = *upper, b = *lower;  // four columns of a tile, and of the next but one
        const u32 words[4] = {a.x, a.y, b.x, b.y};
        u32 even = 0, odd = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) even = MAX(even, words[n] << 17), odd = MAX(odd, words[n] & 0x7fffffffu);
        const u32 exponent = MAX(warp_most(MAX(even >> 24, odd >> 23)), 20u);
        const float lift = __uint_as_float((267 - exponent) << 23);
        // Rounded, plus 128, so that the upper byte is the nearest to the number's 256th.
        u32 whole[8], total = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            whole[2 * n] = __float_as_uint(fmaf(low(words[n]), lift, base + 128.f));
            whole[2 * n + 1] = __float_as_uint(fmaf(high(words[n]), lift, base + 128.f));
            total += whole[2 * n] + whole[2 * n + 1];
        }
        u32 ups[2], downs[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const u32 first = __byte_perm(whole[2 * n], whole[2 * n + 4], 0x5140);
            const u32 second = __byte_perm(whole[2 * n + 1], whole[2 * n + 5], 0x5140);
            ups[n] = __byte_perm(first, second, 0x7632);
            downs[n] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
        }
        *upper = make_uint2(ups[0], ups[1]), *lower = make_uint2(downs[0], downs[1]);
        const int own = (int)(total - 8 * (0x4b400000u + 128));
        const int both = warp_sum(own), first = warp_sum(lane < 16 ? own : 0);
        const float down = __uint_as_float(exponent == 255 ? 0x7fc00000u : (exponent - 13) << 23);
        if (place == 0)
            ((float4*)(shared + AT_GROUPS))[group] =
                make_float4(down * 16, down * (ZEROS ? 1 : 8) * (lane < 16 ? first : both - first), down / 16, 0.f);
    }
}

static_assert(D == 128, "eight rows of keys of a program are next to each other");

// Rows that are next to each other in a matrix with `all`: where those of its first span are, and how many.
struct Run {
    const Weight* numbers;
    const Scale* scales;
    u32 all;
    int count;
};

// Where the rows of a program are: those of tile `t` of each product, from row `i` of it on.
struct Rows {
    const Layer& p;
    u32 program, team, rank;

    __device__ __forceinline__ static Run run(const Weight* numbers, const Scale* scales, u32 all, u32 row, int count) {
        return {numbers + row * (SPAN / 2), scales + row * SCALE_WORDS, all, count < 0 ? 0 : count};
    }
    __device__ __forceinline__ Run qkv(int t, int i) const {
        i += t * QKV_HIGH;
        return run(p.qkv, p.qkv_scales, (HEADS + 2 * KV_HEADS) * D, i < QKV_ROWS ? qkv_row(team, rank, i) : 0, MIN(QKV_ROWS - i, 8));
    }
    __device__ __forceinline__ Run out(const Weight* numbers, const Scale* scales, int t, int i) const {
        i += t * OUT_HIGH;
        return run(numbers, scales, HIDDEN, program * OUT_ROWS + i, MIN(OUT_ROWS - i, OUT_HIGH == 16 ? 8 : OUT_HIGH));
    }
    __device__ __forceinline__ Run o(int t, int i) const { return out(p.o, p.o_scales, t, i); }
    __device__ __forceinline__ Run down(int t, int i) const { return out(p.down, p.down_scales, t, i); }
    __device__ __forceinline__ Run gate_up(int t, int i) const {
        i += t / 2 * INNER_HIGH;
        return run(p.gate_up, p.gate_up_scales, 2 * INNER, t % 2 * INNER + program * INNER_ROWS + i,
                   MIN(INNER_ROWS - i, INNER_HIGH == 16 ? 8 : INNER_HIGH));
    }
};

// How a product's rows are cut into tiles of TALL rows: WIDE spans each. Of eight rows, each warp has two spans. Of 16, it
// has one. Of 32, half of the warps have the first 16 rows, and half the others.
template <int K, int TALL>
struct Cut {
    static constexpr int SPANS = K / SPAN, WIDE = CELLS * 8 / TALL, PIECES = UP(SPANS, WIDE);
    // A tile of 16 rows comes in two runs of eight: those of queries, keys and values are not together.
    static constexpr int RUNS = TALL == 16 ? 2 : 1, RUN = TALL / RUNS;
    // Of a warp's two cells: the span, and the first row.
    __device__ __forceinline__ static int span(u32 warp, int cell) { return TALL == 8 ? warp + cell * WARPS : warp % WIDE; }
    __device__ __forceinline__ static int row(u32 warp, int cell) { return TALL == 8 ? 0 : (warp / WIDE * 2 + cell) * 8; }
};

// The rows of one program, tile by tile, into the ring: numbers by the first 16 lanes, scales by the others.
template <int K, int TILES, int TALL, typename Row>
__device__ __forceinline__ void stream(Ring& ring, Ring& landed, u32& issued, u32 to, u32 full, u32 empty, u64 policy, u32* report, Row row) {
    typedef Cut<K, TALL> Of;
    const u32 lane = threadIdx.x & 31, copy = lane % 16, from = copy % Of::RUNS * Of::RUN;
    const bool numbers = lane < 16;
    const u32 each = numbers ? SPAN / 2 : 4 * SCALE_WORDS;
    // In a stage: the place of this lane's rows.
    const u32 place = (numbers ? 0 : CELLS * CELL_BYTES) + (copy / Of::RUNS * TALL + from) * each;
#pragma unroll 1
    for (int t = 0; t < TILES; t++) {
        const Run run = row(t, from);
        const int rows = row(t, 0).count + (Of::RUNS > 1 ? row(t, Of::RUN).count : 0);
        const char* first = numbers ? (const char*)run.numbers : (const char*)run.scales;
#pragma unroll 1
        for (int piece = 0; piece < Of::PIECES; piece++) {
            const int left = Of::SPANS - piece * Of::WIDE, spans = MIN(left, Of::WIDE), nth = copy / Of::RUNS;
            make_room(ring, landed, issued, full, empty, report);
            if (lane == 0) expect(full + ring.stage * 8, rows * spans * (SPAN / 2 + 4 * SCALE_WORDS));
            __syncwarp();
            if (nth < spans && run.count)
                bulk(to + ring.stage * STAGE_BYTES + place, first + (u64)(piece * Of::WIDE + nth) * run.all * each,
                     run.count * each, full + ring.stage * 8, policy);
            ring.next();
        }
    }
}

// Products of one program's rows with the whole numbers of a vector [K]. A lane has 16 bytes of a row's group, a quarter of
// it, as four rows of the left operand, two and two: row 1 is tiles 0 and 2, row 9 tiles 1 and 3. Even rows begin with
// the span's first group, odd ones with the second, so that eight lanes read from all banks. So of the right operand,
// the columns are tiles 0 and 2, 1 and 3, upper bytes; the same of lower bytes; then all that of the other group.
// A lane's sums are thus of a row's upper or lower bytes. Two of the four lanes have the other group's, which is of no use.
template <int K, int TILES, int TALL>
struct Product {
    typedef Cut<K, TALL> Of;
    static constexpr int ALL = TILES * Of::PIECES, SETS = TALL == 8 ? 1 : 2, PARTS = TALL == 32 ? WARPS / 2 : WARPS;
    uint4 w[2][2][2];  // of two tiles, two cells, two groups
    u32 s[2][2][SCALE_WORDS];  // both groups' scales; or of each the scale and, in the upper half, the zero point

    // Take two tiles out of the ring, which then has room for others: the first two before the vector is there.
    __device__ __forceinline__ void take(Ring& ring, u32 full, u32 empty, u32* report, int tile = 0) {
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, turn = lane / 4 % 2;
        u32 done[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (ALL % 2 && tile + n >= ALL) continue;
            await_tile(ring, full, report);
            const unsigned char* stage = shared + AT_RING + ring.stage * STAGE_BYTES;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const u32 row = Of::span(warp, c) * TALL + Of::row(warp, c) + lane / 4;
                const unsigned char* numbers = stage + row * (SPAN / 2) + lane % 4 * 16;
                const u32* scales = (const u32*)(stage + CELLS * CELL_BYTES) + row * SCALE_WORDS;
#pragma unroll
                for (int j = 0; j < 2; j++) w[n][c][j] = *(const uint4*)(numbers + (j ^ turn) * (GROUP_COLUMNS / 2));
#pragma unroll
                for (int j = 0; j < SCALE_WORDS; j++) s[n][c][j] = scales[j ^ ZEROS * turn];
            }
            done[n] = empty + ring.stage * 8;
            ring.next();
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 2; n++)
            if (lane == 0 && (ALL % 2 == 0 || tile + n < ALL)) arrive(done[n]);
    }

    // After `take` of the first two.
    template <typename Slot>
    __device__ __forceinline__ void multiply(Ring& ring, u32 full, u32 empty, u32 vector, u32 scales, u32* report, Slot slot) {
        const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = lane / 4, turn = column / 4, own = lane / 2 % 2;
        const unsigned char* bytes = shared + vector + column / 2 % 2 * 128 + column % 2 * 64 + lane % 4 * 16;
        const unsigned char* groups = shared + AT_GROUPS + lane % 2 * 8;
        // Which bytes of a word are the scale of a row's first group here, and of its second: as the upper half of a float32.
        const u32 lower = SCALE_BF16 ? 0x1044 : 0x4410, upper = SCALE_BF16 ? 0x3244 : 0x4432;
        const u32 first = !ZEROS && column % 2 ? upper : lower, second = ZEROS || column % 2 ? lower : upper;
        float sums[SETS] = {};
#pragma unroll 1
        for (int tile = 0; tile < ALL; tile += 2) {
            if (tile) take(ring, full, empty, report, tile);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (ALL % 2 && tile + n >= ALL) continue;
                const int t = (tile + n) / Of::PIECES, piece = (tile + n) % Of::PIECES;
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const int span = piece * Of::WIDE + Of::span(warp, c);
                        if (Of::SPANS % Of::WIDE && span >= Of::SPANS) continue;
                        const uint4 v = *(const uint4*)(bytes + (span * 2 + (j ^ turn)) * 256), y = w[n][c][j];
                        const float2 factors = *(const float2*)(groups + (span * 2 + (j ^ own)) * 16);
                        constexpr u32 even = 0x0f0f0f0f, odd = 0xf0f0f0f0;  // tiles
                        int part[4] = {};
                        product_bytes(part, make_uint4(y.x & even, y.x & odd, y.y & even, y.y & odd), make_uint2(v.x, v.y));
                        product_bytes(part, make_uint4(y.z & even, y.z & odd, y.w & even, y.w & odd), make_uint2(v.z, v.w));
                        const u32 word = s[n][c][ZEROS * j], half = __byte_perm(word, 0, j ? second : first);
                        const float scale = SCALE_BF16 ? __uint_as_float(half) : widen_f16(half);
                        const float zero = ZEROS ? __uint_as_float(0x4b000000u | word >> 16) - 8388608.f : 1.f;
                        float& sum = sums[SETS == 1 ? 0 : c];
                        sum = fmaf(scale, fmaf((float)(part[0] * 16 + part[3]), factors.x, -zero * factors.y), sum);
                    }
                if (piece < Of::PIECES - 1) continue;
#pragma unroll
                for (int c = 0; c < SETS; c++) {
                    const float sum = sums[c] + __shfl_xor_sync(~0u, sums[c], 1);
                    if (lane % 4 == lane / 4 % 2 * 2)
                        *(float*)(shared + AT_ROWS + (warp % PARTS * MOST_ROWS + t * TALL + Of::row(warp, c) + lane / 4) * 4) = sum;
                    sums[c] = 0.f;
                }
            }
        }
        together();
    }
};
#endif
