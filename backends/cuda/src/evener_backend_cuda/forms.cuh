// How weights are stored and read: comes before the sizes of a kernel (one_token.cuh, one_token_experts.cuh,
// one_token_latent.cuh).

#define PROGRAMS 128
#define WARPS 8
#define THREADS 256
#define UP(a, b) (((a) + (b) - 1) / (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
// Tiles that are summed at a time, so that sums fit into registers.
#define AT_ONCE(tiles) UP(tiles, UP(tiles, 6))
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
// Rows of a matrix have so many scales of blocks.
#define SCALE_ROWS(k, rows) (BLOCK ? (k) / (BLOCK ? BLOCK : 1) * (rows) : 0)
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
// Messages of 16 bytes, three words each.
#define MESSAGES(words) UP(words, 3)
