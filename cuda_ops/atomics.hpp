// atomics.hpp: the only memory orders, fences and futex waits of the project.
//
// Shared words are plain uint32/uint64 fields of layout.h; they are read and written through the
// functions below. Two disciplines cover everything:
//
//   publish/observe   a word is stored after what it announces, and loaded before it is used.
//                     seq_cst on both sides: the sleeper's "I wait" and the publisher's "is anyone
//                     waiting" form a Dekker pair with the published word, which needs store-load
//                     order; on x86 the store is one xchg (2 ns), on ARM the load costs as an
//                     acquire.
//   versioned copy    two copies chosen by a turn word; a reader loads word, copy, word and uses
//                     the copy only if the word has not moved.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "fault.hpp"
#include "layout.h"

namespace tp {

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);

// Announces everything stored before it. Pairs with observe() of the same word.
template <class Word> inline void publish(Word &word, Word value) noexcept {
  std::atomic_ref<Word>(word).store(value, std::memory_order_seq_cst);
}

template <class Word> [[nodiscard]] inline Word observe(const Word &word) noexcept {
  return std::atomic_ref<Word>(const_cast<Word &>(word)).load(std::memory_order_seq_cst);
}

// A word that others may read meanwhile, but that announces nothing.
template <class Word> inline void put(Word &word, Word value) noexcept {
  std::atomic_ref<Word>(word).store(value, std::memory_order_relaxed);
}

template <class Word> [[nodiscard]] inline Word get(const Word &word) noexcept {
  return std::atomic_ref<Word>(const_cast<Word &>(word)).load(std::memory_order_relaxed);
}

// Stores `to` if the word is `from`: of several threads that try, one.
[[nodiscard]] inline bool swap(uint32_t &word, uint32_t from, uint32_t to) noexcept {
  return std::atomic_ref<uint32_t>(word).compare_exchange_strong(from, to,
                                                                 std::memory_order_seq_cst);
}

// Between the turn word and the first store into the copy that it has just retired: a reader that
// sees any of those stores also sees the new turn word, and so rejects what it read.
inline void begin_rewrite() noexcept { std::atomic_thread_fence(std::memory_order_release); }

// Between reading a copy and reading the turn word again.
inline void end_read() noexcept { std::atomic_thread_fence(std::memory_order_acquire); }

// Behind a copy of bytes that somebody else may be changing: what is decided from the copy is not
// read from there again.
inline void end_copy() noexcept { std::atomic_signal_fence(std::memory_order_seq_cst); }

[[nodiscard]] inline uint64_t now_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

inline void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void futex_wake(uint32_t &word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Sleeps while `word` is `value`, for at most `timeout_ns`. False when a signal ended the sleep.
inline bool futex_wait(uint32_t &word, uint32_t value, uint64_t timeout_ns) noexcept {
  const timespec t{static_cast<time_t>(timeout_ns / 1'000'000'000u),
                   static_cast<long>(timeout_ns % 1'000'000'000u)};
  const long rc = syscall(SYS_futex, &word, FUTEX_WAIT, value, &t, nullptr, 0);
  return rc == 0 || errno != EINTR;
}

// Wakes the sleeper of `bell` unless it is awake. Called after the publish() that it waits for.
inline void ring_bell(tp_bell &bell) noexcept {
  // SYNC POINT: bell - release: the published word is stored before `waiting` is looked at
  if (observe(bell.waiting) == TP_WAIT_NOTHING)
    return;
  std::atomic_ref<uint32_t>(bell.bell).fetch_add(1, std::memory_order_seq_cst);
  futex_wake(bell.bell);
}

// The same for a sleeper that waits for space and asked not to be rung before `released`.
inline void ring_bell_at(tp_bell &bell, uint64_t released) noexcept {
  if (observe(bell.waiting) == TP_WAIT_SPACE && released >= get(bell.wake_at))
    ring_bell(bell);
}

// Counts one event for a sleeper whose `ready` is "the bell has moved": nothing else need be looked
// at.
inline void count_event(tp_bell &bell) noexcept {
  std::atomic_ref<uint32_t>(bell.bell).fetch_add(1, std::memory_order_seq_cst);
  if (observe(bell.waiting) != TP_WAIT_NOTHING)
    futex_wake(bell.bell);
}

struct Patience {
  uint64_t spin_ns;    // pause this long first; more than 1000 costs 2 to 70 times on 2 cores
  uint64_t timeout_ns; // then, after 16 yields, sleep for at most so long
};

// Waits until ready() or the time is up or a signal came; returns ready(). One sleeper per bell.
template <class Ready>
bool wait_for(tp_bell &bell, uint32_t reason, const Patience &patience, Ready &&ready) noexcept {
  if (ready())
    return true;
  if (patience.timeout_ns == 0)
    return false;
  const uint64_t begun = now_ns();
  if (patience.spin_ns != 0)
    do {
      pause();
      if (ready())
        return true;
    } while (now_ns() - begun < patience.spin_ns);
  for (int i = 0; i < 16; ++i) {
    sched_yield();
    if (ready())
      return true;
  }
  put(bell.since_ns, begun);
  bool is_ready = false;
  for (;;) {
    // SYNC POINT: bell - acquire: `waiting` is stored before the published word is looked at again
    publish(bell.waiting, reason);
    const uint32_t seen = observe(bell.bell);
    is_ready = ready();
    const uint64_t waited = now_ns() - begun;
    if (is_ready || waited >= patience.timeout_ns)
      break;
    fault::point("sleep");
    if (!futex_wait(bell.bell, seen, patience.timeout_ns - waited)) {
      is_ready = ready();
      break;
    }
  }
  publish(bell.waiting, static_cast<uint32_t>(TP_WAIT_NOTHING));
  return is_ready;
}

} // namespace tp
