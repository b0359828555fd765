// The whole way in one process: writer, reader, decoders, client and coordinator as threads over
// both segments. Reader and decoders are replaced again and again, the engine runs one step behind
// its own book, and every token is checked by value.
//
// The threads tell each other nothing but through the segments, relaxed words apart: a lock of the
// test would order what the protocol must order.
#include <sched.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "book.hpp"
#include "client.hpp"
#include "decoder.hpp"
#include "output_ops.hpp"

namespace {

using test::mix;

constexpr uint32_t kSubmit = 1;   // tokenpipe.commands.CommandKind.SUBMIT
constexpr uint32_t kFirstEos = 2; // eos ids are 2 to 4, all other tokens are 10 or more
constexpr uint32_t kNumEos = 3;
constexpr tp::Patience kPatience{1000, 2'000'000};
constexpr tp::Patience kWatchdog{1000, 30'000'000'000};

// ---------------------------------------------------------------- what request k is

[[nodiscard]] uint32_t limit_of(uint64_t k) { return static_cast<uint32_t>(1 + mix(k) % 12); }
[[nodiscard]] uint32_t eos_at(uint64_t k) { return static_cast<uint32_t>(mix(k ^ 0xe05) % 16); }
[[nodiscard]] bool is_aborted(uint64_t k) { return k % 5 == 3; }
[[nodiscard]] uint32_t blocks_of(uint64_t k) { return static_cast<uint32_t>(k % 3); }
[[nodiscard]] uint32_t prompt_of(uint64_t k) { return static_cast<uint32_t>(1 + k % 7); }
[[nodiscard]] uint32_t tokens_of(uint64_t k) { return std::min(limit_of(k), eos_at(k) + 1); }
[[nodiscard]] uint32_t reason_of(uint64_t k) {
  return eos_at(k) < limit_of(k) ? TP_FINISH_STOP : TP_FINISH_LENGTH;
}
[[nodiscard]] uint64_t seed_of(uint64_t k, uint64_t position) { return k << 20 | position; }
[[nodiscard]] int32_t token_of(uint64_t k, uint64_t position) {
  if (position == eos_at(k))
    return static_cast<int32_t>(kFirstEos + k % kNumEos);
  return static_cast<int32_t>(10 + mix(seed_of(k, position)) % 100'000);
}
[[nodiscard]] int32_t id_of(uint64_t k, uint64_t position, uint64_t j) {
  return j == 0 ? token_of(k, position)
                : static_cast<int32_t>(mix(seed_of(k, position) * 8 + j) % 100'000);
}
[[nodiscard]] float logprob_of(uint64_t k, uint64_t position, uint64_t j) {
  return -static_cast<float>(mix(seed_of(k, position) * 8 + j) % 10'000) / 7;
}
[[nodiscard]] int32_t rank_of(uint64_t k, uint64_t position) {
  return static_cast<int32_t>(1 + mix(seed_of(k, position) + 1) % 1000);
}

// Candidates of a step follow from its sequence: 0 (a plain step) or 1 to top_logprobs + 1.
[[nodiscard]] uint32_t width_of(const tp_sizes &sizes, uint64_t source_sequence) {
  const uint64_t x = mix(source_sequence ^ 0x71d);
  return x % 3 == 0 ? 0 : static_cast<uint32_t>(1 + x / 3 % (sizes.top_logprobs + 1));
}

// ---------------------------------------------------------------- the stage

struct Stage {
  explicit Stage(const tp_sizes &sizes, uint64_t requests)
      : arena(sizes), core(arena.core), source(arena.source), requests(requests),
        mailbox(sizes.max_num_seqs) {}

  const test::Arena arena;
  const tp::Core &core;
  const tp::SourceMap &source;
  const uint64_t requests;
  // What a client would tell its scheduler: (generation << 32) | request, per row.
  std::vector<std::atomic<uint64_t>> mailbox;
  std::atomic<bool> engine_stops{false}, reader_stops{false}, decoders_stop{false};
  std::atomic<uint64_t> tokens_read{0}, saved_tokens{0};
};

[[nodiscard]] bool is_set(const std::atomic<bool> &flag) {
  return flag.load(std::memory_order_relaxed);
}

// ---------------------------------------------------------------- engine

struct Batch {
  std::vector<int32_t> rows, generations, accept;
  std::vector<uint8_t> states;
  std::vector<int64_t> positions;
  std::vector<uint64_t> request, begin; // whose tokens, from which position on
  bool has_positions = false;
};

// Design: `life_` is the scheduler's own book. A batch is stamped when it is composed and saved one
// turn later, so tokens of rows that have ended or been given out again are in every run.
class Engine {
public:
  explicit Engine(Stage &stage)
      : stage_(stage), sizes_(stage.core.sizes), writer_(stage.source), random_(7),
        life_(sizes_.max_num_seqs) {}

  void run() {
    Batch held;
    while (!is_set(stage_.engine_stops)) {
      listen();
      Batch next = compose();
      if (!held.rows.empty())
        save(held);
      else if (next.rows.empty())
        sched_yield();
      held = std::move(next);
    }
    if (!held.rows.empty())
      save(held);
    hear_control();
    for (const auto &life : composed_)
      CHECK(finished_.count(life) == 1, "row %u life %u was run, its end was not told", life.first,
            life.second);
    stage_.saved_tokens = writer_.saved_tokens();
  }

private:
  struct Life {
    uint32_t generation = 0;
    uint64_t request = 0;
    uint32_t position = 0;
    bool runs = false;
  };
  using Key = std::pair<uint32_t, uint32_t>; // row, generation

  void listen() {
    for (uint32_t row = 0; row < life_.size(); ++row) {
      const uint64_t word = stage_.mailbox[row].load(std::memory_order_relaxed);
      const auto generation = static_cast<uint32_t>(word >> 32);
      if (generation > life_[row].generation)
        life_[row] = Life{generation, word & UINT32_MAX, 0, true};
    }
    hear_control();
  }

  void hear_control() {
    writer_.poll([&](uint32_t row, uint32_t generation, uint32_t bits) {
      const Key key{row, generation};
      if (bits & TP_CONTROL_ABORT)
        CHECK(aborted_.insert(key).second, "row %u life %u: its abort was told twice", row,
              generation);
      if (bits & TP_CONTROL_FINISHED)
        CHECK(finished_.insert(key).second, "row %u life %u: its end was told twice", row,
              generation);
    });
    for (uint32_t row = 0; row < life_.size(); ++row)
      if (finished_.count({row, life_[row].generation}))
        life_[row].runs = false;
  }

  [[nodiscard]] Batch compose() {
    Batch b;
    b.has_positions = random_.one_in(2);
    for (uint32_t row = 0; row < life_.size(); ++row) {
      Life &life = life_[row];
      if (!life.runs || random_.one_in(6))
        continue;
      if (aborted_.count({row, life.generation})) {
        life.runs = false;
        add(b, row, life.generation, TP_ROW_ACKNOWLEDGED, life.request, life.position, 0);
        continue;
      }
      const auto num = static_cast<uint32_t>(
          sizes_.max_draft_tokens == 1 ? 1 : random_.below(sizes_.max_draft_tokens + 1));
      const uint32_t state = random_.one_in(16) ? TP_ROW_NONE : TP_ROW_TOKEN;
      const bool again = b.has_positions && state == TP_ROW_TOKEN && num > 0 && life.position > 0;
      if (again && random_.one_in(8)) // its last token once more, and only the position tells
        --life.position;
      add(b, row, life.generation, state, life.request, life.position, num);
      if (state == TP_ROW_TOKEN)
        life.position += num;
      // What a correct engine does not save, as long as the rows to come still fit.
      const bool fits = b.rows.size() + (life_.size() - row - 1) < sizes_.max_num_seqs;
      if (fits && random_.one_in(4)) // a row twice in a step
        add(b, row, life.generation, TP_ROW_TOKEN, life.request, life.position, 1);
      else if (fits && random_.one_in(4)) // a life that nobody has admitted
        add(b, row, life.generation + 1'000'000, TP_ROW_TOKEN, life.request, life.position, 1);
      else if (fits && random_.one_in(4)) // padded
        add(b, row, 0, TP_ROW_TOKEN, 0, 0, 1);
    }
    return b;
  }

  void add(Batch &b, uint32_t row, uint32_t generation, uint32_t state, uint64_t request,
           uint32_t begin, uint32_t num) {
    if (generation == life_[row].generation) {
      writer_.note(row, generation);
      composed_.insert({row, generation});
    }
    b.rows.push_back(static_cast<int32_t>(row));
    b.generations.push_back(static_cast<int32_t>(generation));
    b.states.push_back(static_cast<uint8_t>(state));
    b.request.push_back(request);
    b.begin.push_back(begin);
    b.accept.push_back(static_cast<int32_t>(num));
    b.positions.push_back(generation == 0 ? -1 : int64_t{begin});
  }

  template <class T>
  [[nodiscard]] static tp::Tensor view(const std::vector<T> &of, tp::Dtype dtype,
                                       std::vector<int64_t> shape, std::vector<int64_t> stride) {
    tp::Tensor t;
    t.data = of.data();
    t.dtype = dtype;
    t.dtype_name = "of the test";
    t.ndim = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    std::copy(stride.begin(), stride.end(), t.stride);
    return t;
  }

  void save(const Batch &b) {
    while (!writer_.wait_for_space(kPatience))
      ;
    const auto n = static_cast<int64_t>(b.rows.size()),
               depth = static_cast<int64_t>(sizes_.max_draft_tokens),
               width = static_cast<int64_t>(width_of(sizes_, writer_.published()));
    // [candidate][row][token] in memory, [row][token][candidate] as a view: nothing is contiguous.
    std::vector<int64_t> tokens(n * depth, -1), ids(n * depth * width), ranks(n * depth);
    std::vector<float> logprobs(n * depth * width);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < b.accept[i]; ++d) {
        const uint64_t k = b.request[i], position = b.begin[i] + d;
        tokens[i * depth + d] = b.generations[i] == 0 ? -5 : token_of(k, position);
        ranks[i * depth + d] = rank_of(k, position);
        for (int64_t j = 0; j < width; ++j) {
          ids[(j * n + i) * depth + d] = id_of(k, position, j);
          logprobs[(j * n + i) * depth + d] = logprob_of(k, position, j);
        }
      }
    tp::SaveArguments a;
    a.rows = view(b.rows, tp::Dtype::int32, {n}, {1});
    a.generations = view(b.generations, tp::Dtype::int32, {n}, {1});
    a.states = view(b.states, tp::Dtype::uint8, {n}, {1});
    if (b.has_positions)
      a.positions = view(b.positions, tp::Dtype::int64, {n}, {1});
    const bool packed = depth > 1;
    if (packed)
      a.accept_num = view(b.accept, tp::Dtype::int32, {n}, {1});
    const auto cut = [&](std::vector<int64_t> dims) { // without the token dimension where it is 1
      if (!packed)
        dims.erase(dims.begin() + 1);
      return dims;
    };
    a.tokens = view(tokens, tp::Dtype::int64, cut({n, depth}), cut({depth, 1}));
    if (width != 0) {
      a.ranks = view(ranks, tp::Dtype::int64, cut({n, depth}), cut({depth, 1}));
      a.topk_ids = view(ids, tp::Dtype::int64, cut({n, depth, width}), cut({depth, 1, n * depth}));
      a.logprobs =
          view(logprobs, tp::Dtype::float32, cut({n, depth, width}), cut({depth, 1, n * depth}));
    }
    writer_.save(a);
  }

  Stage &stage_;
  const tp_sizes sizes_;
  tp::Writer writer_;
  test::Random random_;
  std::vector<Life> life_;
  std::set<Key> composed_, aborted_, finished_;
};

// ---------------------------------------------------------------- reader and decoders, in many
// lives

void run_reader(Stage &stage) {
  test::Random random(11);
  for (;;) {
    tp::Producer producer(stage.core);
    tp::SourceReader reader(stage.source, stage.core);
    for (uint64_t turns = 1 + random.below(200); turns > 0; --turns) {
      tp_step *slot = producer.claim(kPatience);
      if (slot == nullptr)
        continue;
      const bool stops =
          is_set(stage.reader_stops); // before the look: what is saved by then counts
      if (!reader.wait_for_step(kPatience)) {
        if (stops)
          return;
        continue;
      }
      reader.get_any(*slot);
      producer.publish();
      if (turns > 1) // the last one of each life ends between publish and release
        reader.release();
    }
  }
}

void run_decoder(Stage &stage, uint32_t k) {
  test::Random random(13 + k);
  for (;;) {
    tp::Decoder decoder(stage.core, k);
    // Lives of a turn or two: what one of them leaves unwritten is what the next but one reads.
    for (uint64_t calls = 1 + random.below(random.one_in(4) ? 100 : 3); calls > 0; --calls) {
      const bool stops = is_set(stage.decoders_stop);
      const auto turns = static_cast<uint32_t>(1 + random.below(5));
      if (decoder.run(turns, kPatience) == 0 && stops)
        return;
    }
  }
}

// ---------------------------------------------------------------- coordinator

class Coordinator {
public:
  explicit Coordinator(Stage &stage)
      : stage_(stage), core_(stage.core), book_(core_, stage.source), random_(17),
        live_(core_.sizes.max_num_seqs), generation_(core_.sizes.max_num_seqs, 0) {
    for (uint32_t b = 0; b < core_.sizes.num_blocks; ++b)
      free_blocks_.push_back(b);
  }

  void run() {
    for (;;) {
      const uint32_t seen = book_.events();
      for (uint32_t k = 0; k < core_.sizes.num_decoders; ++k)
        sweep(k);
      for (const auto &[number, slot] : book_.posted())
        admit(slot);
      for (uint32_t row = 0; row < live_.size(); ++row)
        if (live_[row].is_there && is_aborted(live_[row].request) && random_.one_in(4))
          abort(row);
      if (released_ == stage_.requests)
        return;
      // Only what this thread does by chance needs another turn without an event.
      const bool is_idle = !has_abort_to_do();
      CHECK(book_.wait(seen, is_idle ? kWatchdog : kPatience) || !is_idle,
            "the coordinator was not rung");
    }
  }

private:
  struct Live {
    bool is_there = false, is_marked = false;
    uint64_t request = 0;
    std::vector<uint32_t> blocks;
  };

  void admit(uint32_t slot) {
    const tp_command &c = core_.command(slot);
    CHECK(c.kind == kSubmit && c.num_blocks == blocks_of(c.argument), "command of slot %u", slot);
    uint32_t row = 0;
    while (row < live_.size() && live_[row].is_there)
      ++row;
    if (row == live_.size() || free_blocks_.size() < c.num_blocks)
      return; // it stays in its slot
    Live live{true, false, c.argument, {}};
    for (uint32_t b = 0; b < c.num_blocks; ++b) {
      live.blocks.push_back(free_blocks_.front());
      free_blocks_.pop_front();
    }
    const uint32_t generation = ++generation_[row];
    book_.log_choice(slot, row, generation, 0);
    CHECK(!book_.is_applied(slot), "row %u is applied before its admission", row);
    book_.admit(slot, row, generation, live.blocks);
    CHECK(book_.is_applied(slot), "row %u is not applied after its admission", row);
    const uint32_t first = live.blocks.empty() ? UINT32_MAX : live.blocks.front();
    CHECK(book_.blocks_of(row) == live.blocks, "the chain of row %u", row);
    book_.reply(slot, 0, row, generation, c.argument, first);
    live_[row] = std::move(live);
  }

  [[nodiscard]] bool has_abort_to_do() const {
    return std::any_of(live_.begin(), live_.end(), [](const Live &live) {
      return live.is_there && !live.is_marked && is_aborted(live.request);
    });
  }

  void abort(uint32_t row) {
    if (!live_[row].is_marked) // only what is saved from now on is the engine's answer
      book_.note_acknowledged(row, 0);
    live_[row].is_marked = true;
    book_.mark(row, generation_[row], TP_FINISH_ABORT); // again and again: it is idempotent
    book_.control(row, generation_[row], TP_CONTROL_ABORT);
  }

  void sweep(uint32_t k) {
    for (const tp::Ending &e : book_.endings(k)) {
      CHECK(e.row % core_.sizes.num_decoders == k && live_[e.row].is_there &&
                e.generation == generation_[e.row],
            "an ending of row %u life %u, which is not out", e.row, e.generation);
      if (e.terminal == TP_FINISH_NONE)
        continue; // acknowledged before the mark was met
      CHECK(e.terminal != TP_FINISH_ABORT || live_[e.row].is_marked, "row %u: an abort of nobody",
            e.row);
      if (e.terminal == TP_FINISH_ABORT && e.acknowledged != e.generation)
        continue;
      Live &live = live_[e.row];
      book_.release(e.row, e.generation, live.blocks);
      free_blocks_.insert(free_blocks_.end(), live.blocks.begin(), live.blocks.end());
      live = Live{};
      ++released_;
    }
  }

  Stage &stage_;
  const tp::Core &core_;
  tp::Book book_;
  test::Random random_;
  std::vector<Live> live_;
  std::vector<uint32_t> generation_;
  std::deque<uint32_t> free_blocks_;
  uint64_t released_ = 0;
};

// ---------------------------------------------------------------- client

class ClientThread {
public:
  explicit ClientThread(Stage &stage)
      : stage_(stage), core_(stage.core), client_(core_), random_(19),
        posted_(core_.sizes.command_slots, false), next_frame_(core_.sizes.num_decoders, 0),
        last_sequence_(core_.sizes.num_decoders, 0) {}

  void run() {
    while (finals_ < stage_.requests) {
      submit();
      if (!client_.wait_for_frame(kPatience))
        continue;
      // Several frames may be in hand; they go back in order.
      std::deque<uint32_t> in_hand;
      for (tp::Client::Head head = client_.first(); head.is_there; head = client_.first()) {
        read(head);
        client_.take(head.decoder);
        in_hand.push_back(head.decoder);
        if (random_.one_in(2))
          break;
      }
      for (const uint32_t k : in_hand)
        client_.release(k);
    }
    CHECK(open_.empty(), "%zu requests are open after all finals", open_.size());
    stage_.tokens_read = tokens_;
  }

private:
  using Key = std::pair<uint32_t, uint32_t>; // row, generation
  struct Open {
    uint64_t request;
    uint32_t emitted;
    uint32_t outputs = 0;        // that had tokens
    uint64_t first_token_ns = 0; // as the output that had it said
  };

  void submit() {
    for (uint32_t slot = 0; slot < posted_.size(); ++slot) {
      tp_command &c = core_.command(slot);
      if (posted_[slot]) {
        if (!tp::wait_for_reply(core_, slot, random_.one_in(4) ? 100'000 : 0))
          continue;
        admitted(c);
        tp::publish(c.state, static_cast<uint32_t>(TP_COMMAND_FREE));
        posted_[slot] = false;
      }
      if (submitted_ < stage_.requests && random_.one_in(2))
        post(slot, submitted_++);
    }
  }

  void post(uint32_t slot, uint64_t request) {
    const std::string id = "request-" + std::to_string(request);
    tp::CommandFields f;
    f.kind = kSubmit;
    f.argument = request;
    f.arrival_ns = 1'000'000 + request;
    f.max_tokens = limit_of(request);
    f.prompt_tokens = prompt_of(request);
    f.num_blocks = blocks_of(request);
    f.id = id;
    for (uint32_t e = 0; e < kNumEos; ++e)
      f.eos.push_back(static_cast<int32_t>(kFirstEos + e));
    tp::post(core_, slot, f);
    posted_[slot] = true;
  }

  void admitted(const tp_command &c) {
    CHECK(c.status == 0 && c.reply_row < core_.sizes.max_num_seqs && c.reply_value == c.argument,
          "the reply to request %llu", static_cast<unsigned long long>(c.argument));
    const Key key{c.reply_row, c.reply_generation};
    if (ended_.erase(key) == 0)
      open_[key] = Open{c.argument, 0};
    stage_.mailbox[c.reply_row].store(uint64_t{c.reply_generation} << 32 | c.argument,
                                      std::memory_order_relaxed);
  }

  void read(const tp::Client::Head &head) {
    const auto &f = core_.at<tp_frame>(head.offset);
    const tp::FrameColumns at(f.num_rows, f.num_tokens, f.width, f.num_drafts, f.num_finals,
                              core_.sizes.max_request_id_bytes, f.flags);
    CHECK(f.decoder == head.decoder && f.number == next_frame_[head.decoder]++,
          "frame %llu of decoder %u", static_cast<unsigned long long>(f.number), f.decoder);
    CHECK(f.sequence >= last_sequence_[f.decoder], "frame %llu goes back",
          static_cast<unsigned long long>(f.number));
    last_sequence_[f.decoder] = f.sequence;
    CHECK(f.bytes == at.end && f.num_rows > 0, "frame %llu",
          static_cast<unsigned long long>(f.number));
    CHECK(f.width == (f.num_tokens ? width_of(core_.sizes, f.source_sequence) : 0),
          "frame %llu has %u candidates", static_cast<unsigned long long>(f.number), f.width);
    CHECK(!f.has_slot || (f.saved_ns <= f.published_ns && f.published_ns <= f.committed_ns),
          "the stamps of frame %llu", static_cast<unsigned long long>(f.number));
    const auto *offsets = tp::column<uint32_t>(f, at.token_offsets);
    uint32_t finals = 0, firsts = 0;
    for (uint32_t i = 0; i < f.num_rows; ++i)
      read_row(f, at, i, offsets[i], offsets[i + 1], finals, firsts);
    CHECK(f.num_firsts == firsts && f.num_drafts == 0, "the firsts of frame %llu",
          static_cast<unsigned long long>(f.number));
    CHECK(offsets[0] == 0 && offsets[f.num_rows] == f.num_tokens && finals == f.num_finals,
          "the counts of frame %llu", static_cast<unsigned long long>(f.number));
    tokens_ += f.num_tokens;
  }

  void read_row(const tp_frame &f, const tp::FrameColumns &at, uint32_t i, uint32_t begin,
                uint32_t end, uint32_t &finals, uint32_t &firsts) {
    const Key key{tp::column<uint32_t>(f, at.row)[i], tp::column<uint32_t>(f, at.generation)[i]};
    const uint32_t reason = tp::column<uint8_t>(f, at.finish_reason)[i];
    CHECK(key.first % core_.sizes.num_decoders == f.decoder, "row %u of decoder %u", key.first,
          f.decoder);
    auto open = open_.find(key);
    if (open == open_.end()) { // an abort that overtook the reply
      CHECK(reason == TP_FINISH_ABORT && begin == end, "row %u life %u is not open", key.first,
            key.second);
      open = open_.emplace(key, Open{request_of(f, at, finals), 0}).first;
      ended_.insert(key);
    }
    Open &o = open->second;
    CHECK(tp::column<uint32_t>(f, at.send_idx)[i] == o.emitted, "request %llu goes on at %u of %u",
          static_cast<unsigned long long>(o.request), tp::column<uint32_t>(f, at.send_idx)[i],
          o.emitted);
    const uint64_t first_token_ns = tp::column<uint64_t>(f, at.first_token_ns)[i];
    if (o.emitted == 0 && begin != end) {
      ++firsts;
      o.first_token_ns = f.saved_ns;
    }
    CHECK(first_token_ns == o.first_token_ns, "the first token of request %llu",
          static_cast<unsigned long long>(o.request));
    o.outputs += begin != end;
    for (uint32_t m = begin; m < end; ++m)
      read_token(f, at, m, o.request, o.emitted++);
    CHECK(o.emitted <= tokens_of(o.request), "request %llu goes on after its end",
          static_cast<unsigned long long>(o.request));
    if (reason == TP_FINISH_NONE) {
      CHECK(begin != end, "an output of nothing");
      return;
    }
    read_final(f, at, i, reason, o, finals++);
    open_.erase(open);
  }

  void read_token(const tp_frame &f, const tp::FrameColumns &at, uint32_t m, uint64_t k,
                  uint32_t position) {
    CHECK(tp::column<int32_t>(f, at.token_ids)[m] == token_of(k, position),
          "token %u of request %llu", position, static_cast<unsigned long long>(k));
    for (uint32_t j = 0; j < f.width; ++j)
      CHECK(tp::column<int32_t>(f, at.topk_ids)[m * f.width + j] == id_of(k, position, j) &&
                std::equal_to<>{}(tp::column<float>(f, at.topk_logprobs)[m * f.width + j],
                                  logprob_of(k, position, j)),
            "candidate %u of token %u of request %llu", j, position,
            static_cast<unsigned long long>(k));
    CHECK(f.width == 0 || tp::column<int32_t>(f, at.ranks)[m] == rank_of(k, position),
          "the rank of token %u of request %llu", position, static_cast<unsigned long long>(k));
  }

  [[nodiscard]] std::string id_of_final(const tp_frame &f, const tp::FrameColumns &at, uint32_t n) {
    const tp_final &final = tp::column<tp_final>(f, at.finals)[n];
    return {tp::column<char>(f, at.ids) + uint64_t{n} * core_.sizes.max_request_id_bytes,
            final.id_bytes};
  }

  [[nodiscard]] uint64_t request_of(const tp_frame &f, const tp::FrameColumns &at, uint32_t n) {
    return std::stoull(id_of_final(f, at, n).substr(std::strlen("request-")));
  }

  void read_final(const tp_frame &f, const tp::FrameColumns &at, uint32_t i, uint32_t reason,
                  const Open &o, uint32_t n) {
    const tp_final &final = tp::column<tp_final>(f, at.finals)[n];
    const uint64_t k = o.request;
    CHECK(final.index == i && id_of_final(f, at, n) == "request-" + std::to_string(k),
          "the final of request %llu", static_cast<unsigned long long>(k));
    CHECK(final.num_tokens == o.emitted && final.prompt_tokens == prompt_of(k) &&
              final.arrival_ns == 1'000'000 + k && final.first_token_ns == o.first_token_ns,
          "the facts of request %llu", static_cast<unsigned long long>(k));
    const bool speculates = core_.sizes.max_draft_tokens > 1;
    uint64_t heads = 0;
    for (const uint32_t head : final.heads)
      heads += head;
    CHECK(final.spec_steps == (speculates ? o.outputs : 0) &&
              heads == (speculates ? o.emitted : 0) && final.heads[0] == final.spec_steps,
          "the accepted tokens of request %llu", static_cast<unsigned long long>(k));
    if (reason == TP_FINISH_ABORT)
      CHECK(is_aborted(k) && o.emitted < tokens_of(k), "request %llu was not to be aborted",
            static_cast<unsigned long long>(k));
    else
      CHECK(reason == reason_of(k) && o.emitted == tokens_of(k),
            "request %llu ended by %u after %u tokens", static_cast<unsigned long long>(k), reason,
            o.emitted);
    ++finals_;
  }

  Stage &stage_;
  const tp::Core &core_;
  tp::Client client_;
  test::Random random_;
  std::vector<bool> posted_;
  std::vector<uint64_t> next_frame_, last_sequence_;
  std::map<Key, Open> open_;
  std::set<Key> ended_;
  uint64_t submitted_ = 0, finals_ = 0, tokens_ = 0;
};

// ---------------------------------------------------------------- what must be left

[[nodiscard]] tp_counters operator+(tp_counters left, const tp_counters &right) {
  auto *to = reinterpret_cast<uint64_t *>(&left);
  for (size_t i = 0; i < sizeof(left) / 8; ++i)
    to[i] += reinterpret_cast<const uint64_t *>(&right)[i];
  return left;
}

[[nodiscard]] uint64_t dropped(const tp_counters &c) {
  return c.dropped_padded + c.dropped_unadmitted + c.dropped_stale + c.dropped_early +
         c.dropped_finished + c.dropped_repeated + c.dropped_bad_row + c.dropped_chunk +
         c.dropped_adapter + c.dropped_prefill + c.dropped_shielded + c.dropped_warm_up;
}

// Returns the sum of the decoders' counters.
[[nodiscard]] tp_counters check_the_books(const Stage &stage) {
  const tp::Core &core = stage.core;
  tp_counters sum{};
  for (uint32_t k = 0; k < core.sizes.num_decoders; ++k) {
    const tp_decoder &decoder = core.decoder(k);
    const tp_counters &of = decoder.commit[decoder.turn & 1].counters;
    CHECK(of.steps == tp::get(stage.source.head().published), "decoder %u has missed a step", k);
    sum = sum + of;
  }
  CHECK(sum.tokens_seen == sum.tokens_delivered + dropped(sum), "tokens are lost or counted twice");
  CHECK(sum.tokens_seen == stage.saved_tokens, "not every saved token was seen");
  CHECK(sum.tokens_delivered == stage.tokens_read, "not every delivered token was read");
  CHECK(sum.finals_stop + sum.finals_length + sum.finals_abort == stage.requests,
        "requests and finals differ");
  CHECK(sum.completions == sum.finals_stop + sum.finals_length, "completions and results differ");
  uint64_t heads = 0;
  for (const uint64_t head : sum.spec_heads)
    heads += head;
  CHECK(heads == (core.sizes.max_draft_tokens > 1 ? sum.tokens_delivered : 0),
        "accepted tokens and delivered ones differ");
  CHECK(sum.draft_rows_seen + sum.prompt_rows + sum.poison_slots + sum.dropped_chunk +
                sum.dropped_adapter + sum.dropped_prefill + sum.dropped_shielded +
                sum.dropped_warm_up ==
            0,
        "what was never saved was seen");
  CHECK(sum.dropped_bad_row + sum.bad_rows + sum.bad_width + sum.bad_tokens + sum.bad_bytes +
                sum.bad_flags + sum.bad_message ==
            0,
        "a good step was refused");
  for (uint32_t row = 0; row < core.sizes.max_num_seqs; ++row)
    CHECK(core.admitted(row) == core.freed(row) && core.admitted(row) > 1,
          "row %u is not back or was given out once only", row);
  for (uint32_t b = 0; b < core.sizes.num_blocks; ++b)
    CHECK(core.block(b).owner == 0, "block %u is not back", b);
  return sum;
}

[[nodiscard]] tp_counters every_token_arrives_once(uint32_t max_draft_tokens, uint32_t ring_slots,
                                                   uint64_t num_requests) {
  tp_sizes sizes = test::small_sizes();
  sizes.num_decoders = 2;
  sizes.max_num_seqs = 7;
  sizes.max_draft_tokens = max_draft_tokens;
  sizes.ring_slots = ring_slots;
  sizes.output_slots = 2;
  sizes.source_slots = 2;
  sizes.num_blocks = 9;
  Stage stage(sizes, num_requests);
  std::thread engine([&] { Engine(stage).run(); });
  std::thread reader([&] { run_reader(stage); });
  std::vector<std::thread> decoders;
  for (uint32_t k = 0; k < sizes.num_decoders; ++k)
    decoders.emplace_back([&stage, k] { run_decoder(stage, k); });
  std::thread coordinator([&] { Coordinator(stage).run(); });
  ClientThread(stage).run();
  coordinator.join();
  stage.engine_stops.store(true, std::memory_order_relaxed);
  engine.join();
  stage.reader_stops.store(true, std::memory_order_relaxed);
  reader.join();
  stage.decoders_stop.store(true, std::memory_order_relaxed);
  for (std::thread &decoder : decoders)
    decoder.join();
  return check_the_books(stage);
}

} // namespace

int main() {
  const tp_counters sum = every_token_arrives_once(1, 4, 3'000) +
                          every_token_arrives_once(1, 2, 1'000) +
                          every_token_arrives_once(3, 4, 3'000);
  std::printf("pipeline: %llu tokens seen, %llu delivered, %llu dropped\n",
              static_cast<unsigned long long>(sum.tokens_seen),
              static_cast<unsigned long long>(sum.tokens_delivered),
              static_cast<unsigned long long>(dropped(sum)));
  // Without these the runs have shown less than they claim.
  CHECK(sum.finals_stop && sum.finals_length && sum.finals_abort && sum.acknowledgements,
        "a way to end was not taken");
  CHECK(sum.dropped_padded && sum.dropped_unadmitted && sum.dropped_stale && sum.dropped_finished &&
            sum.dropped_repeated,
        "a reason to drop did not occur");
}
