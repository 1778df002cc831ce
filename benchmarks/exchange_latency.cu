// Ways in which programs that stream weights give each other a vector: see exchange_latency.py. Comes after hopper.cuh.
//
// A program a multiprocessor. Warps 0-7 compute, which here is an exclusive or, warp 8 streams weights through a ring as
// one_token.cu does, warp 9 probes, or hands a piece on to the rest of its cluster. Of the ways with a leader, the program
// of rank 0 in a cluster streams nothing and has no part of the vector.

#define TILE 16384
#define STAGES 10
#define WARPS 8
#define THREADS 256
// The vector: 12,288 numbers of two bytes. As messages of 16 bytes, three words and a mark: "raw".
#define WORDS 6144
#define MESSAGES (WORDS / 3)
#define UNITS (WORDS / 4)
#define RAW_BYTES (MESSAGES * 16)
#define PACKED_BYTES (WORDS * 4)
// As in one_token.cu: copies of what all programs read.
#define COPIES 4
#define SLICE 2048

// Two vectors take turns: a program of the cluster may be one exchange ahead.
#define AT_RING 0
#define AT_VECTORS (STAGES * TILE)
#define AT_BARRIERS (AT_VECTORS + 2 * RAW_BYTES)
#define BARRIERS (2 * STAGES + 5)
#define SHARED (AT_BARRIERS + BARRIERS * 8)
static_assert(SHARED == SHARED_BYTES, "exchange_latency.py has another size of shared memory");

// Device memory: messages of two exchanges in turn, each in COPIES copies; then a line for each program's probe.
#define AT_PROBES (2 * COPIES * MESSAGES * 2)
// Cycles after which a launch has failed, 0.14 s: every wait looks at the clock.
#define LIMIT (1ull << 28)

struct Asked {
    const unsigned char* weights;
    u64* messages;
    u32* vector;   // of the ways that count: two, in turn
    u32* counter;  // parts written so far, in all exchanges
    u64* stamps;   // [program][round][4]: clock before its part is written, clock with all, the same by the common timer
    u32 *report, *errors, *sink;
    u32 tiles, rounds;  // between exchanges, of one program
    u32 flight;         // tiles that it asks for at once; 0: none is read
    u32 ahead;          // tiles of the next round that it may ask for before an exchange ends
    u32 taken;          // tiles of the next round that it takes out of the ring before it looks for the vector
    u32 blocks;         // of 32 KB, of one program's weights
    u32 leads;          // is rank 0 of each cluster a leader?
};

enum Way { NONE, PROBE, MESSAGE, COUNTED, COUNTED_BULK, PARTS_PUSH, PARTS_MULTICAST, LEADER_PUSH, LEADER_SCATTER, LEADER_MULTICAST, LEADER_COUNTED };

__device__ __forceinline__ u32 special_rank() { u32 v; asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(v)); return v; }
__device__ __forceinline__ u32 special_size() { u32 v; asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(v)); return v; }
__device__ __forceinline__ u64 cycles() { u64 t; asm volatile("mov.u64 %0, %clock64;" : "=l"(t) :: "memory"); return t; }
// An address of this program's shared memory in another one's.
__device__ __forceinline__ u32 of_rank(u32 at, u32 rank) {
    u32 d; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(at), "r"(rank)); return d;
}
// What loads and stores have seen or written is there for bulk copies, from this program's shared memory or from the card's.
// For both at once the compiler makes a fence of the whole card, which waits for answers behind all copies under way.
__device__ __forceinline__ void before_push() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void before_fetch() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// From shared memory to that of another program of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void push(u32 to, u32 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void fetch(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// To the same place of all programs in `mask`.
__device__ __forceinline__ void multicast(u32 to, const void* from, u32 bytes, u32 barrier, u32 mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)mask) : "memory");
}
__device__ __forceinline__ void cluster_together() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void count_one(u32* at) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(at) : "memory");
}
__device__ __forceinline__ u32 look_acquired(const u32* at) {
    u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory"); return v;
}
__device__ __forceinline__ u32 look_once(const u64* at) {
    u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory"); return v;
}
__device__ __forceinline__ u32 look_shared(u32 at) {
    u32 v; asm volatile("ld.relaxed.cluster.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory"); return v;
}

__device__ __noinline__ void give_up(u32* report, u32 code) {
    atomicExch_system(report, code | blockIdx.x << 16);
    __threadfence_system();
    __trap();
}

struct Here {
    u32 tid, lane, warp, rank, size, worker, workers, base, full, empty, go, came, piece;
    bool leader;
    u64 began;

    __device__ __forceinline__ Here(const Asked& a)
        : tid(threadIdx.x), lane(tid & 31), warp(tid >> 5), rank(special_rank()), size(special_size()),
          base((u32)__cvta_generic_to_shared(shared)), full(base + AT_BARRIERS), empty(full + STAGES * 8),
          go(empty + STAGES * 8), came(go + 8), piece(came + 16), leader(a.leads && rank == 0), began(cycles()) {
        const u32 working = size - (a.leads ? 1 : 0);
        worker = blockIdx.x / size * working + rank - (a.leads ? 1 : 0), workers = gridDim.x / size * working;
    }
    __device__ __forceinline__ void late(const Asked& a, u32 code) const { if (cycles() - began > LIMIT) give_up(a.report, code); }
    __device__ __forceinline__ void wait(const Asked& a, u32 barrier, u32 parity, u32 code) const {
        while (!try_wait(barrier, parity)) late(a, code);
    }
};

struct Ring {
    u32 stage, parity;
    __device__ __forceinline__ void next() { if (++stage == STAGES) { stage = 0; parity ^= 1; } }
};

__device__ __forceinline__ u32 word_of(u32 word, u32 round) { return (word * 2654435761u) ^ (round * 40503u + 77u); }
// Where part `i` of `n` begins, of so many.
__device__ __forceinline__ u32 part(u32 i, u32 n, u32 all) { return i * all / n; }

// As one_token.cu reads: eight rows of 4 KB lie one after another, a tile is half of each, a lane asks for 2 KB.
__device__ __forceinline__ void stream(const Asked& a, const Here& here) {
    const u64 policy = evict_first();
    const unsigned char* from = a.weights + (u64)here.worker * a.blocks * 32768 + here.lane * 4096;
    Ring ring{0, 0}, landed{0, 0};
    const u32 all = a.tiles * a.rounds + a.taken;
    u32 block = 0, at = 0, round = 0;
#pragma unroll 1
    for (u32 n = 0; n < all; n++) {
        if (a.flight < STAGES && n >= a.flight) {
            here.wait(a, here.full + landed.stage * 8, landed.parity, 1);
            landed.next();
        }
        if (round && at == a.ahead) here.wait(a, here.go, (round - 1) & 1, 2);
        here.wait(a, here.empty + ring.stage * 8, ring.parity ^ 1, 3);
        if (here.lane == 0) expect(here.full + ring.stage * 8, TILE);
        __syncwarp();
        if (here.lane < 8)
            bulk(here.base + AT_RING + ring.stage * TILE + here.lane * 2048, from + (u64)block * 32768 + (n & 1) * 2048, 2048,
                 here.full + ring.stage * 8, policy);
        ring.next();
        if (n & 1 && ++block == a.blocks) block = 0;
        if (++at == a.tiles) at = 0, round++;
    }
}

__device__ __forceinline__ void consume(const Asked& a, const Here& here, Ring& ring, u32 count, u32& mixed) {
#pragma unroll 1
    for (u32 n = 0; n < count; n++) {
        here.wait(a, here.full + ring.stage * 8, ring.parity, 4);
        const uint4* row = (const uint4*)(shared + AT_RING + ring.stage * TILE + here.warp * 2048) + here.lane;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 v = row[j * 32];
            mixed ^= v.x ^ v.y ^ v.z ^ v.w;
        }
        __syncwarp();
        if (here.lane == 0) arrive(here.empty + ring.stage * 8);
        ring.next();
    }
}

__device__ __forceinline__ u64* region(const Asked& a, u32 round) { return a.messages + (round & 1) * (COPIES * MESSAGES * 2); }
__device__ __forceinline__ u32* counted(const Asked& a, u32 round) { return a.vector + (round & 1) * WORDS; }
__device__ __forceinline__ u32 vector_at(u32 round) { return AT_VECTORS + (round & 1) * RAW_BYTES; }

// This program's part as messages, in so many copies.
__device__ __forceinline__ void tell(const Asked& a, const Here& here, u32 round, u32 copies) {
    const u32 first = part(here.worker, here.workers, MESSAGES), count = part(here.worker + 1, here.workers, MESSAGES) - first;
    for (u32 e = here.tid; e < copies * count; e += THREADS) {
        const u32 copy = e / count, m = first + e % count;
        post_wide(region(a, round) + (copy * MESSAGES + m) * 2, __uint_as_float(word_of(3 * m, round)),
                  __uint_as_float(word_of(3 * m + 1, round)), __uint_as_float(word_of(3 * m + 2, round)), round + 1);
    }
}
// The same without marks, and the counter.
__device__ __forceinline__ void tell_counted(const Asked& a, const Here& here, u32 round) {
    if (here.warp) return;
    const u32 first = part(here.worker, here.workers, UNITS), end = part(here.worker + 1, here.workers, UNITS);
    for (u32 unit = first + here.lane; unit < end; unit += 32)
        ((uint4*)counted(a, round))[unit] = make_uint4(word_of(4 * unit, round), word_of(4 * unit + 1, round),
                                                      word_of(4 * unit + 2, round), word_of(4 * unit + 3, round));
    __syncwarp();
    if (here.lane == 0) count_one(a.counter);
}
__device__ __forceinline__ void hear_counter(const Asked& a, const Here& here, u32 round, u32 code) {
    if (here.tid == 0)
        while (look_acquired(a.counter) < (round + 1) * here.workers) here.late(a, code);
}

// Messages first .. first + ALL of a copy, as one_token.cu reads them; into shared memory if they are to be packed.
template <int ALL, bool PACKED>
__device__ __forceinline__ void hear(const Asked& a, const Here& here, u32 round, u32 copy, u32 first, u32 code) {
    constexpr int MANY = (ALL + THREADS - 1) / THREADS, CHUNK = MANY < 4 ? MANY : 4;
    const u64* from = region(a, round) + (copy * MESSAGES + first) * 2;
    const u32 flag = round + 1;
    u32* words = (u32*)(shared + vector_at(round));
#pragma unroll 1
    for (int begin = 0; begin < MANY; begin += CHUNK) {
        uint4 v[CHUNK];
        if (here.lane == 0 && here.tid + begin * THREADS < ALL)
            while (look_wide(from + (here.tid + begin * THREADS) * 2).w != flag) here.late(a, code);
        __syncwarp();
        while (true) {
            bool all = true;
#pragma unroll
            for (int n = 0; n < CHUNK; n++) {
                const int e = here.tid + (begin + n) * THREADS;
                if (e < ALL) v[n] = look_wide(from + e * 2);
            }
#pragma unroll
            for (int n = 0; n < CHUNK; n++) all = all && (here.tid + (begin + n) * THREADS >= ALL || v[n].w == flag);
            if (all) break;
            here.late(a, code);
        }
        if (PACKED)
#pragma unroll
            for (int n = 0; n < CHUNK; n++) {
                const int e = here.tid + (begin + n) * THREADS, word = (first + e) * 3;
                if (e < ALL) words[word] = v[n].x, words[word + 1] = v[n].y, words[word + 2] = v[n].z;
            }
    }
}

// Of a vector of UNITS of 16 bytes, the piece that worker `rank` of a cluster with a leader hands on: where it begins.
__device__ __forceinline__ u32 piece_at(u32 rank, u32 size) { return part(rank - 1, size - 1, UNITS) * 16; }

__device__ __forceinline__ u32 came_of(const Here& here, u32 round) { return here.came + (round & 1) * 8; }
__device__ __forceinline__ u32 piece_of(const Here& here, u32 round) { return here.piece + (round & 1) * 8; }

// The leader's vector, packed, to the cluster: all of it to each, or a piece to each, which that one hands on.
__device__ __forceinline__ void give_all(const Here& here, u32 round) {
    const u32 at = here.base + vector_at(round);
    if (here.warp == 0 && here.lane && here.lane < here.size)
        push(of_rank(at, here.lane), at, PACKED_BYTES, of_rank(came_of(here, round), here.lane));
}
__device__ __forceinline__ void scatter(const Here& here, u32 round) {
    if (here.warp || !here.lane || here.lane >= here.size) return;
    const u32 begin = piece_at(here.lane, here.size), at = here.base + vector_at(round) + begin;
    push(of_rank(at, here.lane), at, piece_at(here.lane + 1, here.size) - begin, of_rank(piece_of(here, round), here.lane));
}
// Warp 9 of a worker.
__device__ __forceinline__ void hand_on(const Asked& a, const Here& here) {
    const u32 begin = piece_at(here.rank, here.size), bytes = piece_at(here.rank + 1, here.size) - begin;
#pragma unroll 1
    for (u32 round = 0; round < a.rounds; round++) {
        if (here.lane == 0) expect(piece_of(here, round), bytes);
        __syncwarp();
        here.wait(a, piece_of(here, round), round >> 1 & 1, 5);
        const u32 at = here.base + vector_at(round) + begin;
        if (here.lane && here.lane < here.size && here.lane != here.rank)
            push(of_rank(at, here.lane), at, bytes, of_rank(came_of(here, round), here.lane));
    }
}

// Bytes of the vector that come to this program by copies that its barrier counts.
template <Way WAY>
__device__ __forceinline__ u32 expected(const Here& here) {
    switch (WAY) {
        case COUNTED_BULK: case LEADER_PUSH: return PACKED_BYTES;
        case PARTS_PUSH: return PACKED_BYTES - PACKED_BYTES / here.size;
        case PARTS_MULTICAST: case LEADER_MULTICAST: return RAW_BYTES;
        case LEADER_SCATTER: case LEADER_COUNTED: return PACKED_BYTES - (piece_at(here.rank + 1, here.size) - piece_at(here.rank, here.size));
        default: return 0;
    }
}

// A part of the messages of a program that shares them out with its cluster.
template <bool PACKED>
__device__ __forceinline__ void hear_part(const Asked& a, const Here& here, u32 round) {
    const u32 first = here.rank * (MESSAGES / here.size);
    if (here.size == 16) hear<MESSAGES / 16, PACKED>(a, here, round, 0, first, 8);
    else hear<MESSAGES / 8, PACKED>(a, here, round, 0, first, 8);
}

// After its part is written: the whole vector into shared memory.
template <Way WAY>
__device__ __forceinline__ void receive(const Asked& a, const Here& here, u32 round) {
    const u32 at = here.base + vector_at(round), came = came_of(here, round), parity = round >> 1 & 1;
    if constexpr (WAY == MESSAGE) {
        hear<MESSAGES, true>(a, here, round, blockIdx.x % COPIES, 0, 6);
    } else if constexpr (WAY == COUNTED) {
        hear_counter(a, here, round, 7);
        together();
#pragma unroll
        for (int n = 0; n < UNITS / THREADS; n++) {
            const u32 unit = here.tid + n * THREADS;
            ((uint4*)(shared + vector_at(round)))[unit] = look_wide((const u64*)counted(a, round) + unit * 2);
        }
    } else if constexpr (WAY == COUNTED_BULK) {
        hear_counter(a, here, round, 7);
        if (here.warp == 0) {
            __syncwarp();
            before_fetch();
            if (here.lane < PACKED_BYTES / SLICE)
                fetch(at + here.lane * SLICE, (const char*)counted(a, round) + here.lane * SLICE, SLICE, came);
        }
        here.wait(a, came, parity, 9);
    } else if constexpr (WAY == PARTS_PUSH) {
        hear_part<true>(a, here, round);
        before_push();
        together();
        const u32 bytes = PACKED_BYTES / here.size, own = at + here.rank * bytes;
        if (here.tid < here.size && here.tid != here.rank) push(of_rank(own, here.tid), own, bytes, of_rank(came, here.tid));
        here.wait(a, came, parity, 10);
    } else if constexpr (WAY == PARTS_MULTICAST) {
        hear_part<false>(a, here, round);
        before_fetch();
        together();
        const u32 bytes = RAW_BYTES / here.size, own = here.rank * bytes;
        if (here.tid == 0) multicast(at + own, (const char*)region(a, round) + own, bytes, came, (1u << here.size) - 1);
        here.wait(a, came, parity, 11);
    } else if constexpr (WAY >= LEADER_PUSH) {
        here.wait(a, came, parity, 12);
        if constexpr (WAY == LEADER_SCATTER || WAY == LEADER_COUNTED) here.wait(a, piece_of(here, round), parity, 13);
    }
}

// A leader: the vector of each round, to its cluster.
template <Way WAY>
__device__ __forceinline__ void lead(const Asked& a, const Here& here) {
#pragma unroll 1
    for (u32 round = 0; round < a.rounds; round++) {
        const u32 at = here.base + vector_at(round), came = came_of(here, round);
        if constexpr (WAY == LEADER_COUNTED) {
            if (here.tid == 0) expect(came, PACKED_BYTES);
            hear_counter(a, here, round, 14);
            if (here.warp == 0) {
                __syncwarp();
                before_fetch();
                if (here.lane < PACKED_BYTES / SLICE)
                    fetch(at + here.lane * SLICE, (const char*)counted(a, round) + here.lane * SLICE, SLICE, came);
            }
            here.wait(a, came, round >> 1 & 1, 15);
        } else {
            hear<MESSAGES, WAY != LEADER_MULTICAST>(a, here, round, 0, 0, 16);
            if constexpr (WAY == LEADER_MULTICAST) before_fetch();
            else before_push();
        }
        together();
        if (here.tid == 0) a.stamps[(blockIdx.x * a.rounds + round) * 4 + 2] = now();
        if constexpr (WAY == LEADER_PUSH) give_all(here, round);
        if constexpr (WAY == LEADER_SCATTER || WAY == LEADER_COUNTED) scatter(here, round);
        if constexpr (WAY == LEADER_MULTICAST)
            if (here.tid < RAW_BYTES / SLICE)
                multicast(at + here.tid * SLICE, (const char*)region(a, round) + here.tid * SLICE, SLICE, came, (1u << here.size) - 2);
        if (here.tid == 0) a.stamps[(blockIdx.x * a.rounds + round) * 4 + 3] = now();
        together();
    }
}

// Each word of the vector in shared memory is that of this round.
template <Way WAY>
__device__ __forceinline__ void check(const Asked& a, const Here& here, u32 round) {
    constexpr bool RAW = WAY == PARTS_MULTICAST || WAY == LEADER_MULTICAST;
    const u32* words = (const u32*)(shared + vector_at(round));
    u32 wrong = 0;
    for (u32 word = here.tid; word < WORDS; word += THREADS)
        wrong += words[RAW ? word / 3 * 4 + word % 3 : word] != word_of(word, round);
    if (wrong) atomicAdd(a.errors, wrong);
}

template <Way WAY>
__device__ __forceinline__ void compute(const Asked& a, const Here& here) {
    Ring ring{0, 0};
    u32 mixed = 0;
#pragma unroll 1
    for (u32 round = 0; round < a.rounds; round++) {
        consume(a, here, ring, a.tiles - (round ? a.taken : 0), mixed);
        together();
        u64 began = 0, told = 0;
        if (here.tid == 0) {
            began = cycles(), told = now();
            if (expected<WAY>(here)) expect(came_of(here, round), expected<WAY>(here));
        }
        if constexpr (WAY == COUNTED || WAY == COUNTED_BULK || WAY == LEADER_COUNTED) tell_counted(a, here, round);
        else if constexpr (WAY != NONE && WAY != PROBE) tell(a, here, round, WAY == MESSAGE ? COPIES : 1);
        consume(a, here, ring, a.taken, mixed);
        receive<WAY>(a, here, round);
        together();
        if (here.tid == 0) {
            arrive(here.go);
            if constexpr (WAY != PROBE) {
                u64* to = a.stamps + (blockIdx.x * a.rounds + round) * 4;
                to[0] = began, to[1] = cycles(), to[2] = told, to[3] = now();
            }
        }
        if constexpr (WAY != NONE && WAY != PROBE) check<WAY>(a, here, round);
    }
    atomicXor(a.sink + blockIdx.x, mixed);
}

// One lane of each program, one access at a time, cycles: a number from the card's cache, a fence behind a store there, and
// numbers of two other programs' shared memory, the next worker's and the leader's (a leader asks the first worker twice).
__device__ __forceinline__ void probe(const Asked& a, const Here& here) {
    u64* line = a.messages + AT_PROBES + blockIdx.x * 32;
    u32 next = here.rank + 1, sum = 0;
    if (next >= here.size) next = a.leads;
    const u32 neighbour = of_rank(here.base + AT_VECTORS, next), leader = of_rank(here.base + AT_VECTORS, here.leader ? next : 0);
#pragma unroll 1
    for (u32 n = 0; n < a.rounds; n++) {
        u64* to = a.stamps + (blockIdx.x * a.rounds + n) * 4;
        // Whether the clock is read again depends on the number, so that it is read after the number has come.
        u64 began = cycles();
        sum += look_once(line);
        if (sum != 0x7fffffffu) to[0] = cycles() - began;
        began = cycles();
        post(line + 16, n, 0);
        fence_gpu();
        to[1] = cycles() - began;
        began = cycles();
        sum += look_shared(neighbour);
        if (sum != 0x7fffffffu) to[2] = cycles() - began;
        began = cycles();
        sum += look_shared(leader);
        if (sum != 0x7fffffffu) to[3] = cycles() - began;
        here.late(a, 17);
        __nanosleep(1000);
    }
    atomicXor(a.sink + blockIdx.x, sum);
}

template <Way WAY>
__device__ __forceinline__ void run(const Asked& a) {
    const Here here(a);
    for (u32 i = here.tid; i < 2 * RAW_BYTES / 4; i += blockDim.x) ((u32*)(shared + AT_VECTORS))[i] = 0;
    if (here.tid == 0) {
        for (int i = 0; i < STAGES; i++) init(here.full + i * 8, 1), init(here.empty + i * 8, WARPS);
        init(here.go, 1);
        for (int i = 0; i < 2; i++) init(here.came + i * 8, 1), init(here.piece + i * 8, 1);
        barriers_made();
    }
    before_push();
    __syncthreads();
    cluster_together();  // no barrier is counted at before it is made
    if (here.warp == WARPS) {
        if (a.flight && !here.leader) stream(a, here);
    } else if (here.warp == WARPS + 1) {
        if constexpr (WAY == PROBE) {
            if (here.lane == 0) probe(a, here);
        }
        if constexpr (WAY == LEADER_SCATTER || WAY == LEADER_COUNTED) {
            if (!here.leader) hand_on(a, here);
        }
    } else if (!here.leader) {
        if (a.flight) compute<WAY>(a, here);
    } else {
        if constexpr (WAY >= LEADER_PUSH) lead<WAY>(a, here);
    }
    __syncwarp();
    cluster_together();  // shared memory stays until everybody has read it
}

#define KERNEL(name, way) extern "C" __global__ void __launch_bounds__(320, 1) name(const __grid_constant__ Asked asked) { run<way>(asked); }
KERNEL(none, NONE)
KERNEL(probe, PROBE)
KERNEL(messages, MESSAGE)
KERNEL(counted, COUNTED)
KERNEL(counted_bulk, COUNTED_BULK)
KERNEL(parts_push, PARTS_PUSH)
KERNEL(parts_multicast, PARTS_MULTICAST)
KERNEL(leader_push, LEADER_PUSH)
KERNEL(leader_scatter, LEADER_SCATTER)
KERNEL(leader_multicast, LEADER_MULTICAST)
KERNEL(leader_counted, LEADER_COUNTED)
