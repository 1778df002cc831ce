// What the host's stand-ins for a card's instructions (host.h) ask of the scheduler (runtime.cpp).

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct Index { u32 x, y, z; };

// Of the thread that runs. Another thread runs only inside of the functions below.
extern Index threadIdx, blockIdx, blockDim, gridDim;
extern unsigned char* shared;

// The number of the fault that a test wants; 0: none.
extern "C" u32 emulator_planted;

namespace emulator {

// Nobody can go on: every wait fails from now on, so that its kernel says which one it is.
extern bool stuck;

// The launch fails with this message, and with where the thread is.
[[noreturn]] void fail(const char* format, ...);
// This thread ends. `code`: the wait that it gave up.
[[noreturn]] void give_up(u32 code);

// What the lanes of `mask` do together: when all have come, `finish` gets what each of them brought, by lane.
typedef void (*Finish)(u32 mask, void* const (&lanes)[32]);
void meet(Finish finish, u32 mask, void* own);
// Named barrier `id`: wait until `count` threads have come; 0: all of the program that have not ended.
void meet_program(u32 id, u32 count);

// Addresses in shared memory are numbers, as on a card, and do not begin at 0.
constexpr u32 SHARED_BASE = 1024;

void barrier_init(u32 at, u32 count);
void barrier_arrive(u32 at, u32 expected_bytes);
// True when the phase of this parity is over. False only if it never will be.
bool barrier_wait(u32 at, u32 parity);
// Starts a copy. What it writes is made of NaN until it is complete.
void copy(u32 to, const void* from, u32 bytes, u32 barrier);

// Words for other programs: the store may be seen later, and a load that finds nothing new waits a little.
void store(void* at, const u32* words, u32 count);
void load(const void* at, u32* words, u32 count);
void pause();

void wait_for_launch_before();
void let_next_launch_start();
u64 ticks();

}  // namespace emulator
