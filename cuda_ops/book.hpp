// book.hpp: the coordinator's stores: admissions, marks, blocks, replies. The policy (who gets
// which row) is Python; the order of the stores, which a kill must not be able to break, is here.
#pragma once

#include <vector>

#include "client.hpp"
#include "output_ops.hpp"

namespace tp {

struct Ending {
  uint32_t row, generation, terminal, acknowledged;
  uint64_t num_acknowledged;
  uint32_t emitted;
};

// Design: the coordinator is the only writer of everything that this class stores.
class Book {
public:
  Book(const Core &core, const SourceMap &source) noexcept : core_(core), source_(source) {}

  // Slots with a command to do, oldest first.
  [[nodiscard]] std::vector<uint32_t> posted() const {
    std::vector<uint32_t> found;
    for (uint32_t i = 0; i < core_.sizes.command_slots; ++i)
      // SYNC POINT: command - acquire: the command's fields are there
      if (observe(core_.command(i).state) == TP_COMMAND_POSTED)
        found.push_back(i);
    std::sort(found.begin(), found.end(), [&](uint32_t a, uint32_t b) {
      return core_.command(a).number < core_.command(b).number;
    });
    return found;
  }

  // The choice goes into the command's slot before the first effect, so that a successor finishes
  // this command and no other.
  void log_choice(uint32_t i, uint32_t row, uint32_t generation) noexcept {
    publish(core_.command(i).choice, uint64_t{row} << 32 | generation);
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
    tp_admission &a = core_.admission(row);
    a.command_number = c.number;
    a.arrival_ns = c.arrival_ns;
    a.max_tokens = c.max_tokens;
    a.num_emitted = c.num_emitted;
    a.prompt_tokens = c.prompt_tokens;
    a.num_eos = std::min(c.num_eos, core_.sizes.max_eos_ids);
    a.id_bytes = std::min(c.id_bytes, core_.sizes.max_request_id_bytes);
    a.first_block = blocks.empty() ? UINT32_MAX : blocks.front();
    a.num_blocks = static_cast<uint32_t>(blocks.size());
    std::memcpy(core_.id(row), core_.command_id(i), a.id_bytes);
    std::memcpy(core_.eos(row), core_.command_eos(i), uint64_t{a.num_eos} * 4);
    a.from_sequence = observe(source_.head().published);
    // SYNC POINT: admission - release: a decoder that sees the generation sees the fields
    publish(core_.admitted(row), uint64_t{generation});
    open_control(row, generation);
  }

  // SYNC POINT: control word - release: one word, nothing behind it
  void open_control(uint32_t row, uint32_t generation) noexcept {
    if (observe(source_.control(row)) >> 8 < generation)
      publish(source_.control(row), uint64_t{generation} << 8);
  }

  void control(uint32_t row, uint32_t generation, uint32_t bits) noexcept {
    const uint64_t word = observe(source_.control(row));
    if (word >> 8 == generation)
      publish(source_.control(row), word | bits);
  }

  // Ends the row's generation at the decoder: everything saved from now on is not delivered. A mark
  // that stands is not moved: tokens between the two would be delivered or not by chance.
  void mark(uint32_t row, uint32_t generation, uint32_t reason) noexcept {
    tp_mark &mark = core_.mark(row);
    if (get(mark.word) >> 8 != generation) {
      put(mark.from_sequence, observe(source_.head().published));
      // SYNC POINT: mark - release: its from_sequence is there
      publish(mark.word, uint64_t{generation} << 8 | reason);
    }
    count_event(core_.role(TP_ROLE_DECODER + row % core_.sizes.num_decoders).bell);
  }

  // Blocks first, then the row: a row that is free owns nothing.
  void release(uint32_t row, uint32_t generation, const std::vector<uint32_t> &blocks) noexcept {
    for (const uint32_t b : blocks)
      publish(core_.block(b).owner, uint64_t{0});
    control(row, generation, TP_CONTROL_FINISHED);
    publish(core_.mark(row).word, uint64_t{0});
    publish(core_.freed(row), uint64_t{generation});
  }

  void reply(uint32_t i, uint32_t status, uint32_t row, uint32_t generation,
             uint64_t value) noexcept {
    tp_command &c = core_.command(i);
    c.status = status;
    c.reply_row = row;
    c.reply_generation = generation;
    c.reply_first_block = generation != 0 && row < core_.sizes.max_num_seqs
                              ? core_.admission(row).first_block
                              : UINT32_MAX;
    c.reply_value = value;
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
                       get(p.emitted)};
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
