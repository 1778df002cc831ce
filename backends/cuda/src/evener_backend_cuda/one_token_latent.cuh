// Latent attention of one token: see docs/lab/one-token-kernel.md and one_token_latent.py, which defines the sizes. Here are
// sizes, shared memory, messages, and where rows are; one_token_latent.cu has the block.
//
// 128 programs; a team of them has one head. Warps 0-7 compute, warp 8 streams weights, warp 9 streams the state of earlier
// tokens, and warp 10, in the last program of a team, makes the new token's.

// Programs of a team.
#define SHARE (PROGRAMS / HEADS)
// Rows of one program of each product: of its head's query, of the latent, and of the key that all heads share, of which
// one program in so many has one.
#define NOPE_ROWS (NOPE / SHARE)
#define ROPE_ROWS (ROPE / SHARE)
#define LATENT_ROWS (RANK / PROGRAMS)
#define KEY_EVERY (PROGRAMS / ROPE)
#define QUERY_ROWS (NOPE_ROWS + ROPE_ROWS)
#define STATE_ROWS (LATENT_ROWS + 1)
#define DOWN_ROWS (STATE_ROWS + QUERY_ROWS)
#define VALUE_ROWS (VALUE / SHARE)
#define OUT_ROWS (HIDDEN / PROGRAMS)
// Tiles of eight rows; those of the way into latent space are a program's rows one behind the other. The first tile has the
// rows of state, which are on their way while the others are computed, and the first ones of the query.
#define DOWN_TILES MAX(UP(DOWN_ROWS, 8), 2)
#define VALUE_TILES UP(VALUE_ROWS, 8)
#define OUT_TILES UP(OUT_ROWS, 8)
#define NOPE_TILE_ROWS MIN(NOPE_ROWS, 8 * MOST / RANK)
#define NOPE_TILES UP(NOPE_ROWS, NOPE_TILE_ROWS)
#define MOST_ROWS (MAX(MAX(DOWN_TILES - 1, VALUE_TILES), OUT_TILES) * 8)
#define ATTENDED (HEADS * VALUE)
// Pairs of numbers that are rotated: of a head, and those of one program.
#define HALF (ROPE / 2)
#define PAIRS (ROPE_ROWS / 2)
// Elements of the stream of one thread.
#define EACH (HIDDEN / THREADS)
// Of a token's state: its numbers; of the STAGE_TOKENS tokens of a stage, those of one warp.
#define WIDTH (RANK + ROPE)
#define WARP_TOKENS (STAGE_TOKENS / WARPS)
#define STATE_BYTES (STAGE_TOKENS * WIDTH * 2)
// Pieces of 16 bytes of a latent that a lane has.
#define PIECES_OF_LANE (RANK / 256)
// Words that a program sends to its team: a part of the query in latent space, then rotated pairs; maximum and mass, then a
// part of attention's result.
#define QUERY_WORDS (RANK / 2 + PAIRS)
#define PART_WORDS (RANK / 2 + 2)
// To all: latent and key; values.
#define LATENT_WORDS (LATENT_ROWS / 2 + 1)
#define VALUE_WORDS (VALUE_ROWS / 2)
#define MOST_MESSAGES MAX(MAX(MESSAGES(QUERY_WORDS), MESSAGES(PART_WORDS)), MESSAGES(VALUE_WORDS))

// Shared memory, in bytes.
#define AT_RING 0
#define AT_STATE (AT_RING + STAGES * STAGE_BYTES)
#define AT_NEWEST (AT_STATE + STATE_STAGES * STATE_BYTES)
#define AT_VECTOR (AT_NEWEST + WIDTH * 2)
#define AT_FOUND (AT_VECTOR + HIDDEN * 2)
#define AT_WIDE (AT_FOUND + RANK * 2)
// Sums of warps, or the words of a team.
#define AT_SUMS (AT_WIDE + ATTENDED * 2)
#define AT_TEAM AT_SUMS
#define AT_STATS (AT_SUMS + MAX(WARPS * RANK * 4, SHARE * MAX(MESSAGES(QUERY_WORDS), MESSAGES(PART_WORDS)) * 12))
#define AT_QUERY (AT_STATS + WARPS * 8)
#define AT_ANGLES (AT_QUERY + WIDTH * 4)
#define AT_OWN (AT_ANGLES + ROPE * 4)
#define AT_ROWS (AT_OWN + DOWN_TILES * 32)
#define AT_WORDS (AT_ROWS + WARPS * MOST_ROWS * 4)
#define AT_NORMS (AT_WORDS + UP(MOST_MESSAGES * 12, 16) * 16)
#define AT_MOST (AT_NORMS + WARPS * 4)
#define AT_SCALES AT_MOST
#define AT_GROUPS AT_MOST
#define AT_META AT_MOST
#define AT_BARRIERS (AT_META + 16)
#define SHARED (AT_BARRIERS + (2 * STAGES + 2 * STATE_STAGES + 2) * 8)

// Device memory of all layers, in messages of 8 bytes.
#define CONTROL 256
#define INBOX(words) (COPIES * PROGRAMS * MESSAGES(words) * 2)
#define AT_QUERIES CONTROL
#define AT_LATENTS (AT_QUERIES + PROGRAMS * MESSAGES(QUERY_WORDS) * 2)
#define AT_PART_MESSAGES (AT_LATENTS + INBOX(LATENT_WORDS))
#define AT_VALUES (AT_PART_MESSAGES + PROGRAMS * MESSAGES(PART_WORDS) * 2)
#define ALL_MESSAGES (AT_VALUES + INBOX(VALUE_WORDS))

struct Latent {
    u64* messages;
    u32* report;  // or null: a word of the host's memory, for the number of a wait that was given up
    u64* stamps;  // or null
    u16* x;       // and the result
    const float* residual;  // or null
    float* stream;
    const u16 *norm, *down, *kv_norm, *kv_b, *o;
    const float* cos_sin;
    const int* positions;
    const void* slots;
    const int *kv_lens, *table;
    u16* rows;
    long long page;
    u32 site, wide_slots, page_bits;
};

// The row of `down` that is row `i` of a program: of the latent, of the key, and of the query. -1: none.
__device__ __forceinline__ int down_row(int program, int i) {
    constexpr int STATE = HEADS * (NOPE + ROPE);
    if (i < LATENT_ROWS) return STATE + program * LATENT_ROWS + i;
    if (i < STATE_ROWS) return program % KEY_EVERY == 0 ? STATE + RANK + program / KEY_EVERY : -1;
    const int head = program / SHARE * (NOPE + ROPE), rank = program % SHARE, n = i - STATE_ROWS;
    if (n < NOPE_ROWS) return head + rank * NOPE_ROWS + n;
    if (n >= QUERY_ROWS) return -1;
    // Both numbers of a pair, one after the other.
    const int pair = rank * PAIRS + (n - NOPE_ROWS) / 2, second = (n - NOPE_ROWS) % 2;
    return head + NOPE + (INTERLEAVED ? 2 * pair + second : pair + second * HALF);
}
