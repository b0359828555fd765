// output_ops.hpp: the output ops in their CPU form, over the source segment.
//
// Engine side (Writer): save_output, save_output_topk and their speculative forms fill the next
// step of the source ring and publish it. Reader side (SourceReader): get_output, get_output_topk
// copy the oldest step straight into a claimed slot of the ring and check it there, on our own
// copy.
#pragma once

#include <algorithm>
#include <vector>

#include "atomics.hpp"
#include "plan.hpp"
#include "tensor.hpp"

namespace tp {

// What a save is given. Absent tensors have ndim 0.
struct SaveArguments {
  Tensor tokens;          // [n], or [n, D] with accept_num
  Tensor accept_num;      // [n]
  Tensor topk_ids;        // [n, T], or [n, D, T] with accept_num
  Tensor logprobs;        // the same shape
  Tensor ranks;           // [n], or [n, D]
  Tensor rows;            // [n]; absent: 0..n-1
  Tensor generations;     // [n]
  Tensor states;          // [n]; absent: all TP_ROW_TOKEN
  Tensor positions;       // [n]; absent: not checked
  Tensor vectors;         // [n, V]: a pooling step, which has neither tokens nor candidates
  bool is_prompt = false; // tokens are [m] prompt tokens, accept_num [n] says whose
  uint32_t message_flag = 3;
  bool not_need_stop = true;
  Counts counts = Counts::accepted;
  bool has_wire_values =
      false; // of tokens on a GPU: below 0 they are FastDeploy's, and say a state
};

// Design: the writer alone stores `published` and the steps; it reads `released` and the control
// words. `reported_` holds what poll() has told, so a control word is told once.
class Writer {
public:
  explicit Writer(const SourceMap &source)
      : source_(source), published_(observe(source.head().published)),
        saved_tokens_(published_ ? source.slot(published_ - 1).saved_tokens : 0),
        known_(source.sizes.max_num_seqs, 0), reported_(source.sizes.max_num_seqs, 0) {}

  [[nodiscard]] uint64_t published() const noexcept { return published_; }
  [[nodiscard]] uint64_t saved_tokens() const noexcept { return saved_tokens_; }

  // Waits for a free step. False when the time is up or a signal came.
  [[nodiscard]] bool wait_for_space(const Patience &patience) noexcept {
    if (has_space())
      return true;
    tp_source &head = source_.head();
    const uint64_t begun = now_ns();
    put(head.writer_bell.wake_at,
        published_ - source_.sizes.source_slots + std::max(1u, source_.sizes.source_slots / 4));
    const bool has =
        wait_for(head.writer_bell, TP_WAIT_SPACE, patience, [&]() noexcept { return has_space(); });
    put(head.blocked_ns, get(head.blocked_ns) + (now_ns() - begun));
    return has;
  }

  // Fills and publishes one step. Call only when wait_for_space() said true.
  void save(const SaveArguments &a) {
    const tp_sizes &sizes = source_.sizes;
    const Shape shape = check(a, sizes);
    tp_step &step = source_.slot(published_);
    const uint32_t flags = flags_of(a);
    // Which rows run and how many tokens each has decides where the later columns lie.
    const StepColumns head(shape.n, 0, 0, flags);
    fill_rows(a, shape, step, head, sizes);
    const uint64_t m = flags & TP_STEP_ACCEPT ? fill_accept(a, shape, step, head) : shape.n;
    const StepColumns at(shape.n, m, shape.width, flags);
    if (flags & TP_STEP_POOLING)
      copy_block(a.vectors, 0, 0, a.vectors.shape[0], a.vectors.shape[1],
                 [to = column<float>(step, at.logprobs), &a](int64_t from, int64_t c,
                                                             int64_t stride) mutable {
                   copy_as_float(to, a.vectors, from, c, stride);
                   to += c;
                 });
    else
      fill_tokens(a, shape, step, at);
    step.source_sequence = published_;
    step.saved_ns = now_ns();
    step.num_rows = static_cast<uint32_t>(shape.n);
    step.num_tokens = static_cast<uint32_t>(m);
    step.width = static_cast<uint32_t>(shape.width);
    step.flags = flags;
    step.message_flag = a.message_flag;
    step.body_bytes = static_cast<uint32_t>(at.end - sizeof(tp_step));
    step.bad = TP_BAD_NONE;
    step.device_epoch = 0;
    if (a.message_flag == TP_MESSAGE_TARGET && !(flags & (TP_STEP_POOLING | TP_STEP_PROMPT)))
      saved_tokens_ += count_tokens(step, at, flags);
    step.saved_tokens = saved_tokens_;
    ++published_;
    fault::point("writer.filled");
    put(source_.head().beat_ns, step.saved_ns);
    put(source_.head().busy, uint64_t{0});
    publish_below(source_.head(), published_);
  }

  // Says that every step below `sequence` may be read.
  static void publish_below(tp_source &source, uint64_t sequence) noexcept {
    // SYNC POINT: source cursor - release: the step's bytes are visible to whoever sees the cursor
    publish(source.published, sequence);
    fault::point("writer.published");
    ring_bell(source.reader_bell);
  }

  // Takes the next step for somebody who fills and publishes it later (cuda_writer.hpp). Until then
  // save() must not be called.
  uint64_t claim() noexcept { return published_++; }
  void set_saved_tokens(uint64_t tokens) noexcept { saved_tokens_ = tokens; }

  void beat(bool busy) noexcept {
    put(source_.head().beat_ns, now_ns());
    put(source_.head().busy, uint64_t{busy});
  }

  // Remembers which life of a row the scheduler runs, so that poll() can tell of its end even when
  // the row has been given out again meanwhile.
  void note(uint32_t row, uint32_t generation) noexcept {
    if (row < known_.size() && generation > known_[row])
      known_[row] = generation;
  }

  // Calls act(row, generation, bits) for every control bit that was not reported before. A second
  // preemption of one life is told from the first by its count.
  template <class Act> void poll(Act &&act) {
    constexpr uint64_t bits_mask = 0xff, count_mask = 0xffffff00;
    for (uint32_t row = 0; row < source_.sizes.max_num_seqs; ++row) {
      // SYNC POINT: control word - acquire: one word, nothing behind it
      const uint64_t word = observe(source_.control(row)), told = reported_[row];
      if (word == told)
        continue;
      const auto generation = static_cast<uint32_t>(word >> 32);
      uint64_t old_bits = told & bits_mask;
      if (generation != told >> 32) {
        if (known_[row] != 0 && known_[row] < generation &&
            !(told >> 32 == known_[row] && old_bits & TP_CONTROL_FINISHED))
          act(row, known_[row], static_cast<uint32_t>(TP_CONTROL_FINISHED));
        old_bits = 0;
      } else if ((word & count_mask) != (told & count_mask)) {
        old_bits &= ~uint64_t{TP_CONTROL_PREEMPT};
      }
      reported_[row] = word;
      if (const uint64_t news = word & bits_mask & ~old_bits)
        act(row, generation, static_cast<uint32_t>(news));
    }
  }

  struct Shape {
    uint64_t n, depth, width;
  };

  [[nodiscard]] static uint32_t flags_of(const SaveArguments &a) noexcept {
    uint32_t flags = 0;
    if (a.accept_num.is_there())
      flags |= TP_STEP_ACCEPT;
    if (a.positions.is_there())
      flags |= TP_STEP_POSITIONS;
    if (a.not_need_stop)
      flags |= TP_STEP_NOT_NEED_STOP;
    if (a.vectors.is_there())
      flags |= TP_STEP_POOLING;
    if (a.is_prompt)
      flags |= TP_STEP_PROMPT;
    return flags;
  }

  [[nodiscard]] static Shape check(const SaveArguments &a, const tp_sizes &sizes) {
    constexpr const char *ints = "int32 or int64", *floats = "float32, float16 or bfloat16";
    if (a.message_flag != TP_MESSAGE_TARGET && a.message_flag != TP_MESSAGE_DRAFT)
      throw OpArgumentError("message_flag", "message_flag is " + std::to_string(a.message_flag) +
                                                ", must be 3 (target) or 4 (draft)");
    if (a.vectors.is_there())
      return check_pooling(a, sizes);
    if (a.is_prompt)
      return check_prompt(a, sizes);
    const bool speculative = a.accept_num.is_there();
    const int extra = speculative ? 1 : 0;
    if (a.tokens.ndim != 1 + extra)
      throw OpArgumentError("tokens", "tokens is " + shown(a.tokens) + ", must have " +
                                          (speculative ? "two dimensions [rows, draft tokens]"
                                                       : "one dimension [rows]"));
    const int64_t n = a.tokens.shape[0], depth = speculative ? a.tokens.shape[1] : 1;
    if (n > sizes.max_num_seqs)
      throw OpArgumentError("tokens", "tokens has " + std::to_string(n) +
                                          " rows, max_num_seqs is " +
                                          std::to_string(sizes.max_num_seqs));
    if (depth > sizes.max_draft_tokens)
      throw OpArgumentError("tokens", "tokens has " + std::to_string(depth) +
                                          " columns, max_draft_tokens is " +
                                          std::to_string(sizes.max_draft_tokens));
    expect("tokens", a.tokens, false, 1 + extra, {n, depth, 0}, ints);
    expect("generations", a.generations, false, 1, {n, 0, 0}, ints);
    if (speculative)
      expect("accept_num", a.accept_num, false, 1, {n, 0, 0}, ints);
    check_rows(a, n);
    int64_t width = 0;
    if (a.topk_ids.is_there() || a.logprobs.is_there() || a.ranks.is_there()) {
      // (of the first tokens alone, or of all)
      const int deep = a.counts == Counts::behind_a_first ? 0 : extra;
      if (a.topk_ids.ndim != 2 + deep)
        throw OpArgumentError("topk_ids", "topk_ids is " + shown(a.topk_ids) + ", must have " +
                                              std::to_string(2 + deep) + " dimensions");
      width = a.topk_ids.shape[1 + deep];
      if (width < 1 || width > int64_t{sizes.top_logprobs} + 1)
        throw OpArgumentError("topk_ids", "topk_ids has " + std::to_string(width) +
                                              " columns, must be 1 to top_logprobs + 1 = " +
                                              std::to_string(sizes.top_logprobs + 1));
      const int64_t cube[3] = {n, deep ? depth : width, width};
      expect("topk_ids", a.topk_ids, false, 2 + deep, cube, ints);
      expect("logprobs", a.logprobs, true, 2 + deep, cube, floats);
      expect("ranks", a.ranks, false, 1 + deep, {n, depth, 0}, ints);
    }
    return {static_cast<uint64_t>(n), static_cast<uint64_t>(depth), static_cast<uint64_t>(width)};
  }

  // The columns that tell whose the rows are, checked.
  static void read_rows(const Tensor &t, uint32_t *rows, uint64_t n, const tp_sizes &sizes) {
    copy_column("rows", reinterpret_cast<int32_t *>(rows), t, n);
    for (uint64_t i = 0; i < n; ++i)
      if (rows[i] >= sizes.max_num_seqs)
        throw OpArgumentError(
            "rows",
            "rows[" + std::to_string(i) + "] is " + std::to_string(static_cast<int32_t>(rows[i])) +
                ", must be 0 to max_num_seqs - 1 = " + std::to_string(sizes.max_num_seqs - 1));
  }
  static void read_generations(const Tensor &t, int32_t *generations, uint64_t n) {
    copy_column("generations", generations, t, n);
    for (uint64_t i = 0; i < n; ++i)
      if (generations[i] < 0)
        throw OpArgumentError("generations", "generations[" + std::to_string(i) + "] is " +
                                                 std::to_string(generations[i]) +
                                                 ", must be 0 (padded) or an admission's");
  }
  static void read_states(const Tensor &t, uint8_t *states, uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) {
      int32_t state = -1;
      const bool fits = copy_ints(&state, t, static_cast<int64_t>(i) * t.stride[0], 1, 1);
      if (!fits || state < TP_ROW_TOKEN || state > TP_ROW_ACKNOWLEDGED)
        throw OpArgumentError("states",
                              "states[" + std::to_string(i) + "] is " +
                                  (fits ? std::to_string(state) : first_outside_int32(t)) +
                                  ", must be 0 to 3");
      states[i] = static_cast<uint8_t>(state);
    }
  }
  static void copy_column(const char *name, int32_t *to, const Tensor &t, uint64_t n) {
    if (!copy_ints(to, t, 0, static_cast<int64_t>(n), t.stride[0]))
      refuse_outside_int32(name, t);
  }

  [[noreturn]] static void refuse_outside_int32(const char *name, const Tensor &t) {
    throw OpArgumentError(name, std::string(name) + " holds " + first_outside_int32(t) +
                                    ", which is outside int32");
  }

  // Refuses a tensor of another dtype or shape.
  static void expect(const char *name, const Tensor &t, bool is_float, int ndim,
                     const int64_t (&shape)[3], const char *what) {
    const bool right_type =
        is_float
            ? t.dtype == Dtype::float32 || t.dtype == Dtype::float16 || t.dtype == Dtype::bfloat16
            : t.dtype == Dtype::int32 || t.dtype == Dtype::int64 || t.dtype == Dtype::uint8 ||
                  t.dtype == Dtype::uint32 || t.dtype == Dtype::uint64;
    bool right_shape = t.ndim == ndim;
    for (int i = 0; right_shape && i < ndim; ++i)
      right_shape = t.shape[i] == shape[i];
    if (right_type && right_shape)
      return;
    std::string wanted = what;
    wanted += " [";
    for (int i = 0; i < ndim; ++i)
      wanted += (i ? ", " : "") + std::to_string(shape[i]);
    throw OpArgumentError(name,
                          std::string(name) + " is " + shown(t) + ", must be " + wanted + "]");
  }

private:
  [[nodiscard]] bool has_space() const noexcept {
    // SYNC POINT: source released - acquire: the reader has copied the steps below it
    return published_ - observe(source_.head().released) < source_.sizes.source_slots;
  }

  [[nodiscard]] static std::string shown(const Tensor &t) {
    std::string text = t.dtype_name + "[";
    for (int i = 0; i < t.ndim; ++i)
      text += (i ? ", " : "") + std::to_string(t.shape[i]);
    return text + "]";
  }

  static void check_rows(const SaveArguments &a, int64_t n) {
    if (a.rows.is_there())
      expect("rows", a.rows, false, 1, {n, 0, 0}, "int32 or int64");
    if (a.states.is_there())
      expect("states", a.states, false, 1, {n, 0, 0}, "uint8, int32 or int64");
    if (a.positions.is_there())
      expect("positions", a.positions, false, 1, {n, 0, 0}, "int32 or int64");
  }

  static void check_count(const char *name, const char *what, int64_t found, int64_t most,
                          const char *limit) {
    if (found > most)
      throw OpArgumentError(name, std::string(name) + " has " + std::to_string(found) + " " + what +
                                      ", " + limit + " is " + std::to_string(most));
  }

  [[nodiscard]] static Shape check_pooling(const SaveArguments &a, const tp_sizes &sizes) {
    if (a.vectors.ndim != 2)
      throw OpArgumentError("vectors", "vectors is " + shown(a.vectors) +
                                           ", must have two dimensions [rows, floats]");
    const int64_t n = a.vectors.shape[0], floats = a.vectors.shape[1];
    check_count("vectors", "rows", n, sizes.max_num_seqs, "max_num_seqs");
    check_count("vectors", "floats", floats, sizes.max_pooling_floats, "max_pooling_floats");
    expect("vectors", a.vectors, true, 2, {n, floats, 0}, "float32, float16 or bfloat16");
    expect("generations", a.generations, false, 1, {n, 0, 0}, "int32 or int64");
    check_rows(a, n);
    return {static_cast<uint64_t>(n), 1, static_cast<uint64_t>(floats)};
  }

  // Prompt tokens come packed: `accept_num` of row i says how many of the m are its own.
  [[nodiscard]] static Shape check_prompt(const SaveArguments &a, const tp_sizes &sizes) {
    const int64_t n = a.accept_num.shape[0], m = a.tokens.shape[0], width = a.topk_ids.shape[1];
    expect("accept_num", a.accept_num, false, 1, {n, 0, 0}, "int32 or int64");
    check_count("accept_num", "rows", n, sizes.max_num_seqs, "max_num_seqs");
    check_count("tokens", "prompt tokens", m, static_cast<int64_t>(max_prompt_tokens(sizes)),
                "the most that one step holds");
    check_count("topk_ids", "columns", width, int64_t{sizes.top_logprobs} + 1, "top_logprobs + 1");
    expect("tokens", a.tokens, false, 1, {m, 0, 0}, "int32 or int64");
    expect("generations", a.generations, false, 1, {n, 0, 0}, "int32 or int64");
    expect("positions", a.positions, false, 1, {n, 0, 0}, "int32 or int64");
    expect("topk_ids", a.topk_ids, false, 2, {m, width, 0}, "int32 or int64");
    expect("logprobs", a.logprobs, true, 2, {m, width, 0}, "float32, float16 or bfloat16");
    expect("ranks", a.ranks, false, 1, {m, 0, 0}, "int32 or int64");
    check_rows(a, n);
    return {static_cast<uint64_t>(n), static_cast<uint64_t>(m), static_cast<uint64_t>(width)};
  }

  void fill_rows(const SaveArguments &a, const Shape &shape, tp_step &step, const StepColumns &at,
                 const tp_sizes &sizes) {
    uint32_t *rows = column<uint32_t>(step, at.rows);
    if (!a.rows.is_there())
      for (uint32_t i = 0; i < shape.n; ++i)
        rows[i] = i;
    else
      read_rows(a.rows, rows, shape.n, sizes);
    read_generations(a.generations, column<int32_t>(step, at.generations), shape.n);
    uint8_t *states = column<uint8_t>(step, at.states);
    std::memset(states, TP_ROW_TOKEN, shape.n);
    if (a.states.is_there())
      read_states(a.states, states, shape.n);
    if (a.positions.is_there())
      copy_column("positions", column<int32_t>(step, at.positions), a.positions, shape.n);
  }

  // Returns how many tokens the rows accepted in all.
  static uint64_t fill_accept(const SaveArguments &a, const Shape &shape, tp_step &step,
                              const StepColumns &at) {
    // (of a prompt step `depth` is the number of all its tokens)
    int32_t *accept = column<int32_t>(step, at.accept_num);
    copy_column("accept_num", accept, a.accept_num, shape.n);
    const uint8_t *states = column<uint8_t>(step, at.states);
    uint64_t m = 0;
    for (uint64_t i = 0; i < shape.n; ++i) {
      if (accept[i] < 0 || static_cast<uint64_t>(accept[i]) > shape.depth)
        throw OpArgumentError("accept_num", "accept_num[" + std::to_string(i) + "] is " +
                                                std::to_string(accept[i]) + ", must be 0 to " +
                                                std::to_string(shape.depth));
      if (states[i] != TP_ROW_TOKEN)
        accept[i] = 0;
      m += static_cast<uint64_t>(accept[i]);
    }
    if (a.is_prompt && m != shape.depth)
      throw OpArgumentError("accept_num", "accept_num adds up to " + std::to_string(m) +
                                              ", tokens has " + std::to_string(shape.depth));
    return m;
  }

  static void fill_tokens(const SaveArguments &a, const Shape &shape, tp_step &step,
                          const StepColumns &at) {
    const int32_t *accept =
        a.accept_num.is_there() && !a.is_prompt ? column<int32_t>(step, at.accept_num) : nullptr;
    int32_t *tokens = column<int32_t>(step, at.tokens);
    int32_t *ids = column<int32_t>(step, at.topk_ids);
    float *logprobs = column<float>(step, at.logprobs);
    int32_t *ranks = column<int32_t>(step, at.ranks);
    const auto width = static_cast<int64_t>(shape.width);
    bool fit = true, ids_fit = true, ranks_fit = true;
    // Whole columns where every row has one token; a packed row after row otherwise.
    const uint64_t pieces = accept ? shape.n : 1;
    for (uint64_t i = 0; i < pieces; ++i) {
      const int64_t row = static_cast<int64_t>(i), count = accept ? accept[i] : a.tokens.shape[0];
      if (count == 0)
        continue;
      const int along = accept ? 1 : 0; // the dimension that `count` walks
      fit &= copy_ints(tokens, a.tokens, row * a.tokens.stride[0], count, a.tokens.stride[along]);
      tokens += count;
      if (width == 0)
        continue;
      ranks_fit &= copy_ints(ranks, a.ranks, row * a.ranks.stride[0], count, a.ranks.stride[along]);
      ranks += count;
      copy_block(a.topk_ids, row, along, count, width,
                 [&](int64_t from, int64_t c, int64_t stride) {
                   ids_fit &= copy_ints(ids, a.topk_ids, from, c, stride);
                   ids += c;
                 });
      copy_block(a.logprobs, row, along, count, width,
                 [&](int64_t from, int64_t c, int64_t stride) {
                   copy_as_float(logprobs, a.logprobs, from, c, stride);
                   logprobs += c;
                 });
    }
    if (!fit)
      refuse_outside_int32("tokens", a.tokens);
    if (!ids_fit)
      refuse_outside_int32("topk_ids", a.topk_ids);
    if (!ranks_fit)
      refuse_outside_int32("ranks", a.ranks);
    if (!a.is_prompt)
      check_ids(step, at, accept, shape.n);
  }

  // A [count, width] block of `t` in as few pieces as its strides allow.
  template <class Copy>
  static void copy_block(const Tensor &t, int64_t row, int along, int64_t count, int64_t width,
                         Copy &&copy) {
    const int64_t from = row * t.stride[0] * (along ? 1 : 0), step = t.stride[along],
                  stride = t.stride[along + 1];
    if (stride == 1 && (step == width || count == 1))
      copy(from, count * width, 1);
    else
      for (int64_t j = 0; j < count; ++j)
        copy(from + j * step, width, stride);
  }

  // Control states have a field of their own on this wire: a running row's token is never negative.
  static void check_ids(const tp_step &step, const StepColumns &at, const int32_t *accept,
                        uint64_t n) {
    const int32_t *tokens = column<int32_t>(step, at.tokens);
    const int32_t *generations = column<int32_t>(step, at.generations);
    const uint8_t *states = column<uint8_t>(step, at.states);
    for (uint64_t i = 0; i < n; ++i)
      for (int32_t left = accept ? accept[i] : 1; left > 0; --left, ++tokens)
        if (*tokens < 0 && generations[i] != 0 && states[i] == TP_ROW_TOKEN)
          throw OpArgumentError("tokens", "the token of batch row " + std::to_string(i) + " is " +
                                              std::to_string(*tokens) +
                                              ", must be 0 or more; use states= for rows "
                                              "without a token");
  }

  [[nodiscard]] static uint64_t count_tokens(const tp_step &step, const StepColumns &at,
                                             uint32_t flags) noexcept {
    if (flags & TP_STEP_ACCEPT)
      return step.num_tokens;
    const uint8_t *states = column<uint8_t>(step, at.states);
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < step.num_rows; ++i)
      tokens += states[i] == TP_ROW_TOKEN;
    return tokens;
  }

  const SourceMap &source_;
  uint64_t published_;
  uint64_t saved_tokens_;
  std::vector<uint32_t> known_;
  std::vector<uint64_t> reported_;
};

// Says who writes: `pid` 0, nobody any more. Who announces himself holds the writer's lock.
inline void announce_writer(tp_source &head, uint32_t pid, uint64_t start) noexcept {
  put(head.writer_start, start);
  put(head.writer_epoch, get(head.writer_epoch) + (pid != 0 ? 1 : 0));
  publish(head.writer_pid, pid);
}

// The writer's cursor as far as it can be true: within one ring of what the reader has released. An
// engine may write anything over its own segment; a cursor that cannot be counts as nothing new. On
// a queue the cursor is the reader's own.
[[nodiscard]] inline uint64_t published_steps(const SourceMap &source) noexcept {
  const tp_source &head = source.head();
  if (head.kind == TP_SOURCE_SYSV)
    return observe(head.published);
  uint64_t released = observe(head.released);
  for (int tries = 0; tries < 1000; ++tries) { // again only while the reader moves
    const uint64_t published = observe(head.published);
    if (published - released <= source.sizes.source_slots)
      return published;
    const uint64_t was = released;
    released = observe(head.released);
    if (released == was)
      break;
  }
  return released;
}

// Design: the reader alone stores `released`. `next_` is the step to take next; a successor begins
// behind what its predecessor has published into the ring, so no step is taken twice.
class SourceReader {
public:
  SourceReader(const SourceMap &source, const Core &core) noexcept
      : source_(source), next_(get(source.head().released)) {
    const uint64_t cursor = observe(core.ring().cursor);
    if (cursor != 0 && core.slot(cursor - 1).source_sequence + 1 > next_)
      release(core.slot(cursor - 1).source_sequence + 1);
  }

  [[nodiscard]] uint64_t next() const noexcept { return next_; }

  // Waits for a step. False when the time is up or a signal came.
  [[nodiscard]] bool wait_for_step(const Patience &patience) noexcept {
    return wait_for(source_.head().reader_bell, TP_WAIT_INPUT, patience, [&]() noexcept {
      // SYNC POINT: source cursor - acquire: steps below the cursor may be read
      const uint64_t waiting = observe(source_.head().published) - next_;
      return waiting != 0 && waiting <= source_.sizes.source_slots; // else no cursor: see above
    });
  }

  // Copies the oldest step into `slot`, whatever its mode. Call only after wait_for_step(). A step
  // that fails the checks becomes an empty slot that says why, so that it is counted, not lost.
  void get_any(tp_step &slot) noexcept {
    get_with(slot, [&](void *to, uint64_t bytes) noexcept {
      std::memcpy(to, column<uint8_t>(source_.slot(next_), sizeof(tp_step)), bytes);
      return source_.slot(next_).device_epoch == 0;
    });
  }

  // The same, with copy(to, bytes) to bring the body; false: it is lost.
  template <class Copy> void get_with(tp_step &slot, Copy &&copy) {
    const tp_step head = source_.slot(next_);
    end_copy();
    const bool speculative = head.flags & TP_STEP_ACCEPT, candidates = head.width != 0;
    const uint32_t bad = head.flags & TP_STEP_POOLING  ? check_pooling(head)
                         : head.flags & TP_STEP_PROMPT ? check_prompt_logprobs(head)
                         : speculative && candidates   ? check_speculate_topk(head)
                         : speculative                 ? check_speculate(head)
                         : candidates                  ? check_topk(head)
                                                       : check_plain(head);
    take(head, slot, bad == TP_BAD_NONE ? check_body(head) : bad, copy);
    slot.source_sequence = next_;
    slot.barrier = 0;
    fault::point("reader.filled");
  }

  // Hands the taken step back to the writer. After the slot is published: a reader killed between
  // the two finds the step in the ring and skips it.
  void release() noexcept { release(next_ + 1); }

private:
  // get_output: a token a row.
  [[nodiscard]] uint32_t check_plain(const tp_step &head) const noexcept {
    return head.num_tokens == head.num_rows ? TP_BAD_NONE : TP_BAD_TOKENS;
  }

  // get_output_topk: with 1 to top_logprobs + 1 candidates each.
  [[nodiscard]] uint32_t check_topk(const tp_step &head) const noexcept {
    if (head.width > source_.sizes.top_logprobs + 1)
      return TP_BAD_WIDTH;
    return check_plain(head);
  }

  // speculate_get_output: up to max_draft_tokens a row, packed.
  [[nodiscard]] uint32_t check_speculate(const tp_step &head) const noexcept {
    const uint64_t most = uint64_t{head.num_rows} * source_.sizes.max_draft_tokens;
    return head.num_tokens <= most ? TP_BAD_NONE : TP_BAD_TOKENS;
  }

  // speculate_get_output_topk
  [[nodiscard]] uint32_t check_speculate_topk(const tp_step &head) const noexcept {
    if (head.width > source_.sizes.top_logprobs + 1)
      return TP_BAD_WIDTH;
    return check_speculate(head);
  }

  // A vector a row.
  [[nodiscard]] uint32_t check_pooling(const tp_step &head) const noexcept {
    if (head.width > source_.sizes.max_pooling_floats)
      return TP_BAD_WIDTH;
    if (head.flags & (TP_STEP_ACCEPT | TP_STEP_PROMPT) || head.message_flag != TP_MESSAGE_TARGET)
      return TP_BAD_FLAGS;
    return check_plain(head);
  }

  // Candidates of prompt tokens, packed; positions say where each row's piece begins.
  [[nodiscard]] uint32_t check_prompt_logprobs(const tp_step &head) const noexcept {
    if (head.width > source_.sizes.top_logprobs + 1)
      return TP_BAD_WIDTH;
    constexpr uint32_t needed = TP_STEP_ACCEPT | TP_STEP_POSITIONS;
    if ((head.flags & needed) != needed || head.message_flag != TP_MESSAGE_TARGET)
      return TP_BAD_FLAGS;
    return head.num_tokens <= max_prompt_tokens(source_.sizes) ? TP_BAD_NONE : TP_BAD_TOKENS;
  }

  // What holds in every mode. The body must be as long as its counts say, to the byte.
  [[nodiscard]] uint32_t check_body(const tp_step &head) const noexcept {
    constexpr uint32_t known = TP_STEP_ACCEPT | TP_STEP_POSITIONS | TP_STEP_NOT_NEED_STOP |
                               TP_STEP_POOLING | TP_STEP_PROMPT;
    if (head.flags & ~known ||
        (head.message_flag != TP_MESSAGE_TARGET && head.message_flag != TP_MESSAGE_DRAFT))
      return TP_BAD_FLAGS;
    if (head.source_sequence != next_)
      return TP_BAD_SEQUENCE;
    if (head.num_rows > source_.sizes.max_num_seqs)
      return TP_BAD_ROWS;
    const StepColumns at(head.num_rows, head.num_tokens, head.width, head.flags);
    if (at.end - sizeof(tp_step) != head.body_bytes || at.end > source_.slot_size)
      return TP_BAD_BYTES;
    return TP_BAD_NONE;
  }

  template <class Copy> void take(const tp_step &head, tp_step &slot, uint32_t bad, Copy &&copy) {
    slot = head;
    slot.device_epoch = 0;
    if (bad == TP_BAD_NONE && !copy(column<uint8_t>(slot, sizeof(tp_step)), head.body_bytes))
      bad = TP_BAD_LOST;
    if (bad != TP_BAD_NONE)
      slot.num_rows = slot.num_tokens = slot.width = slot.flags = slot.body_bytes = 0;
    slot.bad = bad;
  }

  void release(uint64_t sequence) noexcept {
    next_ = sequence;
    // SYNC POINT: source released - release: the steps below it are copied
    publish(source_.head().released, sequence);
    fault::point("reader.released");
    ring_bell_at(source_.head().writer_bell, sequence);
  }

  const SourceMap &source_;
  uint64_t next_;
};

} // namespace tp
