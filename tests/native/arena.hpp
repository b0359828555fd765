// arena.hpp: both segments as anonymous shared memory, for tests in one process. Zeroed pages are
// what the coordinator's fresh files are; the headers are not needed by anything tested here.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "plan.hpp"

// A broken promise ends the program, also where NDEBUG is set.
#define CHECK(condition, ...)                                                                      \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      std::fprintf(stderr, "%s:%d: not true: %s: ", __FILE__, __LINE__, #condition);               \
      std::fprintf(stderr, __VA_ARGS__);                                                           \
      std::fputc('\n', stderr);                                                                    \
      std::abort();                                                                                \
    }                                                                                              \
  } while (false)

namespace test {

// Small sizes that work; a test changes what it is about.
[[nodiscard]] inline tp_sizes small_sizes() noexcept {
  tp_sizes s{};
  s.max_num_seqs = 8;
  s.top_logprobs = 3;
  s.max_draft_tokens = 1;
  s.num_decoders = 1;
  s.ring_slots = 8;
  s.output_slots = 4;
  s.source_slots = 4;
  s.command_slots = 8;
  s.num_blocks = 0;
  s.block_size = 16;
  s.max_eos_ids = 4;
  s.max_request_id_bytes = 16;
  s.max_pooling_floats = 0;
  return s;
}

class Pages {
public:
  explicit Pages(uint64_t bytes) : bytes_(bytes) {
    at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "%llu bytes", static_cast<unsigned long long>(bytes));
  }
  ~Pages() { munmap(at, bytes_); }
  Pages(const Pages &) = delete;
  Pages &operator=(const Pages &) = delete;

  void *at;

private:
  uint64_t bytes_;
};

class Arena {
public:
  explicit Arena(const tp_sizes &sizes)
      : core_pages_(tp::CorePlan(sizes).end), source_pages_(tp::SourcePlan(sizes).end),
        core(core_pages_.at, sizes), source(source_pages_.at, sizes) {}

private:
  Pages core_pages_, source_pages_;

public:
  const tp::Core core;
  const tp::SourceMap source;
};

// A good enough spread of the bits of `x` (splitmix64): content and pauses are functions of it.
[[nodiscard]] constexpr uint64_t mix(uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
public:
  explicit Random(uint64_t seed) noexcept : state_(mix(seed)) {}
  uint64_t next() noexcept { return mix(++state_); }
  uint64_t below(uint64_t n) noexcept { return next() % n; }
  bool one_in(uint64_t n) noexcept { return below(n) == 0; }

private:
  uint64_t state_;
};

} // namespace test
