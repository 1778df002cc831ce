// Decoder layers for one token: see docs/lab/one-token-kernel.md and one_token.py, which defines the sizes. Here are
// sizes, shared memory, messages, and where rows are; four_bits.cuh has products of integers of four bits, one_token.cu
// others, and the layer.
//
// 128 programs; a team of 16 has an eighth of the query heads, and their key head. Warps 0-7 compute, warp 8 streams
// weights, warp 9 waits for the launch before and streams keys and values. Without MLP it ends after attention.

#define PROGRAMS 128
#define SHARE 16
#define WARPS 8
#define THREADS 256
#define TEAMS (PROGRAMS / SHARE)
// Query heads of a team, and teams that have one key head: each projects it, and the first writes it to memory.
#define GROUP (HEADS / TEAMS)
#define TWINS (TEAMS / KV_HEADS)
// Rows of one program of each product, and rows of one warp.
#define Q_ROWS (GROUP * D / SHARE)
#define K_ROWS (D / SHARE)
#define QKV_ROWS (Q_ROWS + 2 * K_ROWS)
#define OUT_ROWS (HIDDEN / PROGRAMS)
#define INNER_ROWS (INNER / PROGRAMS)
#define UP(a, b) (((a) + (b) - 1) / (b))
// Tiles of eight rows, of four bits of up to 32; gate and up take turns.
#define HIGH(rows) (!PACKED || (rows) <= 8 ? 8 : (rows) <= 16 ? 16 : 32)
#define QKV_HIGH (PACKED ? 16 : 8)
#define OUT_HIGH HIGH(OUT_ROWS)
#define INNER_HIGH HIGH(INNER_ROWS)
#define QKV_TILES UP(QKV_ROWS, QKV_HIGH)
#define OUT_TILES UP(OUT_ROWS, OUT_HIGH)
#define INNER_TILES (2 * UP(INNER_ROWS, INNER_HIGH))
// Tiles that are summed at a time, so that sums fit into registers.
#define AT_ONCE(tiles) UP(tiles, UP(tiles, 6))
#define ATTENDED (HEADS * D)
// Of one program: elements of its cluster's attention that it merges.
#define MERGED (GROUP * D / SHARE)
// Messages of 16 bytes, three numbers each, that bring it from one program: sums, maximum, mass.
#define PART_MESSAGES UP(MERGED + 2, 3)
#define HEAD_WORDS ((GROUP + 2) * D / 2)
// Elements of the stream of one thread.
#define EACH (HIDDEN / THREADS)
// Keys: lanes of one key, keys of one warp, keys of one stage.
#define KEY_LANES (D / 8)
#define WARP_KEYS (32 / KEY_LANES)
#define STAGE_KEYS (WARPS * WARP_KEYS)
#define KV_STAGES 2
#define KV_STAGE_BYTES (STAGE_KEYS * D * 4)
// Weights have two bytes, bfloat16, or one, e4m3 with a scale for a row (BLOCK 0) or for BLOCK x BLOCK of them. PACKED ones
// are integers of four bits; a group of a row's columns has a scale, bfloat16 (SCALE_BF16) or float16, and a zero point
// (ZEROS), or else 8 stands for zero.
#define PACKED (WEIGHT_BITS == 4)
#define STORED (WEIGHT_BITS == 8)
#define WEIGHT_BYTES (WEIGHT_BITS / 8)
#if PACKED || STORED
typedef unsigned char Weight;
#else
typedef u16 Weight;
#endif
#if PACKED
typedef u32 Scale;  // words of two scales of a row, or of one with its zero point
#else
typedef float Scale;
#endif
// Columns of a tile. Those of a warp, an eighth, are whole blocks or within one.
#define FITS(k, c) ((k) % (c) == 0 && MOST >= (c))
#define WIDE_PLAIN(k) (FITS(k, 1024) ? 1024 : FITS(k, 768) ? 768 : FITS(k, 512) ? 512 : 256)
#define WIDE_STORED(k) (FITS(k, 2048) ? 2048 : FITS(k, 1024) ? 1024 : 512)
#define WIDE(k) (STORED ? WIDE_STORED(k) : WIDE_PLAIN(k))
// The rows of a tile are 64 bytes further apart than they are long, so that eight lanes read from all banks.
#define PITCH(c) ((c) * WEIGHT_BYTES + 64)
#define STAGE_BYTES (PACKED ? CELLS * (CELL_BYTES + CELL_SCALES) : 8 * PITCH(MOST))
// Of four bits, a tile has 16 cells: eight rows of a span of 256 columns, then their scales.
#define SPAN 256
#define GROUP_COLUMNS 128
#define CELLS 16
#define CELL_BYTES (8 * SPAN / 2)
#define SCALE_WORDS (1 + ZEROS)
#define CELL_SCALES (8 * 4 * SCALE_WORDS)
#define MOST_ROWS MAX(MAX(QKV_TILES * QKV_HIGH, OUT_TILES * OUT_HIGH), INNER_TILES * INNER_HIGH)
// Words that a program sends to all: attention, rows of the stream, of the MLP, of the next layer's stream (float32);
// and their messages of 16 bytes, three words each.
#define ATTENDED_WORDS (MERGED / 2)
#define OUT_WORDS (OUT_ROWS / 2)
#define INNER_WORDS (INNER_ROWS / 2)
#define NEXT_WORDS OUT_ROWS
#define MESSAGES(words) UP(words, 3)
#define MOST_WORDS MAX(MAX(ATTENDED_WORDS, INNER_WORDS), NEXT_WORDS)
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

// Shared memory, in bytes.
#define AT_RING 0
#define AT_KV (AT_RING + STAGES * STAGE_BYTES)
#define AT_VECTOR (AT_KV + KV_STAGES * KV_STAGE_BYTES)
#define AT_WIDE (AT_VECTOR + HIDDEN * 2)
#define VECTORS (HIDDEN * 2 + MAX(MAX(ATTENDED, INNER) * 2, HIDDEN * 4))
#define SUMS (WARPS * GROUP * D * 4)
#define AT_SUMS AT_VECTOR
#define AT_STATS (AT_VECTOR + MAX(VECTORS, SUMS))
#define AT_PARTS (AT_STATS + WARPS * GROUP * 8)
#define AT_QUERY (AT_PARTS + SHARE * PART_MESSAGES * 12)
#define AT_KEY (AT_QUERY + GROUP * D * 4)
#define AT_VALUE (AT_KEY + D * 2)
#define AT_ANGLES (AT_VALUE + D * 2)
#define AT_OWN (AT_ANGLES + D * 4)
#define AT_ROWS (AT_OWN + UP(OUT_ROWS * 4, 16) * 16)
#define AT_WORDS (AT_ROWS + WARPS * MOST_ROWS * 4)
#define AT_NORMS (AT_WORDS + UP(MESSAGES(MOST_WORDS) * 12, 16) * 16)
// Largest values of the warps' parts of a vector, and scales of this program's blocks.
#define AT_MOST (AT_NORMS + 2 * WARPS * 4)
#define AT_SCALES (AT_MOST + STORED * WARPS * 4)
#define AT_GROUPS (AT_SCALES + DOWN_SCALES * 4 + SCALE_ROWS(INNER, 2) * 4)
// Four numbers for each group of a vector (four_bits.cuh).
#define AT_META (AT_GROUPS + PACKED * (MAX(MAX(HIDDEN, ATTENDED), INNER) / GROUP_COLUMNS * 16))
#define AT_BARRIERS (AT_META + 16)
#define BARRIERS (2 * STAGES + 2 * KV_STAGES + 2)
#define SHARED (AT_BARRIERS + BARRIERS * 8)

// Scales, in rows of a product's columns / BLOCK: of queries, keys and values one row each; a program's rows of the other
// matrices are in at most two rows of blocks. Where those of each product begin.
#define SCALE_ROWS(k, rows) (BLOCK ? (k) / (BLOCK ? BLOCK : 1) * (rows) : 0)
#define QKV_SCALES 0
#define OUT_SCALES SCALE_ROWS(HIDDEN, 3)
#define INNER_SCALES (OUT_SCALES + SCALE_ROWS(ATTENDED, 2))
#define DOWN_SCALES (INNER_SCALES + MLP * SCALE_ROWS(HIDDEN, 4))

// Device memory of all layers, in messages of 8 bytes.
#define CONTROL 256
#define AT_PART_MESSAGES CONTROL
#define AT_QKV (AT_PART_MESSAGES + PROGRAMS * SHARE * PART_MESSAGES * 2)
#define AT_ATTENDED (AT_QKV + TEAMS * HEAD_WORDS)
#define INBOX(words) (COPIES * PROGRAMS * MESSAGES(words) * 2)
#define AT_STREAM (AT_ATTENDED + INBOX(ATTENDED_WORDS))
#define AT_INNER (AT_STREAM + INBOX(OUT_WORDS))
#define AT_NEXT (AT_INNER + INBOX(INNER_WORDS))
#define ALL_MESSAGES (AT_NEXT + INBOX(NEXT_WORDS))

struct Layer {
    const u16* x;
    const float* residual;  // or null
    u16* out;
    float* stream;
    const u16* norm;
    const Weight* qkv;
    const u16 *qkv_bias, *q_norm, *k_norm;  // a bias: or null
    const Weight* o;
    const u16 *o_bias, *mlp_norm;
    const Weight *gate_up, *down;
    const float* cos_sin;
    const int* positions;
    const void* slots;
    const int *kv_lens, *table;
    u16 *keys, *values;
    long long key_page, value_page;
    u32 before, after;  // flags of the stream of the layer before (0: it comes as x and residual) and of this one
    u32 site, wide_slots, page_bits;
    const Scale *qkv_scales, *o_scales, *gate_up_scales, *down_scales;  // of stored and packed weights
};

// So many layers a launch has: where there is room for one only, the compiler is to know.
#define COUNT_OF(launch) (MOST_LAYERS == 1 ? 1 : (launch).count)
// The layers of a launch, one after another. Each but the first takes the stream from the messages of the one before.
struct Layers {
    u64* messages;
    u32* report;  // or null: a word of the host's memory, for the number of a wait that was given up
    u64* stamps;  // or null
    u32 count;
    Layer layer[MOST_LAYERS];
};

// Copies of what all programs read.
#define COPIES 4
// FLIGHT tiles are under way at once, of one program. Who asks memory for more makes messages wait behind the rest.

// Nanoseconds between looks at the layer before.
#define NAP 40
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
            post_wide(region + ((copy * PROGRAMS + program) * COUNT + m) * 2, words[3 * m], words[3 * m + 1], words[3 * m + 2], flag);
    }
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
            for (int n = 0; n < CHUNK; n++) all = all && (threadIdx.x + (first + n) * THREADS >= ALL || v[n].w == flag);
            if (all) break;
            too_long(looks, report, code);
        }
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

// The row of queries, keys and values that is row `i` of program `rank` of a team.
__device__ __forceinline__ int qkv_row(int team, int rank, int i) {
    const int head = team / TWINS;
    if (i < Q_ROWS) return team * GROUP * D + rank * Q_ROWS + i;
    if (i < Q_ROWS + K_ROWS) return (HEADS + head) * D + rank * K_ROWS + i - Q_ROWS;
    return (HEADS + KV_HEADS + head) * D + rank * K_ROWS + i - Q_ROWS - K_ROWS;
}
