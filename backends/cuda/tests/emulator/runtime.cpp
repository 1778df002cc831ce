// Runs launches of a kernel's source, compiled for the host, on one thread of the operating system. Each of the kernel's
// threads has a stack of its own, and another one runs when it waits.

#include "runtime.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;
unsigned char* shared;
bool emulator::stuck;
extern "C" { u32 emulator_planted; }

namespace {

using namespace emulator;

constexpr u32 LANES = 32, NAMED = 16, RECENT = 16;
constexpr size_t PAGE = 4096, GUARD = 16 * PAGE;
// Not a multiple of a page, so that the frames of a warp's threads are not in the same lines of the cache.
constexpr size_t STACK = 2 * PAGE + 320, STACK_LEFT = 1024;
// Rounds without any progress: after so many all threads run in each round, after some more nobody will go on.
constexpr u32 IDLE = 4, TOO_IDLE = 8;

enum class State : unsigned char { READY, MEETS, NAMED_BARRIER, COPY_BARRIER, POLLS, NAPS, LAUNCH, ENDED, GAVE_UP };

// A message that a thread looked at: what it saw, how often in a row, and what is there when it waits for a change.
struct Message { const void* at; u32 bytes, times; u64 seen[2], there[2]; };

// What a thread looked at last.
struct Looks {
    Message messages[RECENT];
    u32 count, in_a_row;  // how many there were, and without a wait between
    u32 kept() const { return std::min(count, RECENT); }
};

struct Thread {
    void* sp;
    unsigned char* stack;
    Finish finish;    // of a meeting
    void* own;
    u32 mask;
    u32 id, parity;   // of a barrier
    State state;
    u32 code;         // of a wait that was given up
    Looks* looks;     // made with the first one
};

struct Program;

struct Warp {
    Program* program;
    u32 first, ready, meets, looks, ended;  // number of its first thread; lanes
    u32 sleeps_until;
    bool queued, looking;
    Thread* threads;
};

struct Barrier { u32 count, pending, phase; long long bytes; };

struct Copy { u32 to, bytes, barrier; const void* from; };

struct Launched;

struct Program {
    Launched* launch;
    u32 index, living, slot, queued;  // queued: warps that can run
    bool allowed;
    unsigned char* memory;
    std::vector<Warp> warps;
    u32 arrived[NAMED];
    std::map<u32, Barrier> barriers;
    std::vector<Copy> copies;  // under way
};

struct Launch {
    void (*start)(const void*);
    const void* argument;
    u32 programs, threads, shared;
};

struct Options {
    u64 seed;    // 0: threads run in order, and messages are there at once
    u32 room;    // programs that the card holds at a time
    u32 overlap; // a launch may start before the one ahead of it has ended
};

struct Launched {
    Launch what;
    u32 number, started, ended, allowed;
    std::vector<Program*> programs;
    bool done() const { return ended == what.programs; }
};

struct Store { Launched* launch; void* at; u32 words[4], count; };

// All that is of one call of `run`.
struct Machine {
    Options options;
    u64 random, progress;
    std::vector<Launched> launches;
    std::vector<Warp*> ready;
    u32 copies;
    std::vector<Store> stores;
    std::unordered_map<void*, size_t> stored;  // where the last store to an address is
    std::vector<u32> free_slots;
    Warp* warp;
    Thread* thread;
    void* scheduler;
    std::string error;
    jmp_buf out;
    u64 clock;
    u32 idle, round;
    std::vector<Warp*> looking;  // that have threads which wait for a message or a launch
};

Machine* m;

// Stacks and shared memories of the programs that are there at a time; kept from run to run.
struct Pool {
    unsigned char *stacks = nullptr, *memories = nullptr;
    size_t stack_bytes = 0, memory_bytes = 0, per_program = 0;

    static void fit(unsigned char*& at, size_t& has, size_t bytes) {
        if (bytes <= has) return;
        if (at) munmap(at, has);
        at = (unsigned char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) { at = nullptr; has = 0; m->error = "there is no memory for stacks"; longjmp(m->out, 1); }
        madvise(at, bytes, MADV_NOHUGEPAGE);
        has = bytes;
    }
} pool;

u64 next_random() {
    u64 x = m->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return m->random = x;
}
// True once in `of` times.
bool once_in(u32 of) { return (next_random() >> 20) % of == 0; }

// Goes on with another stack: pushes what a function has to keep, and takes that of the other one.
#ifndef __x86_64__
#error "the emulator switches stacks with instructions of x86-64"
#endif
extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

void enqueue(Warp& warp) {
    if (!warp.queued) warp.queued = true, warp.program->queued++, m->ready.push_back(&warp);
}
void wake(Warp& warp, u32 lane) {
    warp.threads[lane].state = State::READY;
    warp.ready |= 1u << lane;
    enqueue(warp);
}

void run_thread(Warp& warp, u32 lane, void** save) {
    Thread& thread = warp.threads[lane];
    warp.ready &= ~(1u << lane);
    m->warp = &warp, m->thread = &thread;
    threadIdx = {warp.first + lane, 0, 0};
    blockIdx = {warp.program->index, 0, 0};
    shared = warp.program->memory;
    if (warp.ready) {  // who is probably next
        const char* frame = (const char*)warp.threads[__builtin_ctz(warp.ready)].sp;
        for (u32 line = 0; line < 4; line++) __builtin_prefetch(frame + line * 64);
    }
    emulator_switch(save, thread.sp);
}

// By chance a warp stops for some rounds, while some of its lanes could go on.
bool halts(Warp& warp) {
    if (!m->options.seed || m->idle > IDLE || !once_in(64)) return false;
    warp.sleeps_until = m->round + (1 << (next_random() >> 20) % 7);
    return true;
}

// The next lane of a warp that can run.
u32 choose(const Warp& warp) {
    if (m->options.seed) {
        const u32 turn = next_random() >> 30 & 31, turned = warp.ready >> turn | warp.ready << (32 - turn & 31);
        return __builtin_ctz(turned) + turn & 31;
    }
    return __builtin_ctz(warp.ready);
}

// This thread waits. Another of its warp runs, or the scheduler.
void block(State state) {
    Thread& thread = *m->thread;
    thread.state = state;
    if (state == State::POLLS || state == State::NAPS || state == State::LAUNCH) {
        if (thread.looks) thread.looks->in_a_row = 0;
        Warp& warp = *m->warp;
        warp.looks |= 1u << (threadIdx.x - warp.first);
        if (!warp.looking) warp.looking = true, m->looking.push_back(&warp);
    }
    if ((unsigned char*)__builtin_frame_address(0) < thread.stack + STACK_LEFT) fail("its stack is too small");
    if (m->warp->ready && !halts(*m->warp)) run_thread(*m->warp, choose(*m->warp), &thread.sp);
    else emulator_switch(&thread.sp, m->scheduler);
}

void end_of_thread() {
    Warp& warp = *m->warp;
    Program& program = *warp.program;
    const u32 lane = threadIdx.x - warp.first;
    warp.ended |= 1u << lane;
    m->progress++;
    if (--program.living == 0) {
        if (!program.copies.empty()) fail("its program ends while %u copies are under way", (u32)program.copies.size());
        Launched& launch = *program.launch;
        launch.ended++;
        if (!program.allowed) program.allowed = true, launch.allowed++;
        m->free_slots.push_back(program.slot);
    }
    block(State::ENDED);
}

void begin() {
    const Launch& what = m->warp->program->launch->what;
    blockDim = {what.threads, 1, 1}, gridDim = {what.programs, 1, 1};
    what.start(what.argument);
    end_of_thread();
    __builtin_unreachable();
}

void start_program(Launched& launch, u32 slot) {
    auto* program = new Program{};
    const Launch& what = launch.what;
    program->launch = &launch, program->index = launch.started++, program->living = what.threads, program->slot = slot;
    launch.programs.push_back(program);
    const size_t per = pool.per_program;
    // It ends where memory that nobody may touch begins.
    program->memory = pool.memories + slot * per + per - GUARD - (what.shared + 127) / 128 * 128;
    memset(program->memory, 0xff, (what.shared + 127) / 128 * 128);
    const u32 warps = (what.threads + LANES - 1) / LANES;
    program->warps.resize(warps);
    auto* threads = new Thread[warps * LANES]();
    for (u32 w = 0; w < warps; w++) {
        Warp& warp = program->warps[w];
        warp.program = program, warp.first = w * LANES, warp.threads = threads + w * LANES;
        for (u32 lane = 0; lane < LANES && w * LANES + lane < what.threads; lane++) {
            Thread& thread = warp.threads[lane];
            thread.stack = pool.stacks + (size_t(slot) * warps * LANES + w * LANES + lane) * STACK;
            void** top = (void**)((u64)(thread.stack + STACK) & ~u64(15)) - 2;
            *top = (void*)begin;  // where the first switch to it returns to
            thread.sp = top - 6;
            wake(warp, lane);
        }
    }
    m->progress++;
}

void complete(Program& program, u32 at, Barrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1, barrier.pending = barrier.count;
    for (Warp& warp : program.warps)
        for (u32 lane = 0; lane < LANES; lane++) {
            const Thread& thread = warp.threads[lane];
            if (thread.state == State::COPY_BARRIER && thread.id == at) wake(warp, lane);
        }
}

Barrier& barrier_at(Program& program, u32 at) {
    auto found = program.barriers.find(at);
    if (found == program.barriers.end()) fail("there is no barrier at %u of shared memory", at);
    const u64 mark = *(const u64*)(program.memory + at - SHARED_BASE);
    if (mark != (0xbaaaaaaa00000000ull | at)) fail("the barrier at %u of shared memory was overwritten", at);
    return found->second;
}

void check_shared(const char* what, u32 at, u32 bytes) {
    const u32 size = m->warp->program->launch->what.shared;
    if (at < SHARED_BASE || at - SHARED_BASE + bytes > size)
        fail("%s of %u bytes at %u is outside of shared memory of %u", what, bytes, at, size);
}

void finish_copy(Program& program, size_t which) {
    const Copy copy = program.copies[which];
    program.copies[which] = program.copies.back(), program.copies.pop_back();
    m->copies--, m->progress++;
    memcpy(program.memory + copy.to - SHARED_BASE, copy.from, copy.bytes);
    Barrier& barrier = barrier_at(program, copy.barrier);
    barrier.bytes -= copy.bytes;
    complete(program, copy.barrier, barrier);
}

void write(const Store& store) {
    memcpy(store.at, store.words, store.count * 4);
    m->progress++;
}
void finish_store(size_t which) {
    const Store store = m->stores[which];
    m->stored.erase(store.at);
    if (which + 1 != m->stores.size()) m->stores[which] = m->stores.back(), m->stored[m->stores[which].at] = which;
    m->stores.pop_back();
    write(store);
}

// By chance, some of what was started before becomes visible.
void deliver() {
    const u32 rare = m->ready.empty() ? 2 : 2 + (next_random() >> 20) % 7;
    for (Launched& launch : m->launches)
        for (Program* program : launch.programs)
            for (size_t n = program->copies.size(); n-- > 0;)
                if (once_in(rare)) finish_copy(*program, n);
    for (size_t n = m->stores.size(); n-- > 0;)
        if (once_in(rare)) finish_store(n);
}

// Programs for which there is room; launches that have ended are complete.
void start_programs() {
    for (size_t n = 0; n < m->launches.size(); n++) {
        Launched& launch = m->launches[n];
        if (n > 0) {
            const Launched& before = m->launches[n - 1];
            if (m->options.overlap ? before.allowed < before.what.programs : !before.done()) return;
        }
        while (launch.started < launch.what.programs && !m->free_slots.empty()) {
            const u32 slot = m->free_slots.back();
            m->free_slots.pop_back();
            start_program(launch, slot);
        }
        if (launch.started < launch.what.programs) return;
    }
}

template <typename Act>
void each_thread(Act act) {
    for (Launched& launch : m->launches)
        for (Program* program : launch.programs)
            if (program->living)
                for (Warp& warp : program->warps)
                    for (u32 lane = 0; lane < LANES && warp.first + lane < launch.what.threads; lane++)
                        act(launch, *program, warp, lane);
}

bool has_news(const Thread& thread) {
    for (u32 n = 0; n < thread.looks->kept(); n++) {
        const Message& message = thread.looks->messages[n];
        if (memcmp(message.there, message.at, message.bytes)) return true;
    }
    return false;
}

void wake_who_looks(bool all) {
    std::vector<Warp*> now;
    now.swap(m->looking);
    for (Warp* warp : now) {
        const u32 number = warp->program->launch->number;
        const bool launched = !number || m->launches[number - 1].done();
        for (u32 rest = warp->looks; rest; rest &= rest - 1) {
            const u32 lane = __builtin_ctz(rest);
            const Thread& thread = warp->threads[lane];
            const bool news = thread.state == State::NAPS || (thread.state == State::POLLS && (all || has_news(thread)));
            if (thread.state == State::LAUNCH && launched) m->progress++;
            else if (!news) continue;
            warp->looks &= ~(1u << lane);
            wake(*warp, lane);
        }
        warp->looking = warp->looks;
        if (warp->looks) m->looking.push_back(warp);
    }
}

void run_warp(Warp& warp) {
    warp.queued = false, warp.program->queued--;
    while (warp.ready) {
        run_thread(warp, choose(warp), &m->scheduler);
        if (halts(warp)) break;
    }
    if (warp.ready) enqueue(warp);
}

// Each program goes on until it waits for others; its copies are complete when it can do nothing else.
void run_in_order(const std::vector<Warp*>& now) {
    for (Warp* first : now) {
        Program& program = *first->program;
        run_warp(*first);
        while (true) {
            while (!m->ready.empty() && m->ready.back()->program == &program) {
                Warp& warp = *m->ready.back();
                m->ready.pop_back();
                run_warp(warp);
            }
            if (program.queued || program.copies.empty()) break;
            finish_copy(program, 0);
        }
    }
}

void run_at_random(std::vector<Warp*>& now) {
    for (size_t n = now.size(); n > 1; n--) std::swap(now[n - 1], now[(next_random() >> 20) % n]);
    for (Warp* warp : now)
        if (m->idle > IDLE || (m->round >= warp->sleeps_until && once_in(2))) run_warp(*warp);
        else m->ready.push_back(warp);
    deliver();
}

void run_ready() {
    std::vector<Warp*> now;
    now.swap(m->ready);
    if (m->options.seed) run_at_random(now);
    else run_in_order(now);
}

// Who waits for what, a line for each kind of wait.
void describe() {
    std::map<std::string, std::pair<u32, std::string>> found;
    each_thread([&](Launched& launch, Program& program, Warp& warp, u32 lane) {
        const Thread& thread = warp.threads[lane];
        char what[200] = "", where[100];
        switch (thread.state) {
            case State::GAVE_UP: snprintf(what, sizeof what, "in wait %u", thread.code); break;
            case State::MEETS: snprintf(what, sizeof what, "for the lanes %08x of their warp", thread.mask); break;
            case State::NAMED_BARRIER: snprintf(what, sizeof what, "at barrier %u of their program", thread.id); break;
            case State::COPY_BARRIER: snprintf(what, sizeof what, "at the mbarrier %u for parity %u", thread.id, thread.parity); break;
            case State::LAUNCH: snprintf(what, sizeof what, "for the launch before"); break;
            case State::POLLS: case State::NAPS: snprintf(what, sizeof what, "for a message"); break;
            default: return;
        }
        snprintf(where, sizeof where, "launch %u program %u warp %u lane %u", launch.number, program.index, warp.first / LANES, lane);
        auto& each = found[what];
        if (!each.first++) each.second = where;
    });
    m->error = "nobody can go on:";
    for (auto& each : found)
        m->error += "\n  " + std::to_string(each.second.first) + " threads wait " + each.first + ", first " + each.second.second;
}

void run_all() {
    while (true) {
        start_programs();
        const u64 before = m->progress;
        m->round++;
        run_ready();
        // Stores of a launch are visible when it has ended.
        for (size_t n = m->stores.size(); n-- > 0;)
            if (m->stores[n].launch->done()) finish_store(n);
        bool done = true;
        for (const Launched& launch : m->launches) done = done && launch.done();
        if (done) return;
        m->idle = m->progress == before && !m->copies && m->stores.empty() ? m->idle + 1 : 0;
        if (m->idle > TOO_IDLE) break;
        wake_who_looks(m->idle > 0);
    }
    stuck = true;
    m->looking.clear();
    each_thread([&](Launched&, Program&, Warp& warp, u32 lane) {
        const State state = warp.threads[lane].state;
        if (state == State::POLLS || state == State::COPY_BARRIER) wake(warp, lane);
    });
    m->options.seed = 0;
    while (!m->ready.empty()) run_ready();
    describe();
}

// Memory that is not there, or an instruction that the compiler put where a check fails (-fsanitize).
void on_signal(int number, siginfo_t* info, void*) {
    if (!m || !m->thread) {  // it is not a kernel's
        signal(number, SIG_DFL);
        return;
    }
    Dl_info place = {};
    if (number == SIGILL && dladdr(info->si_addr, &place))
        fail("an address is not aligned, an index is outside of its array, or a shift is too far: in %s at %#llx", place.dli_fname,
             (u64)info->si_addr - (u64)place.dli_fbase);
    fail("accesses memory at %p, which is %lld bytes from the start of shared memory", info->si_addr,
         (long long)((unsigned char*)info->si_addr - shared));
}

}  // namespace

void emulator::fail(const char* format, ...) {
    char text[400];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    m->error = "program " + std::to_string(blockIdx.x) + " thread " + std::to_string(threadIdx.x) + ": " + text;
    longjmp(m->out, 1);
}

void emulator::give_up(u32 code) {
    if (!stuck) fail("gives up in wait %u", code);
    m->thread->code = code;
    block(State::GAVE_UP);
    __builtin_unreachable();
}

void emulator::meet(Finish finish, u32 mask, void* own) {
    Warp& warp = *m->warp;
    Thread& thread = *m->thread;
    const u32 lane = threadIdx.x - warp.first;
    if (!(mask >> lane & 1)) fail("is not in the mask %08x that it names", mask);
    if (warp.ended & mask) fail("names lanes %08x, of which %08x have ended", mask, warp.ended & mask);
    thread.finish = finish, thread.mask = mask, thread.own = own;
    warp.meets |= 1u << lane;
    if ((warp.meets & mask) != mask) return block(State::MEETS);
    void* lanes[32] = {};
    for (u32 n = 0; n < LANES; n++) {
        if (!(mask >> n & 1)) continue;
        const Thread& other = warp.threads[n];
        if (other.finish != finish || other.mask != mask) fail("and lane %u of its warp call different functions together", n);
        lanes[n] = other.own;
    }
    finish(mask, lanes);
    warp.meets &= ~mask;
    for (u32 n = 0; n < LANES; n++)
        if (mask >> n & 1 && n != lane) wake(warp, n);
    m->progress++;
}

void emulator::meet_program(u32 id, u32 count) {
    Program& program = *m->warp->program;
    Thread& thread = *m->thread;
    thread.id = id;
    if (!count) count = program.living;
    if (++program.arrived[id] < count) return block(State::NAMED_BARRIER);
    program.arrived[id] = 0;
    for (Warp& warp : program.warps)
        for (u32 lane = 0; lane < LANES; lane++)
            if (warp.threads[lane].state == State::NAMED_BARRIER && warp.threads[lane].id == id) wake(warp, lane);
    m->progress++;
}

void emulator::barrier_init(u32 at, u32 count) {
    check_shared("a barrier", at, 8);
    if (at % 8) fail("the barrier at %u of shared memory is not aligned", at);
    m->warp->program->barriers[at] = {count, count, 0, 0};
    *(u64*)(shared + at - SHARED_BASE) = 0xbaaaaaaa00000000ull | at;
}

void emulator::barrier_arrive(u32 at, u32 expected_bytes) {
    Program& program = *m->warp->program;
    Barrier& barrier = barrier_at(program, at);
    if (!barrier.pending) fail("one too many arrives at the barrier at %u of shared memory", at);
    barrier.bytes += expected_bytes, barrier.pending--;
    complete(program, at, barrier);
    m->progress++;
}

bool emulator::barrier_wait(u32 at, u32 parity) {
    while (true) {
        const Barrier& barrier = barrier_at(*m->warp->program, at);
        if (barrier.phase != parity) return true;
        if (stuck) return false;
        m->thread->id = at, m->thread->parity = parity;
        block(State::COPY_BARRIER);
    }
}

void emulator::copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    Program& program = *m->warp->program;
    check_shared("a copy", to, bytes);
    if (to % 16 || (u64)from % 16 || bytes % 16 || !bytes) fail("a copy of %u bytes from %p to %u is not aligned", bytes, from, to);
    barrier_at(program, barrier);
    for (const Copy& other : program.copies)
        if (other.to < to + bytes && to < other.to + other.bytes)
            fail("a copy to %u of shared memory goes where another is under way", to);
    memset(program.memory + to - SHARED_BASE, 0xff, bytes);
    program.copies.push_back({to, bytes, barrier, from});
    m->copies++, m->progress++;
}

void emulator::store(void* at, const u32* words, u32 count) {
    if ((u64)at % (count * 4)) fail("a message of %u words at %p is not aligned", count, at);
    Store store{m->warp->program->launch, at, {}, count};
    memcpy(store.words, words, count * 4);
    if (!m->options.seed) return write(store);
    // Stores to one address keep their order.
    auto found = m->stored.find(at);
    if (found != m->stored.end()) finish_store(found->second);
    m->stored[at] = m->stores.size();
    m->stores.push_back(store);
    m->progress++;
}

void emulator::load(const void* at, u32* words, u32 count) {
    Thread& thread = *m->thread;
    if ((u64)at % (count * 4)) fail("a message of %u words at %p is not aligned", count, at);
    if (!thread.looks) thread.looks = new Looks{};
    Looks& looks = *thread.looks;
    const u32 bytes = count * 4;
    Message* end = looks.messages + looks.kept();
    Message* message = std::find_if(looks.messages, end, [&](const Message& each) { return each.at == at; });
    if (message == end) {
        message = &looks.messages[looks.count++ % RECENT];
        *message = {at, bytes, 0, {}, {}};
        if (++looks.in_a_row > RECENT && !stuck) block(State::NAPS);
    } else if (!memcmp(message->seen, at, bytes) && !stuck) {
        // A second look may be another one. Who looks a third time and sees nothing new waits for a change.
        for (Message* each = looks.messages; each < end; each++) memcpy(each->there, each->at, each->bytes);
        block(message->times > 1 ? State::POLLS : State::NAPS);
    }
    message->times = memcmp(message->seen, at, bytes) ? 1 : message->times + 1;
    memcpy(message->seen, at, bytes);
    memcpy(words, at, bytes);
}

void emulator::pause() { if (!stuck) block(State::NAPS); }

void emulator::wait_for_launch_before() {
    const u32 number = m->warp->program->launch->number;
    if (number && !m->launches[number - 1].done()) block(State::LAUNCH);
}

void emulator::let_next_launch_start() {
    Program& program = *m->warp->program;
    if (!program.allowed) program.allowed = true, program.launch->allowed++, m->progress++;
}

u64 emulator::ticks() { return m->clock++; }

// Runs launches one after another. Returns 0, or writes what went wrong.
extern "C" int emulator_run(const Launch* launches, u32 count, const Options* options, char* error, u32 size) {
    Machine machine{};
    m = &machine;
    stuck = false;
    machine.options = *options;
    machine.random = options->seed * 0x9e3779b97f4a7c15ull + 1;
    u32 warps = 0, bytes = 0, programs = 0;
    for (u32 n = 0; n < count; n++) {
        machine.launches.push_back({launches[n], n, 0, 0, 0, {}});
        warps = std::max(warps, (launches[n].threads + LANES - 1) / LANES);
        bytes = std::max(bytes, launches[n].shared), programs += launches[n].programs;
    }
    u32& room = machine.options.room;
    room = std::min(room, programs);
    const int signals[] = {SIGSEGV, SIGBUS, SIGILL};
    struct sigaction action = {}, before[3];
    stack_t own = {}, others;
    static unsigned char fault_stack[65536];
    own.ss_sp = fault_stack, own.ss_size = sizeof fault_stack;
    sigaltstack(&own, &others);
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int n = 0; n < 3; n++) sigaction(signals[n], &action, &before[n]);
    if (!setjmp(machine.out)) {
        Pool::fit(pool.stacks, pool.stack_bytes, size_t(room) * warps * LANES * STACK);
        const size_t per = (bytes + 127) / 128 * 128 / PAGE * PAGE + PAGE + GUARD;
        if (per != pool.per_program || per * room != pool.memory_bytes) {
            if (pool.memories) munmap(pool.memories, pool.memory_bytes);
            pool.memories = nullptr, pool.memory_bytes = 0;
            Pool::fit(pool.memories, pool.memory_bytes, per * room);
            pool.per_program = per;
            for (u32 n = 0; n < room; n++) mprotect(pool.memories + (n + 1) * per - GUARD, GUARD, PROT_NONE);
        }
        for (u32 n = room; n-- > 0;) machine.free_slots.push_back(n);
        run_all();
    }
    for (int n = 0; n < 3; n++) sigaction(signals[n], &before[n], nullptr);
    sigaltstack(&others, nullptr);
    for (Launched& launch : machine.launches)
        for (Program* program : launch.programs) {
            Thread* threads = program->warps[0].threads;
            for (u32 n = 0; n < program->warps.size() * LANES; n++) delete threads[n].looks;
            delete[] threads;
            delete program;
        }
    m = nullptr;
    if (machine.error.empty()) return 0;
    snprintf(error, size, "%s", machine.error.c_str());
    return 1;
}
