// Stands for hopper.cuh, and for what a card's compiler knows by itself: the same functions, computed on the host.

#pragma once

#include <math.h>
#include <string.h>

#include "runtime.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "not of the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(u32 v) { return bits_of<float>(v); }
inline u32 __float_as_uint(float v) { return bits_of<u32>(v); }
inline float rsqrtf(float a) { return 1.f / sqrtf(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs(v); }
// Four of the eight bytes of two words, by the lower three bits of a number of four bits for each.
inline u32 __byte_perm(u32 a, u32 b, u32 which) {
    const u64 both = (u64)b << 32 | a;
    u32 result = 0;
    for (u32 n = 0; n < 4; n++) result |= (u32)(both >> (which >> 4 * n & 7) * 8 & 255) << 8 * n;
    return result;
}
inline u64 __cvta_generic_to_shared(const void* at) { return (const unsigned char*)at - shared + emulator::SHARED_BASE; }
inline void __threadfence_system() {}
inline void __nanosleep(u32) { emulator::pause(); }
inline u64 clock64() { return emulator::ticks(); }
inline u64 now() { return emulator::ticks(); }

// A kernel reports the number of a wait that it gives up, and stops.
inline u32 given_up;
inline u32 atomicExch_system(u32* at, u32 value) {
    const u32 before = *at;
    *at = value, given_up = value & 0xffff;
    return before;
}
// Threads run one at a time, so these are single by themselves.
template <typename T>
inline T atomicExch(T* at, T value) {
    const T before = *at;
    *at = value;
    return before;
}
template <typename T>
inline T atomicMax(T* at, T value) { return atomicExch(at, value > *at ? value : *at); }
template <typename T>
inline T atomicAdd(T* at, T value) { return atomicExch(at, *at + value); }
inline void __threadfence() {}
[[noreturn]] inline void __trap() { emulator::give_up(given_up); }

// Numbers of 16 and 8 bits.
inline float from_bf16(u32 v) { return bits_of<float>(v << 16); }
inline u32 to_bf16(float a) {
    const u32 v = bits_of<u32>(a);
    return a != a ? 0x7fff : v + 0x7fff + (v >> 16 & 1) >> 16;
}
// Finite numbers of a sign, EXPONENT bits and FRACTION bits.
template <u32 EXPONENT, u32 FRACTION>
inline float from_small(u32 v) {
    constexpr int LEAST = 2 - (1 << (EXPONENT - 1)) - (int)FRACTION;  // exponent of the smallest
    const u32 exponent = v >> FRACTION & ((1u << EXPONENT) - 1), fraction = v & ((1u << FRACTION) - 1);
    const float size = exponent ? ldexpf((1u << FRACTION) + fraction, LEAST + exponent - 1) : ldexpf(fraction, LEAST);
    return v >> (EXPONENT + FRACTION) & 1 ? -size : size;
}
// Rounds to even. `a` is no larger than the largest.
template <u32 EXPONENT, u32 FRACTION>
inline u32 to_small(float a) {
    constexpr u32 DROPPED = 23 - FRACTION;
    constexpr int BIAS = (1 << (EXPONENT - 1)) - 1;
    const u32 sign = (u32)!!signbit(a) << (EXPONENT + FRACTION), v = bits_of<u32>(fabsf(a));
    if (fabsf(a) < ldexpf(1, 1 - BIAS)) return sign | (u32)rintf(ldexpf(fabsf(a), BIAS - 1 + FRACTION));
    return sign | ((v + (1u << (DROPPED - 1)) - 1 + (v >> DROPPED & 1) >> DROPPED) - (127 - BIAS << FRACTION));
}
inline float from_f16(u32 v) {
    if ((v >> 10 & 31) < 31) return from_small<5, 10>(v);
    return v & 1023 ? NAN : v >> 15 & 1 ? -INFINITY : INFINITY;
}
inline u32 to_f16(float a) {
    if (a != a) return 0x7fff;
    return fabsf(a) >= 65520.f ? (u32)!!signbit(a) << 15 | 0x7c00 : to_small<5, 10>(a);
}
inline float from_e4m3(u32 v) { return (v & 127) == 127 ? NAN : from_small<4, 3>(v); }
// What is too large becomes the largest.
inline u32 to_e4m3(float a) {
    if (a != a) return 0x7f;
    return fabsf(a) >= 448.f ? (u32)!!signbit(a) << 7 | 0x7e : to_small<4, 3>(a);
}

// What the lanes of a warp do together. Each brings a record, and `finish` fills in the results when all are there.
struct Shuffle { u32 value, from, result; };
inline void exchange(u32 mask, void* const (&lanes)[32]) {
    for (u32 lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        auto* own = (Shuffle*)lanes[lane];
        if (!(mask >> own->from & 1)) emulator::fail("lane %u asks lane %u, which is not in the mask %08x", lane, own->from, mask);
        own->result = ((Shuffle*)lanes[own->from])->value;
    }
}
template <typename T>
inline T shuffle(u32 mask, T value, u32 from) {
    Shuffle own{bits_of<u32>(value), from, 0};
    emulator::meet(exchange, mask, &own);
    return bits_of<T>(own.result);
}
template <typename T>
inline T __shfl_sync(u32 mask, T value, u32 from, u32 width = 32) {
    return shuffle(mask, value, (threadIdx.x & 31 & ~(width - 1)) + from % width);
}
template <typename T>
inline T __shfl_xor_sync(u32 mask, T value, u32 bits, u32 width = 32) {
    const u32 lane = threadIdx.x & 31, from = lane ^ bits;
    return shuffle(mask, value, from < (lane & ~(width - 1)) + width ? from : lane);
}
template <typename T>
inline T __shfl_down_sync(u32 mask, T value, u32 by, u32 width = 32) {
    const u32 lane = threadIdx.x & 31;
    return shuffle(mask, value, lane % width + by < width ? lane + by : lane);
}
template <typename T>
inline T __shfl_up_sync(u32 mask, T value, u32 by, u32 width = 32) {
    const u32 lane = threadIdx.x & 31;
    return shuffle(mask, value, lane % width >= by ? lane - by : lane);
}
inline void nothing(u32, void* const (&)[32]) {}
inline void __syncwarp(u32 mask = ~0u) { emulator::meet(nothing, mask, nullptr); }
struct Vote { u32 yes, all; };
inline void count_votes(u32 mask, void* const (&lanes)[32]) {
    u32 all = 0;
    for (u32 lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) all |= ((Vote*)lanes[lane])->yes << lane;
    for (u32 lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) ((Vote*)lanes[lane])->all = all;
}
inline u32 __ballot_sync(u32 mask, bool yes) {
    Vote own{yes, 0};
    emulator::meet(count_votes, mask, &own);
    return own.all;
}
// redux.sync.max.u32
inline u32 warp_most(u32 a) {
    for (u32 bit = 16; bit; bit >>= 1) {
        const u32 other = __shfl_xor_sync(~0u, a, bit);
        a = a > other ? a : other;
    }
    return a;
}
// redux.sync.add.s32
inline int warp_sum(int a) {
    for (u32 bit = 16; bit; bit >>= 1) a += __shfl_xor_sync(~0u, a, bit);
    return a;
}
inline bool __any_sync(u32 mask, bool yes) { return __ballot_sync(mask, yes) != 0; }
inline bool __all_sync(u32 mask, bool yes) { return __ballot_sync(mask, yes) == mask; }

// sums [16, 8] += left [16, K] x right [K, 8], where K are 32 bytes of a row (PTX ISA, fragments of mma.m16n8k16 and of
// m16n8k32): register r of a lane of `left` has 4 bytes of row lane / 4 + r % 2 * 8, from byte lane % 4 * 4 + r / 2 * 16.
struct Fragments { const u32 *left, *right; void* sums; };
template <typename Format, typename Right, typename Sum>
inline void multiply(u32 mask, void* const (&lanes)[32]) {
    constexpr u32 EACH = Format::IN_A_WORD, K = 8 * EACH;
    if (mask != ~0u) emulator::fail("a product needs the whole warp");
    typedef float Row __attribute__((vector_size(32)));
    float left[16][K];
    Row right[K], totals[16] = {};
    for (u32 lane = 0; lane < 32; lane++) {
        const auto& own = *(const Fragments*)lanes[lane];
        for (u32 n = 0; n < EACH; n++) {
            const u32 at = lane % 4 * EACH + n, bits = 32 / EACH, shift = n * bits, ones = (1u << bits) - 1;
            for (u32 r = 0; r < 4; r++)
                left[lane / 4 + r % 2 * 8][at + r / 2 * 4 * EACH] = Format::widen(own.left[r] >> shift & ones);
            for (u32 r = 0; r < 2; r++) right[at + r * 4 * EACH][lane / 4] = Right::widen(own.right[r] >> shift & ones);
        }
    }
    for (u32 row = 0; row < 16; row++)
        for (u32 k = 0; k < K; k++) totals[row] += left[row][k] * right[k];
    for (u32 lane = 0; lane < 32; lane++)
        for (u32 n = 0; n < 4; n++)
            ((Sum*)((const Fragments*)lanes[lane])->sums)[n] += (Sum)totals[lane / 4 + n / 2 * 8][lane % 4 * 2 + n % 2];
}
struct Bf16 { static constexpr u32 IN_A_WORD = 2; static float widen(u32 v) { return from_bf16(v); } };
struct F16 { static constexpr u32 IN_A_WORD = 2; static float widen(u32 v) { return from_f16(v); } };
struct E4m3 { static constexpr u32 IN_A_WORD = 4; static float widen(u32 v) { return from_e4m3(v); } };
// Whole numbers are exact in float32: a product's sum has less than 24 bits.
struct U8 { static constexpr u32 IN_A_WORD = 4; static float widen(u32 v) { return v; } };
struct S8 { static constexpr u32 IN_A_WORD = 4; static float widen(u32 v) { return (signed char)v; } };
template <typename Format, typename Right = Format, typename Sum = float>
inline void product_of(Sum (&sums)[4], const uint4& left, const uint2& right) {
    Fragments own{&left.x, &right.x, sums};
    emulator::meet(multiply<Format, Right, Sum>, ~0u, &own);
}

// The functions of hopper.cuh, in its order.
inline u32 pack(float a, float b) { return to_bf16(a) | to_bf16(b) << 16; }
inline float power(float a) {
    const float d = exp2f(a);
    return d < 0x1p-126f ? 0.f : d;
}
inline bool try_wait(u32 barrier, u32 parity) { return emulator::barrier_wait(barrier, parity); }
inline void arrive(u32 barrier) { emulator::barrier_arrive(barrier, 0); }
inline void expect(u32 barrier, u32 bytes) { emulator::barrier_arrive(barrier, bytes); }
inline void init(u32 barrier, u32 count) { emulator::barrier_init(barrier, count); }
inline void barriers_made() {}
inline u64 evict_first() { return 1; }
inline void bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64) { emulator::copy(to, from, bytes, barrier); }
inline void post(u64* at, u32 value, u32 flag) {
    const u32 words[2] = {value, flag};
    emulator::store(at, words, 2);
}
inline void post_wide(u64* at, float a, float b, float c, u32 flag) {
    const u32 words[4] = {bits_of<u32>(a), bits_of<u32>(b), bits_of<u32>(c), flag};
    emulator::store(at, words, 4);
}
inline uint4 look_wide(const u64* at) {
    uint4 v;
    emulator::load(at, &v.x, 4);
    return v;
}
inline uint2 look(const u64* at) {
    uint2 v;
    emulator::load(at, &v.x, 2);
    return v;
}
inline uint4 fresh_four(const void* at) { return *(const uint4*)at; }
inline uint4 read_once(const void* at) { return *(const uint4*)at; }
inline int dot_bytes(u32 left, u32 right, int sum) {
    for (u32 n = 0; n < 4; n++) sum += (int)(left >> 8 * n & 255) * (signed char)(right >> 8 * n & 255);
    return sum;
}
inline void grid_wait() { emulator::wait_for_launch_before(); }
inline void launch_next() { emulator::let_next_launch_start(); }
inline void __syncthreads() { emulator::meet_program(0, 0); }
inline void together() { emulator::meet_program(1, 256); }
inline void product(float (&sums)[4], const uint4& left, const uint2& right) { product_of<Bf16>(sums, left, right); }

// For kernels to come. Names and meanings are to be those of hopper.cuh.
inline float widen_f16(u32 half) { return from_f16(half & 0xffff); }
inline u32 pack_f16(float a, float b) { return to_f16(a) | to_f16(b) << 16; }
// cvt.rn.f16x2.e4m3x2: two bytes become two halves, the lower one first.
inline u32 widen_e4m3(u32 two) { return to_f16(from_e4m3(two & 255)) | to_f16(from_e4m3(two >> 8 & 255)) << 16; }
// cvt.rn.satfinite.e4m3x2.f32
inline u32 pack_e4m3(float a, float b) { return to_e4m3(a) | to_e4m3(b) << 8; }
inline void product_f16(float (&sums)[4], const uint4& left, const uint2& right) { product_of<F16>(sums, left, right); }
inline void product_e4m3(float (&sums)[4], const uint4& left, const uint2& right) { product_of<E4m3>(sums, left, right); }
inline void product_bytes(int (&sums)[4], const uint4& left, const uint2& right) { product_of<U8, S8>(sums, left, right); }

// Is this the fault that a test plants?
#define FAULT(number) (emulator_planted == number)

// How the runtime begins a kernel whose argument it does not know.
template <typename Argument>
inline void call_kernel(void (*kernel)(const Argument&), const void* argument) { kernel(*(const Argument*)argument); }
