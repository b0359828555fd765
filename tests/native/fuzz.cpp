// Untrusted steps: a valid step is saved, its bytes in the source segment are spoilt, and the
// reader and the decoders must live with it. Whatever the bytes are: no access outside of what the
// slot holds, no token lost or counted twice, each refused step counted once under a reason that is
// true of it, and the next good step delivered to the last bit.
//
//   fuzz [steps, 30,000 if not given] [seed, 1 if not given]
//
// One thread, turn by turn, so that a run is a function of its seed.
#include <sanitizer/asan_interface.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "arena.hpp"
#include "book.hpp"
#include "client.hpp"
#include "decoder.hpp"
#include "output_ops.hpp"

namespace {

using test::mix;
using ull = unsigned long long;

constexpr tp::Patience kNoWait{0, 0};
constexpr int32_t kFirstEos = 2, kNumEos = 3, kFirstToken = 10; // eos ids are 2 to 4
constexpr unsigned kHangSeconds = 60;                           // for a thousand steps

// ---------------------------------------------------------------- what a step holds

// Candidates, ranks and vectors follow from the token or the place, so that they are checked by
// value without being kept.
[[nodiscard]] int32_t id_of(int32_t token, uint64_t j) {
  return j == 0 ? token : static_cast<int32_t>(mix(uint64_t(token) * 32 + j) % 100'000);
}
[[nodiscard]] float logprob_of(int32_t token, uint64_t j) {
  return -static_cast<float>(mix(uint64_t(token) * 32 + j) % 10'000) / 7;
}
[[nodiscard]] int32_t rank_of(int32_t token) { return 1 + token % 1000; }
[[nodiscard]] float vector_of(uint32_t row, uint64_t sequence, uint64_t j) {
  return static_cast<float>(mix(sequence * 64 + row * 1024 + j) % 10'000) / 7;
}

enum class Kind { plain, topk, speculative, speculative_topk, draft, pooling, prompt };

struct StepRow {
  uint32_t row, generation, state;
  int32_t position;
  std::vector<int32_t> tokens;
};

struct Step {
  Kind kind = Kind::plain;
  uint32_t width = 0, message_flag = TP_MESSAGE_TARGET;
  bool has_accept = false, has_positions = false;
  std::vector<StepRow> rows;
};

struct Life {
  uint32_t generation = 0, emitted = 0, max_tokens = 0;
  std::string id;
  bool is_open = false, is_marked = false;
};

struct Totals {
  uint64_t steps = 0, mutated = 0, refused = 0, good = 0, tokens = 0, finals = 0, frames = 0;
  std::array<uint64_t, TP_BAD_REASONS> bad{};
};

// ---------------------------------------------------------------- verdict from the text of
// layout.h

[[nodiscard]] bool has_fault(uint32_t faults, uint32_t reason) { return faults >> reason & 1; }

// Every reason that is true of the step, as bits; which one is counted is the reader's choice.
[[nodiscard]] uint32_t faults_of(const tp_sizes &sizes, const tp_step &head, uint64_t due,
                                 const std::vector<uint8_t> &bytes) {
  using Wide = unsigned __int128; // counts of 32 bits multiplied by each other: nothing may wrap
  const Wide n = head.num_rows, m = head.num_tokens, width = head.width;
  const bool pooling = head.flags & TP_STEP_POOLING, prompt = head.flags & TP_STEP_PROMPT,
             accepts = head.flags & TP_STEP_ACCEPT, positions = head.flags & TP_STEP_POSITIONS,
             draft = head.message_flag == TP_MESSAGE_DRAFT;
  uint32_t faults = 0;
  const auto fault_if = [&](bool is_so, uint32_t reason) { faults |= uint32_t{is_so} << reason; };
  fault_if(head.source_sequence != due, TP_BAD_SEQUENCE);
  fault_if(head.device_epoch != 0, TP_BAD_LOST); // there is no GPU here
  fault_if(n > sizes.max_num_seqs, TP_BAD_ROWS);
  fault_if(width > (pooling ? sizes.max_pooling_floats : sizes.top_logprobs + 1), TP_BAD_WIDTH);
  const uint64_t rows_each = (sizes.max_num_seqs + sizes.num_decoders - 1) / sizes.num_decoders;
  fault_if(prompt && !pooling ? m > rows_each * sizes.max_draft_tokens
           : accepts          ? m > n * sizes.max_draft_tokens
                              : m != n,
           TP_BAD_TOKENS);
  fault_if(head.flags >= 2 * TP_STEP_PROMPT, TP_BAD_FLAGS);
  fault_if(head.message_flag != TP_MESSAGE_TARGET && !draft, TP_BAD_FLAGS);
  fault_if(pooling && (accepts || prompt || draft), TP_BAD_FLAGS);
  fault_if(prompt && (!accepts || !positions || draft), TP_BAD_FLAGS);
  Wide end = 0;
  const auto take = [&](Wide size) {
    const Wide here = end;
    end = (end + size + 15) / 16 * 16;
    return here;
  };
  take(4 * n);
  take(4 * n);
  take(n);
  take(positions ? 4 * n : 0);
  const Wide accept_at = take(accepts ? 4 * n : 0);
  take(pooling ? 0 : 4 * m);
  take(pooling ? 0 : 4 * m * width);
  take(4 * m * width);
  take(width && !pooling ? 4 * m : 0);
  fault_if(end != head.body_bytes, TP_BAD_BYTES);
  fault_if(end + sizeof(tp_step) > bytes.size(), TP_BAD_BYTES);
  if (faults != 0 || !accepts)
    return faults;
  // Counts that a row cannot have cost that row only; the others must add up.
  const int64_t most = prompt ? head.num_tokens : sizes.max_draft_tokens;
  int64_t sum = 0;
  for (uint32_t i = 0; i < head.num_rows; ++i) {
    int32_t count = 0;
    std::memcpy(&count, bytes.data() + sizeof(tp_step) + uint64_t(accept_at) + 4 * uint64_t{i}, 4);
    if (count >= 0 && count <= most)
      sum += count;
  }
  fault_if(sum != head.num_tokens, TP_BAD_TOKENS);
  return faults;
}

// ---------------------------------------------------------------- spoiling

class Spoiler {
public:
  Spoiler(test::Random &random, const tp_sizes &sizes, tp_step &slot, uint64_t slot_size)
      : random_(random), sizes_(sizes), slot_(slot), slot_size_(slot_size) {}

  void spoil() {
    for (uint64_t times = 1 + random_.below(3); times > 0; --times)
      spoil_once();
  }

private:
  void spoil_once() {
    switch (random_.below(10)) {
    case 0:
    case 1:
      return spoil_header();
    case 2:
      return lie_to_the_byte();
    case 3:
      return flip_bits(sizeof(tp_step) + std::min<uint64_t>(slot_.body_bytes, body_room()));
    case 4:
      return move_accepted();
    case 5:
      if (random_.one_in(8)) // garbage from the first byte on, or behind the header
        fill_with_garbage(random_.one_in(4) ? 0 : sizeof(tp_step));
      return;
    default:
      return spoil_column();
    }
  }

  [[nodiscard]] uint64_t body_room() const { return slot_size_ - sizeof(tp_step); }

  [[nodiscard]] uint32_t value(uint32_t old) {
    const uint32_t limits[] = {sizes_.max_num_seqs, sizes_.top_logprobs + 1,
                               sizes_.max_draft_tokens, sizes_.max_pooling_floats,
                               sizes_.max_num_seqs * sizes_.max_draft_tokens};
    switch (random_.below(10)) {
    case 0:
      return 0;
    case 1:
      return 1;
    case 2:
      return UINT32_MAX;
    case 3:
      return UINT32_MAX - 1;
    case 4:
      return uint32_t{1} << random_.below(32);
    case 5:
      return INT32_MAX;
    case 6:
      return limits[random_.below(std::size(limits))] + static_cast<uint32_t>(random_.below(3)) - 1;
    case 7:
      return old + static_cast<uint32_t>(random_.below(5)) - 2;
    case 8:
      return old ^ uint32_t{1} << random_.below(32);
    default:
      return static_cast<uint32_t>(random_.next());
    }
  }

  void spoil_header() {
    uint32_t *const fields[] = {&slot_.num_rows, &slot_.num_tokens,   &slot_.width,
                                &slot_.flags,    &slot_.message_flag, &slot_.body_bytes,
                                &slot_.bad,      &slot_.device_epoch};
    uint64_t *const words[] = {&slot_.sequence, &slot_.source_sequence, &slot_.saved_ns,
                               &slot_.published_ns, &slot_.saved_tokens};
    if (random_.one_in(4)) {
      uint64_t &word = *words[random_.below(std::size(words))];
      const uint64_t high = value(static_cast<uint32_t>(word >> 32));
      word = high << 32 | value(static_cast<uint32_t>(word));
      return;
    }
    uint32_t &field = *fields[random_.below(std::size(fields))];
    field = value(field);
  }

  // Counts that are not those of the columns, and a length that agrees: only what the body says of
  // itself can give it away.
  void lie_to_the_byte() {
    const auto small = [&](uint32_t most) {
      return static_cast<uint32_t>(random_.below(most + 2));
    };
    if (random_.one_in(2))
      slot_.num_rows = small(sizes_.max_num_seqs);
    if (random_.one_in(2))
      slot_.width = small(std::max(sizes_.top_logprobs + 1, sizes_.max_pooling_floats));
    if (random_.one_in(2))
      slot_.flags ^= uint32_t{1} << random_.below(5);
    if (random_.one_in(4))
      slot_.message_flag =
          slot_.message_flag == TP_MESSAGE_TARGET ? TP_MESSAGE_DRAFT : TP_MESSAGE_TARGET;
    if (!(slot_.flags & TP_STEP_ACCEPT))
      slot_.num_tokens = slot_.num_rows;
    else if (random_.one_in(2))
      slot_.num_tokens = small(sizes_.max_num_seqs * sizes_.max_draft_tokens);
    const tp::StepColumns at(slot_.num_rows, slot_.num_tokens, slot_.width, slot_.flags);
    slot_.body_bytes = static_cast<uint32_t>(at.end - sizeof(tp_step));
  }

  void flip_bits(uint64_t end) {
    auto *bytes = reinterpret_cast<uint8_t *>(&slot_);
    if (end > sizeof(tp_step))
      for (uint64_t times = 1 + random_.below(8); times > 0; --times)
        bytes[sizeof(tp_step) + random_.below(end - sizeof(tp_step))] ^=
            static_cast<uint8_t>(1u << random_.below(8));
  }

  void fill_with_garbage(uint64_t from) {
    auto *bytes = reinterpret_cast<uint8_t *>(&slot_);
    const uint64_t end = std::min<uint64_t>(slot_size_, 1024);
    for (uint64_t i = from; i < end; ++i)
      bytes[i] = static_cast<uint8_t>(random_.next());
  }

  // Where the columns lie, as long as the header still tells.
  [[nodiscard]] bool has_columns() const {
    return slot_.num_rows != 0 && slot_.num_rows <= sizes_.max_num_seqs &&
           slot_.num_tokens <= sizes_.max_num_seqs * sizes_.max_draft_tokens &&
           slot_.width <= std::max(sizes_.top_logprobs + 1, sizes_.max_pooling_floats) &&
           tp::StepColumns(slot_.num_rows, slot_.num_tokens, slot_.width, slot_.flags).end <=
               slot_size_;
  }

  void spoil_column() {
    if (!has_columns())
      return;
    const uint32_t n = slot_.num_rows, m = slot_.num_tokens;
    const tp::StepColumns at(n, m, slot_.width, slot_.flags);
    const uint64_t i = random_.below(n);
    const auto spoil_word = [&](uint64_t offset, uint64_t index) {
      uint32_t &word = tp::column<uint32_t>(slot_, offset)[index];
      word = value(word);
    };
    switch (random_.below(8)) {
    case 0:
      return spoil_word(at.rows, i);
    case 1: // one that is in range: a row twice, or of another decoder
      tp::column<uint32_t>(slot_, at.rows)[i] =
          static_cast<uint32_t>(random_.below(sizes_.max_num_seqs));
      return;
    case 2:
      return spoil_word(at.generations, i);
    case 3:
      tp::column<uint8_t>(slot_, at.states)[i] =
          static_cast<uint8_t>(random_.one_in(2) ? random_.below(6) : random_.next());
      return;
    case 4:
      if (slot_.flags & TP_STEP_POSITIONS)
        spoil_word(at.positions, i);
      return;
    case 5:
      if (slot_.flags & TP_STEP_ACCEPT)
        spoil_word(at.accept_num, i);
      return;
    case 6:
      if (m != 0 && at.topk_ids > at.tokens)
        spoil_word(at.tokens, random_.below(m));
      return;
    default:
      if (at.end > at.topk_ids)
        spoil_word(at.topk_ids, random_.below((at.end - at.topk_ids) / 4));
    }
  }

  // The sum stays right: only the single counts are wrong.
  void move_accepted() {
    if (!has_columns() || !(slot_.flags & TP_STEP_ACCEPT))
      return;
    const tp::StepColumns at(slot_.num_rows, slot_.num_tokens, slot_.width, slot_.flags);
    auto *accept = tp::column<uint32_t>(slot_, at.accept_num);
    const uint32_t by = value(1);
    accept[random_.below(slot_.num_rows)] += by;
    accept[random_.below(slot_.num_rows)] -= by;
  }

  test::Random &random_;
  const tp_sizes &sizes_;
  tp_step &slot_;
  const uint64_t slot_size_;
};

// ---------------------------------------------------------------- the pipeline of one thread

// Design: `lives_` is what the frames have told so far; a step's outputs are checked against it. Of
// ring and frames only what the turn in hand may touch is open to the sanitizer, and of the slot
// that is decoded its body only: slots lie side by side, so an overrun would hit mapped memory.
class World {
public:
  World(const tp_sizes &sizes, const tp_options &options, uint64_t seed)
      : arena_(sizes), core_(arena_.core), source_(arena_.source), sizes_(core_.sizes),
        options_(options), random_(seed), book_(core_, source_), writer_(source_), producer_(core_),
        reader_(source_, core_), client_(core_), lives_(sizes.max_num_seqs),
        next_frame_(sizes.num_decoders, 0), before_(sizes.num_decoders),
        was_(tp::slot_bytes(sizes)) {
    core_.header().options = options;
    for (uint32_t k = 0; k < sizes.num_decoders; ++k)
      decoders_.push_back(std::make_unique<tp::Decoder>(core_, k));
    for (uint32_t row = 0; row < sizes.max_num_seqs; ++row)
      admit(row);
    close(source_.slot(0), source_.slot_size * sizes.source_slots);
    close(core_.slot(0), core_.slot_size * sizes.ring_slots);
    close(core_.frame(0, 0), core_.frame_size * sizes.output_slots * sizes.num_decoders);
  }
  ~World() { // the pages go back: what is mapped there next is open
    open(source_.slot(0), source_.slot_size * sizes_.source_slots);
    open(core_.slot(0), core_.slot_size * sizes_.ring_slots);
    open(core_.frame(0, 0), core_.frame_size * sizes_.output_slots * sizes_.num_decoders);
  }
  World(const World &) = delete;
  World &operator=(const World &) = delete;

  void turn(Totals &totals) {
    const bool is_good = is_good_ = random_.one_in(8);
    const uint64_t sequence = writer_.published();
    if (random_.one_in(400)) { // a successor, which takes all it knows from the segment
      const uint64_t k = random_.below(decoders_.size());
      decoders_[k] = std::make_unique<tp::Decoder>(core_, static_cast<uint32_t>(k));
    }
    if (!is_good && random_.one_in(16))
      abort(static_cast<uint32_t>(random_.below(lives_.size())));
    step_ = compose(is_good);
    tp_step &from = source_.slot(sequence);
    open(from, source_.slot_size);
    save();
    std::memcpy(was_.data(), &from, was_.size());
    if (!is_good)
      Spoiler(random_, sizes_, from, source_.slot_size).spoil();
    // Not every try changes a byte: what stayed as it was is not counted as mutated.
    const bool is_mutated = std::memcmp(was_.data(), &from, was_.size()) != 0;
    std::memcpy(was_.data(), &from, was_.size());
    tp_step head;
    std::memcpy(&head, was_.data(), sizeof(head));
    const uint32_t faults = faults_of(sizes_, head, sequence, was_);
    CHECK(!is_good || faults == 0, "a good step has faults %x", faults);
    expected_.clear();
    if (is_good)
      expect_outputs();
    must_fail_.clear();
    if (faults == 0)
      expect_failures();

    tp_step *slot = producer_.try_claim();
    CHECK(slot != nullptr && reader_.wait_for_step(kNoWait), "step %llu is stuck", ull{sequence});
    open(*slot, core_.slot_size);
    reader_.get_any(*slot);
    CHECK(slot->source_sequence == sequence, "step %llu says that it is %llu", ull{sequence},
          ull{slot->source_sequence});
    CHECK(slot->body_bytes + sizeof(tp_step) <= core_.slot_size, "step %llu is too long",
          ull{sequence});
    const uint64_t used = sizeof(tp_step) + slot->body_bytes;
    close(*tp::column<uint8_t>(*slot, used), core_.slot_size - used);
    producer_.publish();
    reader_.release();
    close(from, source_.slot_size);

    for (uint32_t k = 0; k < decoders_.size(); ++k)
      decode(k, sequence);
    close(*slot, core_.slot_size);
    const uint32_t reason = check_counters(faults, sequence);
    if (is_good)
      CHECK(expected_.empty(), "step %llu: row %u has no output", ull{sequence},
            expected_.begin()->first);
    CHECK(must_fail_.empty(), "step %llu: row %u has a broken entry and goes on", ull{sequence},
          *must_fail_.begin());
    for (uint32_t row = 0; row < lives_.size(); ++row) {
      CHECK(!lives_[row].is_open || !lives_[row].is_marked, "row %u outlives its abort", row);
      if (!lives_[row].is_open)
        admit(row);
    }
    ++totals.steps;
    totals.mutated += is_mutated;
    totals.good += is_good;
    totals.refused += reason != TP_BAD_NONE;
    ++totals.bad[reason];
  }

  void add_to(Totals &totals) const {
    totals.tokens += tokens_;
    totals.finals += finals_;
    totals.frames += frames_;
  }

private:
  struct Expected {
    uint32_t send_idx, reason;
    std::vector<int32_t> tokens, drafts;
  };

  template <class T> static void open(T &at, [[maybe_unused]] uint64_t bytes) {
    ASAN_UNPOISON_MEMORY_REGION(&at, bytes);
    (void)at;
  }
  template <class T> static void close(T &at, [[maybe_unused]] uint64_t bytes) {
    ASAN_POISON_MEMORY_REGION(&at, bytes);
    (void)at;
  }

  // -------------------------------------------------------------- coordinator

  void admit(uint32_t row) {
    Life &life = lives_[row];
    if (life.generation != 0)
      book_.release(row, life.generation, {});
    life = Life{life.generation + 1,
                0,
                static_cast<uint32_t>(random_.below(40)),
                std::to_string(row) + "/" + std::to_string(life.generation + 1),
                true,
                false};
    if (random_.one_in(4)) // goes on where another instance stopped
      life.emitted = static_cast<uint32_t>(random_.below(life.max_tokens + 1));
    if (life.max_tokens != 0)
      life.max_tokens += 1;
    tp::CommandFields f;
    f.kind = 1; // tokenpipe.commands.CommandKind.SUBMIT
    f.arrival_ns = tp::now_ns();
    f.inference_start_ns = f.preprocess_end_ns = f.arrival_ns;
    f.max_tokens = life.max_tokens;
    f.num_emitted = life.emitted;
    f.flags = options_.role == TP_ENGINE_PREFILL ? TP_ADMISSION_DISAGGREGATED : 0;
    f.id = life.id;
    for (int32_t e = 0; e < kNumEos; ++e)
      f.eos.push_back(kFirstEos + e);
    tp::post(core_, 0, f);
    book_.log_choice(0, row, life.generation, 0);
    book_.admit(0, row, life.generation, {});
    book_.reply(0, 0, row, life.generation, 0, UINT32_MAX);
    tp::publish(core_.command(0).state, static_cast<uint32_t>(TP_COMMAND_FREE));
  }

  void abort(uint32_t row) {
    lives_[row].is_marked = true;
    book_.mark(row, lives_[row].generation, TP_FINISH_ABORT);
  }

  // -------------------------------------------------------------- engine

  [[nodiscard]] Step compose(bool is_good) {
    Step s;
    const uint32_t depth = sizes_.max_draft_tokens;
    s.kind = static_cast<Kind>(random_.below(7));
    if (s.kind == Kind::pooling && (sizes_.max_pooling_floats == 0 || !random_.one_in(4)))
      s.kind = Kind::plain; // it ends every row that it names
    const bool prompt = s.kind == Kind::prompt, draft = s.kind == Kind::draft;
    s.has_accept =
        prompt || draft || s.kind == Kind::speculative || s.kind == Kind::speculative_topk;
    s.has_positions = prompt || draft || random_.one_in(3);
    if (prompt || draft || s.kind == Kind::topk || s.kind == Kind::speculative_topk)
      s.width = static_cast<uint32_t>(1 + random_.below(sizes_.top_logprobs + 1));
    if (s.kind == Kind::pooling)
      s.width = static_cast<uint32_t>(1 + random_.below(sizes_.max_pooling_floats));
    if (draft)
      s.message_flag = TP_MESSAGE_DRAFT;
    uint64_t room = tp::max_prompt_tokens(sizes_);
    for (uint32_t row = 0; row < lives_.size(); ++row) {
      if (random_.one_in(4))
        continue;
      const Life &life = lives_[row];
      StepRow r{row, life.generation, TP_ROW_TOKEN, static_cast<int32_t>(life.emitted), {}};
      if (random_.one_in(is_good ? 32 : 12))
        r.state = static_cast<uint32_t>(random_.below(4));
      uint64_t count = s.has_accept ? random_.below(depth + 1) : s.kind == Kind::pooling ? 0 : 1;
      if (prompt) // the counts of a prompt step are not bounded by the drafts
        count = r.state == TP_ROW_TOKEN ? random_.below(std::min<uint64_t>(room, 6) + 1) : 0;
      room -= prompt ? count : 0;
      for (; count > 0; --count)
        r.tokens.push_back(random_.one_in(24)
                               ? kFirstEos + static_cast<int32_t>(random_.below(3))
                               : kFirstToken + static_cast<int32_t>(random_.below(100'000)));
      s.rows.push_back(std::move(r));
    }
    return s;
  }

  template <class T>
  [[nodiscard]] static tp::Tensor view(const std::vector<T> &of, tp::Dtype dtype,
                                       std::vector<uint64_t> shape) {
    tp::Tensor t;
    t.data = of.data();
    t.dtype = dtype;
    t.dtype_name = "of the test";
    t.ndim = static_cast<int>(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      t.shape[i] = static_cast<int64_t>(shape[i]);
      t.stride[i] = stride;
      stride *= t.shape[i];
    }
    return t;
  }

  void save() {
    CHECK(writer_.wait_for_space(kNoWait), "the source ring is full");
    const uint64_t n = step_.rows.size(), depth = sizes_.max_draft_tokens, width = step_.width;
    const bool prompt = step_.kind == Kind::prompt, packed = step_.has_accept && !prompt;
    std::vector<int32_t> rows, generations, states, positions, accept, tokens, ids, ranks;
    std::vector<float> logprobs;
    for (const StepRow &r : step_.rows) {
      rows.push_back(static_cast<int32_t>(r.row));
      generations.push_back(static_cast<int32_t>(r.generation));
      states.push_back(static_cast<int32_t>(r.state));
      positions.push_back(r.position);
      accept.push_back(static_cast<int32_t>(r.tokens.size()));
      std::vector<int32_t> padded = r.tokens;
      if (packed)
        padded.resize(depth, -1);
      for (const int32_t token : padded) {
        tokens.push_back(token);
        ranks.push_back(rank_of(token));
        for (uint64_t j = 0; j < width; ++j) {
          ids.push_back(id_of(token, j));
          logprobs.push_back(logprob_of(token, j));
        }
      }
      if (step_.kind == Kind::pooling)
        for (uint64_t j = 0; j < width; ++j)
          logprobs.push_back(vector_of(r.row, writer_.published(), j));
    }
    tp::SaveArguments a;
    a.rows = view(rows, tp::Dtype::int32, {n});
    a.generations = view(generations, tp::Dtype::int32, {n});
    a.states = view(states, tp::Dtype::int32, {n});
    if (step_.has_positions)
      a.positions = view(positions, tp::Dtype::int32, {n});
    if (step_.has_accept)
      a.accept_num = view(accept, tp::Dtype::int32, {n});
    a.message_flag = step_.message_flag;
    a.is_prompt = prompt;
    if (step_.kind == Kind::pooling) {
      a.vectors = view(logprobs, tp::Dtype::float32, {n, width});
      return writer_.save(a);
    }
    const auto shaped = [&](std::vector<uint64_t> behind) {
      std::vector<uint64_t> shape =
          packed ? std::vector<uint64_t>{n, depth} : std::vector<uint64_t>{tokens.size()};
      shape.insert(shape.end(), behind.begin(), behind.end());
      return shape;
    };
    a.tokens = view(tokens, tp::Dtype::int32, shaped({}));
    if (width != 0) {
      a.ranks = view(ranks, tp::Dtype::int32, shaped({}));
      a.topk_ids = view(ids, tp::Dtype::int32, shaped({width}));
      a.logprobs = view(logprobs, tp::Dtype::float32, shaped({width}));
    }
    writer_.save(a);
  }

  // -------------------------------------------------------------- what a good step must give

  void expect_outputs() {
    for (const StepRow &r : step_.rows) {
      const Life &life = lives_[r.row];
      if (r.state == TP_ROW_NONE || r.state == TP_ROW_ACKNOWLEDGED)
        continue;
      Expected e{life.emitted, TP_FINISH_NONE, {}, {}};
      const bool has_tokens = r.state == TP_ROW_TOKEN && !r.tokens.empty();
      if (step_.kind == Kind::draft || step_.kind == Kind::prompt) {
        e.tokens = r.tokens;
        if (has_tokens && (step_.kind == Kind::prompt || options_.enable_draft_logprob))
          expected_[r.row] = e;
        continue;
      }
      if (r.state == TP_ROW_RECOVERY)
        e.reason = TP_FINISH_RECOVERY;
      else if (step_.kind == Kind::pooling)
        e.reason = TP_FINISH_STOP;
      else if (has_tokens)
        expect_tokens(r, life, e);
      else
        continue;
      expected_[r.row] = e;
    }
  }

  void expect_tokens(const StepRow &r, const Life &life, Expected &e) const {
    uint32_t taken = 0;
    while (taken < r.tokens.size() && e.reason == TP_FINISH_NONE) {
      const int32_t token = r.tokens[taken++];
      const bool is_end = token < kFirstToken;
      if (!is_end || !options_.internal_adapter)
        e.tokens.push_back(token);
      if (is_end || options_.role == TP_ENGINE_PREFILL)
        e.reason = TP_FINISH_STOP;
      else if (life.max_tokens != 0 && life.emitted + taken >= life.max_tokens)
        e.reason = TP_FINISH_LENGTH;
    }
    if (options_.role == TP_ENGINE_PREFILL && r.tokens.size() > 1)
      e.drafts = r.tokens;
  }

  // A request whose own entry is broken must end by an error, not go on with a hole.
  void expect_failures() {
    const auto &s = *reinterpret_cast<const tp_step *>(was_.data());
    const tp::StepColumns at(s.num_rows, s.num_tokens, s.width, s.flags);
    const bool has_tokens =
        s.message_flag == TP_MESSAGE_TARGET && !(s.flags & (TP_STEP_POOLING | TP_STEP_PROMPT));
    const int64_t most = s.flags & TP_STEP_PROMPT ? s.num_tokens : sizes_.max_draft_tokens;
    std::set<uint32_t> named;
    for (uint32_t i = 0; i < s.num_rows; ++i) {
      const uint32_t row = tp::column<uint32_t>(s, at.rows)[i],
                     state = tp::column<uint8_t>(s, at.states)[i];
      if (row >= lives_.size() || lives_[row].is_marked ||
          tp::column<uint32_t>(s, at.generations)[i] != lives_[row].generation ||
          !named.insert(row).second)
        continue;
      const int64_t count =
          s.flags & TP_STEP_ACCEPT ? int64_t{tp::column<int32_t>(s, at.accept_num)[i]} : 1;
      const bool is_broken = count < 0 || count > most || state > TP_ROW_ACKNOWLEDGED;
      const bool has_hole = has_tokens && state == TP_ROW_TOKEN && count != 0 &&
                            s.flags & TP_STEP_POSITIONS &&
                            int64_t{tp::column<int32_t>(s, at.positions)[i]} > lives_[row].emitted;
      if (state != TP_ROW_NONE && state != TP_ROW_ACKNOWLEDGED && (is_broken || has_hole))
        must_fail_.insert(row);
    }
  }

  // -------------------------------------------------------------- decoders and client

  void decode(uint32_t k, uint64_t sequence) {
    // A turn for the slot, and one for a mark that a step of drafts has put off.
    open(core_.frame(k, next_frame_[k]), core_.frame_size);
    open(core_.frame(k, next_frame_[k] + 1), core_.frame_size);
    const uint32_t turns = decoders_[k]->run(4, kNoWait);
    CHECK(turns == 1 || turns == 2, "step %llu: decoder %u took %u turns", ull{sequence}, k, turns);
    CHECK(decoders_[k]->slots_done() == sequence + 1, "decoder %u is at %llu, not behind %llu", k,
          ull{decoders_[k]->slots_done()}, ull{sequence});
    const uint64_t first = next_frame_[k];
    for (tp::Client::Head head = client_.head(k); head.is_there; head = client_.head(k)) {
      read(core_.at<tp_frame>(head.offset), k, sequence);
      client_.take(k);
      client_.release(k);
      ++next_frame_[k];
    }
    CHECK(next_frame_[k] - first <= turns, "decoder %u has written more frames than turns", k);
    close(core_.frame(k, first), core_.frame_size);
    close(core_.frame(k, first + 1), core_.frame_size);
  }

  void read(const tp_frame &f, uint32_t k, uint64_t sequence) {
    ++frames_;
    CHECK(f.number == next_frame_[k] && f.decoder == k, "frame %llu of decoder %u", ull{f.number},
          f.decoder);
    CHECK(f.source_sequence == sequence + (f.has_slot ? 0 : 1), "frame %llu of step %llu",
          ull{f.number}, ull{f.source_sequence});
    const uint64_t most = tp::rows_per_decoder(sizes_);
    CHECK(f.num_rows <= most && f.num_finals <= f.num_rows && f.num_firsts <= f.num_rows,
          "frame %llu has %u rows, %u finals", ull{f.number}, f.num_rows, f.num_finals);
    CHECK(f.num_tokens <= most * sizes_.max_draft_tokens && f.num_drafts <= f.num_rows * 16,
          "frame %llu has %u tokens", ull{f.number}, f.num_tokens);
    const bool pooling = f.flags & TP_STEP_POOLING;
    const tp::FrameColumns at(f.num_rows, pooling ? f.num_rows : f.num_tokens, f.width,
                              f.num_drafts, f.num_finals, sizes_.max_request_id_bytes, f.flags);
    CHECK(f.bytes == at.end && at.end <= core_.frame_size, "frame %llu has %u bytes, needs %llu",
          ull{f.number}, f.bytes, ull{at.end});
    const auto *offsets = tp::column<uint32_t>(f, at.token_offsets);
    CHECK(offsets[0] == 0 && offsets[f.num_rows] == f.num_tokens, "the offsets of frame %llu",
          ull{f.number});
    uint32_t finals = 0;
    for (uint32_t i = 0; i < f.num_rows; ++i) {
      CHECK(offsets[i] <= offsets[i + 1] && offsets[i + 1] <= f.num_tokens,
            "the offsets of frame %llu", ull{f.number});
      read_row(f, at, i, offsets[i], offsets[i + 1], finals);
    }
    CHECK(finals == f.num_finals, "frame %llu has %u finals, says %u", ull{f.number}, finals,
          f.num_finals);
  }

  void read_row(const tp_frame &f, const tp::FrameColumns &at, uint32_t i, uint32_t begin,
                uint32_t end, uint32_t &finals) {
    const uint32_t row = tp::column<uint32_t>(f, at.row)[i],
                   generation = tp::column<uint32_t>(f, at.generation)[i],
                   send_idx = tp::column<uint32_t>(f, at.send_idx)[i],
                   reason = tp::column<uint8_t>(f, at.finish_reason)[i];
    CHECK(row < lives_.size() && row % sizes_.num_decoders == f.decoder, "row %u of decoder %u",
          row, f.decoder);
    Life &life = lives_[row];
    CHECK(life.is_open && generation == life.generation, "row %u life %u is not open", row,
          generation);
    const bool passes = f.message_flag == TP_MESSAGE_DRAFT || f.flags & TP_STEP_PROMPT;
    const auto *tokens = tp::column<int32_t>(f, at.token_ids) + begin;
    const uint32_t num = end - begin;
    if (num != 0)
      check_origin(row, generation, tokens, num);
    // What is passed on without being counted ends a row only where its own entry is broken.
    if (passes)
      CHECK(reason == TP_FINISH_ERROR ? num == 0 : reason == TP_FINISH_NONE && num != 0,
            "row %u of a step of drafts or prompt tokens ends by %u", row, reason);
    if (!passes || reason != TP_FINISH_NONE) {
      CHECK(send_idx == life.emitted, "row %u goes on at %u of %u", row, send_idx, life.emitted);
      CHECK(num != 0 || reason != TP_FINISH_NONE, "row %u: an output of nothing", row);
      CHECK(life.is_marked == (reason == TP_FINISH_ABORT), "row %u ends by %u", row, reason);
      for (uint32_t m = 0; m < num; ++m)
        CHECK(tokens[m] >= 0, "row %u got the token %d", row, tokens[m]);
      tokens_ += num;
      life.emitted += num;
      CHECK(life.max_tokens == 0 || life.emitted <= life.max_tokens, "row %u has %u tokens of %u",
            row, life.emitted, life.max_tokens);
    }
    if (is_good_)
      check_expected(f, at, i, row, send_idx, reason, begin, num);
    CHECK(must_fail_.erase(row) == 0 || reason == TP_FINISH_ERROR,
          "row %u has a broken entry and ends by %u", row, reason);
    if (reason != TP_FINISH_NONE)
      read_final(f, at, i, life, reason, finals++);
  }

  // Whatever the step was turned into: a token in a frame stood at an entry of that life.
  void check_origin(uint32_t row, uint32_t generation, const int32_t *tokens, uint32_t num) const {
    const auto &s = *reinterpret_cast<const tp_step *>(was_.data());
    const tp::StepColumns at(s.num_rows, s.num_tokens, s.width, s.flags);
    const auto *begin = tp::column<int32_t>(s, at.tokens);
    uint64_t first = 0;
    for (uint32_t i = 0; i < s.num_rows; ++i) {
      const int64_t count =
          s.flags & TP_STEP_ACCEPT ? int64_t{tp::column<int32_t>(s, at.accept_num)[i]} : 1;
      const int64_t most = s.flags & TP_STEP_PROMPT ? s.num_tokens : sizes_.max_draft_tokens;
      if (count < 0 || count > most)
        continue;
      if (tp::column<uint32_t>(s, at.rows)[i] == row &&
          tp::column<uint32_t>(s, at.generations)[i] == generation) {
        const auto is_there = std::search(begin + first, begin + first + count, tokens,
                                          tokens + num) != begin + first + count;
        CHECK(is_there, "row %u got tokens that are not its own", row);
        return;
      }
      first += static_cast<uint64_t>(count);
    }
    CHECK(false, "row %u got tokens and was not in the step", row);
  }

  void check_expected(const tp_frame &f, const tp::FrameColumns &at, uint32_t i, uint32_t row,
                      uint32_t send_idx, uint32_t reason, uint32_t begin, uint32_t num) {
    const auto found = expected_.find(row);
    CHECK(found != expected_.end(), "row %u has an output that it should not have", row);
    const Expected &e = found->second;
    CHECK(send_idx == e.send_idx && reason == e.reason && num == e.tokens.size(),
          "row %u: %u tokens from %u on and the end %u, not %zu from %u on and %u", row, num,
          send_idx, reason, e.tokens.size(), e.send_idx, e.reason);
    for (uint32_t t = 0; t < num; ++t) {
      const uint32_t m = begin + t;
      const int32_t token = e.tokens[t];
      CHECK(tp::column<int32_t>(f, at.token_ids)[m] == token, "token %u of row %u", t, row);
      CHECK(f.width == step_.width, "%u candidates, not %u", f.width, step_.width);
      for (uint32_t j = 0; j < f.width; ++j)
        CHECK(tp::column<int32_t>(f, at.topk_ids)[m * f.width + j] == id_of(token, j) &&
                  std::equal_to<>{}(tp::column<float>(f, at.topk_logprobs)[m * f.width + j],
                                    logprob_of(token, j)),
              "candidate %u of token %u of row %u", j, t, row);
      CHECK(f.width == 0 || tp::column<int32_t>(f, at.ranks)[m] == rank_of(token),
            "the rank of token %u of row %u", t, row);
    }
    if (step_.kind == Kind::pooling && reason == TP_FINISH_STOP)
      for (uint32_t j = 0; j < step_.width; ++j)
        CHECK(std::equal_to<>{}(tp::column<float>(f, at.topk_logprobs)[i * f.width + j],
                                vector_of(row, f.source_sequence, j)),
              "float %u of row %u", j, row);
    if (f.num_drafts != 0) {
      const auto *offsets = tp::column<uint32_t>(f, at.draft_offsets);
      const auto *drafts = tp::column<int32_t>(f, at.draft_token_ids);
      CHECK(std::equal(drafts + offsets[i], drafts + offsets[i + 1], e.drafts.begin(),
                       e.drafts.end()),
            "the drafts of row %u", row);
    } else {
      CHECK(e.drafts.empty(), "row %u has lost its drafts", row);
    }
    expected_.erase(found);
  }

  void read_final(const tp_frame &f, const tp::FrameColumns &at, uint32_t i, Life &life,
                  uint32_t reason, uint32_t n) {
    CHECK(reason <= TP_FINISH_SHUTDOWN && n < f.num_finals, "an end by %u", reason);
    const tp_final &final = tp::column<tp_final>(f, at.finals)[n];
    const char *id = tp::column<char>(f, at.ids) + uint64_t{n} * sizes_.max_request_id_bytes;
    CHECK(final.index == i && std::string(id, final.id_bytes) == life.id, "the final of %s",
          life.id.c_str());
    // The adapter keeps back the end token itself, and counts it.
    const bool kept_back = options_.internal_adapter && reason == TP_FINISH_STOP;
    CHECK(final.num_tokens - life.emitted <= uint32_t{kept_back}, "%s has %u tokens, says %u",
          life.id.c_str(), life.emitted, final.num_tokens);
    life.is_open = false;
    ++finals_;
  }

  // -------------------------------------------------------------- counters

  // Returns the reason that the step was refused for.
  [[nodiscard]] uint32_t check_counters(uint32_t faults, uint64_t sequence) {
    uint32_t reason = TP_BAD_NONE;
    uint64_t delivered = 0, finals = 0;
    for (uint32_t k = 0; k < sizes_.num_decoders; ++k) {
      const tp_decoder &d = core_.decoder(k);
      const tp_counters &c = d.commit[d.turn & 1].counters;
      CHECK(c.steps == sequence + 1, "decoder %u has seen %llu of %llu steps", k, ull{c.steps},
            ull{sequence + 1});
      CHECK(c.tokens_seen == c.tokens_delivered + dropped(c), "decoder %u has lost tokens", k);
      CHECK(c.poison_slots == 0, "decoder %u: nothing has died", k);
      uint32_t counted = 0;
      for (uint32_t r = TP_BAD_ROWS; r < TP_BAD_REASONS; ++r) {
        const uint64_t news = (&c.bad_rows)[r - 1] - (&before_[k].bad_rows)[r - 1];
        CHECK(news <= (k == 0 ? 1 : 0), "decoder %u has counted reason %u %llu times", k, r,
              ull{news});
        counted += static_cast<uint32_t>(news);
        if (news != 0)
          reason = r;
      }
      CHECK(k != 0 || counted == (faults != 0 ? 1 : 0),
            "step %llu has the faults %x and was counted %u times", ull{sequence}, faults, counted);
      delivered += c.tokens_delivered;
      finals += c.finals_stop + c.finals_length + c.finals_abort + c.finals_recovery +
                c.finals_error + c.finals_shutdown;
      before_[k] = c;
    }
    CHECK(faults == 0 || has_fault(faults, reason), "step %llu was refused for %u, has %x",
          ull{sequence}, reason, faults);
    CHECK(delivered == tokens_, "%llu tokens were delivered, %llu read", ull{delivered},
          ull{tokens_});
    CHECK(finals == finals_, "%llu requests have ended, %llu finals were read", ull{finals},
          ull{finals_});
    return reason;
  }

  [[nodiscard]] static uint64_t dropped(const tp_counters &c) {
    return c.dropped_padded + c.dropped_unadmitted + c.dropped_stale + c.dropped_early +
           c.dropped_finished + c.dropped_repeated + c.dropped_bad_row + c.dropped_chunk +
           c.dropped_adapter + c.dropped_prefill + c.dropped_shielded + c.dropped_warm_up;
  }

  const test::Arena arena_;
  const tp::Core &core_;
  const tp::SourceMap &source_;
  const tp_sizes &sizes_;
  const tp_options options_;
  test::Random random_;
  tp::Book book_;
  tp::Writer writer_;
  tp::Producer producer_;
  tp::SourceReader reader_;
  tp::Client client_;
  std::vector<std::unique_ptr<tp::Decoder>> decoders_;
  std::vector<Life> lives_;
  std::vector<uint64_t> next_frame_;
  std::vector<tp_counters> before_;
  std::vector<uint8_t> was_; // the step as the reader found it
  bool is_good_ = false;     // and was not spoilt
  Step step_;
  std::map<uint32_t, Expected> expected_; // by row
  std::set<uint32_t> must_fail_;          // rows
  uint64_t tokens_ = 0, finals_ = 0, frames_ = 0;
};

[[nodiscard]] tp_sizes sizes_of(uint32_t decoders, uint32_t rows, uint32_t drafts, uint32_t top,
                                uint32_t floats) {
  tp_sizes s = test::small_sizes();
  s.num_decoders = decoders;
  s.max_num_seqs = rows;
  s.max_draft_tokens = drafts;
  s.top_logprobs = top;
  s.max_pooling_floats = floats;
  s.ring_slots = s.source_slots = 2;
  return s;
}

} // namespace

int main(int argc, char **argv) {
  const uint64_t steps = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 30'000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  tp_options plain{}, drafts{}, prefill{};
  drafts.enable_draft_logprob = drafts.internal_adapter = 1;
  prefill.role = TP_ENGINE_PREFILL;
  std::vector<std::unique_ptr<World>> worlds;
  worlds.push_back(std::make_unique<World>(sizes_of(2, 7, 3, 3, 5), plain, seed * 4));
  worlds.push_back(std::make_unique<World>(sizes_of(1, 5, 1, 0, 0), plain, seed * 4 + 1));
  worlds.push_back(std::make_unique<World>(sizes_of(3, 8, 16, 7, 40), drafts, seed * 4 + 2));
  worlds.push_back(std::make_unique<World>(sizes_of(2, 6, 4, 2, 3), prefill, seed * 4 + 3));
  Totals t;
  while (t.steps < steps) {
    if (t.steps % 1000 == 0)
      alarm(kHangSeconds); // a hang ends the program by its signal
    worlds[t.steps % worlds.size()]->turn(t);
  }
  alarm(0);
  for (const auto &world : worlds)
    world->add_to(t);
  std::printf(
      "fuzz: %llu steps, %llu mutated, %llu refused (rows %llu, width %llu, tokens %llu, "
      "bytes %llu, flags %llu, sequence %llu, lost %llu), %llu good, %llu frames, %llu tokens, "
      "%llu finals\n",
      ull{t.steps}, ull{t.mutated}, ull{t.refused}, ull{t.bad[TP_BAD_ROWS]},
      ull{t.bad[TP_BAD_WIDTH]}, ull{t.bad[TP_BAD_TOKENS]}, ull{t.bad[TP_BAD_BYTES]},
      ull{t.bad[TP_BAD_FLAGS]}, ull{t.bad[TP_BAD_SEQUENCE]}, ull{t.bad[TP_BAD_LOST]}, ull{t.good},
      ull{t.frames}, ull{t.tokens}, ull{t.finals});
  // Without these the run has shown less than it claims.
  if (steps >= 10'000)
    for (uint32_t reason = TP_BAD_ROWS; reason < TP_BAD_REASONS; ++reason)
      CHECK(t.bad[reason] != 0 || reason == TP_BAD_MESSAGE, // of another source
            "no step was refused for reason %u", reason);
}
