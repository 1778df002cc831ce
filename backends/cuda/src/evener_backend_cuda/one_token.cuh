// Decoder layers for one token: see docs/lab/one-token-kernel.md and one_token.py, which defines the sizes. Here are
// sizes, shared memory, messages, and where rows are; four_bits.cuh has products of integers of four bits, one_token.cu
// others, and the layer.
//
// 128 programs; a team of 16 has an eighth of the query heads, and their key head. Warps 0-7 compute, warp 8 streams
// weights, warp 9 waits for the launch before and streams keys and values. Without MLP it ends after attention.

#define SHARE 16
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
// Tiles of eight rows, of four bits of up to 32; gate and up take turns.
#define HIGH(rows) (!PACKED || (rows) <= 8 ? 8 : (rows) <= 16 ? 16 : 32)
#define QKV_HIGH (PACKED ? 16 : 8)
#define OUT_HIGH HIGH(OUT_ROWS)
#define INNER_HIGH HIGH(INNER_ROWS)
#define QKV_TILES UP(QKV_ROWS, QKV_HIGH)
#define OUT_TILES UP(OUT_ROWS, OUT_HIGH)
#define INNER_TILES (2 * UP(INNER_ROWS, INNER_HIGH))
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
#define MOST_ROWS MAX(MAX(QKV_TILES * QKV_HIGH, OUT_TILES * OUT_HIGH), INNER_TILES * INNER_HIGH)
// Words that a program sends to all: attention, rows of the stream, of the MLP, of the next layer's stream (float32);
// and their messages of 16 bytes, three words each.
#define ATTENDED_WORDS (MERGED / 2)
#define OUT_WORDS (OUT_ROWS / 2)
#define INNER_WORDS (INNER_ROWS / 2)
#define NEXT_WORDS OUT_ROWS
#define MOST_WORDS MAX(MAX(ATTENDED_WORDS, INNER_WORDS), NEXT_WORDS)

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

// Nanoseconds between looks at the layer before.
#define NAP 40

// The row of queries, keys and values that is row `i` of program `rank` of a team.
__device__ __forceinline__ int qkv_row(int team, int rank, int i) {
    const int head = team / TWINS;
    if (i < Q_ROWS) return team * GROUP * D + rank * Q_ROWS + i;
    if (i < Q_ROWS + K_ROWS) return (HEADS + head) * D + rank * K_ROWS + i - Q_ROWS;
    return (HEADS + KV_HEADS + head) * D + rank * K_ROWS + i - Q_ROWS - K_ROWS;
}
