// tensor.hpp: a strided view of somebody's tensor on the CPU, and its copy into a wire column.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "plan.hpp"

namespace tp {

enum class Dtype : uint8_t {
  int32,
  int64,
  uint8,
  uint32,
  uint64,
  float16,
  bfloat16,
  float32,
  other
};

// A wrong argument of an op: nothing was saved. `argument` is the parameter's name.
class OpArgumentError : public std::runtime_error {
public:
  OpArgumentError(std::string argument, const std::string &text)
      : std::runtime_error(text), argument(std::move(argument)) {}
  std::string argument;
};

// What accept_num holds. The kernel counts by itself; on the CPU FirstTokens has.
enum class Counts : uint32_t {
  accepted,       // how many of a row's tokens count
  first_step,     // mtp_save_first_token's step_idx: two of them where it is 1, else none
  behind_a_first, // ..._with_topk's token_num: none where it is 0, else one more; the candidates,
                  // [n, T] and [n], are those of the row's first token
};

struct Tensor {
  const void *data = nullptr;
  Dtype dtype = Dtype::other;
  std::string dtype_name;
  int ndim = 0;
  int64_t shape[3] = {1, 1, 1};
  int64_t stride[3] = {0, 0, 0}; // in elements

  [[nodiscard]] bool is_there() const noexcept { return ndim != 0; }
  // `num` dimensions of `sizes`; none at all where there are not 1 to 3.
  void set_contiguous(int num, const int64_t *sizes) noexcept {
    ndim = num >= 1 && num <= 3 ? num : 0;
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      shape[i] = sizes[i];
      stride[i] = step;
      step *= sizes[i];
    }
  }
  [[nodiscard]] bool is_contiguous() const noexcept {
    int64_t expected = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      if (shape[i] != 1 && stride[i] != expected)
        return false;
      expected *= shape[i];
    }
    return true;
  }
};

[[nodiscard]] TP_BOTH inline float float_of_bits(uint32_t bits) noexcept {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

[[nodiscard]] TP_BOTH inline float half_to_float(uint16_t half) noexcept {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 0x1f,
                 mantissa = half & 0x3ffu;
  if (exponent == 0x1f) // infinities and NaN
    return float_of_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return float_of_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

// Copies `count` neighbours as int32; false when one does not fit. One look at all of them at the
// end, so that the loop has no branch and the compiler takes several at once.
template <class From>
[[nodiscard]] bool narrow(int32_t *to, const From *from, int64_t count) noexcept {
  using Bits = std::conditional_t<sizeof(From) == 8, uint64_t, uint32_t>;
  constexpr Bits below = std::numeric_limits<From>::is_signed ? Bits{1} << 31 : 0;
  Bits outside = 0; // bits that no int32 has, shifted so that its least one is bit 31
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<Bits>(from[i]);
    to[i] = static_cast<int32_t>(value);
    outside |= below != 0 ? (value + below) >> 1 : value;
  }
  return outside >> 31 == 0;
}

// Copies `count` elements at stride `stride` as int32; false when one does not fit.
template <class From>
[[nodiscard]] bool copy_as_int32(int32_t *to, const From *from, int64_t count,
                                 int64_t stride) noexcept {
  if constexpr (sizeof(From) == 4 && std::numeric_limits<From>::is_signed) {
    if (stride == 1) {
      if (count != 0) // an empty tensor may have no address, which memcpy may not be given
        std::memcpy(to, from, static_cast<size_t>(count) * 4);
      return true;
    }
  } else if (stride == 1) {
    return narrow(to, from, count);
  }
  bool fits = true;
  for (int64_t i = 0; i < count; ++i) {
    const From value = from[i * stride];
    to[i] = static_cast<int32_t>(value);
    fits &= std::cmp_equal(to[i], value);
  }
  return fits;
}

// The first value of `t` that no int32 holds, as text. For the message, when a copy has met one.
[[nodiscard]] inline std::string first_outside_int32(const Tensor &t) {
  const auto shown = [](auto value) {
    return std::in_range<int32_t>(value) ? std::string() : std::to_string(value);
  };
  const auto at = [&](int64_t i) {
    switch (t.dtype) {
    case Dtype::int64:
      return shown(static_cast<const int64_t *>(t.data)[i]);
    case Dtype::uint32:
      return shown(static_cast<const uint32_t *>(t.data)[i]);
    case Dtype::uint64:
      return shown(static_cast<const uint64_t *>(t.data)[i]);
    default:
      return std::string();
    }
  };
  for (int64_t i = 0; i < t.shape[0]; ++i)
    for (int64_t j = 0; j < t.shape[1]; ++j)
      for (int64_t k = 0; k < t.shape[2]; ++k)
        if (std::string text = at(i * t.stride[0] + j * t.stride[1] + k * t.stride[2]);
            !text.empty())
          return text;
  return "a value";
}

inline void copy_as_float(float *to, const Tensor &t, int64_t at, int64_t count,
                          int64_t stride) noexcept {
  switch (t.dtype) {
  case Dtype::float32: {
    const float *from = static_cast<const float *>(t.data) + at;
    if (stride == 1 && count != 0)
      std::memcpy(to, from, static_cast<size_t>(count) * 4);
    else
      for (int64_t i = 0; i < count; ++i)
        to[i] = from[i * stride];
    return;
  }
  case Dtype::bfloat16: {
    const uint16_t *from = static_cast<const uint16_t *>(t.data) + at;
    for (int64_t i = 0; i < count; ++i)
      to[i] = float_of_bits(uint32_t{from[i * stride]} << 16);
    return;
  }
  default: {
    const uint16_t *from = static_cast<const uint16_t *>(t.data) + at;
    for (int64_t i = 0; i < count; ++i)
      to[i] = half_to_float(from[i * stride]);
  }
  }
}

[[nodiscard]] inline bool copy_ints(int32_t *to, const Tensor &t, int64_t at, int64_t count,
                                    int64_t stride) noexcept {
  switch (t.dtype) {
  case Dtype::int32:
    return copy_as_int32(to, static_cast<const int32_t *>(t.data) + at, count, stride);
  case Dtype::uint8:
    return copy_as_int32(to, static_cast<const uint8_t *>(t.data) + at, count, stride);
  case Dtype::uint32:
    return copy_as_int32(to, static_cast<const uint32_t *>(t.data) + at, count, stride);
  case Dtype::uint64:
    return copy_as_int32(to, static_cast<const uint64_t *>(t.data) + at, count, stride);
  default:
    return copy_as_int32(to, static_cast<const int64_t *>(t.data) + at, count, stride);
  }
}

} // namespace tp
