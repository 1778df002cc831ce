// What a kernel checks before it touches memory. Only the caller knows how long its tensors are, and compares their shapes with the sizes
// that it passes (evener_backend_cpu/arguments.py); here sizes are compared with each other and with limits, and every index that a kernel
// reads from a tensor with the size of what it points into. It costs a few microseconds a call.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <initializer_list>

#include "experts.h"

// What an entry returns. After WRONG, evener_problem() says what is wrong.
enum Result { DONE = 0, NO_MEMORY = 1, WRONG = 2 };

static char* problem_text() {
  static thread_local char text[256];
  return text;
}
__attribute__((format(printf, 1, 2))) static int wrong(const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  vsnprintf(problem_text(), 256, format, rest);
  va_end(rest);
  return WRONG;
}
#define REQUIRE(condition, ...) \
  if (!(condition)) return wrong(__VA_ARGS__)
#define PASS(check)         \
  if (int result = (check)) \
  return result

// Limits of sizes, so that no product of three of them overflows.
static const long MOST_TOKENS = 1L << 24, MOST_COLUMNS = 1L << 24, MOST_ROWS = 1L << 28, MOST_HEADS = 1L << 16, MOST_HEAD_DIM = 1024,
                  MOST_THREADS = 1L << 12, MOST_EXPERTS = 1L << 16, MOST_BLOCKS = 1L << 40;

static int check_size(const char* name, long size, long least, long most) {
  REQUIRE(least <= size && size <= most, "%s is %ld; it must be %ld to %ld", name, size, least, most);
  return DONE;
}

static int check_call(long tokens, long threads) {
  PASS(check_size("the number of tokens", tokens, 0, MOST_TOKENS));
  return check_size("the number of threads", threads, 1, MOST_THREADS);
}

static int check_pointer(const char* name, const void* p) {
  REQUIRE(p, "%s is missing", name);
  return DONE;
}

static int check_stored(const char* name, const Stored& p, long columns) {
  PASS(check_pointer(name, p.weight));
  PASS(check_pointer("a matrix of scales", p.scale));
  PASS(check_size("the number of rows with one scale", p.high, 1, MOST_ROWS));
  PASS(check_size("the number of columns with one scale", p.wide, 1, MOST_COLUMNS));
  REQUIRE(p.blocks == (columns + p.wide - 1) / p.wide, "%s has %ld scales for %ld columns, not one for each %ld", name, (long)p.blocks, columns,
          (long)p.wide);
  return DONE;
}

static int check_indices(const char* name, const int32_t* at, long count, long least, long end);

static int check_ordered(const char* name, const Ordered& p, long columns) {
  PASS(check_pointer(name, p.tiles));
  PASS(check_size("the number of columns in another order", p.columns, UNIT, MOST_COLUMNS));
  REQUIRE(p.columns % UNIT == 0, "%s has %ld columns in another order, not a multiple of %ld", name, (long)p.columns, UNIT);
  REQUIRE(with_block_format(p.form, [](auto) {}), "%s has a part of kind %ld in another order", name, (long)p.form);
  return check_indices("an order of columns", p.order, p.columns, -1, columns);
}

static int check_matrix(const char* name, const Matrix& w, long rows, long columns) {
  PASS(check_size("a number of rows", rows, 1, MOST_ROWS));
  PASS(check_size("a number of columns", columns, 1, MOST_COLUMNS));
  if (!w.blocks) return check_pointer(name, w.plain);
  REQUIRE(!w.plain, "%s is both plain and in blocks", name);
  long at = 0, most = w.blocks->count;
  PASS(check_size("a number of parts", most, 1, 1 << 16));
  PASS(check_pointer(name, w.blocks->segments));
  REQUIRE(columns % UNIT == 0 || !needs_integers(w), "%s in blocks has %ld columns, not a multiple of %ld", name, columns, UNIT);
  for (long i = 0; i < most; i++) {
    const Segment& s = w.blocks->segments[i];
    PASS(check_pointer(name, s.data));
    bool stored = with_stored_kind(s.kind, [](auto) {});
    REQUIRE(stored || s.kind == PLAIN_PART || s.kind == ORDERED || with_block_format(s.kind, [](auto) {}), "%s has a part of kind %ld", name, (long)s.kind);
    REQUIRE(s.first == at && s.rows > 0 && s.rows <= rows - at, "%s has rows %ld to %ld in a part, after %ld of %ld", name, (long)s.first,
            (long)s.first + (long)s.rows, at, rows);
    at += s.rows;
    if (stored) PASS(check_stored(name, *(const Stored*)s.data, columns));
    if (s.kind == ORDERED) PASS(check_ordered(name, *(const Ordered*)s.data, columns));
  }
  REQUIRE(at == rows, "%s has %ld rows, not %ld", name, at, rows);
  return DONE;
}

static int check_indices(const char* name, const int32_t* at, long count, long least, long end) {
  PASS(count ? check_pointer(name, at) : DONE);
  for (long i = 0; i < count; i++) REQUIRE(least <= at[i] && at[i] < end, "%s has %d, outside %ld to %ld", name, at[i], least, end - 1);
  return DONE;
}
static int check_indices(const char* name, const void* at, long is64, long count, long end) {
  if (!is64) return check_indices(name, (const int32_t*)at, count, 0, end);
  PASS(count ? check_pointer(name, at) : DONE);
  const int64_t* all = (const int64_t*)at;
  for (long i = 0; i < count; i++) REQUIRE(0 <= all[i] && all[i] < end, "%s has %ld, outside 0 to %ld", name, (long)all[i], end - 1);
  return DONE;
}

static int check_heads(const Geometry& g) {
  PASS(check_size("the number of KV heads", g.kv_heads, 1, MOST_HEADS));
  PASS(check_size("the number of query heads", g.heads, 1, MOST_HEADS));
  REQUIRE(g.heads % g.kv_heads == 0, "%ld query heads are not a multiple of %ld KV heads", (long)g.heads, (long)g.kv_heads);
  for (long size : {g.d, g.dv}) {
    PASS(check_size("the width of a head", size, 16, MOST_HEAD_DIM));
    REQUIRE(size % 16 == 0, "heads are %ld wide, not a multiple of 16", size);
  }
  PASS(check_size("the block size", g.block, 16, 1 << 20));
  REQUIRE(g.block % 16 == 0, "blocks have %ld tokens, not a multiple of 16", (long)g.block);
  PASS(check_size("the window", g.window, 0, 1L << 40));
  REQUIRE(!g.chunked || g.window, "chunks have no size");
  return DONE;
}

template <class T> static int check_geometry(const Geometry& g) {
  PASS(check_heads(g));
  PASS(check_size("the number of blocks", g.blocks, 1, MOST_BLOCKS));
  PASS(check_pointer("the pool", g.pages));
  REQUIRE(!g.stored || with_stored_kind(g.stored, [](auto) {}), "state has elements of kind %ld", (long)g.stored);
  PASS(g.stored ? check_pointer("the scales of keys", g.key_scales) : DONE);
  PASS(g.stored ? check_pointer("the scales of values", g.value_scales) : DONE);
  long least = g.block * g.kv_heads * (g.d + g.dv) * element_bytes<T>(g);
  return check_size("the number of bytes of a block", g.page_bytes, least, 1L << 46);
}

// Requests' tokens and lengths; sets ``covered`` to the tokens that belong to requests.
static int check_requests(const int32_t* query_start, const int32_t* kv_lens, long requests, long tokens, long most_length) {
  PASS(check_size("the number of requests", requests, 0, MOST_TOKENS));
  PASS(check_pointer("query_start", query_start));
  PASS(requests ? check_pointer("kv_lens", kv_lens) : DONE);
  REQUIRE(query_start[0] == 0, "the first request starts at token %d", query_start[0]);
  for (long r = 0; r < requests; r++) {
    long count = (long)query_start[r + 1] - query_start[r];
    REQUIRE(count >= 0 && query_start[r + 1] <= tokens, "request %ld has tokens %d to %d of %ld", r, query_start[r], query_start[r + 1], tokens);
    REQUIRE(kv_lens[r] >= 0 && kv_lens[r] <= most_length, "request %ld has %d tokens of state; the block table has room for %ld", r, kv_lens[r],
            most_length);
    REQUIRE(kv_lens[r] >= count || !kv_lens[r], "request %ld adds %ld tokens, and has %d then", r, count, kv_lens[r]);
  }
  return DONE;
}

// Layers of one kind share a step: it is walked for the first of them only.
static uint64_t form(const Geometry& g) {
  uint64_t mixed = 1;
  for (int64_t n : {g.heads, g.kv_heads, g.block, g.blocks, g.window, g.chunked}) mixed = (mixed ^ (uint64_t)n) * 0x9e3779b97f4a7c15u;
  return mixed ? mixed : 1;
}

static int check_slots(const Geometry& g, const Step& s) { return check_indices("slot_mapping", s.slots, s.slots64, s.tokens, g.blocks * g.block); }

static int check_items(const Geometry& g, const Step& s) {
  PASS(check_size("the number of work items", s.items, 0, 1L << 31));
  PASS(check_size("the number of partial results", s.parts, 0, 1L << 26));
  PASS(s.items ? check_pointer("the plan", s.plan) : DONE);
  for (long i = 0; i < s.items; i++) {
    const Item& item = s.plan[i];
    REQUIRE(0 <= item.request && item.request < s.requests, "the plan names request %d of %ld", item.request, (long)s.requests);
    long first = s.query_start[item.request], end = s.query_start[item.request + 1], length = s.kv_lens[item.request];
    REQUIRE(length && first <= item.token && item.count > 0 && item.count <= tile_tokens(g) && item.token + (long)item.count <= end,
            "the plan has tokens %d to %d of request %d", item.token, item.token + item.count, item.request);
    if (item.span < 0) continue;
    REQUIRE(item.count == 1 && item.span * SPAN < length && item.part >= 0 && item.part < s.parts && item.spans > 1, "the plan has span %d",
            item.span);
    bool leads = !i || s.plan[i - 1].request != item.request;
    REQUIRE(!leads || item.part + (long)item.spans <= s.parts, "the plan has %d spans at part %d of %ld", item.spans, item.part, (long)s.parts);
  }
  return DONE;
}

static int check_table(const Geometry& g, const Step& s) {
  for (long r = 0; r < s.requests; r++) {
    long count = s.query_start[r + 1] - s.query_start[r], length = s.kv_lens[r];
    if (!count || !length) continue;
    // Entries before the first chunk that is read may be stale.
    long from = first_attended(g, length - count) / CHUNK * CHUNK / g.block, to = (length + g.block - 1) / g.block;
    PASS(check_indices("the block table", s.table + r * s.table_stride + from, to - from, 0, g.blocks));
  }
  return DONE;
}

// ``tokens``: of the call.
static int check_step(const Geometry& g, const Step* step, long tokens) {
  PASS(check_pointer("the step", step));
  const Step& s = *step;
  REQUIRE(tokens == s.tokens, "the step has %ld tokens, not %ld", (long)s.tokens, tokens);
  if (s.checked == form(g)) return DONE;
  PASS(check_size("the number of tokens of the step", s.tokens, 0, MOST_TOKENS));
  PASS(check_size("the number of columns of the block table", s.table_columns, s.requests ? 1 : 0, MOST_TOKENS));
  REQUIRE(s.table_stride >= s.table_columns || s.requests < 2, "rows of the block table overlap");
  PASS(s.requests ? check_pointer("the block table", s.table) : DONE);
  PASS(check_requests(s.query_start, s.kv_lens, s.requests, s.tokens, s.table_columns * g.block));
  PASS(check_slots(g, s));
  PASS(check_table(g, s));
  PASS(check_items(g, s));
  s.checked = form(g);
  return DONE;
}

static int check_rotation(long dim, long size, const void* cos_sin, const void* positions, long is64, long tokens, long rows) {
  REQUIRE(0 <= dim && dim <= size && dim % 2 == 0, "%ld dimensions of heads that are %ld wide cannot be rotated in pairs", dim, size);
  PASS(check_size("the number of positions", rows, 0, 1L << 32));
  PASS(dim ? check_pointer("the table of angles", cos_sin) : DONE);
  return check_indices("positions", positions, is64, tokens, rows);
}

template <class T>
static int check_layer(const Layer* layer, const Step* step, long tokens, const void* x, const void* stream, const void* out,
                       const void* positions, long positions64, long flags, long threads) {
  PASS(check_call(tokens, threads));
  PASS(check_pointer("the layer", layer));
  const Layer& l = *layer;
  REQUIRE(flags == ENTER || flags == MLP || flags == (ENTER | ATTEND) || flags == (ENTER | ATTEND | MLP), "no layer has the parts %ld", flags);
  PASS(check_size("the hidden size", l.hidden, 1, MOST_COLUMNS));
  PASS(check_pointer("the stream", stream));
  PASS(check_pointer("the output", out));
  if (flags & ENTER) {
    const Geometry& g = l.g;
    PASS(check_geometry<T>(g));
    PASS(check_step(g, step, tokens));
    PASS(check_matrix("qkv", l.qkv, g.heads * g.d + g.kv_heads * (g.d + g.dv), l.hidden));
    PASS(check_pointer("the norm", l.norm));
    PASS(check_rotation(l.rotary, g.d, l.cos_sin, positions, positions64, tokens, l.positions));
  }
  if (flags & ATTEND) PASS(check_matrix("o", l.o, l.hidden, l.g.heads * l.g.dv));
  if (flags & MLP) {
    PASS(check_size("the inner width", l.inner, 1, MOST_COLUMNS));
    PASS(check_size("the activation", l.activation, SILU, GELU_TANH));
    PASS(check_matrix("gate_up", l.gate_up, 2 * l.inner, l.hidden));
    PASS(check_matrix("down", l.down, l.hidden, l.inner));
    PASS(check_pointer("the MLP's norm", l.mlp_norm));
    if (!(flags & ATTEND)) PASS(check_pointer("the input", x));
  }
  bool integers = flags & ENTER && needs_integers(l.qkv);
  integers |= flags & ATTEND && needs_integers(l.o);
  integers |= flags & MLP && (needs_integers(l.gate_up) || needs_integers(l.down));
  REQUIRE(l.packed || !integers, "a matrix in blocks was not announced");
  return DONE;
}

// ``outer``, ``inner``: some matrix of gate_up, of down is in blocks.
static int check_stacks(const Experts& e, bool* outer, bool* inner) {
  PASS(check_pointer("gate_up", e.gate_up));
  PASS(check_pointer("down", e.down));
  for (long s = 0; s < e.slots; s++) {
    PASS(check_matrix("gate_up", e.gate_up[s], 2 * e.inner, e.hidden));
    PASS(check_matrix("down", e.down[s], e.hidden, e.inner));
    *outer |= needs_integers(e.gate_up[s]), *inner |= needs_integers(e.down[s]);
  }
  PASS(check_indices("the copies of experts", e.copies, e.count, 0, e.copy_columns + 1));
  return check_indices("the slots of experts", e.slot_of, e.count * e.copy_columns, -1, e.slots);
}

static int check_expert_sizes(const Experts& e) {
  PASS(check_size("the hidden size", e.hidden, 1, MOST_COLUMNS));
  PASS(check_size("the inner width", e.inner, 1, MOST_COLUMNS));
  PASS(check_size("the shared inner width", e.shared_inner, 0, MOST_COLUMNS));
  PASS(check_size("the number of experts", e.count, 1, MOST_EXPERTS));
  PASS(check_size("the number of slots", e.slots, 1, MOST_EXPERTS));
  PASS(check_size("the number of copies", e.copy_columns, 1, MOST_EXPERTS));
  PASS(check_size("the number of groups", e.groups, 1, e.count));
  REQUIRE(e.count % e.groups == 0, "%ld experts are not %ld equal groups", (long)e.count, (long)e.groups);
  PASS(check_size("the number of groups a token", e.top_groups, 1, e.groups));
  PASS(check_size("the number of best scores", e.group_best, 1, e.count / e.groups));
  PASS(check_size("the number of experts a token", e.top, 1, e.count / e.groups * e.top_groups));
  PASS(check_size("the scoring", e.scoring, SOFTMAX, SOFTMAX_TOP));
  PASS(check_size("the activation", e.activation, SILU, CLAMPED_SWIGLU));
  return DONE;
}

static int check_experts(const Experts* experts, long tokens, const void* x, const void* stream, long threads) {
  PASS(check_call(tokens, threads));
  PASS(check_pointer("the experts", experts));
  const Experts& e = *experts;
  PASS(check_pointer("the input", x));
  PASS(check_pointer("the stream", stream));
  PASS(check_pointer("the norm", e.norm));
  PASS(check_expert_sizes(e));
  PASS(check_matrix("the router", e.router, e.count, e.hidden));
  bool outer = needs_integers(e.router), inner = false, shared = false;
  PASS(check_stacks(e, &outer, &inner));
  if (e.shared_inner) {
    PASS(check_matrix("shared_gate_up", e.shared_gate_up, 2 * e.shared_inner, e.hidden));
    PASS(check_matrix("shared_down", e.shared_down, e.hidden, e.shared_inner));
    outer |= needs_integers(e.shared_gate_up), shared = needs_integers(e.shared_down);
  }
  if (e.gated()) {
    PASS(check_matrix("shared_gate", e.shared_gate, 1, e.hidden));
    outer |= needs_integers(e.shared_gate);
  }
  REQUIRE((e.packed || !outer) && (e.packed_inner || !inner) && (e.packed_shared || !shared), "a matrix in blocks was not announced");
  return DONE;
}

// Of ``tokens`` rows x, ids and weights [tokens, top], and results y.
static int check_routed(const Experts* experts, long tokens, const void* x, const int32_t* ids, const void* weights, const void* y, long threads) {
  PASS(check_call(tokens, threads));
  PASS(check_pointer("the experts", experts));
  const Experts& e = *experts;
  PASS(check_expert_sizes(e));
  bool outer = false, inner = false;
  PASS(check_stacks(e, &outer, &inner));
  REQUIRE((e.packed || !outer) && (e.packed_inner || !inner) && !e.shared_inner, "a matrix in blocks was not announced, or experts are shared");
  if (!tokens) return DONE;
  PASS(check_pointer("the input", x));
  PASS(check_pointer("the weights", weights));
  PASS(check_pointer("the output", y));
  return check_indices("the experts' ids", ids, tokens * e.top, 0, e.count);
}

template <class T> static int check_attend(const Geometry* g, const Step* s, const void* q, const void* out, long threads) {
  PASS(check_call(0, threads));
  PASS(check_pointer("the geometry", g));
  PASS(check_geometry<T>(*g));
  PASS(check_pointer("the step", s));
  PASS(check_step(*g, s, s->tokens));
  PASS(s->tokens ? check_pointer("the query", q) : DONE);
  return s->tokens ? check_pointer("the output", out) : DONE;
}

template <class T>
static int check_write(const Geometry* g, const Step* s, const void* k, long ldk, const void* v, long ldv, long threads) {
  PASS(check_call(0, threads));
  PASS(check_pointer("the geometry", g));
  PASS(check_geometry<T>(*g));
  PASS(check_pointer("the step", s));
  PASS(check_size("the number of tokens", s->tokens, 0, MOST_TOKENS));
  PASS(check_slots(*g, *s));
  if (!s->tokens) return DONE;
  PASS(check_pointer("the keys", k));
  PASS(check_pointer("the values", v));
  REQUIRE((ldk >= g->kv_heads * g->d && ldv >= g->kv_heads * g->dv) || s->tokens < 2, "rows of keys or values overlap");
  return DONE;
}

static int check_linear(const void* x, long M, const Matrix& w, long N, long K, const void* y, long threads) {
  PASS(check_call(M, threads));
  PASS(check_matrix("the weight", w, N, K));
  if (M) PASS(check_pointer("the input", x));
  return M ? check_pointer("the output", y) : DONE;
}

static int check_rows_of(const void* ids, long ids64, long M, const Blocks* blocks, long N, long K, const void* y, long threads) {
  PASS(check_call(M, threads));
  PASS(check_pointer("the table", blocks));
  PASS(check_matrix("the table", Matrix{nullptr, blocks}, N, K));
  for (long i = 0; i < blocks->count; i++) {
    long kind = blocks->segments[i].kind;
    REQUIRE(with_block_format(kind, [](auto) {}), "the table has a part of kind %ld, of which no single rows are read", kind);
  }
  PASS(check_indices("the ids", ids, ids64, M, N));
  return M ? check_pointer("the output", y) : DONE;
}

static int check_grouped(const void* x, long tokens, const int32_t* slots, long top, long count, const Matrix* w, long N, long K, const void* y,
                         long threads) {
  PASS(check_call(tokens, threads));
  PASS(check_size("the number of matrices", count, 1, MOST_EXPERTS));
  PASS(check_size("the number of matrices a row", top, 1, MOST_EXPERTS));
  PASS(check_size("the number of products", tokens * top, 0, (1L << 31) - 1));
  PASS(check_pointer("the weight", w));
  for (long s = 0; s < count; s++) {
    PASS(check_matrix("the weight", w[s], N, K));
    REQUIRE(!w[s].blocks == !w[0].blocks && needs_integers(w[s]) == needs_integers(w[0]), "some matrices are in blocks and some are not");
  }
  PASS(check_indices("slots", slots, tokens * top, -1, count));
  if (tokens) PASS(check_pointer("the input", x));
  return tokens ? check_pointer("the output", y) : DONE;
}

static int check_rows(const void* x, long ldx, const void* y, long rows, long n, long threads) {
  PASS(check_size("the number of rows", rows, 0, MOST_ROWS));
  PASS(check_size("the width of a row", n, 1, MOST_ROWS));
  PASS(check_size("the number of threads", threads, 1, MOST_THREADS));
  REQUIRE(ldx >= n || rows < 2, "rows overlap: each has %ld numbers, and the next begins after %ld", n, ldx);
  if (rows) PASS(check_pointer("the input", x));
  return rows ? check_pointer("the output", y) : DONE;
}

static int check_rotary(const void* positions, long is64, const void* q, long ldq, long heads, const void* k, long ldk, long kv_heads,
                        long tokens, long d, long dim, const void* table, long rows, long threads) {
  PASS(check_call(tokens, threads));
  PASS(check_size("the number of query heads", heads, 0, MOST_HEADS));
  PASS(check_size("the number of KV heads", kv_heads, 0, MOST_HEADS));
  PASS(check_size("the width of a head", d, 1, MOST_COLUMNS));
  REQUIRE((ldq >= heads * d && ldk >= kv_heads * d) || tokens < 2, "rows of queries or keys overlap");
  if (tokens && heads) PASS(check_pointer("the query", q));
  if (tokens && kv_heads) PASS(check_pointer("the key", k));
  return check_rotation(dim, d, table, positions, is64, tokens, rows);
}

// Bytes of one of the file's blocks.
static long block_bytes(long kind) {
  static const long bytes[] = {0, 18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 17, 19, 19, 35, 35, 18, 16};
  return bytes[kind];
}

static int check_pack(long kind, const void* from, long row_bytes, long rows, long columns, const void* to, long threads) {
  PASS(check_size("the number of threads", threads, 1, MOST_THREADS));
  PASS(check_size("a number of rows", rows, 1, MOST_ROWS));
  PASS(check_size("a number of columns", columns, 1, MOST_COLUMNS));
  PASS(check_size("the kind of block", kind, Q4_0, TABLE4));
  long group = kind >= Q2_K && kind <= Q6_K ? SUPER : UNIT;
  REQUIRE(columns % group == 0, "%ld columns are not a multiple of the block size, %ld", columns, group);
  REQUIRE(row_bytes == columns / group * block_bytes(kind), "rows of %ld columns have %ld bytes, not %ld", columns, columns / group * block_bytes(kind),
          row_bytes);
  PASS(check_pointer("the blocks", from));
  return check_pointer("the tiles", to);
}
