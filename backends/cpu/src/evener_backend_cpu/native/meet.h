// A barrier that spins for some microseconds and then sleeps. OpenMP's own spins for milliseconds, which on a machine with other work
// keeps the core from the very thread that is waited for.
#pragma once
#include <sched.h>

#include <atomic>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

class Meet {
  static const int SPINS = 3000;
  alignas(64) std::atomic<int> here{0};
  alignas(64) std::atomic<int> round{0};
  std::atomic<int> asleep{0};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 public:
  void wait(long threads) {
    if (threads == 1) return;
    int now = round.load(std::memory_order_acquire);
    if (here.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      here.store(0, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_seq_cst);
#if defined(__linux__)
      if (asleep.load(std::memory_order_seq_cst)) syscall(SYS_futex, (int*)&round, FUTEX_WAKE_PRIVATE, (int)threads, nullptr, nullptr, 0);
#endif
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (round.load(std::memory_order_acquire) != now) return;
      pause();
    }
    asleep.fetch_add(1, std::memory_order_seq_cst);
    while (round.load(std::memory_order_seq_cst) == now) {
#if defined(__linux__)
      syscall(SYS_futex, (int*)&round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
#else
      sched_yield();
#endif
    }
    asleep.fetch_sub(1, std::memory_order_relaxed);
  }
};
