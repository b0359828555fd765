// pickled_array.hpp: a numpy array or Paddle tensor as it lies in a pickle, read without alignment,
// in any byte order and either memory order.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "tensor.hpp"

namespace tp::pickle {

enum class Element : uint8_t {
  boolean,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  float16,
  float32,
  float64,
  bfloat16, // only in a Paddle tensor, whose array is of uint16 then
};
struct ElementType {
  std::string_view code, name;
  Element is;
  uint32_t bytes;
};
constexpr ElementType element_types[] = {
    {"b1", "bool", Element::boolean, 1},    {"i1", "int8", Element::int8, 1},
    {"i2", "int16", Element::int16, 2},     {"i4", "int32", Element::int32, 4},
    {"i8", "int64", Element::int64, 8},     {"u1", "uint8", Element::uint8, 1},
    {"u2", "uint16", Element::uint16, 2},   {"u4", "uint32", Element::uint32, 4},
    {"u8", "uint64", Element::uint64, 8},   {"f2", "float16", Element::float16, 2},
    {"f4", "float32", Element::float32, 4}, {"f8", "float64", Element::float64, 8},
    {"", "bfloat16", Element::bfloat16, 2},
};
[[nodiscard]] constexpr const ElementType &type_of(Element element) noexcept {
  return element_types[static_cast<size_t>(element)];
}

struct Dtype {
  Element element;
  bool is_swapped = false; // big-endian
  bool is_built = false;
};

// A numpy array or a Paddle tensor of at most two dimensions, in place in the message.
struct Array {
  Element element = Element::boolean;
  bool is_swapped = false;
  bool is_built = false;
  uint32_t ndim = 0;
  uint64_t shape[2] = {1, 1};
  uint64_t stride[2] = {1, 1}; // in elements
  const uint8_t *data = nullptr;

  [[nodiscard]] uint64_t count() const noexcept { return shape[0] * shape[1]; }
  [[nodiscard]] bool is_float() const noexcept { return element >= Element::float16; }
  [[nodiscard]] uint64_t bytes() const noexcept { return count() * type_of(element).bytes; }

  // Calls use(value) for the elements `from` .. `to` - 1 in C order, each as its own type.
  template <class Use> void each(uint64_t from, uint64_t to, Use &&use) const {
    switch (element) {
    case Element::boolean:
    case Element::uint8:
      return each_as<uint8_t>(from, to, use);
    case Element::int8:
      return each_as<int8_t>(from, to, use);
    case Element::int16:
      return each_as<int16_t>(from, to, use);
    case Element::int32:
      return each_as<int32_t>(from, to, use);
    case Element::int64:
      return each_as<int64_t>(from, to, use);
    case Element::uint16:
      return each_as<uint16_t>(from, to, use);
    case Element::uint32:
      return each_as<uint32_t>(from, to, use);
    case Element::uint64:
      return each_as<uint64_t>(from, to, use);
    case Element::float16:
      return each_as<uint16_t>(from, to, [&](uint16_t half) { use(half_to_float(half)); });
    case Element::bfloat16:
      return each_as<uint16_t>(
          from, to, [&](uint16_t half) { use(std::bit_cast<float>(uint32_t{half} << 16)); });
    case Element::float32:
      return each_as<float>(from, to, use);
    case Element::float64:
      return each_as<double>(from, to, use);
    }
  }

private:
  // An element has no alignment in a message.
  template <class As> [[nodiscard]] As load(uint64_t at) const noexcept {
    uint8_t bytes[sizeof(As)];
    std::memcpy(bytes, data + at * sizeof(As), sizeof(As));
    if (is_swapped)
      std::reverse(bytes, bytes + sizeof(As));
    return std::bit_cast<As>(bytes);
  }

  template <class As, class Use> void each_as(uint64_t from, uint64_t to, Use &&use) const {
    if (stride[1] == 1 && (shape[0] == 1 || stride[0] == shape[1])) {
      for (uint64_t i = from; i < to; ++i)
        use(load<As>(i));
      return;
    }
    for (uint64_t i = from; i < to; ++i)
      use(load<As>(i / shape[1] * stride[0] + i % shape[1] * stride[1]));
  }
};

} // namespace tp::pickle
