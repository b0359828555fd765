// histograms.hpp: the bounds of every histogram, and how a value is counted. A value belongs to the
// first bound that it does not exceed; the last bucket has no bound.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "atomics.hpp"

namespace tp {

inline constexpr uint64_t ms = 1'000'000, second = 1'000'000'000; // times are kept in ns

// Our own latencies: 1 us to 16.8 s, doubling.
inline constexpr auto latency_bounds = [] {
  std::array<uint64_t, 25> bounds{};
  for (uint32_t b = 0; b < bounds.size(); ++b)
    bounds[b] = uint64_t{1000} << b;
  return bounds;
}();

// FastDeploy's buckets (shared/spec/token-processor.md section 3).
inline constexpr std::array<uint64_t, 12> first_token_bounds{
    1 * ms,  5 * ms,   10 * ms,  20 * ms,  40 * ms,  60 * ms,
    80 * ms, 100 * ms, 250 * ms, 500 * ms, 750 * ms, 1 * second};
inline constexpr std::array<uint64_t, 12> per_token_bounds{
    10 * ms,  25 * ms,  50 * ms,  75 * ms,  100 * ms, 150 * ms,
    200 * ms, 300 * ms, 400 * ms, 500 * ms, 750 * ms, 1 * second};
inline constexpr std::array<uint64_t, 21> request_bounds{
    300 * ms,     500 * ms,      800 * ms,     1 * second,   1500 * ms,    2 * second,
    2500 * ms,    5 * second,    10 * second,  15 * second,  20 * second,  30 * second,
    40 * second,  50 * second,   60 * second,  120 * second, 240 * second, 480 * second,
    960 * second, 1920 * second, 7680 * second};
inline constexpr std::array<uint64_t, 14> token_count_bounds{
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000};
// Tokens per 1000 s, so that a rate below one a second is told too.
inline constexpr std::array<uint64_t, 14> token_rate_bounds{
    500,    1'000,   2'000,   5'000,   10'000,  20'000,    50'000,
    75'000, 100'000, 150'000, 200'000, 500'000, 1'000'000, 2'000'000};

template <size_t N>
inline void count_value(tp_histogram &h, const std::array<uint64_t, N> &bounds, uint64_t value,
                        uint64_t times = 1) noexcept {
  static_assert(N < TP_MAX_BUCKETS);
  const auto bucket = std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin();
  put(h.count[bucket], get(h.count[bucket]) + times);
  put(h.sum, get(h.sum) + value * times);
}

} // namespace tp
