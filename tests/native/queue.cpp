// Untrusted messages of a System V queue: a valid message of each variant and generation is packed
// and spoilt, and the reader that finds it in hand must make a step of it or refuse it. Whatever
// the bytes are: no access outside of what the slot holds, no token lost or counted twice, and the
// next good message right to the last bit.
//
//   queue [messages, 40,000 if not given] [seed, 1 if not given]
//
// The message is put where msgrcv would have put it, so that no queue and no raised limit is
// needed: a successor finds it in hand.
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "arena.hpp"
#include "client.hpp"
#include "decoder.hpp"
#include "sysv_source.hpp"

namespace {

using test::mix;
using ull = unsigned long long;
using namespace tp::sysv;

constexpr tp::Patience no_wait{0, 0};
constexpr uint32_t rows = 7, drafts = 4, top = 3;
constexpr unsigned hang_s = 60; // for a thousand messages

struct Totals {
  uint64_t messages = 0, good = 0, tokens = 0, bad[TP_BAD_REASONS] = {};
};

[[nodiscard]] tp_sizes sizes_for(Variant v) {
  tp_sizes s = test::small_sizes();
  s.max_num_seqs = rows;
  s.max_draft_tokens = drafts;
  s.top_logprobs = top;
  s.num_decoders = 2;
  s.ring_slots = 2;
  s.raw_bytes = raw_message_bytes(v);
  return s;
}

[[nodiscard]] int32_t token_of(uint64_t n, uint64_t row, uint64_t j) {
  return static_cast<int32_t>(100 + mix(n * 64 + row * 8 + j) % 100'000);
}

class World {
public:
  World(Variant variant, Generation generation, uint64_t seed)
      : variant_(variant), generation_(generation), arena_(sizes_for(variant)), core_(arena_.core),
        source_(arena_.source), random_(seed), producer_(core_),
        reader_(core_, source_, variant, generation, Queue(1, 0)), client_(core_),
        message_(payload_bytes(variant)) {
    core_.header().options.source = source_.head().kind = TP_SOURCE_SYSV;
    for (uint32_t k = 0; k < core_.sizes.num_decoders; ++k)
      decoders_.push_back(std::make_unique<tp::Decoder>(core_, k));
  }

  void turn(Totals &t) {
    for (uint32_t row = 0; row < rows; ++row) // whoever has ended is followed by a new life
      if (has_ended(row))
        admit(row);
    ++number_;
    pack();
    const bool is_good = random_.one_in(3);
    if (!is_good)
      spoil();
    const uint64_t cursor = producer_.cursor();
    tp_step &slot = *check(producer_.try_claim());
    int64_t *raw = tp::column<int64_t>(slot, tp::raw_offset(core_.sizes));
    raw[0] = is_good || !random_.one_in(40) ? 1 : static_cast<int64_t>(random_.next() >> 2);
    std::memcpy(raw + 1, message_.data(), message_.size());
    // Room for one more word, and what says that nothing stands in it.
    std::memset(reinterpret_cast<uint8_t *>(raw + 1) + message_.size(),
                is_good || !random_.one_in(50) ? 0xa5 : 0, sizeof(int64_t));
    source_.head().queue.claim = cursor + 1;
    if (!reader_.get_output(slot, cursor, false)) {
      CHECK(raw[0] == 0, "a barrier is let go of");
      return;
    }
    ++t.messages;
    judge(slot, is_good);
    CHECK(slot.bad < TP_BAD_REASONS, "reason %u", slot.bad);
    ++t.bad[slot.bad];
    t.good += is_good;
    producer_.publish();
    deliver(t, slot, is_good);
  }

private:
  template <class T> [[nodiscard]] static T *check(T *there) {
    CHECK(there != nullptr, "the ring is full");
    return there;
  }

  [[nodiscard]] bool has_ended(uint32_t row) const {
    const uint64_t turn = tp::observe(core_.decoder(row % core_.sizes.num_decoders).turn);
    const tp_progress &p = core_.progress(turn & 1, row);
    return core_.admitted(row) == 0 ||
           (p.generation == core_.admitted(row) && p.terminal != TP_FINISH_NONE);
  }

  void admit(uint32_t row) {
    tp_admission &a = core_.admission(row);
    a = {};
    a.id_bytes = 1;
    a.acknowledge_from = UINT64_MAX;
    *core_.id(row) = 'r';
    tp::publish(core_.freed(row), core_.admitted(row));
    tp::publish(core_.admitted(row), core_.admitted(row) + 1);
  }

  // All rows running; ids count up from the token, so that each column is told from its neighbours.
  void pack() {
    std::memset(message_.data(), 0, message_.size());
    const bool is_packed = generation_ == Generation::g4;
    switch (variant_) {
    case Variant::plain: {
      auto &m = *reinterpret_cast<PlainMessage *>(message_.data());
      m.words[0] = 1, m.words[1] = rows;
      for (uint32_t i = 0; i < rows; ++i)
        m.words[2 + i] = token_of(number_, i, 0);
      break;
    }
    case Variant::topk: {
      auto &m = *reinterpret_cast<TopkMessage *>(message_.data());
      const uint32_t stride = is_packed ? top + 1 : 21;
      m.words[0] = 1, m.words[1] = static_cast<int32_t>(rows | (is_packed ? stride << 16 : 0));
      for (uint32_t i = 0; i < rows; ++i)
        for (uint32_t j = 0; j < stride; ++j) {
          m.words[2 + i * stride + j] = token_of(number_, i, 0) + static_cast<int32_t>(j);
          m.scores[i * stride + j] = -static_cast<float>(j);
        }
      break;
    }
    case Variant::speculate: {
      auto &m = *reinterpret_cast<SpeculateMessage *>(message_.data());
      m.words[0] = 1, m.words[1] = rows;
      for (uint32_t i = 0; i < rows; ++i) {
        m.words[2 + i] = static_cast<int32_t>(1 + i % drafts);
        for (uint32_t j = 0; j < wire_draft_tokens; ++j)
          m.words[2 + most_speculate_rows + i * wire_draft_tokens + j] = token_of(number_, i, j);
      }
      break;
    }
    case Variant::speculate_topk: {
      auto &m = *reinterpret_cast<SpeculateTopkMessage *>(message_.data());
      m.words[0] = 1, m.words[1] = TP_MESSAGE_TARGET | (is_packed ? (top + 1) << 8 : 0);
      m.words[2] = rows;
      for (uint32_t i = 0; i < rows; ++i) {
        m.words[3 + i] = static_cast<int32_t>(1 + i % drafts);
        for (uint32_t j = 0; j < wire_draft_tokens; ++j)
          for (uint32_t c = 0; c < wire_columns; ++c)
            m.rows[i].tokens[j * wire_columns + c] =
                token_of(number_, i, j) + static_cast<int32_t>(c);
      }
      break;
    }
    }
  }

  // Words at the front, where the counts are, more often than those behind.
  void spoil() {
    auto *words = reinterpret_cast<int32_t *>(message_.data());
    const uint64_t most = message_.size() / 4;
    for (uint64_t left = 1 + random_.below(6); left > 0; --left) {
      const uint64_t at = random_.below(random_.one_in(2) ? 12 : most);
      constexpr int32_t edges[] = {
          -1,  -2,  -3,  -9,        0,         1, 6, 7,           21,          256,
          257, 512, 513, INT32_MIN, INT32_MAX, 3, 4, 3 | 21 << 8, 7 | 4 << 16, 7 | 22 << 16};
      words[at] = random_.one_in(2) ? edges[random_.below(std::size(edges))]
                                    : static_cast<int32_t>(random_.next());
    }
  }

  void judge(const tp_step &slot, bool is_good) const {
    if (is_good)
      CHECK(slot.bad == TP_BAD_NONE, "a good message was refused: %u", slot.bad);
    if (slot.bad != TP_BAD_NONE) {
      CHECK(slot.num_rows == 0 && slot.num_tokens == 0 && slot.body_bytes == 0, "a refused step");
      return;
    }
    CHECK(slot.num_rows <= rows && slot.num_tokens <= rows * drafts && slot.width <= top + 1,
          "%u rows, %u tokens, %u columns", slot.num_rows, slot.num_tokens, slot.width);
    const tp::StepColumns at(slot.num_rows, slot.num_tokens, slot.width, slot.flags);
    CHECK(at.end <= tp::raw_offset(core_.sizes), "the columns reach the message");
    CHECK(at.end - sizeof(tp_step) == slot.body_bytes, "%u bytes", slot.body_bytes);
    CHECK(slot.flags & TP_STEP_UNSTAMPED, "flags %u", slot.flags);
    if (is_good)
      CHECK(slot.num_tokens == (variant_ < Variant::speculate ? rows : 1 + 2 + 3 + 4 + 1 + 2 + 3),
            "%u tokens", slot.num_tokens);
  }

  void deliver(Totals &t, const tp_step &slot, bool is_good) {
    uint64_t got = 0, seen = 0, delivered = 0, dropped = 0;
    for (uint32_t k = 0; k < decoders_.size(); ++k) {
      while (decoders_[k]->run(8, no_wait) != 0)
        ;
      const tp_counters &c =
          core_.decoder(k).commit[tp::observe(core_.decoder(k).turn) & 1].counters;
      seen += c.tokens_seen, delivered += c.tokens_delivered;
      dropped += c.dropped_padded + c.dropped_unadmitted + c.dropped_early + c.dropped_finished +
                 c.dropped_repeated + c.dropped_bad_row;
    }
    for (tp::Client::Head head; (head = client_.first()).is_there;) {
      const auto &frame = core_.at<tp_frame>(head.offset);
      const tp::FrameColumns at(frame.num_rows, frame.num_tokens, frame.width, frame.num_drafts,
                                frame.num_finals, core_.sizes.max_request_id_bytes, frame.flags);
      const auto *row = tp::column<uint32_t>(frame, at.row),
                 *offset = tp::column<uint32_t>(frame, at.token_offsets);
      const auto *token = tp::column<int32_t>(frame, at.token_ids),
                 *ids = tp::column<int32_t>(frame, at.topk_ids);
      for (uint32_t i = 0; is_good && i < frame.num_rows; ++i)
        for (uint32_t j = offset[i]; j < offset[i + 1]; ++j) {
          const int32_t due = token_of(number_, row[i], j - offset[i]);
          CHECK(token[j] == due, "token %d of row %u is %d", due, row[i], token[j]);
          for (uint32_t c = 0; c < frame.width; ++c)
            CHECK(ids[j * frame.width + c] == due + static_cast<int32_t>(c), "column %u", c);
        }
      got += frame.num_tokens;
      client_.take(head.decoder);
      client_.release(head.decoder);
    }
    CHECK(seen == delivered + dropped, "%llu seen, %llu delivered, %llu dropped", ull{seen},
          ull{delivered}, ull{dropped});
    CHECK(seen == slot.saved_tokens, "%llu seen of %llu", ull{seen}, ull{slot.saved_tokens});
    if (is_good)
      CHECK(got == slot.num_tokens, "%llu of %u tokens", ull{got}, slot.num_tokens);
    t.tokens += got;
  }

  const Variant variant_;
  const Generation generation_;
  const test::Arena arena_;
  const tp::Core &core_;
  const tp::SourceMap &source_;
  test::Random random_;
  tp::Producer producer_;
  SysvReader reader_;
  tp::Client client_;
  std::vector<std::unique_ptr<tp::Decoder>> decoders_;
  std::vector<uint8_t> message_;
  uint64_t number_ = 0;
};

} // namespace

int main(int argc, char **argv) {
  const uint64_t messages = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 40'000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::vector<std::unique_ptr<World>> worlds;
  for (const Variant v :
       {Variant::plain, Variant::topk, Variant::speculate, Variant::speculate_topk})
    for (const Generation g : {Generation::g3, Generation::g4})
      worlds.push_back(std::make_unique<World>(v, g, seed * 8 + worlds.size()));
  Totals t;
  for (uint64_t i = 0; t.messages < messages; ++i) {
    if (i % 1000 == 0)
      alarm(hang_s); // a hang ends the program by its signal
    worlds[i % worlds.size()]->turn(t);
  }
  alarm(0);
  std::printf("queue: %llu messages, %llu good, %llu refused (rows %llu, bytes %llu, flags %llu), "
              "%llu tokens\n",
              ull{t.messages}, ull{t.good}, ull{t.messages - t.bad[TP_BAD_NONE]},
              ull{t.bad[TP_BAD_ROWS]}, ull{t.bad[TP_BAD_BYTES]}, ull{t.bad[TP_BAD_FLAGS]},
              ull{t.tokens});
  // Without these the run has shown less than it claims.
  if (messages >= 10'000)
    CHECK(t.bad[TP_BAD_ROWS] && t.bad[TP_BAD_BYTES] && t.bad[TP_BAD_FLAGS], "a reason is missing");
}
