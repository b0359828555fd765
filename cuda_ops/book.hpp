// book.hpp: the coordinator's stores: admissions, marks, blocks, replies. The policy (who gets
// which row) is Python; the order of the stores, which a kill must not be able to break, is here.
#pragma once

#include <utility>
#include <vector>

#include "client.hpp"
#include "output_ops.hpp"
#include "sysv_wire.hpp"

namespace tp {

struct Ending {
  uint32_t row, generation, terminal, acknowledged;
  uint64_t num_acknowledged;
  uint64_t idle_at;
};

// Design: the coordinator is the only writer of everything that this class stores.
class Book {
public:
  Book(const Core &core, const SourceMap &source) noexcept : core_(core), source_(source) {}

  // (number, slot) of each command to do, oldest first.
  [[nodiscard]] std::vector<std::pair<uint64_t, uint32_t>> posted() const {
    // Numbers are copied first: a client that changes one meanwhile must not upset the sort.
    std::vector<std::pair<uint64_t, uint32_t>> found;
    for (uint32_t i = 0; i < core_.sizes.command_slots; ++i)
      // SYNC POINT: command - acquire: the command's fields are there
      if (observe(core_.command(i).state) == TP_COMMAND_POSTED)
        found.emplace_back(get(core_.command(i).number), i);
    std::sort(found.begin(), found.end());
    return found;
  }

  // The choice goes into the command's slot before the first effect, so that a successor finishes
  // this command and no other.
  void log_choice(uint32_t i, uint32_t row, uint32_t generation, uint64_t barrier) noexcept {
    if (barrier != 0)
      put(core_.command(i).argument, barrier);
    publish(core_.command(i).choice, uint64_t{row} << 32 | generation);
    fault::point("submit.choice_logged");
  }

  // Whether the logged choice of slot i has been published already.
  [[nodiscard]] bool is_applied(uint32_t i) const noexcept {
    const tp_command &c = core_.command(i);
    const auto row = static_cast<uint32_t>(c.choice >> 32),
               generation = static_cast<uint32_t>(c.choice);
    return generation != 0 && row < core_.sizes.max_num_seqs &&
           observe(core_.admitted(row)) == generation &&
           core_.admission(row).command_number == c.number;
  }

  // Blocks; fields and from_sequence; generation (this publishes); the engine's control word.
  void admit(uint32_t i, uint32_t row, uint32_t generation,
             const std::vector<uint32_t> &blocks) noexcept {
    const tp_command &c = core_.command(i);
    own_blocks(row, generation, blocks);
    fault::point("submit.blocks_owned");
    tp_admission &a = core_.admission(row);
    a.command_number = c.number;
    a.arrival_ns = c.arrival_ns;
    a.max_tokens = c.max_tokens;
    a.num_emitted = c.num_emitted;
    a.prompt_tokens = c.prompt_tokens;
    a.preprocess_end_ns = c.preprocess_end_ns;
    a.inference_start_ns = c.inference_start_ns;
    a.num_chunks = c.num_chunks;
    a.flags = c.flags;
    a.phase = TP_PHASE_RUNNING;
    a.acknowledged_before = 0;
    put(a.acknowledge_from, uint64_t{UINT64_MAX});
    a.handed_over = 0;
    a.num_eos = std::min(c.num_eos, core_.sizes.max_eos_ids);
    a.id_bytes = std::min(c.id_bytes, core_.sizes.max_request_id_bytes);
    a.first_block = blocks.empty() ? UINT32_MAX : blocks.front();
    a.num_blocks = static_cast<uint32_t>(blocks.size());
    std::memcpy(core_.id(row), core_.command_id(i), a.id_bytes);
    std::memcpy(core_.eos(row), core_.command_eos(i), uint64_t{a.num_eos} * 4);
    // Where tokens begin to be the newcomer's. No order of loading a queue's length and its
    // reader's cursor would be right: there a barrier that was sent before tells.
    const bool is_queue = source_.head().kind == TP_SOURCE_SYSV;
    a.from_sequence = is_queue ? 0 : published_steps(source_);
    a.from_barrier = is_queue ? c.argument : 0;
    fault::point("submit.fields_stored");
    // SYNC POINT: admission - release: a decoder that sees the generation sees the fields
    publish(core_.admitted(row), uint64_t{generation});
    fault::point("submit.published");
    open_control(row, generation);
    fault::point("submit.control_stored");
  }

  // SYNC POINT: control word - release: one word, nothing behind it
  void open_control(uint32_t row, uint32_t generation) noexcept {
    if (observe(source_.control(row)) >> 32 < generation)
      publish(source_.control(row), uint64_t{generation} << 32);
  }

  void control(uint32_t row, uint32_t generation, uint32_t bits) noexcept {
    const uint64_t word = observe(source_.control(row));
    if (word >> 32 == generation)
      publish(source_.control(row), word | bits);
  }

  // Tells the engine to let go of the row for a while. `before`: the acknowledgements of this life
  // so far, stored first, so that only a later one counts. A decode instance's row is shielded too.
  void preempt(uint32_t row, uint32_t generation, uint64_t before, bool shield) noexcept {
    tp_admission &a = core_.admission(row);
    note_acknowledged(row, before);
    put(a.phase, static_cast<uint32_t>(TP_PHASE_PREEMPTING));
    fault::point("preempt.phase_stored");
    if (shield)
      mark(row, generation, TP_MARK_SHIELD);
    const uint64_t word = observe(source_.control(row));
    if (word >> 32 == generation)
      publish(source_.control(row), (word + (uint64_t{1} << 8)) | TP_CONTROL_PREEMPT);
  }

  void set_preempted(uint32_t row) noexcept {
    put(core_.admission(row).phase, static_cast<uint32_t>(TP_PHASE_PREEMPTED));
  }

  // The same life goes on: the engine may run the row again. `before` as in preempt().
  void resume(uint32_t row, uint32_t generation, uint64_t before) noexcept {
    put(core_.admission(row).acknowledged_before, before);
    const uint64_t word = observe(source_.control(row));
    if (word >> 32 == generation)
      publish(source_.control(row), word & ~uint64_t{TP_CONTROL_PREEMPT});
    if (get(core_.mark(row).word) == (uint64_t{generation} << 8 | TP_MARK_SHIELD))
      publish(core_.mark(row).word, uint64_t{0});
    put(core_.admission(row).acknowledge_from, uint64_t{UINT64_MAX});
    put(core_.admission(row).phase, static_cast<uint32_t>(TP_PHASE_RUNNING));
  }

  // The engine is told now: only acknowledgements beyond `before`, saved from now on, are its
  // answer.
  void note_acknowledged(uint32_t row, uint64_t before) noexcept {
    put(core_.admission(row).acknowledged_before, before);
    put(core_.admission(row).acknowledge_from, published_steps(source_));
  }

  void set_handed_over(uint32_t row) noexcept { put(core_.admission(row).handed_over, 1u); }

  // Blocks of the row's admission in their order; one that names it but is not in its chain belongs
  // to a growth that was never finished.
  [[nodiscard]] std::vector<uint32_t> blocks_of(uint32_t row) const {
    std::vector<uint32_t> found;
    const tp_admission &a = core_.admission(row);
    uint32_t b = get(a.first_block);
    for (uint32_t i = 0; i < get(a.num_blocks) && b < core_.sizes.num_blocks; ++i) {
      found.push_back(b);
      b = get(core_.block(b).next);
    }
    return found;
  }

  void disown(uint32_t block) noexcept { publish(core_.block(block).owner, uint64_t{0}); }

  // Gives more blocks to a running request: owned first, then chained behind `last`.
  void grow(uint32_t row, uint32_t generation, const std::vector<uint32_t> &blocks,
            uint32_t last) noexcept {
    own_blocks(row, generation, blocks);
    fault::point("grow.blocks_owned");
    tp_admission &a = core_.admission(row);
    if (last == UINT32_MAX)
      put(a.first_block, blocks.front());
    else
      put(core_.block(last).next, blocks.front());
    put(a.num_blocks, a.num_blocks + static_cast<uint32_t>(blocks.size()));
    fault::point("grow.chained");
  }

  // Ends the row's generation at the decoder: everything saved from now on is not delivered. A mark
  // that stands is not moved: tokens between the two would be delivered or not by chance.
  void mark(uint32_t row, uint32_t generation, uint32_t reason) noexcept {
    tp_mark &mark = core_.mark(row);
    const uint64_t word = get(mark.word);
    const bool is_shielded = word == (uint64_t{generation} << 8 | TP_MARK_SHIELD);
    if (word >> 8 != generation || (is_shielded && reason != TP_MARK_SHIELD)) {
      if (!is_shielded) // what the shield holds back stays held back
        put(mark.from_sequence, published_steps(source_));
      fault::point("mark.from_stored");
      // SYNC POINT: mark - release: its from_sequence is there
      publish(mark.word, uint64_t{generation} << 8 | reason);
    }
    fault::point("mark.published");
    count_event(core_.role(TP_ROLE_DECODER + row % core_.sizes.num_decoders).bell);
  }

  // Blocks first, then the row: a row that is free owns nothing.
  void release(uint32_t row, uint32_t generation, const std::vector<uint32_t> &blocks) noexcept {
    for (const uint32_t b : blocks)
      publish(core_.block(b).owner, uint64_t{0});
    fault::point("release.blocks_freed");
    control(row, generation, TP_CONTROL_FINISHED);
    publish(core_.mark(row).word, uint64_t{0});
    fault::point("release.mark_cleared");
    publish(core_.freed(row), uint64_t{generation});
    fault::point("release.row_freed");
  }

  // `first_block`: where the chain of blocks begins that the reply is about.
  void reply(uint32_t i, uint32_t status, uint32_t row, uint32_t generation, uint64_t value,
             uint32_t first_block) noexcept {
    tp_command &c = core_.command(i);
    c.status = status;
    c.reply_row = row;
    c.reply_generation = generation;
    c.reply_first_block = first_block;
    c.reply_value = value;
    fault::point("reply.fields_stored");
    // SYNC POINT: reply - release: the reply's fields are there
    publish(c.state, static_cast<uint32_t>(TP_COMMAND_DONE));
    futex_wake(c.state);
  }

  // Rows of decoder k that have ended or were acknowledged and are not yet given back. Safe to call
  // again: it reads levels, not events.
  [[nodiscard]] std::vector<Ending> endings(uint32_t k) const {
    std::vector<Ending> found;
    const tp_decoder &decoder = core_.decoder(k);
    for (uint32_t row = k; row < core_.sizes.max_num_seqs; row += core_.sizes.num_decoders) {
      const auto generation = static_cast<uint32_t>(get(core_.admitted(row)));
      if (generation == get(core_.freed(row)))
        continue;
      for (;;) {
        const uint64_t turn = observe(decoder.turn);
        const tp_progress &p = core_.progress(turn & 1, row);
        const uint32_t current = get(p.generation);
        const Ending e{row,
                       generation,
                       get(p.terminal),
                       get(p.acknowledged),
                       get(p.num_acknowledged),
                       get(p.idle_at)};
        end_read();
        if (get(decoder.turn) != turn)
          continue;
        if (current == generation && (e.terminal != TP_FINISH_NONE || e.acknowledged == generation))
          found.push_back(e);
        break;
      }
    }
    return found;
  }

  // Sleeps until somebody counts an event at the coordinator's bell, seen since `seen`.
  [[nodiscard]] bool wait(uint32_t seen, const Patience &patience) noexcept {
    tp_bell &bell = core_.role(TP_ROLE_COORDINATOR).bell;
    return wait_for(bell, TP_WAIT_INPUT, patience,
                    [&]() noexcept { return observe(bell.bell) != seen; });
  }
  [[nodiscard]] uint32_t events() const noexcept {
    return observe(core_.role(TP_ROLE_COORDINATOR).bell.bell);
  }
  void ring() noexcept { count_event(core_.role(TP_ROLE_COORDINATOR).bell); }

  // Sends a barrier through the source's queue and returns its number; 0: it cannot be
  // sent now.
  // What was sent before it is received before it.
  [[nodiscard]] uint64_t send_barrier() {
    tp_queue &queue = source_.head().queue;
    const auto own = static_cast<uint32_t>(getpid());
    if (get(queue.barrier_pid) != own) { // the queue's last sender is not taken for the engine
      put(queue.former_pid, get(queue.barrier_pid));
      put(queue.barrier_pid, own);
    }
    const uint64_t number = observe(queue.barrier_sent) + 1;
    publish(queue.barrier_sent, number); // else its reader would take it for nobody's
    fault::point("barrier.number_stored");
    const int64_t type = sysv::barrier_type(number);
    try {
      return sysv::Queue(queue.key, get(queue.id)).send(&type, 0, false) ? number : 0;
    } catch (const sysv::SysvError &e) {
      if (e.code != EINVAL && e.code != EIDRM)
        throw;
      return 0; // somebody has removed the queue: its reader makes it again
    }
  }
  [[nodiscard]] bool has_passed(uint64_t barrier) const noexcept {
    return observe(source_.head().queue.barrier_seen) >= barrier;
  }
  // Messages received before the last barrier that was met: at least those sent before any earlier
  // one, and no more than were sent by now.
  [[nodiscard]] uint64_t barrier_cursor() const noexcept {
    return observe(source_.head().queue.barrier_cursor);
  }

private:
  // Each block names its owner before the admission that owns it is published.
  void own_blocks(uint32_t row, uint32_t generation, const std::vector<uint32_t> &blocks) noexcept {
    for (size_t b = 0; b < blocks.size(); ++b) {
      put(core_.block(blocks[b]).next,
          b + 1 < blocks.size() ? blocks[b + 1] : static_cast<uint32_t>(UINT32_MAX));
      publish(core_.block(blocks[b]).owner, uint64_t{row} << 32 | generation);
    }
  }

  const Core &core_;
  const SourceMap &source_;
};

} // namespace tp
