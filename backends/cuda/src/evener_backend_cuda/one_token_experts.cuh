// Experts of one token: see docs/lab/one-token-kernel.md and one_token_experts.py, which defines the sizes. Here are sizes,
// shared memory and messages; one_token_experts.cu has the block.
//
// 128 programs share out the router's rows, then the rows of gate and up, as many programs to each choice, then those of
// down, of all choices at once. Warps 0-7 compute; warp 8 chooses experts and streams their weights.

// Programs that have one choice.
#define SHARE (PROGRAMS / TOP)
// Rows of one program of each product.
#define ROUTED UP(EXPERTS, PROGRAMS)
#define INNER_ROWS (INNER / SHARE)
#define OUT_ROWS (HIDDEN / PROGRAMS)
// Tiles of eight rows; gate and up take turns.
#define INNER_TILES (2 * UP(INNER_ROWS, 8))
#define OUT_TILES UP(OUT_ROWS, 8)
#define MOST_ROWS (MAX(INNER_TILES, OUT_TILES) * 8)
// Activated values of all choices.
#define ACTIVATED (TOP * INNER)
// Elements of the stream of one thread.
#define EACH (HIDDEN / THREADS)
// Experts of one lane of the warp that chooses.
#define RANKED UP(EXPERTS, 32)
// Words that a program sends to all.
#define INNER_WORDS (INNER_ROWS / 2)

// Shared memory, in bytes.
#define AT_RING 0
#define AT_VECTOR (AT_RING + STAGES * STAGE_BYTES)
#define AT_WIDE (AT_VECTOR + HIDDEN * 2)
#define AT_KEYS (AT_WIDE + ACTIVATED * 2)
#define AT_SLOTS (AT_KEYS + RANKED * 32 * 4)
#define AT_CHOICES (AT_SLOTS + RANKED * 32 * 4)
// The chosen experts, best first.
#define AT_TOP (AT_CHOICES + TOP * 16)
#define AT_PARTIAL (AT_TOP + UP(TOP, 4) * 16)
#define AT_ROWS (AT_PARTIAL + ROUTED * WARPS * 4)
#define AT_WORDS (AT_ROWS + WARPS * MOST_ROWS * 4)
#define AT_NORMS (AT_WORDS + UP(MAX(MESSAGES(INNER_WORDS), MESSAGES(ROUTED)) * 12, 16) * 16)
#define AT_MOST (AT_NORMS + WARPS * 4)
#define AT_SCALES AT_MOST
#define AT_GROUPS AT_MOST
#define AT_BARRIERS AT_MOST
#define SHARED (AT_BARRIERS + (2 * STAGES + 1) * 8)

// Device memory of all layers, in messages of 8 bytes.
#define CONTROL 256
#define INBOX(words) (COPIES * PROGRAMS * MESSAGES(words) * 2)
#define AT_ROUTER CONTROL
#define AT_INNER (AT_ROUTER + INBOX(ROUTED))
#define ALL_MESSAGES (AT_INNER + INBOX(INNER_WORDS))

struct Experts {
    u64* messages;
    u32* report;  // or null: a word of the host's memory, for the number of a wait that was given up
    u64* stamps;  // or null
    u16* x;       // and the result
    float* stream;
    const u16 *norm, *router, *gate_up, *down;
    const int* slots;  // [EXPERTS, copies]
    u32 copies, site;
};

// Matrices of a choice, in shared memory.
struct Choice {
    const u16 *gate_up, *down;
};
