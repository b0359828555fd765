// weakened.hpp: the word `test::weakened` is published relaxed, all others as ever. Overload
// resolution prefers this function to the template of atomics.hpp, so ring.hpp calls it unchanged.
#pragma once

#include "atomics.hpp"

namespace test {
inline const uint64_t *weakened = nullptr;
} // namespace test

namespace tp {
inline void publish(uint64_t &word, uint64_t value) noexcept {
  std::atomic_ref<uint64_t>(word).store(value, &word == test::weakened ? std::memory_order_relaxed
                                                                       : std::memory_order_seq_cst);
}
} // namespace tp
