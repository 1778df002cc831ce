// What a kernel of Hopper says in PTX, a function each. Comes before the source of a kernel; the tests put functions of
// the host in its place, which do the same (tests/emulator).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

extern __shared__ __align__(128) unsigned char shared[];

__device__ __forceinline__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ __forceinline__ u32 pack(float a, float b) {
    u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a)); return d;
}
__device__ __forceinline__ u32 pack_f16(float a, float b) {
    u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a)); return d;
}
// The lower two bytes, e4m3, as two float16.
__device__ __forceinline__ u32 widen_e4m3(u32 two) {
    u32 d; asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(d) : "r"(two)); return d;
}
// The lower half of a word, float16.
__device__ __forceinline__ float widen_f16(u32 half) {
    float d; asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(d) : "r"(half)); return d;
}
// The largest of a warp, and the sum.
__device__ __forceinline__ u32 warp_most(u32 a) {
    u32 d; asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(a)); return d;
}
__device__ __forceinline__ int warp_sum(int a) {
    int d; asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(a)); return d;
}
__device__ __forceinline__ float power(float a) { float d; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a)); return d; }
// Is the phase of this parity over? May wait a little before it says no.
__device__ __forceinline__ bool try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// For data that is read once.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Copy memory into shared memory; the barrier counts the bytes.
__device__ __forceinline__ void bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void post(u64* at, u32 value, u32 flag) {
    asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" :: "l"(at), "r"(value), "r"(flag) : "memory");
}
// One message of 16 bytes: loads and stores of 128 bits are single (PTX ISA, memory consistency model).
__device__ __forceinline__ void post_wide(u64* at, float a, float b, float c, u32 flag) {
    asm volatile("{ .reg .b128 m; .reg .b64 l, h; mov.b64 l, {%1, %2}; mov.b64 h, {%3, %4}; mov.b128 m, {l, h};\n"
                 "st.relaxed.gpu.global.b128 [%0], m; }"
                 :: "l"(at), "f"(a), "f"(b), "f"(c), "r"(flag) : "memory");
}
__device__ __forceinline__ uint4 look_wide(const u64* at) {
    uint4 v;
    asm volatile("{ .reg .b128 m; .reg .b64 l, h; ld.relaxed.gpu.global.b128 m, [%4]; mov.b128 {l, h}, m;\n"
                 "mov.b64 {%0, %1}, l; mov.b64 {%2, %3}, h; }" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
// A message's value and mark.
__device__ __forceinline__ uint2 look(const u64* at) {
    uint2 v;
    asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
    return v;
}
// Four words that were written since this launch began.
__device__ __forceinline__ uint4 fresh_four(const void* at) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
// Four words that no launch writes and that are read once.
__device__ __forceinline__ uint4 read_once(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
// sum += four bytes without a sign times four with one.
__device__ __forceinline__ int dot_bytes(u32 left, u32 right, int sum) {
    int d; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(left), "r"(right), "r"(sum)); return d;
}
// Wait for the end of the launches before.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next launch may start.
__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// The 256 threads that compute wait for each other.
__device__ __forceinline__ void together() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
// sums [16, 8] += left [16, 16] x right [16, 8] in bfloat16.
__device__ __forceinline__ void product(float (&sums)[4], const uint4& left, const uint2& right) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "r"(right.x), "r"(right.y));
}
// The same in float16.
__device__ __forceinline__ void product_f16(float (&sums)[4], const uint4& left, const uint2& right) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "r"(right.x), "r"(right.y));
}
// sums [16, 8] += left [16, 32], bytes without a sign, x right [32, 8], bytes with one.
__device__ __forceinline__ void product_bytes(int (&sums)[4], const uint4& left, const uint2& right) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "r"(right.x), "r"(right.y));
}
