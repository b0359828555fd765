// sysv_ops.hpp: FastDeploy's save_* and get_* ops on its System V queue, over tensors on the CPU.
//
// The messages are those of sysv_wire.hpp. What FastDeploy leaves to chance is defined here: a
// batch, a count, an id or a tensor that does not fit is refused before anything is sent or
// received; what a sender's buffer would hold of older batches is zero; no queue, key or variable
// is remembered from call to call; any number of threads may call at once. An exception of a save
// means that nothing was sent. One of a get comes after words 0 and 1 were set to "nothing", so
// that no caller takes the last step for a new one.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "sysv_wire.hpp"
#include "tensor.hpp"

namespace tp::sysv {

// ---------------------------------------------------------------- where

// Which queue, and how its messages are marked. `folder` empty: the op's own.
struct Wire {
  uint32_t queue_id = 1;
  int32_t message_id = 1;
  Generation generation = Generation::g3;
  std::string folder;
};

constexpr int32_t nothing_received = -2; // also what a message id may not look like when negated

inline void check_message_id(const char *name, int64_t id) {
  if (id < 1 || id > INT32_MAX || id == -nothing_received)
    throw OpArgumentError(name, std::string(name) + " is " + std::to_string(id) +
                                    ", must be 1 to 2147483647 and not 2: its negative says "
                                    "\"nothing received\"");
}

[[nodiscard]] inline uint32_t checked_queue_id(const char *name, int64_t id, Generation of) {
  const int64_t most = of < Generation::g3 ? 0x7fffffff : 0xfffff;
  if (id < 0 || id > most)
    throw OpArgumentError(name, std::string(name) + " is " + std::to_string(id) +
                                    ", must be 0 to " + std::to_string(most));
  return static_cast<uint32_t>(id);
}

[[nodiscard]] inline Generation generation_of(const char *name, const std::string &text) {
  if (text.size() == 2 && text[0] == 'g' && text[1] >= '1' && text[1] <= '4')
    return static_cast<Generation>(text[1] - '0');
  throw OpArgumentError(name, std::string(name) + " is '" + text + "', must be g1, g2, g3 or g4");
}

// What the environment says, read at each call. INFERENCE_MSG_QUEUE_ID wins over the id that an op
// was given, as it does in FastDeploy.
[[nodiscard]] inline Wire wire_from_environment(int64_t queue_id) {
  const auto number = [](const char *name, int64_t &value) {
    const char *text = std::getenv(name);
    if (text == nullptr)
      return false;
    char *end = nullptr;
    errno = 0;
    value = std::strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0)
      throw OpArgumentError(name, std::string(name) + " is '" + text + "', must be a whole number");
    return true;
  };
  Wire wire;
  if (const char *text = std::getenv("TOKENPIPE_SYSV_GENERATION"))
    wire.generation = generation_of("TOKENPIPE_SYSV_GENERATION", text);
  if (const char *text = std::getenv("TOKENPIPE_SYSV_FOLDER"))
    wire.folder = text;
  constexpr const char *queue = "INFERENCE_MSG_QUEUE_ID", *message = "INFERENCE_MSG_ID";
  const bool is_set = number(queue, queue_id);
  wire.queue_id = checked_queue_id(is_set ? queue : "msg_queue_id", queue_id, wire.generation);
  int64_t id = 1;
  if (number(message, id))
    check_message_id(message, id);
  wire.message_id = static_cast<int32_t>(id);
  return wire;
}

struct Op {
  const char *name;
  Variant variant;
  const char *folder; // "./" is the working folder of the process
};

[[nodiscard]] inline Queue queue_of(const Op &op, const Wire &wire) {
  return Queue::open(
      queue_key(wire.folder.empty() ? op.folder : wire.folder, wire.queue_id, wire.generation));
}

// ---------------------------------------------------------------- tensors

[[nodiscard]] constexpr const char *name_of(Dtype dtype) noexcept {
  return dtype == Dtype::int32     ? "int32"
         : dtype == Dtype::int64   ? "int64"
         : dtype == Dtype::float32 ? "float32"
                                   : "another dtype";
}
template <class T> [[nodiscard]] constexpr Dtype dtype_of() noexcept {
  return sizeof(T) == 8                       ? Dtype::int64
         : std::numeric_limits<T>::is_integer ? Dtype::int32
                                              : Dtype::float32;
}
[[nodiscard]] inline int64_t num_elements(const Tensor &t) noexcept {
  int64_t count = 1;
  for (int i = 0; i < t.ndim; ++i)
    count *= t.shape[i];
  return t.is_there() ? count : 0;
}

// The elements of a contiguous tensor, of which there must be at least `needed`.
template <class T>
[[nodiscard]] const T *elements(const char *name, const Tensor &t, int64_t needed) {
  if (t.dtype != dtype_of<T>())
    throw OpArgumentError(name, std::string(name) + " is " +
                                    (t.dtype_name.empty() ? name_of(t.dtype) : t.dtype_name) +
                                    ", must be " + name_of(dtype_of<T>()));
  assert(t.is_contiguous()); // whoever makes the view sees to it
  if (num_elements(t) < needed)
    throw OpArgumentError(name, std::string(name) + " has " + std::to_string(num_elements(t)) +
                                    " elements, must have at least " + std::to_string(needed));
  return static_cast<const T *>(t.data);
}

// A get writes its results in place.
template <class T> [[nodiscard]] T *room_for(const char *name, const Tensor &t, int64_t needed) {
  return const_cast<T *>(elements<T>(name, t, needed));
}

[[noreturn]] inline void refuse(const char *name, int64_t at, int64_t value,
                                const std::string &must) {
  throw OpArgumentError(name, std::string(name) + "[" + std::to_string(at) + "] is " +
                                  std::to_string(value) + ", " + must);
}

// The wire has 32 bits for an id.
[[nodiscard]] inline int32_t narrowed(const char *name, const int64_t *values, int64_t at) {
  if (values[at] != static_cast<int32_t>(values[at]))
    refuse(name, at, values[at], "which is outside int32");
  return static_cast<int32_t>(values[at]);
}

// Rows of a batch: the first dimension of `t`, at most what the message has.
[[nodiscard]] inline int64_t rows_of(const char *name, const Tensor &t, const Op &op) {
  const int64_t rows = t.is_there() ? t.shape[0] : 0, most = row_limit(op.variant);
  if (!t.is_there() || rows > most)
    throw OpArgumentError(name, std::string(op.name) + ": " + name + " has " +
                                    std::to_string(rows) + " rows, its message has room for " +
                                    std::to_string(most));
  return rows;
}

// Elements per row; 1 of a tensor [rows].
[[nodiscard]] inline int64_t columns_of(const char *name, const Tensor &t, int64_t least,
                                        int64_t most) {
  const int64_t columns =
      t.ndim == 1 || t.shape[0] == 0 ? t.shape[1] : num_elements(t) / t.shape[0];
  if (columns < least || columns > most)
    throw OpArgumentError(name, std::string(name) + " has " + std::to_string(columns) +
                                    " columns, must have " + std::to_string(least) +
                                    (least == most ? "" : " to " + std::to_string(most)));
  return columns;
}

// Which rows are preempted or aborted; a generation-g1 caller has no such tensor.
class Preempted {
public:
  Preempted(const Tensor &t, int64_t rows)
      : marks_(t.is_there() ? elements<int32_t>("preempted_idx", t, rows) : nullptr) {}
  [[nodiscard]] bool operator[](int64_t row) const noexcept { return marks_ && marks_[row] == 1; }

private:
  const int32_t *marks_;
};

// Rows whose prompt is not through yet.
class Prefill {
public:
  Prefill(const Tensor &seq_lens_decoder, const Tensor &prompt_lens, int64_t rows)
      : done_(elements<int32_t>("seq_lens_decoder", seq_lens_decoder, rows)),
        prompt_(elements<int64_t>("prompt_lens", prompt_lens, rows)) {}
  [[nodiscard]] bool is_running(int64_t row) const noexcept { return done_[row] < prompt_[row]; }

private:
  const int32_t *done_;
  const int64_t *prompt_;
};

// ---------------------------------------------------------------- messages in and out

// A message as msgsnd and msgrcv take it. It is the calling thread's own, so that calls do not
// meet, and kept from call to call, because the largest has half a megabyte.
template <class Message> struct Envelope {
  int64_t type;
  Message message;
};

// Zeros from end to end: nothing of an older batch goes over the wire.
template <class Message> [[nodiscard]] Envelope<Message> &blank() {
  thread_local const auto kept = std::make_unique<Envelope<Message>>();
  std::memset(kept.get(), 0, sizeof(*kept));
  kept->type = 1;
  return *kept;
}

// No limit that is known where there is no /proc.
[[nodiscard]] inline uint64_t kernel_limit(const char *path) noexcept {
  unsigned long long value = UINT64_MAX;
  if (std::FILE *file = std::fopen(path, "r")) {
    if (std::fscanf(file, "%llu", &value) != 1)
      value = UINT64_MAX;
    std::fclose(file);
  }
  return value;
}

// A message longer than the limits would be refused at once (msgmax) or wait for ever (msgmnb).
inline void check_limits(const Op &op, Queue &queue) {
  const uint64_t bytes = payload_bytes(op.variant);
  const uint64_t longest = kernel_limit("/proc/sys/kernel/msgmax");
  const uint64_t capacity = queue.facts().msg_qbytes;
  if (bytes <= longest && bytes <= capacity)
    return;
  throw SysvError(std::string(op.name) + ": a message of " + std::to_string(bytes) +
                      " bytes does not fit: kernel.msgmax is " + std::to_string(longest) +
                      ", and the queue of key " + queue.name() + " holds " +
                      std::to_string(capacity) + " bytes; set kernel.msgmax=" +
                      std::to_string(bytes) + " and kernel.msgmnb=" + std::to_string(2 * bytes) +
                      " before the queue is made. Nothing was sent",
                  EMSGSIZE);
}

// Waits while the queue is full.
template <class Message>
void send(const Op &op, const Wire &wire, const Envelope<Message> &envelope) {
  Queue queue = queue_of(op, wire);
  const uint64_t bytes = sizeof(Message);
  try {
    if (queue.send(&envelope, bytes, false))
      return;
  } catch (const SysvError &e) {
    if (e.code == EINVAL)
      check_limits(op, queue);
    throw;
  }
  check_limits(op, queue);
  if (!queue.send(&envelope, bytes, true))
    throw SysvError(std::string(op.name) + ": a signal came while the queue of key " +
                        queue.name() + " was full; nothing was sent",
                    EINTR);
}

// What the kernel would give the longest message of any op: its length is known, then, whichever op
// has sent it.
using AnyMessage = Envelope<uint8_t[sizeof(SpeculateTopkMessage) + 8]>;

// The next message; nullptr when there is none (`wait` not set) or a signal came. One of another
// length is taken off the queue, where it would stand in the way for ever, and refused.
template <class Message>
[[nodiscard]] const Message *receive(const Op &op, const Wire &wire, bool wait) {
  thread_local const auto kept = std::make_unique<AnyMessage>();
  Queue queue = queue_of(op, wire);
  int64_t got = queue.receive(kept.get(), sizeof(kept->message), wait ? 0 : IPC_NOWAIT);
  const bool is_longer = got == Queue::too_long;
  if (is_longer)
    got = queue.receive(kept.get(), sizeof(kept->message), MSG_NOERROR | IPC_NOWAIT);
  if (got == Queue::nothing)
    return nullptr;
  const auto length = static_cast<uint64_t>(got);
  if (is_longer || length < shortest_payload(op.variant) || length > sizeof(Message))
    throw SysvError(std::string(op.name) + ": a message of " + (is_longer ? "more than " : "") +
                        std::to_string(length) + " bytes lay at the head of the queue of key " +
                        queue.name() + ", must have " + std::to_string(sizeof(Message)) +
                        ": another op sends here. It was taken off",
                    EBADMSG);
  return reinterpret_cast<const Message *>(&kept->message);
}

[[noreturn]] inline void refuse_message(const Op &op, const std::string &what) {
  throw SysvError(std::string(op.name) + ": " + what + "; the message was taken off", EBADMSG);
}

inline void check_rows(const Op &op, int64_t rows) {
  if (rows < 0 || rows > row_limit(op.variant))
    refuse_message(op, "a message says that it has " + std::to_string(rows) +
                           " rows, must be 0 to " + std::to_string(row_limit(op.variant)));
}

inline void check_counts(const Op &op, const int32_t *counts, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i)
    if (counts[i] > wire_draft_tokens)
      refuse_message(op, "row " + std::to_string(i) + " of a message says that it has " +
                             std::to_string(counts[i]) + " tokens, must be at most " +
                             std::to_string(wire_draft_tokens));
}

// Columns of a topk message, of which generation g4 writes the number into the high part of a word.
[[nodiscard]] inline int64_t packed_columns(const Op &op, const Wire &wire, int64_t high_part) {
  if (wire.generation < Generation::g4) {
    if (high_part != 0)
      refuse_message(op, "a message's header says " + std::to_string(high_part) +
                             " columns, as only generation g4 does, and g" +
                             std::to_string(static_cast<int>(wire.generation)) + " is expected");
    return wire_columns;
  }
  if (high_part < 1 || high_part > wire_columns)
    refuse_message(op, "a message's header says " + std::to_string(high_part) +
                           " columns, generation g4 has 1 to " + std::to_string(wire_columns));
  return high_part;
}

[[nodiscard]] inline int32_t first_word(const Wire &wire, bool not_need_stop) noexcept {
  return not_need_stop ? wire.message_id : -wire.message_id;
}

// The answer while there is none.
inline void say_nothing(int64_t *words, int num_words) noexcept {
  words[0] = nothing_received;
  std::fill(words + 1, words + num_words, 0);
}

template <class From, class To> void widen(const From *from, int64_t count, To *to) noexcept {
  std::copy(from, from + count, to);
}

// ---------------------------------------------------------------- plain

constexpr const char *shared_folder = "/dev/shm", *working_folder = "./";

inline void save_output(const Wire &wire, const Tensor &x, bool not_need_stop,
                        const Tensor &preempted_idx, int64_t rank_id) {
  constexpr Op op{"save_output", Variant::plain, shared_folder};
  if (rank_id > 0)
    return;
  const int64_t rows = rows_of("x", x, op);
  (void)columns_of("x", x, 1, 1);
  const auto *tokens = elements<int64_t>("x", x, rows);
  const Preempted is_preempted(preempted_idx, rows);
  auto &envelope = blank<PlainMessage>();
  int32_t *words = envelope.message.words;
  words[0] = first_word(wire, not_need_stop);
  words[1] = static_cast<int32_t>(rows);
  for (int64_t i = 0; i < rows; ++i)
    words[2 + i] = is_preempted[i] ? preempted : narrowed("x", tokens, i);
  send(op, wire, envelope);
}

// get_output_ep has no test of the rank.
inline void get_output(const Wire &wire, const Tensor &x, int64_t rank_id, bool wait_flag,
                       bool is_ep) {
  const Op op{is_ep ? "get_output_ep" : "get_output", Variant::plain, shared_folder};
  auto *out = room_for<int64_t>("x", x, 2 + most_rows);
  say_nothing(out, 2);
  if (!is_ep && rank_id > 0)
    return;
  const auto *message = receive<PlainMessage>(op, wire, wait_flag);
  if (message == nullptr)
    return;
  check_rows(op, message->words[1]);
  widen(message->words, 2 + message->words[1], out);
}

// ---------------------------------------------------------------- with candidates

struct Candidates {
  const int64_t *ids;
  const float *scores;
  const int64_t *ranks;
  int64_t width; // columns of the tensors: the sampled token's and its candidates'
};

// Tensors [rows, T], [rows, T] and [rows].
[[nodiscard]] inline Candidates candidates_of(const char *ids_name, const Tensor &ids,
                                              const char *scores_name, const Tensor &scores,
                                              const char *ranks_name, const Tensor &ranks,
                                              int64_t rows) {
  const int64_t width = columns_of(ids_name, ids, 1, wire_columns);
  (void)columns_of(scores_name, scores, width, width);
  return {elements<int64_t>(ids_name, ids, rows * width),
          elements<float>(scores_name, scores, rows * width),
          elements<int64_t>(ranks_name, ranks, rows), width};
}

// One token of the message: column 0 is the sampled token, columns behind the width are empty.
inline void put_candidates(const char *ids_name, const Candidates &from, int64_t row,
                           int32_t sampled, int64_t stride, int32_t *tokens, float *scores) {
  tokens[0] = sampled;
  for (int64_t j = 1; j < from.width; ++j)
    tokens[j] = narrowed(ids_name, from.ids, row * from.width + j);
  std::fill(tokens + from.width, tokens + stride, -1);
  std::copy_n(from.scores + row * from.width, from.width, scores);
}

inline void save_output_topk(const Wire &wire, const Tensor &x, const Tensor &topk_ids,
                             const Tensor &logprob_scores, const Tensor &ranks, bool not_need_stop,
                             const Tensor &preempted_idx, int64_t rank_id) {
  constexpr Op op{"save_output_topk", Variant::topk, shared_folder};
  if (rank_id > 0)
    return;
  const int64_t rows = rows_of("x", x, op);
  (void)columns_of("x", x, 1, 1);
  const auto *sampled = elements<int64_t>("x", x, rows);
  const Candidates from =
      candidates_of("topk_ids", topk_ids, "logprob_scores", logprob_scores, "ranks", ranks, rows);
  const Preempted is_preempted(preempted_idx, rows);
  const bool is_packed = wire.generation >= Generation::g4;
  const int64_t stride = is_packed ? from.width : wire_columns;
  auto &envelope = blank<TopkMessage>();
  TopkMessage &m = envelope.message;
  m.words[0] = first_word(wire, not_need_stop);
  m.words[1] = static_cast<int32_t>(rows | (is_packed ? from.width << 16 : 0));
  for (int64_t i = 0; i < rows; ++i) {
    int32_t *tokens = m.words + 2 + i * stride;
    put_candidates("topk_ids", from, i, narrowed("x", sampled, i), stride, tokens,
                   m.scores + i * stride);
    if (is_preempted[i])
      std::fill(tokens, tokens + stride, preempted);
    m.ranks[i] = narrowed("ranks", from.ranks, i);
  }
  send(op, wire, envelope);
}

[[nodiscard]] inline int64_t checked_k(const char *name, int64_t k) {
  if (k < 0 || k >= wire_columns)
    throw OpArgumentError(name, std::string(name) + " is " + std::to_string(k) + ", must be 0 to " +
                                    std::to_string(wire_columns - 1));
  return k;
}

// No test of the rank.
inline void get_output_topk(const Wire &wire, const Tensor &x, const Tensor &scores,
                            const Tensor &ranks, int64_t k, bool wait_flag) {
  constexpr Op op{"get_output_topk", Variant::topk, shared_folder};
  auto *out = room_for<int64_t>("x", x, 2 + most_rows * wire_columns);
  say_nothing(out, 2);
  auto *out_scores = room_for<float>("scores", scores, most_rows * wire_columns);
  auto *out_ranks = room_for<int64_t>("ranks", ranks, most_rows);
  const int64_t wanted = checked_k("k", k) + 1;
  const auto *m = receive<TopkMessage>(op, wire, wait_flag);
  if (m == nullptr)
    return;
  const auto head = static_cast<uint32_t>(m->words[1]);
  const bool is_packed = wire.generation >= Generation::g4;
  const int64_t rows = is_packed ? int64_t{head & 0xffff} : int64_t{m->words[1]};
  const int64_t stride = packed_columns(op, wire, rows < 0 ? 0 : head >> 16);
  check_rows(op, rows);
  // g4's caller tells the number of columns by the header, and so gets all of them.
  const int64_t columns = is_packed ? stride : wanted;
  for (int64_t i = 0; i < rows; ++i) {
    widen(m->words + 2 + i * stride, columns, out + 2 + i * stride);
    widen(m->scores + i * stride, columns, out_scores + i * stride);
    out_ranks[i] = m->ranks[i];
  }
  widen(m->words, 2, out);
}

// ---------------------------------------------------------------- speculative

// Since g3 only rank 0 saves; before, every rank did when told so.
[[nodiscard]] inline bool saves_nothing(const Wire &wire, int64_t rank_id, bool save_each_rank) {
  return rank_id > 0 && (wire.generation >= Generation::g3 || !save_each_rank);
}

// What a row accepted: 0 to `most` tokens, or -3 and -9, which are no counts.
[[nodiscard]] inline int32_t checked_count(const char *name, const int32_t *counts, int64_t row,
                                           int64_t most) {
  const int32_t n = counts[row];
  if ((n < 0 && n != recovery && n != preempted) || n > most)
    refuse(name, row, n, "must be 0 to " + std::to_string(most) + ", -3 or -9");
  return n;
}

inline void speculate_save_output(const Wire &wire, const Tensor &accept_tokens,
                                  const Tensor &accept_num, bool not_need_stop,
                                  const Tensor &seq_lens_decoder, const Tensor &prompt_lens,
                                  const Tensor &preempted_idx, int64_t rank_id, bool save_each_rank,
                                  bool skip_prefill) {
  constexpr Op op{"speculate_save_output", Variant::speculate, working_folder};
  if (saves_nothing(wire, rank_id, save_each_rank))
    return;
  const int64_t rows = rows_of("accept_tokens", accept_tokens, op);
  const int64_t depth = columns_of("accept_tokens", accept_tokens, 1, INT32_MAX);
  const int64_t kept = std::min<int64_t>(depth, wire_draft_tokens);
  const auto *tokens = elements<int64_t>("accept_tokens", accept_tokens, rows * depth);
  const auto *accepted = elements<int32_t>("accept_num", accept_num, rows);
  const Prefill prefill(seq_lens_decoder, prompt_lens, rows);
  const Preempted is_preempted(preempted_idx, rows);
  auto &envelope = blank<SpeculateMessage>();
  int32_t *words = envelope.message.words;
  words[0] = first_word(wire, not_need_stop);
  words[1] = static_cast<int32_t>(rows);
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t n = checked_count("accept_num", accepted, i, kept);
    words[2 + i] = is_preempted[i] ? preempted : skip_prefill && prefill.is_running(i) ? 0 : n;
    int32_t *to = words + 2 + most_speculate_rows + i * wire_draft_tokens;
    // Positions behind the count go over the wire too, whatever they hold.
    for (int64_t j = 0; j < kept; ++j)
      to[j] = j < words[2 + i] ? narrowed("accept_tokens", tokens, i * depth + j)
                               : static_cast<int32_t>(tokens[i * depth + j]);
  }
  send(op, wire, envelope);
}

// The first token and the first draft behind it, of rows that are at their first step.
inline void mtp_save_first_token(const Wire &wire, const Tensor &x, bool not_need_stop,
                                 const Tensor &seq_lens_decoder, const Tensor &prompt_lens,
                                 const Tensor &step_idx, int64_t rank_id, bool save_each_rank,
                                 bool skip_chunk_prefill) {
  constexpr Op op{"mtp_save_first_token", Variant::speculate, working_folder};
  if (!save_each_rank && rank_id > 0)
    return;
  const int64_t rows = rows_of("x", x, op), depth = columns_of("x", x, 2, INT32_MAX);
  const auto *tokens = elements<int64_t>("x", x, rows * depth);
  const Prefill prefill(seq_lens_decoder, prompt_lens, rows);
  const auto *steps = elements<int64_t>("step_idx", step_idx, rows);
  auto &envelope = blank<SpeculateMessage>();
  int32_t *words = envelope.message.words;
  words[0] = first_word(wire, not_need_stop);
  words[1] = static_cast<int32_t>(rows);
  for (int64_t i = 0; i < rows; ++i) {
    if (steps[i] != 1 || (skip_chunk_prefill && prefill.is_running(i)))
      continue;
    words[2 + i] = 2;
    for (int64_t j = 0; j < 2; ++j)
      words[2 + most_speculate_rows + i * wire_draft_tokens + j] =
          narrowed("x", tokens, i * depth + j);
  }
  send(op, wire, envelope);
}

inline void speculate_get_output(const Wire &wire, const Tensor &x, int64_t rank_id, bool wait_flag,
                                 bool get_each_rank) {
  constexpr Op op{"speculate_get_output", Variant::speculate, working_folder};
  constexpr int64_t num_words = sizeof(SpeculateMessage) / sizeof(int32_t);
  auto *out = room_for<int64_t>("x", x, num_words);
  say_nothing(out, 2);
  if (!get_each_rank && rank_id > 0)
    return;
  const auto *m = receive<SpeculateMessage>(op, wire, wait_flag);
  if (m == nullptr)
    return;
  check_rows(op, m->words[1]);
  check_counts(op, m->words + 2, m->words[1]);
  widen(m->words, num_words, out);
}

// ---------------------------------------------------------------- speculative with candidates

// The tensors that both savers of this message are given.
struct SpeculateTopkInputs {
  Tensor sampled_token_ids, logprob_token_ids, logprob_scores, logprob_ranks, token_num_per_batch,
      cu_batch_token_offset, seq_lens_decoder, prompt_lens, preempted_idx;
};

// `is_first_token`: the candidates are those of the row's first token alone, and the drafts behind
// it are not counted in token_num_per_batch.
inline void save_speculate_topk(const Op &op, const Wire &wire, const SpeculateTopkInputs &in,
                                bool not_need_stop, int64_t message_flag, bool is_first_token) {
  if (message_flag != 3 && message_flag != 4)
    throw OpArgumentError("message_flag", "message_flag is " + std::to_string(message_flag) +
                                              ", must be 3 (target) or 4 (draft)");
  const int64_t rows = rows_of("token_num_per_batch", in.token_num_per_batch, op);
  const auto *counts = elements<int32_t>("token_num_per_batch", in.token_num_per_batch, rows);
  const auto *offsets = elements<int32_t>("cu_batch_token_offset", in.cu_batch_token_offset, rows);
  const int64_t depth = columns_of("sampled_token_ids", in.sampled_token_ids, 1, INT32_MAX);
  const int64_t num_sampled = num_elements(in.sampled_token_ids);
  const auto *sampled = elements<int64_t>("sampled_token_ids", in.sampled_token_ids, 0);
  const int64_t num_tokens = in.logprob_token_ids.shape[0];
  const Candidates from =
      candidates_of("logprob_token_ids", in.logprob_token_ids, "logprob_scores", in.logprob_scores,
                    "logprob_ranks", in.logprob_ranks, num_tokens);
  const Prefill prefill(in.seq_lens_decoder, in.prompt_lens, rows);
  const Preempted is_preempted(in.preempted_idx, rows);
  const bool is_packed = wire.generation >= Generation::g4;
  // Before g3 the tokens lay as flat as their candidates do.
  const bool is_flat = wire.generation < Generation::g3 && !is_first_token;
  auto &envelope = blank<SpeculateTopkMessage>();
  SpeculateTopkMessage &m = envelope.message;
  m.words[0] = first_word(wire, not_need_stop);
  m.words[1] = static_cast<int32_t>(message_flag | (is_packed ? from.width << 8 : 0));
  m.words[2] = static_cast<int32_t>(rows);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t extra = is_first_token && counts[i] != 0 ? 1 : 0;
    const int64_t given = counts[i];
    if (given < 0 || given + extra > wire_draft_tokens)
      refuse("token_num_per_batch", i, given,
             "must be 0 to " + std::to_string(wire_draft_tokens - extra));
    const int64_t n = prefill.is_running(i) ? 0 : given + extra;
    m.words[3 + i] = is_preempted[i] ? preempted : static_cast<int32_t>(n);
    const int64_t first = offsets[i],
                  with_candidates = is_first_token ? std::min<int64_t>(n, 1) : n;
    if (with_candidates > 0 && (first < 0 || first + with_candidates > num_tokens))
      refuse("cu_batch_token_offset", i, first,
             "and the row has " + std::to_string(with_candidates) +
                 " tokens, but logprob_token_ids has " + std::to_string(num_tokens) + " rows");
    const int64_t begin = is_flat ? first : i * depth;
    if (n > 0 && (begin + n > num_sampled || (!is_flat && n > depth)))
      refuse("token_num_per_batch", i, given,
             "but sampled_token_ids has " + std::to_string(num_sampled) + " elements, " +
                 std::to_string(depth) + " a row");
    SpeculateTopkRow &row = m.rows[i];
    for (int64_t j = 0; j < n; ++j) {
      const int32_t token = narrowed("sampled_token_ids", sampled, begin + j);
      int32_t *tokens = row.tokens + j * wire_columns;
      if (j < with_candidates) {
        put_candidates("logprob_token_ids", from, first + j, token, wire_columns, tokens,
                       row.scores + j * wire_columns);
        row.ranks[j] = narrowed("logprob_ranks", from.ranks, first + j);
      } else {
        tokens[0] = token;
        std::fill(tokens + 1, tokens + wire_columns, -1);
      }
    }
  }
  send(op, wire, envelope);
}

inline void speculate_save_output_topk(const Wire &wire, const SpeculateTopkInputs &in,
                                       bool not_need_stop, int64_t message_flag, int64_t rank_id,
                                       bool save_each_rank) {
  constexpr Op op{"speculate_save_output_topk", Variant::speculate_topk, shared_folder};
  if (!saves_nothing(wire, rank_id, save_each_rank))
    save_speculate_topk(op, wire, in, not_need_stop, message_flag, false);
}

inline void mtp_save_first_token_with_topk(const Wire &wire, const SpeculateTopkInputs &in,
                                           bool not_need_stop, int64_t message_flag,
                                           int64_t rank_id, bool save_each_rank) {
  constexpr Op op{"mtp_save_first_token_with_topk", Variant::speculate_topk, shared_folder};
  if (save_each_rank || rank_id <= 0)
    save_speculate_topk(op, wire, in, not_need_stop, message_flag, true);
}

// No test of the rank.
inline void speculate_get_output_topk(const Wire &wire, const Tensor &output_tokens,
                                      const Tensor &output_scores, const Tensor &output_ranks,
                                      int64_t real_k, bool wait_flag) {
  constexpr Op op{"speculate_get_output_topk", Variant::speculate_topk, shared_folder};
  constexpr int64_t per_row = wire_draft_tokens * wire_columns, first_row = 3 + most_rows;
  auto *out = room_for<int64_t>("output_tokens", output_tokens, first_row + most_rows * per_row);
  say_nothing(out, 3);
  auto *scores = room_for<float>("output_scores", output_scores, most_rows * per_row);
  auto *ranks = room_for<int64_t>("output_ranks", output_ranks, most_rows * wire_draft_tokens);
  const int64_t wanted = checked_k("real_k", real_k) + 1;
  const auto *m = receive<SpeculateTopkMessage>(op, wire, wait_flag);
  if (m == nullptr)
    return;
  const int32_t flag = m->words[1] & 0xff, rows = m->words[2];
  if (flag != 3 && flag != 4)
    refuse_message(op, "a message has the flag " + std::to_string(flag) + ", must be 3 or 4");
  const int64_t packed = packed_columns(op, wire, static_cast<uint32_t>(m->words[1]) >> 8);
  check_rows(op, rows);
  check_counts(op, m->words + 3, rows);
  const int64_t columns = wire.generation >= Generation::g4 ? packed : wanted;
  for (int64_t i = 0; i < rows; ++i) {
    const SpeculateTopkRow &row = m->rows[i];
    for (int64_t j = 0; j < m->words[3 + i]; ++j) {
      widen(row.tokens + j * wire_columns, columns,
            out + first_row + i * per_row + j * wire_columns);
      widen(row.scores + j * wire_columns, columns, scores + i * per_row + j * wire_columns);
      ranks[i * wire_draft_tokens + j] = row.ranks[j];
    }
  }
  widen(m->words, 3 + rows, out);
}

} // namespace tp::sysv
