// pickle.hpp: reads the pickles that FastDeploy's worker sends, and nothing else that a pickle can
// say.
//
// A pickle is a program for a stack machine; Python's own machine imports and calls what the
// program names. This one has plain values only. A name must be in the table `names`, and what the
// program wants called (REDUCE, NEWOBJ, BUILD) is a case of a switch over those names. Texts, bytes
// and arrays stay where they lie in the message. Containers are indices into the pools below, never
// pointers, and nothing recurses, so neither depth nor circles cost anything. Each limit is checked
// before the memory is taken.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pickled_array.hpp"

namespace tp::pickle {

// Why a message was refused; the names are those of `refusal_names`.
enum class Refusal : uint8_t {
  size,      // larger than the limit
  truncated, // an argument reaches behind the end of its frame or of the message
  protocol,  // not protocol 4 or 5
  opcode,    // one that these records do not need
  limit,     // too many values, or too deeply marked
  name,      // a class or function that is not in the table
  call,      // a call, or a state, that the named class does not have
  type,      // a value of another type than is needed there
  array,     // bytes, dtype, shape and order do not fit together
  record,    // a record lacks a field, has an unknown one, or one of a senseless value
  row,       // more rows or tokens than configured
  width,     // more candidates, or floats of a vector, than configured
};
constexpr const char *refusal_names[] = {"size",  "truncated", "protocol", "opcode",
                                         "limit", "name",      "call",     "type",
                                         "array", "record",    "row",      "width"};

class Refused : public std::runtime_error {
public:
  Refused(Refusal why, const std::string &text) : std::runtime_error(text), why(why) {}
  Refusal why;
};

// The names a message may hold, and what each stands for. numpy 2 has moved its modules.
enum class Name : uint8_t {
  record,
  decoder_state,
  logprobs,
  ndarray,
  dtype,
  reconstruct,
  frombuffer,
  scalar,
  rebuild_tensor,
  get_attribute, // Python 3.11.0 to 3.11.3 write a member of an enum as getattr(enum, "NAME")
};
struct KnownName {
  std::string_view module, name;
  Name is;
};
constexpr KnownName names[] = {
    {"fastdeploy.output.stream_transfer_data", "StreamTransferData", Name::record},
    {"fastdeploy.output.stream_transfer_data", "DecoderState", Name::decoder_state},
    {"fastdeploy.worker.output", "LogprobsTensors", Name::logprobs},
    {"numpy", "ndarray", Name::ndarray},
    {"numpy", "dtype", Name::dtype},
    {"numpy.core.multiarray", "_reconstruct", Name::reconstruct},
    {"numpy._core.multiarray", "_reconstruct", Name::reconstruct},
    {"numpy.core.numeric", "_frombuffer", Name::frombuffer},
    {"numpy._core.numeric", "_frombuffer", Name::frombuffer},
    {"numpy.core.multiarray", "scalar", Name::scalar},
    {"numpy._core.multiarray", "scalar", Name::scalar},
    {"paddle.base.dygraph.math_op_patch", "_rebuild_tensor", Name::rebuild_tensor},
    {"builtins", "getattr", Name::get_attribute},
};
constexpr std::string_view decoder_states[] = {"text", "image", "video", "audio"};

enum class Kind : uint8_t {
  none,
  boolean,
  integer,
  real,
  text,
  bytes,
  tuple,
  list,
  dict,
  name,
  dtype,
  array,
  record,
  state,
  logprobs,
};
constexpr const char *kind_names[] = {
    "None",   "a bool", "an int",  "a float",  "a str",    "bytes",           "a tuple", "a list",
    "a dict", "a name", "a dtype", "an array", "a record", "a decoder state", "logprobs"};

struct Value {
  Kind kind = Kind::none;
  uint32_t length = 0; // of a text, of bytes, of a tuple
  union {
    int64_t integer = 0;
    double real;
    const uint8_t *data; // text, bytes
    uint32_t index;      // into the pool of its kind; logprobs: of its three items
    Name name;
  };

  [[nodiscard]] std::string_view text() const noexcept {
    return {reinterpret_cast<const char *>(data), length};
  }
};

struct Limits {
  uint64_t bytes;   // of a message
  uint32_t objects; // memo entries, items of containers, arrays: each at most so many
  uint32_t stack = 4096;
  uint32_t marks = 16;
};

// What a sender wrote, for a message to a human: printable and short.
[[nodiscard]] inline std::string shown(std::string_view text) {
  std::string out(text.substr(0, 64));
  for (char &c : out)
    if (c < ' ' || c > '~')
      c = '?';
  return out + (text.size() > 64 ? "..." : "");
}

// Design: one reader is used for message after message, so that its pools stop growing. What it
// returns is valid until the next read() and as long as the message lies where it lay.
class Reader {
public:
  explicit Reader(const Limits &limits) : limits_(limits) {}

  // The value that the message holds. Throws Refused.
  [[nodiscard]] Value read(std::span<const uint8_t> message) {
    if (message.size() > limits_.bytes)
      throw Refused(Refusal::size, "the message has " + std::to_string(message.size()) +
                                       " bytes, the limit is " + std::to_string(limits_.bytes));
    begin_ = at_ = message.data();
    end_ = limit_ = begin_ + message.size();
    stack_.clear();
    marks_.clear();
    memo_.clear();
    items_.clear();
    dtypes_.clear();
    arrays_.clear();
    records_.clear();
    num_containers_ = num_contained_ = 0;
    check_protocol();
    while (step()) {
    }
    if (at_ != end_)
      throw Refused(Refusal::truncated,
                    std::to_string(end_ - at_) + " bytes follow the end of the pickle");
    if (!marks_.empty() || stack_.size() != 1)
      throw Refused(Refusal::type, "the pickle ends with " + std::to_string(stack_.size()) +
                                       " values on its stack, must be 1");
    return stack_[0];
  }

  [[nodiscard]] std::span<const Value> list(const Value &v) const noexcept {
    return containers_[v.index];
  }
  [[nodiscard]] std::span<const Value> tuple(const Value &v) const noexcept {
    return std::span(items_).subspan(v.index, v.length);
  }
  // Keys and values in turn.
  [[nodiscard]] std::span<const Value> dict(const Value &v) const noexcept {
    return containers_[v.index];
  }
  [[nodiscard]] const Array &array(const Value &v) const noexcept { return arrays_[v.index]; }
  // Field names and values in turn; of a record without a state none.
  [[nodiscard]] std::span<const Value> fields(const Value &record) const noexcept {
    const uint32_t state = records_[record.index];
    return state == no_state ? std::span<const Value>()
                             : std::span<const Value>(containers_[state]);
  }

private:
  static constexpr uint32_t no_state = UINT32_MAX;

  enum Opcode : uint8_t {
    PROTO = 0x80,
    FRAME = 0x95,
    STOP = '.',
    MARK = '(',
    NONE = 'N',
    NEWTRUE = 0x88,
    NEWFALSE = 0x89,
    BININT = 'J',
    BININT1 = 'K',
    BININT2 = 'M',
    LONG1 = 0x8a,
    BINFLOAT = 'G',
    SHORT_BINUNICODE = 0x8c,
    BINUNICODE = 'X',
    SHORT_BINBYTES = 'C',
    BINBYTES = 'B',
    BYTEARRAY8 = 0x96,
    EMPTY_TUPLE = ')',
    TUPLE = 't',
    TUPLE1 = 0x85,
    TUPLE2 = 0x86,
    TUPLE3 = 0x87,
    EMPTY_LIST = ']',
    APPEND = 'a',
    APPENDS = 'e',
    EMPTY_DICT = '}',
    SETITEM = 's',
    SETITEMS = 'u',
    MEMOIZE = 0x94,
    BINGET = 'h',
    LONG_BINGET = 'j',
    STACK_GLOBAL = 0x93,
    REDUCE = 'R',
    NEWOBJ = 0x81,
    BUILD = 'b',
  };

  // Protocols below 4 spell bytes and names in other ways and are refused here, by number.
  void check_protocol() {
    const bool has = end_ - at_ >= 2 && at_[0] == PROTO;
    if (!has || at_[1] < 4 || at_[1] > 5)
      throw Refused(Refusal::protocol,
                    has ? "the pickle has protocol " + std::to_string(at_[1]) + ", must be 4 or 5"
                        : std::string("the message does not begin as a pickle of protocol 4 or 5"));
    at_ += 2;
  }

  // One opcode; false after STOP.
  bool step() {
    if (at_ == limit_) // the frame is read
      limit_ = end_;
    const uint8_t opcode = *take(1);
    switch (opcode) {
    case STOP:
      return false;
    case FRAME:
      begin_frame(number<uint64_t>());
      break;
    case MARK:
      if (marks_.size() == limits_.marks)
        throw_limit("open marks", limits_.marks);
      marks_.push_back(static_cast<uint32_t>(stack_.size()));
      break;
    case NONE:
      push({});
      break;
    case NEWTRUE:
    case NEWFALSE:
      push_number(Kind::boolean, opcode == NEWTRUE);
      break;
    case BININT:
      push_number(Kind::integer, number<int32_t>());
      break;
    case BININT1:
      push_number(Kind::integer, number<uint8_t>());
      break;
    case BININT2:
      push_number(Kind::integer, number<uint16_t>());
      break;
    case LONG1:
      push_number(Kind::integer, long_number(number<uint8_t>()));
      break;
    case BINFLOAT:
      push_real();
      break;
    case SHORT_BINUNICODE:
      push_bytes(Kind::text, number<uint8_t>());
      break;
    case BINUNICODE:
      push_bytes(Kind::text, number<uint32_t>());
      break;
    case SHORT_BINBYTES:
      push_bytes(Kind::bytes, number<uint8_t>());
      break;
    case BINBYTES:
      push_bytes(Kind::bytes, number<uint32_t>());
      break;
    case BYTEARRAY8:
      push_bytes(Kind::bytes, number<uint64_t>());
      break;
    case EMPTY_TUPLE:
      push_tuple(0);
      break;
    case TUPLE1:
    case TUPLE2:
    case TUPLE3:
      push_tuple(opcode - TUPLE1 + 1u);
      break;
    case TUPLE:
      push_tuple(unmark());
      break;
    case EMPTY_LIST:
      push_container(Kind::list);
      break;
    case EMPTY_DICT:
      push_container(Kind::dict);
      break;
    case APPEND:
      extend(Kind::list, 1);
      break;
    case APPENDS:
      extend(Kind::list, unmark());
      break;
    case SETITEM:
      extend(Kind::dict, 2);
      break;
    case SETITEMS:
      extend(Kind::dict, unmark());
      break;
    case MEMOIZE:
      check_room(memo_, 1, "memo entries");
      memo_.push_back(top());
      break;
    case BINGET:
      push_memo(number<uint8_t>());
      break;
    case LONG_BINGET:
      push_memo(number<uint32_t>());
      break;
    case STACK_GLOBAL:
      push_name();
      break;
    case REDUCE:
      reduce();
      break;
    case NEWOBJ:
      new_object();
      break;
    case BUILD:
      build();
      break;
    default:
      throw Refused(Refusal::opcode, "opcode " + std::to_string(opcode) + " at byte " +
                                         std::to_string(at_ - 1 - begin_) +
                                         " is none that FastDeploy's records need");
    }
    return true;
  }

  // -------------------------------------------------------------- bytes

  // A frame lies within the message, and everything in it within the frame.
  void begin_frame(uint64_t bytes) {
    if (limit_ != end_ || bytes > static_cast<uint64_t>(end_ - at_))
      throw Refused(Refusal::truncated, "a frame of " + std::to_string(bytes) + " bytes at byte " +
                                            std::to_string(at_ - begin_) + " does not fit there");
    limit_ = at_ + bytes;
  }

  [[nodiscard]] const uint8_t *take(uint64_t bytes) {
    if (bytes > static_cast<uint64_t>(limit_ - at_))
      throw Refused(Refusal::truncated, std::to_string(bytes) + " bytes are wanted at byte " +
                                            std::to_string(at_ - begin_) + ", " +
                                            std::to_string(limit_ - at_) + " are there");
    const uint8_t *here = at_;
    at_ += bytes;
    return here;
  }

  template <class T> [[nodiscard]] T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T)); // little-endian, as this machine is
    return value;
  }

  [[nodiscard]] int64_t long_number(uint8_t bytes) {
    if (bytes > 8)
      throw Refused(Refusal::limit,
                    "an integer of " + std::to_string(bytes) + " bytes, the limit is 8");
    const uint8_t *from = take(bytes);
    uint64_t value = bytes != 0 && from[bytes - 1] & 0x80 ? ~uint64_t{0} : 0;
    std::memcpy(&value, from, bytes);
    return static_cast<int64_t>(value);
  }

  // -------------------------------------------------------------- the stack

  [[noreturn]] static void throw_limit(const char *what, uint64_t limit) {
    throw Refused(Refusal::limit,
                  std::string("more ") + what + " than the limit of " + std::to_string(limit));
  }

  template <class Pool> void check_room(const Pool &pool, uint64_t more, const char *what) const {
    if (pool.size() + more > limits_.objects)
      throw_limit(what, limits_.objects);
  }

  void push(const Value &value) {
    if (stack_.size() == limits_.stack)
      throw_limit("values on the stack", limits_.stack);
    stack_.push_back(value);
  }

  void push_number(Kind kind, int64_t number) {
    Value value;
    value.kind = kind;
    value.integer = number;
    push(value);
  }

  void push_index(Kind kind, size_t index) {
    Value value;
    value.kind = kind;
    value.index = static_cast<uint32_t>(index);
    push(value);
  }

  void push_real() {
    Value value;
    value.kind = Kind::real;
    const uint8_t *from = take(8);
    uint8_t bytes[8];
    std::reverse_copy(from, from + 8, bytes); // big-endian on this wire
    value.real = std::bit_cast<double>(bytes);
    push(value);
  }

  void push_bytes(Kind kind, uint64_t bytes) {
    Value value;
    value.kind = kind;
    value.data = take(bytes);
    if (bytes > UINT32_MAX)
      throw_limit("bytes in one value", UINT32_MAX);
    value.length = static_cast<uint32_t>(bytes);
    push(value);
  }

  // How many values lie above the mark; takes the mark away.
  [[nodiscard]] size_t unmark() {
    if (marks_.empty())
      throw Refused(Refusal::opcode, "a mark is wanted before byte " +
                                         std::to_string(at_ - begin_) + ", none is set");
    const size_t count = stack_.size() - marks_.back();
    marks_.pop_back();
    return count;
  }

  // The uppermost `count` values, none of which lies below a mark.
  [[nodiscard]] std::span<Value> last(size_t count) {
    const size_t floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() - floor < count)
      throw Refused(Refusal::opcode, std::to_string(count) + " values are wanted before byte " +
                                         std::to_string(at_ - begin_) + ", the stack has " +
                                         std::to_string(stack_.size() - floor));
    return std::span(stack_).last(count);
  }
  [[nodiscard]] Value &top() { return last(1)[0]; }
  [[nodiscard]] Value pop() {
    const Value value = top();
    stack_.pop_back();
    return value;
  }

  void push_memo(uint32_t index) {
    if (index >= memo_.size())
      throw Refused(Refusal::opcode, "memo entry " + std::to_string(index) +
                                         " is wanted, there are " + std::to_string(memo_.size()));
    push(memo_[index]);
  }

  void push_tuple(size_t count) {
    const std::span<Value> values = last(count);
    check_room(items_, count, "items of tuples");
    Value value;
    value.kind = Kind::tuple;
    value.index = static_cast<uint32_t>(items_.size());
    value.length = static_cast<uint32_t>(count);
    items_.insert(items_.end(), values.begin(), values.end());
    stack_.resize(stack_.size() - count);
    push(value);
  }

  void push_container(Kind kind) {
    if (num_containers_ == limits_.objects)
      throw_limit("lists and dicts", limits_.objects);
    if (num_containers_ == containers_.size())
      containers_.emplace_back();
    containers_[num_containers_].clear();
    push_index(kind, num_containers_++);
  }

  void extend(Kind kind, size_t count) {
    const std::span<Value> values = last(count + 1);
    expect(values[0], kind);
    if (kind == Kind::dict && count % 2 != 0)
      throw Refused(Refusal::opcode, "a dict is given a key without a value");
    if (num_contained_ + count > limits_.objects)
      throw_limit("items of lists and dicts", limits_.objects);
    num_contained_ += count;
    std::vector<Value> &items = containers_[values[0].index];
    items.insert(items.end(), values.begin() + 1, values.end());
    stack_.resize(stack_.size() - count);
  }

  static void expect(const Value &value, Kind kind) {
    if (value.kind != kind)
      throw Refused(Refusal::type, std::string("found ") +
                                       kind_names[static_cast<size_t>(value.kind)] + ", must be " +
                                       kind_names[static_cast<size_t>(kind)]);
  }

  // -------------------------------------------------------------- names and what they stand for

  void push_name() {
    const Value name = pop(), module = pop();
    expect(name, Kind::text);
    expect(module, Kind::text);
    for (const KnownName &known : names)
      if (known.name == name.text() && known.module == module.text()) {
        Value value;
        value.kind = Kind::name;
        value.name = known.is;
        push(value);
        return;
      }
    throw Refused(Refusal::name, "the message names " + shown(module.text()) + "." +
                                     shown(name.text()) + ", which these records do not need");
  }

  [[noreturn]] static void throw_call(const std::string &what) {
    throw Refused(Refusal::call, "a call that these records do not need: " + what);
  }

  // Whether the tuple `args` holds values of just these kinds.
  [[nodiscard]] bool matches(std::span<const Value> args,
                             std::initializer_list<Kind> kinds) const noexcept {
    return std::equal(args.begin(), args.end(), kinds.begin(), kinds.end(),
                      [](const Value &value, Kind kind) { return value.kind == kind; });
  }

  void reduce() {
    const Value arguments = pop(), function = pop();
    expect(arguments, Kind::tuple);
    expect(function, Kind::name);
    const std::span<const Value> args = tuple(arguments);
    switch (function.name) {
    case Name::reconstruct: // an empty array, which BUILD fills
      if (!matches(args, {Kind::name, Kind::tuple, Kind::bytes}) || args[0].name != Name::ndarray)
        throw_call("_reconstruct");
      return push_array({});
    case Name::frombuffer:
      if (!matches(args, {Kind::bytes, Kind::dtype, Kind::tuple, Kind::text}) ||
          (args[3].text() != "C" && args[3].text() != "F"))
        throw_call("_frombuffer");
      return push_array(made(args[0], args[1], tuple(args[2]), args[3].text() == "F"));
    case Name::scalar:
      if (!matches(args, {Kind::dtype, Kind::bytes}))
        throw_call("scalar");
      return push_array(made(args[1], args[0], {}, false));
    case Name::dtype:
      if (!matches(args, {Kind::text, Kind::boolean, Kind::boolean}))
        throw_call("dtype");
      return push_dtype(args[0].text());
    case Name::rebuild_tensor: // array, dtype, place, requires_grad
      if (!matches(args, {Kind::array, Kind::text, Kind::text, Kind::boolean}))
        throw_call("_rebuild_tensor");
      return push_array(tensor(array(args[0]), args[1].text()));
    case Name::decoder_state:
      if (!matches(args, {Kind::text}))
        throw_call("DecoderState");
      return push_state(args[0].text(), false);
    case Name::get_attribute:
      if (!matches(args, {Kind::name, Kind::text}) || args[0].name != Name::decoder_state)
        throw_call("getattr");
      return push_state(args[1].text(), true);
    default:
      throw_call("of a class");
    }
  }

  void new_object() {
    const Value arguments = pop(), type = pop();
    expect(arguments, Kind::tuple);
    expect(type, Kind::name);
    if (type.name == Name::record && arguments.length == 0) {
      check_room(records_, 1, "records");
      records_.push_back(no_state);
      return push_index(Kind::record, records_.size() - 1);
    }
    if (type.name != Name::logprobs || arguments.length != 3)
      throw_call("of a class, with " + std::to_string(arguments.length) + " arguments");
    Value value = arguments;
    value.kind = Kind::logprobs;
    push(value);
  }

  void build() {
    const Value state = pop();
    const Value object = top();
    if (object.kind == Kind::record) {
      expect(state, Kind::dict);
      if (records_[object.index] != no_state)
        throw_call("a second state of a record");
      records_[object.index] = state.index;
      return;
    }
    expect(state, Kind::tuple);
    if (object.kind == Kind::dtype)
      build_dtype(dtypes_[object.index], tuple(state));
    else if (object.kind == Kind::array)
      build_array(arrays_[object.index], tuple(state));
    else
      throw Refused(Refusal::call, std::string(kind_names[static_cast<size_t>(object.kind)]) +
                                       " is given a state");
  }

  void push_state(std::string_view text, bool is_name) {
    for (const std::string_view known : decoder_states)
      if (std::equal(text.begin(), text.end(), known.begin(), known.end(), [&](char a, char b) {
            return a == (is_name ? static_cast<char>(b - 'a' + 'A') : b);
          }))
        return push_number(Kind::state, 0);
    throw Refused(Refusal::name, "'" + shown(text) + "' is no decoder state");
  }

  // -------------------------------------------------------------- arrays

  void push_dtype(std::string_view code) {
    if (!code.empty() && (code[0] == '<' || code[0] == '|'))
      code.remove_prefix(1);
    for (const ElementType &type : element_types)
      if (type.code == code && !code.empty()) {
        check_room(dtypes_, 1, "dtypes");
        dtypes_.push_back({type.is});
        return push_index(Kind::dtype, dtypes_.size() - 1);
      }
    throw Refused(Refusal::array, "an array of dtype '" + shown(code) + "'");
  }

  // (3, byte order, subarray, names, fields, size, alignment, flags), of a plain number.
  static void build_dtype(Dtype &dtype, std::span<const Value> state) {
    const bool is_plain = state.size() == 8 && state[0].kind == Kind::integer &&
                          state[0].integer == 3 && state[1].kind == Kind::text &&
                          state[1].length == 1 && state[2].kind == Kind::none &&
                          state[3].kind == Kind::none && state[4].kind == Kind::none &&
                          std::all_of(state.begin() + 5, state.end(),
                                      [](const Value &v) { return v.kind == Kind::integer; }) &&
                          state[5].integer == -1 && state[6].integer == -1 && state[7].integer == 0;
    const char order = is_plain ? state[1].text()[0] : '?';
    if ((order != '<' && order != '>' && order != '|') || dtype.is_built)
      throw_call("the state of a dtype");
    dtype.is_swapped = order == '>';
    dtype.is_built = true;
  }

  // (1, shape, dtype, is in Fortran's order, bytes)
  void build_array(Array &array, std::span<const Value> state) {
    if (!matches(state, {Kind::integer, Kind::tuple, Kind::dtype, Kind::boolean, Kind::bytes}) ||
        state[0].integer != 1 || array.is_built)
      throw_call("the state of an array");
    array = made(state[4], state[2], tuple(state[1]), state[3].integer != 0);
  }

  [[nodiscard]] Array made(const Value &bytes, const Value &dtype, std::span<const Value> shape,
                           bool is_fortran) const {
    const Dtype &type = dtypes_[dtype.index];
    if (!type.is_built || shape.size() > 2)
      throw Refused(Refusal::array, type.is_built
                                        ? "an array has " + std::to_string(shape.size()) +
                                              " dimensions, the limit is 2"
                                        : std::string("the dtype of an array has no byte order"));
    Array array;
    array.element = type.element;
    array.is_swapped = type.is_swapped;
    array.is_built = true;
    array.ndim = static_cast<uint32_t>(shape.size());
    array.data = bytes.data;
    for (size_t i = 0; i < shape.size(); ++i) {
      // No side is longer than the message, so that the product below cannot overflow.
      if (shape[i].kind != Kind::integer || shape[i].integer < 0 ||
          shape[i].integer > int64_t{UINT32_MAX})
        throw Refused(Refusal::array, "a side of an array is no number from 0 to 4294967295");
      array.shape[i] = static_cast<uint64_t>(shape[i].integer);
    }
    array.stride[0] = is_fortran ? 1 : array.shape[1];
    array.stride[1] = is_fortran ? array.shape[0] : 1;
    const uint32_t size = type_of(array.element).bytes;
    if (bytes.length % size != 0 || array.count() != bytes.length / size)
      throw Refused(Refusal::array, "an array of " + std::to_string(array.shape[0]) + " x " +
                                        std::to_string(array.shape[1]) + " " +
                                        std::string(type_of(array.element).name) + " has " +
                                        std::to_string(bytes.length) + " bytes");
    return array;
  }

  // Paddle's tensor: its array, and the dtype that it has on the device.
  [[nodiscard]] static Array tensor(Array array, std::string_view dtype) {
    const bool is_bfloat16 = dtype == type_of(Element::bfloat16).name;
    const Element wanted = is_bfloat16 ? Element::uint16 : array.element;
    if (!array.is_built || array.element != wanted ||
        (!is_bfloat16 && dtype != type_of(array.element).name))
      throw Refused(Refusal::array, "a tensor of " + shown(dtype) + " comes as an array of " +
                                        std::string(type_of(array.element).name));
    if (is_bfloat16)
      array.element = Element::bfloat16;
    return array;
  }

  void push_array(const Array &array) {
    check_room(arrays_, 1, "arrays");
    arrays_.push_back(array);
    push_index(Kind::array, arrays_.size() - 1);
  }

  const Limits limits_;
  const uint8_t *begin_ = nullptr, *at_ = nullptr;
  const uint8_t *end_ = nullptr;   // of the message
  const uint8_t *limit_ = nullptr; // of the frame, or of the message between frames
  std::vector<Value> stack_, memo_, items_;
  std::vector<uint32_t> marks_;
  std::vector<std::vector<Value>> containers_; // lists and dicts, the first num_containers_ in use
  size_t num_containers_ = 0, num_contained_ = 0;
  std::vector<Dtype> dtypes_;
  std::vector<Array> arrays_;
  std::vector<uint32_t> records_; // the dict that is its state
};

} // namespace tp::pickle
