// A thread pool and a barrier. Both spin for some microseconds and then sleep. OpenMP spins for milliseconds: on a busy machine that
// takes the core from the very thread it waits for (measured: 240 ms a step instead of 7).
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <vector>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline int next(int round) { return (int)((unsigned)round + 1); }

// A number that threads can wait on.
class Futex {
  alignas(64) std::atomic<int> value{0};
  std::atomic<int> asleep{0};
  static const int SPINS = 3000, LONGER = 4;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 public:
  int get() const { return value.load(std::memory_order_seq_cst); }
  void post(int to) { value.store(to, std::memory_order_seq_cst); }
  void set(int to) {
    post(to);
    wake();
  }
  int add(int n) { return value.fetch_add(n, std::memory_order_seq_cst) + n; }
  void wake() {
#if defined(__linux__)
    if (asleep.load(std::memory_order_seq_cst)) syscall(SYS_futex, (int*)&value, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#endif
  }
  // Returns once the value is no longer ``old``. While ``awake`` is not 0 it spins longer.
  void wait_while_equal(int old, const std::atomic<int>* awake = nullptr) {
    for (int i = 0; i < SPINS || (awake && i < LONGER * SPINS && awake->load(std::memory_order_relaxed)); i++) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
    asleep.fetch_add(1, std::memory_order_seq_cst);
    while (get() == old) {
#if defined(__linux__)
      syscall(SYS_futex, (int*)&value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
      sched_yield();
#endif
    }
    asleep.fetch_sub(1, std::memory_order_relaxed);
  }
};

class Barrier {
  std::atomic<int> here{0};
  Futex round;

 public:
  // One thread more is here; ``idle()`` is called while others are missing, as long as it returns true.
  template <class F> void wait(long threads, F idle) {
    if (threads == 1) return;
    int now = round.get();
    if (here.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      here.store(0, std::memory_order_relaxed);
      round.set(next(now));
      return;
    }
    while (round.get() == now && idle()) {
    }
    round.wait_while_equal(now);
  }
  void wait(long threads) {
    wait(threads, [] { return false; });
  }
};

// Runs a function on the calling thread (number 0) and on workers. One caller at a time; others wait for their turn. Each worker has a number
// of its own to wait on: those that a call does not use sleep, and no call waits for them.
class Pool {
  typedef void (*Work)(void*, long, long);
  struct Worker {
    Pool* pool;
    long number;
    Futex calls;
  };
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  Futex left;
  std::vector<Worker*> workers;
  long threads = 1;
  std::atomic<int> awake{0};  // those who will call again within microseconds
  Work work = nullptr;
  void* context = nullptr;

  static void* main(void* arg) {
    Worker& me = *(Worker*)arg;
    Pool& p = *me.pool;
    for (int now = 0;; now = next(now)) {
      me.calls.wait_while_equal(now, &p.awake);
      p.work(p.context, me.number, p.threads);
      if (p.left.add(-1) == 0) p.left.wake();
    }
    return nullptr;
  }
  void grow(long wanted) {
    while ((long)workers.size() < wanted - 1) {
      pthread_t thread;
      Worker* made = new Worker{this, (long)workers.size() + 1, {}};
      if (pthread_create(&thread, nullptr, main, made)) {
        delete made;
        return;
      }
      pthread_detach(thread);
      workers.push_back(made);
    }
  }
  static Pool*& current() {
    static Pool* pool = fresh();
    return pool;
  }
  static Pool* fresh() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });  // after a fork the threads exist in the parent only
    (void)registered;
    return new Pool;  // never deleted: its threads may outlive static destructors
  }
  void dispatch(long wanted, Work f, void* c) {
    pthread_mutex_lock(&lock);
    grow(wanted);
    threads = (long)workers.size() + 1 < wanted ? (long)workers.size() + 1 : wanted;
    work = f, context = c;
    left.post((int)threads - 1);
    for (long i = 0; i < threads - 1; i++) workers[i]->calls.post(next(workers[i]->calls.get()));
    for (long i = 0; i < threads - 1; i++) workers[i]->calls.wake();  // after all of those that spin have begun
    f(c, 0, threads);
    for (int n; (n = left.get()) > 0;) left.wait_while_equal(n);
    pthread_mutex_unlock(&lock);
  }

 public:
  // f(number, threads) for every number below threads; there may be fewer threads than requested.
  template <class F> static void run(long threads, F f) {
    if (threads <= 1) return f(0L, 1L);
    current()->dispatch(threads, [](void* c, long i, long n) { (*(F*)c)(i, n); }, &f);
  }
  // From ``begin`` on until it is gone, the workers spin longer between calls.
  class Awake {
    Pool* pool = nullptr;

   public:
    void begin() {
      if (!pool) pool = current(), pool->awake.fetch_add(1, std::memory_order_relaxed);
    }
    ~Awake() {
      if (pool) pool->awake.fetch_sub(1, std::memory_order_relaxed);
    }
  };
  // f(i) for 0 <= i < total, divided evenly.
  template <class F> static void each(long threads, long total, F f) {
    run(threads, [&](long i, long n) {
      for (long at = total * i / n; at < total * (i + 1) / n; at++) f(at);
    });
  }
};
